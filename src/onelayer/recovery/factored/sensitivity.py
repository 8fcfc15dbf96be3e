"""How outputs respond to heads whose projections have low rank too.

Layers with Θ_i and W_i of ranks r and q are a manifold. With orthonormal bases, Θ = U S Vᵀ and
W = P T Rᵀ, its tangent directions are

    dΘ = B Vᵀ + U Aᵀ,    dW = C Rᵀ + P Eᵀ,    UᵀB = 0, PᵀC = 0,

and |dΘ|² = |B|² + |A|², |dW|² = |C|² + |E|². So the derivative of a layer by its factors, taken at
U and V in place of the factors of Θ, and at P and Rᵀ in place of those of W, is the Jacobian in
orthonormal coordinates, at the price of products with factors (see `model.py`). Its smallest
singular value bounds how far noise moves heads and projections. To form the features of projections
of any rank, as `onelayer.recovery.sensitivity` does, costs several times as much.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from onelayer.array import backend, blocks
from onelayer.array.backend import Array
from onelayer.array.krylov import lanczos
from onelayer.heads import dense
from onelayer.recovery.factored import model
from onelayer.recovery.factored.model import Activations, Factors
from onelayer.recovery.gauss_newton.batches import Block, in_single
from onelayer.recovery.gauss_newton.varpro import Fit

Values = np.ndarray[Any, Any]

_LOW_RANK = 1e-7  # what projections may have beyond their rank, relative to their size
_SINGLE_SUFFICES = 1e-4  # eigenvalues above this, relative to the largest, are right in float32
_STEPS = (20, 120)  # fewest and most Lanczos steps
_ACCURACY = 0.3  # largest residual of the smallest eigenvalue, relative to it


@dataclass(frozen=True)
class Response:
    """How outputs respond to a change of the layer, at least."""

    least: float  # singular value of the Jacobian with all parts brought to equal strength
    most: float
    attention: Values  # (m,), strengths of attention matrices with key biases..
    projection: Values  # ..and of projections, relative to the strongest part
    error: float  # root mean square of the residuals
    truncated: Values  # (m,), what of the projections is beyond their rank, relative to their size


def response(fit: Fit, rank: int, parts: list[Block], rng: np.random.Generator) -> Response | None:
    """That of a fit on some blocks; None if its projections have a larger rank, or it is unsure."""
    attention, bias = dense.unpack(fit.theta, fit.batches.dim)
    left, middle, right = _svd(attention, rank)
    values, sizes, outputs = _svd(fit.projection, rank)
    kept = (values * sizes[:, None, :]) @ outputs
    truncated = _norms(fit.projection - kept) / np.maximum(_norms(fit.projection), 1e-300)
    if truncated.max() > _LOW_RANK or min(fit.batches.dim, fit.batches.out_dim) <= rank:
        return None
    constant = dense.unpack_weights(fit.weights, fit.heads, fit.batches.dim)[1]
    xp = backend.namespace(outputs)
    bases = Factors(
        query=dense.side_by_side(left),
        key=dense.side_by_side(backend.transpose(right)),
        key_bias=None if bias is None else backend.transpose(bias),
        value=dense.side_by_side(values),
        output=xp.reshape(outputs, (-1, outputs.shape[2])),
        output_bias=constant,
        heads=fit.heads,
    )
    layer = replace(
        bases,
        query=dense.side_by_side(left * middle[:, None, :]),
        value=dense.side_by_side(values * sizes[:, None, :]),
    )
    single = _Jacobian.at(bases.map(backend.single), layer.map(backend.single), parts)
    found = single.response(rng)
    if found is not None and found[0] < _SINGLE_SUFFICES**0.5 * found[1]:
        found = _Jacobian.at(bases, layer, parts).response(rng)
    if found is None:
        return None
    return Response(*found, _error(layer, parts), truncated)


def _svd(matrices: Array, rank: int) -> tuple[Array, Array, Array]:
    xp = backend.namespace(matrices)
    left, sizes, right = xp.linalg.svd(matrices, full_matrices=False)
    return left[:, :, :rank], sizes[:, :rank], right[:, :rank, :]


def _norms(matrices: Array) -> Values:
    return np.asarray(np.linalg.norm(backend.to_numpy(matrices), axis=(1, 2)))


def _error(layer: Factors, parts: list[Block]) -> float:
    """The root mean square of the residuals, in float64."""

    def work(part: Block) -> Values:
        rows = part.outputs.shape[0]
        if part.counted is not None:
            rows = float(backend.namespace(part.counted).sum(part.counted))
        left = backend.squared_norm(model.forward(layer, part).residuals)
        return np.array([left, rows * part.outputs.shape[1]])

    left, count = blocks.fold_over(parts, work, lambda a, b: a + b, layer.query)
    return float((left / count) ** 0.5)


@dataclass(frozen=True, eq=False)
class _Jacobian:
    """Products with the Jacobian in orthonormal coordinates."""

    bases: Factors
    places: list[tuple[Block, Activations]]

    @classmethod
    def at(cls, bases: Factors, layer: Factors, parts: list[Block]) -> _Jacobian:
        work = partial(_place, bases, layer)
        places = blocks.fold_over(parts, work, lambda a, b: a + b, bases.query)
        return cls(bases, places)

    def response(self, rng: np.random.Generator) -> tuple[float, float, Values, Values] | None:
        """Extreme singular values, and strengths; None if the smallest was not found."""
        drawn = self.bases.map(lambda one: backend.like(rng.standard_normal(tuple(one.shape)), one))
        start = self._project(drawn)
        strengths = self._strengths(start)
        if not min(part.min() for part in strengths.values()) > 0:
            return None
        units = self._units(strengths)

        def product(flat: Array) -> Array:
            direction = self.bases.unflat(flat * units)
            return self._project(self._product(direction)).flat() * units

        def project(flat: Array) -> Array:
            return self._project(self.bases.unflat(flat)).flat()

        def accurate(values: Values, residual: float) -> bool:
            return bool(values[0] > 0 and residual < _ACCURACY * values[0])

        flat = start.flat()
        found = lanczos(product, flat, int(flat.shape[0]), accurate, _STEPS, project)
        if not found.converged and not found.values[0] > 0:
            return None
        least, most = (float(max(found.values[at], 0.0)) ** 0.5 for at in (0, -1))
        return least, most, strengths["attention"], strengths["projection"]

    def _project(self, direction: Factors) -> Factors:
        """The nearest direction with UᵀB = 0 and PᵀC = 0."""

        def outside(basis: Array, moved: Array) -> Array:
            basis, moved = (model.split_heads(one, direction.heads) for one in (basis, moved))
            return model.join_heads(moved - basis @ (backend.transpose(basis) @ moved))

        query = outside(self.bases.query, direction.query)
        return replace(direction, query=query, value=outside(self.bases.value, direction.value))

    def _product(self, direction: Factors) -> Factors:
        """JᵀJ times a direction."""

        def work(place: tuple[Block, Activations]) -> Factors:
            part, at = place
            return model.vjp(self.bases, part, at, model.jvp(self.bases, part, at, direction))

        return blocks.fold_over(self.places, work, _added, self.bases.query)

    def _strengths(self, start: Factors) -> dict[str, Values]:
        """How strongly outputs respond to each part alone, relative to the strongest."""
        found = {"attention": [], "projection": [], "bias": []}  # type: dict[str, list[float]]
        for head in range(start.heads):
            for name, of_part in _PARTS.items():
                found[name].append(self._strength(_alone(start, of_part, head)))
        if start.output_bias is not None:
            found["bias"].append(self._strength(_alone(start, ("output_bias",), 0)))
        strongest = max(map(max, (one for one in found.values() if one))) or 1.0
        return {name: np.array(one) / strongest for name, one in found.items() if one}

    def _strength(self, alone: Factors) -> float:
        some = self.places[::_EVERY]

        def work(place: tuple[Block, Activations]) -> float:
            return backend.squared_norm(model.jvp(self.bases, *place, alone))

        size = blocks.fold_over(some, work, lambda a, b: a + b, self.bases.query)
        return float((size / (backend.squared_norm(alone.flat()) or 1.0)) ** 0.5)

    def _units(self, strengths: dict[str, Values]) -> Array:
        """One over the strength of the part that each number belongs to."""

        def filled(name: str, one: Array) -> Array:
            if name == "output_bias":
                return np.full(one.shape, 1 / strengths["bias"][0])
            part = next(part for part, names in _PARTS.items() if name in names)
            axis = 0 if name == "output" else 1
            each = np.repeat(1 / strengths[part], one.shape[axis] // len(strengths[part]))
            return np.broadcast_to(each[:, None] if axis == 0 else each[None, :], one.shape)

        found = {
            name: backend.like(np.array(filled(name, one)), one)
            for name, one in self.bases.arrays()
        }
        return replace(self.bases, **found).flat()


_EVERY = 4  # every fourth block is enough for strengths
_PARTS = {"attention": ("query", "key", "key_bias"), "projection": ("value", "output")}


def _alone(start: Factors, names: tuple[str, ...], head: int) -> Factors:
    """A direction without all parts but those of one head."""
    found = {}
    for name, one in start.arrays():
        axis = 0 if name == "output" else one.ndim - 1
        each = one.shape[axis] // (1 if name == "output_bias" else start.heads)
        there = (np.arange(one.shape[axis]) // each == head) * float(name in names)
        there = backend.like(there, one)
        found[name] = one * (there[:, None] if axis == 0 and one.ndim == 2 else there)
    return replace(start, **found)


def _added(first: Factors, second: Factors) -> Factors:
    return first.map(lambda a, b: a + b, second)


def _place(bases: Factors, layer: Factors, part: Block) -> list[tuple[Block, Activations]]:
    """A block with the attention and values of the layer, and tokens in terms of the bases."""
    if str(bases.query.dtype).endswith("float32"):
        part = in_single(part)
    at, seen = model.forward(layer, part), model.forward(bases, part)
    attended = model.attended(at.attention, seen.value)
    return [(part, at._replace(query=seen.query, key=seen.key, attended=attended))]
