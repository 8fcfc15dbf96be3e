"""What one attention layer can learn, and how to learn one attention layer."""

from importlib.metadata import version

from onelayer import files, inputs
from onelayer.layer import AttentionLayer, HeadMatch
from onelayer.random_features import targets, theory
from onelayer.random_features.curves import LearningCurve, learning_curve
from onelayer.random_features.estimators import (
    AttentionFeatures,
    AttentionKernelRidge,
    RandomFeatureAttention,
    RandomFeatureAttentionClassifier,
    RandomFeatureMLP,
)
from onelayer.random_features.kernel_matrices import attention_kernel, mlp_kernel
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

__version__ = version("onelayer")

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
