"""What one attention layer can learn, and how to learn one attention layer."""

from importlib.metadata import version

from onelayer import inputs
from onelayer.layer import AttentionLayer, HeadMatch
from onelayer.recovery.certificate import Certificate
from onelayer.recovery.recover import Reason, Recovery, recover
from onelayer.recovery.trace import TraceRow

__version__ = version("onelayer")

__all__ = [
    "AttentionLayer",
    "Certificate",
    "HeadMatch",
    "Reason",
    "Recovery",
    "TraceRow",
    "inputs",
    "recover",
]
