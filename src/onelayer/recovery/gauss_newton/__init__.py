"""Gauss-Newton on the attention matrices, with the projections eliminated."""
