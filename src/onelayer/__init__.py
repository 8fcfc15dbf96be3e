"""What one attention layer can learn, and how to learn one attention layer."""

from onelayer import inputs
from onelayer.layer import AttentionLayer, HeadMatch

__all__ = ["AttentionLayer", "HeadMatch", "inputs"]
