"""A preconditioner for steps on all heads: how strongly the outputs respond to each head.

With V_a the covariance of the tokens under the attention of row a, head i alone makes the part

    Σ_a x_a x_aᵀ ⊗ V_a W_i W_iᵀ V_a

of JᵀJ. Tokens are whitened, so that 1 ⊗ M_i is near it, with M_i the mean of V_a W_i W_iᵀ V_a over
the rows. Heads with small projections, or with scores so large that their attention hardly moves,
have a small M_i; in the metric of the M_i all heads are alike. In a layer of a pretrained
transformer with one head of scale 12 among eleven of scale 3 solves took 10 products with it and 50
to 250 without. Random heads are alike to begin with.
"""

from __future__ import annotations

from dataclasses import dataclass

from onelayer.array import backend
from onelayer.array.backend import Array
from onelayer.heads import dense
from onelayer.heads.base import TangentSpace
from onelayer.recovery.gauss_newton.batches import Block, sum_blocks
from onelayer.recovery.gauss_newton.jacobian import Jacobian
from onelayer.recovery.gauss_newton.varpro import Attended, Fit

_LEAST = 1e-3  # eigenvalues are at least this share of their head's mean
_IDLE = 1e-6  # a head whose mean is below this share of the strongest one's explains nothing


@dataclass(frozen=True, eq=False)
class Preconditioner:
    """The matrices M_i by their eigenvalues (m, d) and eigenvectors (m, d, d)."""

    values: Array
    vectors: Array

    def times(self, theta: Array, power: float) -> Array:
        """Every head times its matrix to a power."""
        values, vectors = (backend.like(one, theta) for one in (self.values, self.vectors))
        turned = dense.by_head(theta, vectors.shape[1]) @ vectors
        weighted = turned * (values**power)[:, None, :]
        return dense.side_by_side(weighted @ backend.transpose(vectors))


@dataclass(frozen=True)
class Metric:
    """The inner product on a tangent space: the plain one, or that of a preconditioner."""

    space: TangentSpace
    preconditioner: Preconditioner | None = None

    def times(self, direction: Array, power: float = 1.0) -> Array:
        """The matrix of the metric, nearly to a power, times a direction in the space."""
        if self.preconditioner is None:
            return direction
        return self.space.project(self.preconditioner.times(direction, power))


def preconditioner(fit: Fit, products: Jacobian) -> Preconditioner | None:
    """That of a fit and its products, from one pass over the examples; None if a head is idle."""
    xp = backend.namespace(fit.theta)
    total = sum_blocks(_responses, products.blocks, products.attended, products.images)
    matrices = dense.by_head(total, fit.batches.dim)
    values, vectors = xp.linalg.eigh(matrices / fit.batches.rows)
    mean = xp.mean(values, axis=1, keepdims=True)
    # Directions of an idle head are free: in the metric of their effect, steps would be lost.
    if not float(xp.min(mean)) > _IDLE * float(xp.max(mean)):
        return None
    return Preconditioner(xp.maximum(values, _LEAST * mean), vectors)


def _responses(block: Block, attended: Attended, images: Array) -> Array:
    """Σ_a V_a W_i W_iᵀ V_a over the rows of a block, side by side (d, m·d).

    V_a = Xᵀ C_a X with C_a = diag(p_a) - p_a p_aᵀ. With G = X W Wᵀ Xᵀ and U = P G the sum of
    C_a G C_a over the rows of an example is

        Pᵀ P ∘ G - (P ∘ U)ᵀ P - Pᵀ (P ∘ U) + Pᵀ diag(s) P,    s_a = p_a G p_aᵀ.
    """
    xp, turned = backend.namespace(images), backend.transpose
    keys, attention, images = map(backend.single, (block.keys, attended.attention, images))
    n, tokens, _ = keys.shape
    heads = attention.shape[1] // tokens
    images = xp.reshape(images, (n, heads, tokens, images.shape[2]))
    inner = images @ turned(images)  # G, (n, m, k, k)
    rows = xp.permute_dims(xp.reshape(attention, (n, tokens, heads, tokens)), (0, 2, 1, 3))  # P
    crossed = rows * (rows @ inner)  # P ∘ U
    mixed = turned(crossed) @ rows
    sizes = xp.sum(crossed, axis=-1, keepdims=True)
    within = (turned(rows) @ rows) * inner - mixed - turned(mixed) + turned(rows) @ (sizes * rows)
    within = xp.reshape(xp.permute_dims(within, (0, 2, 1, 3)), attention.shape)
    return backend.double(turned(dense.flat_tokens(keys)) @ dense.features(within, keys))
