"""How an array was rounded, inferred from its values.

A float64 array may hold numbers that passed through float16 or through a text file with three
decimals. Its entries are then exact only up to that rounding. Every format is a grid: entry x has a
spacing u(x), and rounding leaves x = v u(x) with an integer v.

    float formats with p bits     u = 2^(e - p) for 2^(e - 1) <= |x| < 2^e, bounded below
    decimals                      u = 10^-q
    significant digits            u = 10^(⌊log10 |x|⌋ + 1 - s)

An array is recognised as rounded to a format if all its entries lie on the grid and the nonzero
ones make use of it. Rounding leaves the last bit of v odd in half of all entries and the last digit
nonzero in nine of ten, while exact small numbers (±1, counts, halves) leave the last places empty.
Rounding errors are uniform over a spacing, hence of standard deviation u / √12.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import array_api_compat
import numpy as np

from onelayer.array import backend
from onelayer.array.backend import Array, NumpyArray

_MOST_ENTRIES = 100_000
_USED = 0.3  # share of the nonzero entries that use the last bit or digit of their format
_MOST_DIGITS = 8  # decimals, or significant digits, that are looked for
# Decimal fractions are stored in binary, so v is an integer only up to a relative error: that of
# storage and that of computing v. Larger errors of v would make any number look like an integer.
_NEAR = 0.05
_COMPUTING = 2.0**-50
_FEWEST_VALUES, _FEWEST_INTEGERS = 5, 20  # distinct magnitudes: fewer may be labels or counts


@dataclass(frozen=True)
class Rounding:
    """How entries were rounded: the name of the format, and the root mean square rounding error.

    The error is absolute, in the units of the array, and zero if all entries are zero.
    """

    name: str
    error: float

    @property
    def unit(self) -> float:
        """The largest relative rounding error of a floating-point format.

        That of float64 for decimals: numbers that were written so are exact.
        """
        bits = {one.name: one.bits for one in _COARSER}
        return float(2.0 ** -bits.get(self.name, _FLOAT64.bits))


@dataclass(frozen=True)
class _Format:
    """A binary floating-point format."""

    name: str
    bits: int  # of the significand, the hidden one included
    lowest: int  # exponent of the smallest spacing
    largest: float

    def spacing(self, values: NumpyArray) -> NumpyArray:
        _, exponents = np.frexp(values)
        return cast(NumpyArray, np.ldexp(1.0, np.maximum(exponents - self.bits, self.lowest)))

    def holds(self, values: NumpyArray) -> bool:
        if float(np.abs(values).max()) > self.largest:
            return False
        steps = values / self.spacing(values)
        return bool((steps == np.rint(steps)).all())

    def is_used(self, values: NumpyArray) -> bool:
        """Whether the last bit is set in a good share of the values."""
        return bool(np.mean(np.abs(values / self.spacing(values)) % 2 == 1) >= _USED)


_FLOAT64 = _Format("float64", 53, -1074, math.inf)
_COARSER = (
    _Format("bfloat16", 8, -133, (2 - 2.0**-7) * 2.0**127),
    _Format("float16", 11, -24, 65504.0),
    _Format("float32", 24, -149, (2 - 2.0**-23) * 2.0**127),
)
COARSEST = 2.0**-8  # the largest unit that is recognised


def rounding(array: Array) -> Rounding:
    """The coarsest format that the entries of a real, finite array were rounded to.

    Its name is "bfloat16", "float16", "float32", "3 decimals", "4 significant digits" and the like,
    or "float64" if no coarser format is recognised. Of large arrays, 100,000 entries are used.

    >>> import numpy as np
    >>> X = np.random.default_rng(0).standard_normal((50, 4, 8))
    >>> rounding(X.astype(np.float16).astype(np.float64)).name
    'float16'
    >>> rounding(np.round(X, 2))
    Rounding(name='2 decimals', error=0.00288...)
    >>> rounding(np.sign(X)).name
    'float64'
    """
    size = int(array_api_compat.size(array) or 0)
    flat = backend.namespace(array).reshape(backend.detached(array), (-1,))
    if size > _MOST_ENTRIES:  # evenly spread
        flat = backend.rows(flat, np.linspace(0, size - 1, _MOST_ENTRIES).astype(np.int64))
    entries = backend.to_numpy(backend.double(flat))
    nonzero = entries[entries != 0]
    if nonzero.size == 0:
        return Rounding(_FLOAT64.name, 0.0)
    stored = next((one for one in _COARSER if one.holds(nonzero)), _FLOAT64)
    floats = stored if stored.is_used(nonzero) else _FLOAT64
    share = math.sqrt(nonzero.size / entries.size)  # zeros are exact
    found = [Rounding(floats.name, _rms_error(floats.spacing(nonzero)) * share)]
    error = 2.0**-stored.bits + _COMPUTING
    found += [*_decimals(nonzero, error), *_significant_digits(nonzero, share, error)]
    return max(found, key=lambda one: one.error)


def _rms_error(spacing: NumpyArray) -> float:
    """√(mean u² / 12), scaled so that squares of tiny spacings do not vanish."""
    largest = float(spacing.max())
    return largest * math.sqrt(float(np.mean((spacing / largest) ** 2)) / 12)


def _decimals(nonzero: NumpyArray, error: float) -> Iterator[Rounding]:
    """The coarsest rounding to decimals that the values agree with, if any."""
    largest = float(np.abs(nonzero).max())
    for places in range(_MOST_DIGITS + 1):
        relative = error if places else _COMPUTING  # integers are stored exactly
        if largest * relative > _NEAR * 10.0**-places:
            continue
        fewest = _FEWEST_VALUES if places else _FEWEST_INTEGERS
        if _is_decimal(nonzero * 10.0**places, relative, fewest):
            yield Rounding(f"{places} decimals", 10.0**-places / math.sqrt(12))
            return


def _significant_digits(nonzero: NumpyArray, share: float, error: float) -> Iterator[Rounding]:
    """The coarsest rounding to significant digits that the values agree with, if any."""
    # x = f · 10^e with 1 <= |f| < 10; powers are split so that none of them overflows.
    exponents = np.floor(np.log10(np.abs(nonzero)))
    half = np.floor(exponents / 2)
    significand = nonzero / 10.0**half / 10.0 ** (exponents - half)
    for digits in range(2, _MOST_DIGITS + 1):
        if 10.0**digits * error > _NEAR:
            return
        if _is_decimal(significand * 10.0 ** (digits - 1), error, _FEWEST_INTEGERS):
            found = _rms_error(10.0 ** (exponents + 1 - digits)) * share
            yield Rounding(f"{digits} significant digits", found)
            return


def _is_decimal(steps: NumpyArray, error: float, fewest: int) -> bool:
    """Whether steps are integers up to a relative error, and use their last digit.

    Multiples of 1/4 are decimals too, but all of them are multiples of 25 steps: the steps of
    rounded numbers have no common divisor.
    """
    integers = np.rint(steps)
    if not (np.abs(steps - integers) <= error * np.abs(steps)).all():
        return False
    magnitudes = np.unique(np.abs(integers)).astype(np.int64)
    if magnitudes.size < fewest or np.gcd.reduce(magnitudes) != 1:
        return False
    return bool(np.mean(integers % 10 != 0) >= _USED)
