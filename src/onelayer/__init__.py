"""What one attention layer can learn, and how to learn one attention layer."""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from onelayer import inputs, theory
from onelayer.data import files
from onelayer.layer import AttentionLayer, HeadMatch
from onelayer.recovery.api import Recovery, recover
from onelayer.recovery.certificate import Certificate
from onelayer.recovery.conditions import Condition, ConditionSurvey, conditions, survey_conditions
from onelayer.recovery.hard import hard_instance
from onelayer.recovery.reasons import Reason
from onelayer.recovery.trace import TraceRow
from onelayer.theory import targets

if TYPE_CHECKING:
    from onelayer.features.estimators import (
        AttentionFeatures,
        AttentionKernelRidge,
        RandomFeatureAttention,
        RandomFeatureAttentionClassifier,
        RandomFeatureMLP,
    )
    from onelayer.features.kernels.functions import attention_kernel, mlp_kernel
    from onelayer.features.learning_curves import LearningCurve, learning_curve

__version__ = version("onelayer")

# These rest on scikit-learn, whose import takes longer than that of all else: when they are used.
_MODULES = {
    "learning_curves": ("LearningCurve", "learning_curve"),
    "estimators": (
        "AttentionFeatures",
        "AttentionKernelRidge",
        "RandomFeatureAttention",
        "RandomFeatureAttentionClassifier",
        "RandomFeatureMLP",
    ),
    "kernels.functions": ("attention_kernel", "mlp_kernel"),
}
_LATER = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "AttentionFeatures",
    "AttentionKernelRidge",
    "AttentionLayer",
    "Certificate",
    "Condition",
    "ConditionSurvey",
    "HeadMatch",
    "LearningCurve",
    "RandomFeatureAttention",
    "RandomFeatureAttentionClassifier",
    "RandomFeatureMLP",
    "Reason",
    "Recovery",
    "TraceRow",
    "attention_kernel",
    "conditions",
    "files",
    "hard_instance",
    "inputs",
    "learning_curve",
    "mlp_kernel",
    "recover",
    "survey_conditions",
    "targets",
    "theory",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"onelayer.features.{_LATER[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
