"""What one attention layer can learn, and how to learn one attention layer."""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onelayer import files, inputs, theory
    from onelayer.comparison import HeadMatch
    from onelayer.factors import HeadFactors
    from onelayer.features.estimators import (
        AttentionFeatures,
        AttentionKernelRidge,
        RandomFeatureAttention,
        RandomFeatureAttentionClassifier,
        RandomFeatureMLP,
    )
    from onelayer.features.kernels.functions import attention_kernel, mlp_kernel
    from onelayer.features.learning_curves import LearningCurve, learning_curve
    from onelayer.io.capture import capture
    from onelayer.layer import AttentionLayer
    from onelayer.recovery.api import recover
    from onelayer.recovery.certificate import Certificate
    from onelayer.recovery.condition_results import (
        Condition,
        Conditions,
        ConditionSurvey,
        ConditionSurveys,
    )
    from onelayer.recovery.conditions import conditions, survey_conditions
    from onelayer.recovery.hard import hard_instance
    from onelayer.recovery.query import query
    from onelayer.recovery.reasons import Reason
    from onelayer.recovery.result import Recovery
    from onelayer.recovery.trace import TraceRow
    from onelayer.theory import targets


__version__ = version("onelayer")

__all__ = [
    "AttentionFeatures",
    "AttentionKernelRidge",
    "AttentionLayer",
    "Certificate",
    "Condition",
    "ConditionSurvey",
    "ConditionSurveys",
    "Conditions",
    "HeadFactors",
    "HeadMatch",
    "LearningCurve",
    "RandomFeatureAttention",
    "RandomFeatureAttentionClassifier",
    "RandomFeatureMLP",
    "Reason",
    "Recovery",
    "TraceRow",
    "attention_kernel",
    "capture",
    "conditions",
    "files",
    "hard_instance",
    "inputs",
    "learning_curve",
    "mlp_kernel",
    "query",
    "recover",
    "survey_conditions",
    "targets",
    "theory",
]

# Modules are imported when they are first used: scipy and scikit-learn take long to load.
_MODULES = {
    "files": "files",
    "inputs": "inputs",
    "targets": "theory.targets",
    "theory": "theory",
}
_MEMBERS = {
    "comparison": "HeadMatch",
    "factors": "HeadFactors",
    "features.estimators": "AttentionFeatures AttentionKernelRidge RandomFeatureAttention "
    "RandomFeatureAttentionClassifier RandomFeatureMLP",
    "features.kernels.functions": "attention_kernel mlp_kernel",
    "features.learning_curves": "LearningCurve learning_curve",
    "io.capture": "capture",
    "layer": "AttentionLayer",
    "recovery.api": "recover",
    "recovery.certificate": "Certificate",
    "recovery.condition_results": "Condition ConditionSurvey ConditionSurveys Conditions",
    "recovery.conditions": "conditions survey_conditions",
    "recovery.hard": "hard_instance",
    "recovery.query": "query",
    "recovery.reasons": "Reason",
    "recovery.result": "Recovery",
    "recovery.trace": "TraceRow",
}
_HOMES = {name: module for module, names in _MEMBERS.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value: Any = import_module(f"onelayer.{_MODULES[name]}")
    elif name in _HOMES:
        value = getattr(import_module(f"onelayer.{_HOMES[name]}"), name)
    else:
        from onelayer.spelling import did_you_mean

        hint = did_you_mean(name, __all__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
