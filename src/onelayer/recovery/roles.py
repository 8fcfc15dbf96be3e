"""The role of a token: padding, attended to only, or attended to and with an observed output.

Examples carry one array (n, k) for this. It is None if all tokens are there and all outputs are
observed, Boolean if outputs of all tokens that are there are observed, and else has the numbers
below.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from onelayer import spelling
from onelayer.array import backend, checks
from onelayer.array.backend import Array, NumpyArray
from onelayer.data import sources

PADDING, UNOBSERVED, OBSERVED = 0, 1, 2
NAMED = ("first", "last")  # tokens of an example, padding left out

# What is given for all examples at once: None, one of NAMED, or Booleans (k,).
Pattern: TypeAlias = str | NumpyArray | None


def there(roles: Array | None) -> Array | None:
    """Boolean (n, k): the tokens that are no padding; None if all are."""
    if roles is None or _is_boolean(roles):
        return roles
    return roles != PADDING


def observed(roles: Array | None) -> Array | None:
    """Boolean (n, k): the tokens whose outputs count as equations; None if all do."""
    if roles is None or _is_boolean(roles):
        return roles
    return roles == OBSERVED


def partly(roles: Array | None) -> bool:
    """Whether there may be tokens that are attended to and whose outputs are not observed."""
    return roles is not None and not _is_boolean(roles)


def given(value: Any) -> tuple[Pattern, Any]:
    """What was passed as `observed`: a pattern for all examples, or an array (n, tokens)."""
    if value is None or isinstance(value, str):
        return (value if value is None else spelling.one_of(value, "observed", NAMED)), None
    if sources.is_streamed(value):
        return None, value
    array = backend.as_boolean(value, "observed")
    return (backend.to_numpy(array), None) if array.ndim == 1 else (None, array)


def check_pattern(pattern: Pattern, tokens: int) -> None:
    """Refuse a pattern for examples of another length."""
    if isinstance(pattern, np.ndarray) and pattern.shape != (tokens,):
        raise ValueError(
            f"observed has shape {pattern.shape}, expected {(tokens,)} or (examples, tokens): "
            "one entry per token of X"
        )


def of(mask: Array | None, by_example: Array | None, pattern: Pattern, X: Array, start: int) -> Any:
    """The roles of tokens from a Boolean mask and what was passed as `observed`.

    Every example must have an observed output; errors count examples from `start` on.
    """
    if by_example is None and pattern is None:
        return mask
    if by_example is None:
        by_example = backend.as_device(_by_pattern(pattern, mask, X), X)
    seen = checks.key_mask(by_example, X, "observed", start)
    assert seen is not None
    if mask is not None:
        seen = seen & mask
        checks.key_mask(seen, X, "observed, without padding,", start)
    xp = backend.namespace(X)
    found = xp.astype(seen, xp.int8) + UNOBSERVED
    return found if mask is None else xp.where(mask, found, xp.zeros_like(found))


def sample(X: Array) -> Array:
    """Roles of the shape of one example, where outputs may be unobserved."""
    xp = backend.namespace(X)
    return xp.full(tuple(X.shape[:2]), OBSERVED, dtype=xp.int8, device=backend.device(X))


def _by_pattern(pattern: Pattern, mask: Array | None, X: Array) -> NumpyArray:
    """Which outputs are observed, (n, k), by a pattern for all examples."""
    n, tokens = int(X.shape[0]), int(X.shape[1])
    if not isinstance(pattern, str):
        return np.tile(np.asarray(pattern), (n, 1))
    present = np.ones((n, tokens), bool) if mask is None else backend.to_numpy(mask)
    if pattern == "last":
        place = tokens - 1 - present[:, ::-1].argmax(axis=1)
    else:
        place = present.argmax(axis=1)
    return np.asarray(np.arange(tokens) == place[:, None])


def _is_boolean(roles: Array) -> bool:
    return bool(roles.dtype == backend.namespace(roles).bool)
