"""Why a recovery ended: the reasons by name, each with what to do about it."""

from __future__ import annotations

from enum import Enum


class Reason(Enum):
    """Why a recovery ended, with what to do about it."""

    EXACT = "the layer explains the examples to the error asked for, or to rounding"
    NOISE_FLOOR = "the layer explains the examples down to noise in the outputs"
    LOCAL_MINIMUM = "every start ended in a minimum that does not explain the examples"
    WRONG_MODEL = "the best fit leaves over what is no noise: the outputs are not of such a layer"
    TOO_FEW_HEADS = "more heads than were asked for explain the examples, so many do not"
    TOO_FEW_EXAMPLES = "the examples do not determine a layer of this shape"
    HEADS_NOT_DETERMINED = "the examples are explained, but error bars of heads are too large"
    APPROXIMATE = "the six phases found the heads to the error that was measured on the way"
    COARSE = "the six phases found the heads, but only roughly"
    AGREEMENT_HIDDEN = "the projections add up to too few dimensions to show where heads agree"
    TOO_FEW_AGREEMENTS = "heads agree on too few rows to sculpt a body around them"
    NO_LARGE_MARGINS = "too few rows make all heads attend to one token"
    SPAN_NOT_FOUND = "the body is not clearly longer in as many directions as heads would have it"
    NO_CANDIDATES = "no heads in the space that the body leaves open explain the examples"
    BUDGET_SPENT = "steps or seconds ran out before the examples were explained"

    @property
    def remedy(self) -> str:
        """What to try next; empty where nothing is needed."""
        return _REMEDIES[self]

    @property
    def good(self) -> bool:
        """Whether the layer is to be believed."""
        return not self.remedy

    def __str__(self) -> str:
        return f"{self.name.lower()}: {self.value}"


_REMEDIES = {
    Reason.EXACT: "",
    Reason.NOISE_FLOOR: "",
    Reason.LOCAL_MINIMUM: "use more examples, more restarts, bias=True, or another number of heads",
    Reason.WRONG_MODEL: (
        "see advice: use bias=True, causal=True or a mask if the layer has them, or more heads"
    ),
    Reason.TOO_FEW_HEADS: "ask for more heads, or heads='auto'",
    Reason.TOO_FEW_EXAMPLES: "use more examples, fewer heads, or rank= if the head size is known",
    Reason.HEADS_NOT_DETERMINED: (
        "see advice and certificate.attention_error: give more precise outputs, inputs that vary "
        "more, more examples, or fewer heads"
    ),
    Reason.APPROXIMATE: "",
    Reason.COARSE: "use polish=True, or more examples",
    Reason.AGREEMENT_HIDDEN: "use examples of fewer tokens, or method='refine'",
    Reason.TOO_FEW_AGREEMENTS: "use more examples, fewer tokens, or method='refine'",
    Reason.NO_LARGE_MARGINS: "use more or larger examples, or method='refine'",
    Reason.SPAN_NOT_FOUND: "use more examples, heads='auto', or method='refine'",
    Reason.NO_CANDIDATES: "use more examples, another number of heads, or method='refine'",
    Reason.BUDGET_SPENT: "raise max_steps or max_seconds",
}
