"""What one attention layer can learn, and how to learn one attention layer."""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from onelayer import files, inputs
from onelayer.layer import AttentionLayer, HeadMatch
from onelayer.random_features import targets, theory
from onelayer.recovery.certificate import Certificate
from onelayer.recovery.conditions import (
    Condition,
    ConditionSurvey,
    conditions,
    survey_conditions,
)
from onelayer.recovery.hard import hard_instance
from onelayer.recovery.reasons import Reason
from onelayer.recovery.recover import Recovery, recover
from onelayer.recovery.trace import TraceRow

if TYPE_CHECKING:
    from onelayer.random_features.curves import LearningCurve, learning_curve
    from onelayer.random_features.estimators import (
        AttentionFeatures,
        AttentionKernelRidge,
        RandomFeatureAttention,
        RandomFeatureAttentionClassifier,
        RandomFeatureMLP,
    )
    from onelayer.random_features.kernel_matrices import attention_kernel, mlp_kernel

__version__ = version("onelayer")

# These rest on scikit-learn, whose import takes longer than that of all else: when they are used.
_MODULES = {
    "curves": ("LearningCurve", "learning_curve"),
    "estimators": (
        "AttentionFeatures",
        "AttentionKernelRidge",
        "RandomFeatureAttention",
        "RandomFeatureAttentionClassifier",
        "RandomFeatureMLP",
    ),
    "kernel_matrices": ("attention_kernel", "mlp_kernel"),
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
    value = getattr(import_module(f"onelayer.random_features.{_LATER[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
