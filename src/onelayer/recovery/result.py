"""The result of a recovery."""

from __future__ import annotations

from dataclasses import dataclass

from onelayer.layer import AttentionLayer
from onelayer.recovery.certificate import Certificate
from onelayer.recovery.reasons import Reason
from onelayer.recovery.trace import TraceRow


@dataclass(frozen=True, eq=False)
class Recovery:
    """The result of `recover`.

    Attributes
    ----------
    layer : AttentionLayer
        The best layer found. Of all layers that agree on the span of the inputs it is the one of
        least norm.
    converged : bool
        Whether the layer explains the outputs, to rounding or to a noise floor, and the error bar
        of every head is at most `head_tol`.
    reason : Reason
        Why the search ended, with a remedy if it did not converge.
    advice : str
        What was seen in the examples and what to change, in words; may be empty.
    relative_error : float
        Root mean square error on the training examples, relative to that of the outputs (about
        their mean, if the layer may have biases).
    trace : list of TraceRow
        One row per step.
    certificate : Certificate
        Error bars of the heads, and the error on held-out examples.
    seconds : float
        Duration of the recovery.
    """

    layer: AttentionLayer
    converged: bool
    reason: Reason
    advice: str
    relative_error: float
    trace: list[TraceRow]
    certificate: Certificate
    seconds: float
