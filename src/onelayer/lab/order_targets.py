"""Targets that depend on the order of the keys, and their least error without it."""

from collections.abc import Callable

from onelayer.theory import targets
from onelayer.theory.targets import Target

TEST_EXAMPLES = 8000  # an error is compared with an exact floor: its spread is about 1 %
# Of degree 1, by the dimension.
TARGETS: dict[str, Callable[[int], Target]] = {
    "one position": lambda dim: targets.one_position(1, p=1, dim=dim),
    "alternating sum": lambda dim: targets.ordered_sum(dim, weights="alternating"),
    "increasing sum": lambda dim: targets.ordered_sum(dim, weights="increasing"),
}


def floor(name: str, dim: int, keys: int) -> float:
    """The least error, over the variance, of a function that is invariant to the order of keys.

    The best such estimate of Σ_i w_i <β, x_i> is its mean over all orders,
    (Σ_i w_i) · (1/N) Σ_i <β, x_i>.

    >>> floor("one position", dim=8, keys=4), floor("alternating sum", dim=8, keys=4)
    (0.75, 1.0)
    """
    total = {
        "one position": 1.0,
        "alternating sum": (keys % 2) / keys,
        "increasing sum": (keys + 1) / 2,
    }[name]
    known = total**2 * targets.average_power(1, dim).variance(keys)
    return 1 - known / TARGETS[name](dim).variance(keys)
