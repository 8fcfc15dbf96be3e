"""Why a recovery ended."""

from __future__ import annotations

from enum import Enum


class Reason(Enum):
    """Why a recovery ended.

    Attributes
    ----------
    value : str
        The reason in words.
    remedy : str
        What to try next; empty where nothing is needed.
    good : bool
        Whether the recovery converged.
    """

    remedy: str

    def __new__(cls, text: str, remedy: str = "") -> Reason:
        reason = object.__new__(cls)
        reason._value_, reason.remedy = text, remedy
        return reason

    EXACT = "the layer explains the examples to the error asked for, or to rounding"
    NOISE_FLOOR = "the layer explains the examples down to noise in the outputs"
    LOCAL_MINIMUM = (
        "every start ended in a minimum that does not explain the examples",
        "use more examples, more restarts, bias=True, or another number of heads",
    )
    WRONG_MODEL = (
        "the residuals of the best fit are not noise: no such layer has these outputs",
        "see advice: use bias=True, causal=True or a mask if the layer has them, or more heads",
    )
    TOO_FEW_HEADS = (
        "more heads than were asked for explain the examples, this number does not",
        "ask for more heads, or heads='auto'",
    )
    TOO_FEW_EXAMPLES = (
        "the examples do not determine a layer of this shape",
        "use more examples, fewer heads, or rank= if the head size is known",
    )
    HEADS_NOT_DETERMINED = (
        "the examples are explained, but error bars of heads are too large",
        "see advice and certificate.attention_error: give more precise outputs, inputs that vary "
        "more, more examples, or fewer heads",
    )
    APPROXIMATE = "the six phases found the heads to the error that they measured"
    COARSE = (
        "the six phases found the heads, but only roughly",
        "use polish=True, or more examples",
    )
    AGREEMENT_HIDDEN = (
        "the projections add up to too few dimensions to show where heads agree",
        "use examples of fewer tokens, or method='refine'",
    )
    TOO_FEW_AGREEMENTS = (
        "heads agree on too few rows to sculpt a polytope around them",
        "use more examples, fewer tokens, or method='refine'",
    )
    NO_LARGE_MARGINS = (
        "too few rows make all heads attend to one token",
        "use more or larger examples, or method='refine'",
    )
    SPAN_NOT_FOUND = (
        "the polytope is not clearly longer in one direction per further head",
        "use more examples, heads='auto', or method='refine'",
    )
    NO_CANDIDATES = (
        "no heads in the directions that the polytope leaves free explain the examples",
        "use more examples, another number of heads, or method='refine'",
    )
    BUDGET_SPENT = (
        "steps or seconds ran out before the examples were explained",
        "raise max_steps or max_seconds",
    )

    @property
    def good(self) -> bool:
        """Whether the recovery converged: there is nothing to remedy."""
        return not self.remedy

    def __str__(self) -> str:
        return f"{self.name.lower()}: {self.value}"
