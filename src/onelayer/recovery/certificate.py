"""The certificate of a recovered layer: its error on unseen examples, and bounds on its heads.

Each held-out example has a relative squared error, capped at 1. Their mean q̂ is below the true mean
q unless a bounded average strays: P(kl(q̂, q) > log(1/δ)/n and q > q̂) <= δ (Chernoff; Hoeffding
1963), kl the divergence of two coins. So the largest q with n kl(q̂, q) <= log(1/δ) bounds the true
mean with probability 1 - δ, whatever the distribution of the inputs. For errors of zero it is
1 - δ^(1/n), about 3/n at δ = 0.05: no finite sample can promise more without assumptions, since
inputs on which the layer does something else may be that rare. Error bars of heads are another
statement: they assume that the outputs are those of an attention layer (see `error_bars.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import rel_entr

from onelayer.array import backend
from onelayer.array.backend import Array
from onelayer.recovery.error_bars import CONFIDENCE, error_bars
from onelayer.recovery.examples import WhitenedExamples
from onelayer.recovery.gauss_newton import varpro
from onelayer.recovery.gauss_newton.batches import Block
from onelayer.recovery.gauss_newton.varpro import Fit
from onelayer.summary import Summary, number


@dataclass(frozen=True, eq=False, repr=False)
class Certificate:
    """How far a recovered layer can be trusted.

    `print(found.certificate)` shows all of it; a notebook shows the same as tables.

    Attributes
    ----------
    attention_error, projection_error : array (heads,)
        95 % bounds on the relative errors of each head's attention matrix (with its key bias) and
        projection, in the caller's coordinates, on the affine span of the inputs: what
        `layer.distance(truth, inputs=X)` would give. Infinite where the examples do not determine
        a head. They hold if the outputs are those of such a layer with noise.
    input_rank : int
        The number of directions along which the inputs vary; what heads would do along others
        cannot be seen.
    noise : float
        The relative error of the outputs that the bars rest on: what the layer leaves over, or the
        rounding of the outputs as they were given.
    error, worst : float
        Relative root mean square error on held-out examples, and the largest of one example.
    examples : int
        The number of held-out examples.
    error_bound : float
        With probability `confidence` the mean of the relative squared errors (each capped at 1) of
        all examples there may be is at most this, whatever the outputs are. It cannot be less than
        about 3 / examples.
    exceed_probability : float
        With probability `confidence` an unseen example exceeds `worst` at most this often.
    nested_error : array (input_rank,)
        The largest bound on a head's attention matrix on the strongest 1, 2, .. directions alone.
    smallest_singular_value : float
        That of the reduced Jacobian relative to the largest, with tokens whitened and heads brought
        to equal strength.
    confidence : float
        The probability with which bounds and error bars hold, 0.95.

    Examples
    --------
    >>> import onelayer as ol
    >>> layer = ol.AttentionLayer.random(heads=2, dim=4, seed=0)
    >>> X = ol.inputs.boolean(200, 3, 4, seed=1)
    >>> proof = ol.recover(X, layer(X), heads=2).certificate
    >>> proof.input_rank, proof.undetermined_heads, bool(proof.attention_error.max() < 1e-6)
    (4, [], True)
    """

    attention_error: np.ndarray[Any, Any]
    projection_error: np.ndarray[Any, Any]
    nested_error: np.ndarray[Any, Any]
    input_rank: int
    noise: float
    examples: int
    error: float
    worst: float
    error_bound: float
    exceed_probability: float
    confidence: float
    smallest_singular_value: float

    @property
    def determined(self) -> np.ndarray[Any, Any]:
        """For each head, whether the examples determine it at all."""
        return np.asarray(np.isfinite(self.attention_error + self.projection_error))

    @property
    def undetermined_heads(self) -> list[int]:
        """The heads that the examples do not determine."""
        return [int(head) for head in np.flatnonzero(~self.determined)]

    def uncertain_heads(self, tolerance: float) -> list[int]:
        """The heads of which a bar is larger than a tolerance.

        Parameters
        ----------
        tolerance : float
            The largest relative error that is acceptable.

        Returns
        -------
        list of int
            Numbers of heads, from 0. Heads that are not determined are among them.

        Examples
        --------
        >>> import onelayer as ol
        >>> layer = ol.AttentionLayer.random(heads=2, dim=4, seed=0)
        >>> X = ol.inputs.boolean(200, 3, 4, seed=1)
        >>> ol.recover(X, layer(X), heads=2).certificate.uncertain_heads(0.01)
        []
        """
        largest = np.maximum(self.attention_error, self.projection_error)
        return [int(head) for head in np.flatnonzero(~(largest <= tolerance))]

    def __repr__(self) -> str:
        return self._summary().text()

    def _repr_html_(self) -> str:
        return self._summary().html()

    def _summary(self) -> Summary:
        undetermined = ", ".join(map(str, self.undetermined_heads)) or "none"
        facts = {
            "heads not determined": undetermined,
            "inputs vary along": f"{self.input_rank} directions",
            "noise of the outputs": f"{number(self.noise)} (relative)",
            "held-out examples": f"{self.examples}, relative error {number(self.error)}, "
            f"largest {number(self.worst)}",
            "unseen examples": f"mean squared error at most {number(self.error_bound)}; error "
            f"above {number(self.worst)} with probability at most "
            f"{number(self.exceed_probability)}",
            "smallest singular value": f"{number(self.smallest_singular_value)} of the Jacobian, "
            "relative to the largest",
        }
        title = f"Certificate: bounds at {self.confidence:.0%} confidence"
        return Summary(title, facts, *table_of_bars(self))


def table_of_bars(
    certificate: Certificate,
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Headings and rows of a table of the error bars of the heads."""
    bars = zip(certificate.attention_error, certificate.projection_error, strict=True)
    rows = [(str(head), *map(number, both)) for head, both in enumerate(bars)]
    return ("head", "attention error at most", "projection error at most"), rows


def certify(
    fit: Fit,
    fitted: WhitenedExamples,
    held_out: WhitenedExamples,
    rank: int | None,
    rounding: float,
    rng: np.random.Generator,
    sharp: float = 1e-9,
    stored: float = 0.0,
) -> Certificate:
    """The certificate of a fit to outputs with this relative rounding error.

    Error bars that are as small as `sharp` need not be smaller. `stored` is the relative error with
    which the layer's own numbers are stored.
    """
    wrong, size = _errors(fit, held_out)
    relative = np.divide(wrong, size, out=np.where(wrong > 0, np.inf, 0.0), where=size > 0)
    count, delta = len(wrong), 1 - CONFIDENCE
    bars = error_bars(fit, fitted, rank, rounding, rng, sharp)
    return Certificate(
        attention_error=bars.attention + stored,
        projection_error=bars.projection + stored,
        nested_error=bars.nested,
        input_rank=fitted.span.rank,
        noise=bars.noise,
        examples=count,
        error=float(np.sqrt(wrong.sum() / size.sum())) if size.sum() > 0 else float(wrong.sum()),
        worst=float(np.sqrt(relative.max())),
        error_bound=mean_bound(float(np.minimum(relative, 1.0).mean()), count, delta),
        exceed_probability=float(1 - delta ** (1 / count)),
        confidence=CONFIDENCE,
        smallest_singular_value=bars.smallest_singular_value,
    )


def _errors(
    fit: Fit, problem: WhitenedExamples
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Squared error and squared size of the output, example by example."""
    xp, blocks = backend.namespace(fit.theta), problem.blocks(fit.heads)

    def squares(block: Block, rows: Array) -> np.ndarray[Any, Any]:
        rows = xp.reshape(rows, (block.keys.shape[0], -1))
        return backend.to_numpy(xp.sum(rows * rows, axis=1))

    wrong = map(squares, blocks, varpro.residuals_on(fit, blocks))
    size = [squares(block, block.outputs) for block in blocks]
    return np.concatenate(list(wrong)), np.concatenate(size)


def mean_bound(mean: float, count: int, delta: float) -> float:
    """The largest q with count · kl(mean, q) <= log(1/delta), by bisection.

    >>> round(mean_bound(0.0, 100, 0.05), 4)  # 1 - 0.05^(1/100)
    0.0295
    """
    allowed = np.log(1 / delta) / count
    low, high = mean, 1.0
    for _ in range(100):
        middle = (low + high) / 2
        divergence = float(rel_entr(mean, middle) + rel_entr(1 - mean, 1 - middle))
        low, high = (low, middle) if divergence > allowed else (middle, high)
    return high
