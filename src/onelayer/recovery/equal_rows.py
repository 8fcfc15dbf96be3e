"""Rows of arrays that are equal, for examples that are given more than once."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

Values: TypeAlias = np.ndarray[Any, Any]

DECIMALS = 9  # to which whitened tokens agree: their rounding depends on their place in memory


def row_keys(*arrays: Values, decimals: int | None = None) -> list[bytes]:
    """One key for every index of the first axis, equal where all arrays have equal rows.

    Values are rounded to `decimals`, if given, and -0 equals 0.

    >>> first, second, third = row_keys(np.array([0.0, 1.0, -0.0]))
    >>> first == third, first == second
    (True, False)
    """
    rows = [
        np.ascontiguousarray((a if decimals is None else a.round(decimals)) + 0.0) for a in arrays
    ]
    return [b"".join(row.tobytes() for row in together) for together in zip(*rows, strict=True)]


def first_equal(*arrays: Values) -> Values:
    """For every row the position of the first row that is equal to it.

    >>> first_equal(np.array([3, 4, 3]))
    array([0, 1, 0])
    """
    seen: dict[bytes, int] = {}
    return np.array([seen.setdefault(key, i) for i, key in enumerate(row_keys(*arrays))], dtype=int)


def distinct(*arrays: Values) -> Values:
    """Ascending positions of rows that differ from all rows before them."""
    return np.unique(first_equal(*arrays))
