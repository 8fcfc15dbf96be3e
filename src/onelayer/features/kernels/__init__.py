"""Kernels of infinitely many random features, in closed form."""
