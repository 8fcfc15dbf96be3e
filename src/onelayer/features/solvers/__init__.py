"""Ridge regression on features and kernels."""
