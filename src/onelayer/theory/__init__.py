"""What the first paper (arXiv 2307.11353) predicts, as numbers."""

from onelayer.theory.bounds import MODELS, excess_risk, sample_size, sample_size_ratio, target_norm

__all__ = ["MODELS", "excess_risk", "sample_size", "sample_size_ratio", "target_norm"]
