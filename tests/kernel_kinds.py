"""The kinds of arrays that kernels are computed in: numpy's, and torch's on a CPU and on a GPU."""

import numpy as np
import pytest

KINDS = ["numpy", "cpu", "cuda"]


def converter(kind):
    """A function that turns a numpy array into the kind; the test is skipped where it is not."""
    if kind == "numpy":
        return np.asarray
    torch = pytest.importorskip("torch")
    if kind == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no GPU here")
    return lambda array: torch.asarray(array, device=kind)


def has_gpu():
    """Whether kernels can be computed on a GPU here."""
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()
