"""Advice to the caller: what was found in the examples, and what to change."""

from __future__ import annotations

import numpy as np

from onelayer.array.rounding import Rounding
from onelayer.recovery.certificate import Certificate
from onelayer.recovery.diagnosis.second_opinion import SecondOpinion
from onelayer.recovery.reasons import Reason

_ROUNDED = 3.0  # noise up to this many times the rounding error of outputs is that rounding
_WEAK = 1e-2  # smallest singular value below which outputs hardly change with heads


def advice(
    reason: Reason,
    certificate: Certificate,
    dim: int,
    head_tol: float,
    rounding: Rounding,
    output_scale: float,
    opinion: SecondOpinion | None,
) -> str:
    """Sentences for the caller, the most important first, or an empty string."""
    said = []
    if not reason.good and opinion is not None:
        said += [opinion.better] if opinion.better else []
        said += [one.message for one in opinion.suspicions or []]
        said += [opinion.left_over] if opinion.left_over and not opinion.better else []
    if reason is Reason.HEADS_NOT_DETERMINED:
        said += _uncertain(certificate, head_tol, rounding, output_scale)
    if not said and reason.remedy:
        said.append(f"{reason.remedy[0].upper()}{reason.remedy[1:]}.")
    if certificate.input_rank < dim:
        said.append(
            f"The inputs vary along {certificate.input_rank} of {dim} directions: heads are found "
            "on their span."
        )
    return " ".join(said)


def _uncertain(
    certificate: Certificate, head_tol: float, rounding: Rounding, output_scale: float
) -> list[str]:
    """Which heads are uncertain, by how much, and why."""
    heads = certificate.uncertain_heads(head_tol)
    bars = np.maximum(certificate.attention_error, certificate.projection_error)
    sizes = [f"up to {_share(e)}" if np.isfinite(e) else "not determined" for e in bars]
    named = ", ".join(f"head {head} ({sizes[head]})" for head in heads)
    said = [f"Errors may exceed {_share(head_tol)} for {named}."]
    enough = np.flatnonzero(certificate.nested_error <= head_tol)
    known = int(enough[-1]) + 1 if enough.size else 0
    rounded = certificate.noise <= _ROUNDED * rounding.error / output_scale
    source = f"outputs are rounded to {rounding.name}" if rounded else "outputs are noisy"
    cause = f"{source} (relative error {certificate.noise:.1e})"
    if certificate.undetermined_heads:
        said.append(
            "The examples do not determine them: other heads would give the same outputs. Ask for "
            "fewer heads if there are several, or give inputs that vary more."
        )
    elif 0 < known < certificate.input_rank:
        weak = certificate.input_rank - known
        said.append(
            f"Inputs have too little signal along {weak} of their {certificate.input_rank} "
            f"directions while {cause}: give inputs that vary more along these, or more precise "
            "outputs."
        )
    elif certificate.smallest_singular_value < _WEAK:
        said.append(
            f"Outputs hardly change with these heads while {cause}: if scores are small give "
            "larger inputs, if attention is all on one token smaller ones, or more precise outputs."
        )
    else:
        said.append(f"The reason is that {cause}: give more examples, or more precise outputs.")
    return said


def _share(error: float) -> str:
    """An error in words: a percentage, or times the size of the head."""
    return f"{error:.2g} times its size" if error >= 1 else f"{100 * error:.2g} %"
