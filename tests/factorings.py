"""Layers as factors of their heads, with examples, for the tests of what works on factors."""

from dataclasses import replace

import numpy as np
import oracles
from cases import block_of, random_case, random_mask, solved_case
from hypothesis import strategies as st

from onelayer import AttentionLayer, inputs
from onelayer.array.backend import double, like, namespace, to_numpy
from onelayer.recovery.factored import model

# Of factors (rank None: no key factor, value_rank None: no value factor), and of examples.
VARIANTS = [
    {},
    {"rank": None},
    {"value_rank": None},
    {"rank": None, "value_rank": None, "bias": True},
    {"bias": True},
    {"output_bias": False},
    {"masked": True},
    {"causal": True},
    {"masked": True, "causal": True, "bias": True},
    {"heads": 1, "out_dim": 1},
    {"tokens": 1, "bias": True},
    {"rank": 3, "value_rank": 3, "out_dim": 5},
]


def factored(
    xp_array=np.asarray, rank=2, value_rank=2, output_bias=True, seed=0, padded=0, **options
):
    """A case, its examples as one block, and random factors, all of them in float64.

    The first `padded` examples are nothing but padding.
    """
    options = {"dim": 3, "out_dim": 3, **options}
    case = random_case(seed, **options)
    if padded:
        case.mask[:padded] = False
    posed = case.problem(xp_array)
    shape = case.heads, posed.dim, posed.out_dim
    rng = np.random.default_rng(seed)
    drawn = model.random(shape, rank, value_rank, case.bias, rng, posed.X)
    drawn = like_random(drawn, rng)
    if not output_bias:
        drawn = replace(drawn, output_bias=None)
    return case, block_of(posed, slice(0, posed.examples)), drawn


def like_random(factors, rng):
    """Standard normal numbers in place of those of all factors."""
    return factors.map(lambda one: like(rng.standard_normal(tuple(one.shape)), double(one)))


@st.composite
def factored_cases(draw):
    """What `factored` takes, over all shapes and kinds."""
    masked = draw(st.booleans())
    dim, out_dim = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    return {
        "seed": draw(st.integers(0, 2**32 - 1)),
        "n": draw(st.integers(2, 5)),
        "tokens": draw(st.integers(1, 3)),
        "heads": draw(st.integers(1, 3)),
        "dim": dim,
        "out_dim": out_dim,
        "rank": draw(st.sampled_from([None, *range(1, dim + 1)])),
        "value_rank": draw(st.sampled_from([None, *range(1, dim + 1)])),
        "bias": draw(st.booleans()),
        "output_bias": draw(st.booleans()),
        "causal": draw(st.booleans()),
        "masked": masked,
        "padded": int(masked and draw(st.booleans())),
    }


def outputs_by_loops(case, factors, X):
    """What a layer of these factors computes, rows below one another."""
    query, output = (to_numpy(one) for one in (factors.query, factors.output))
    heads, dim = factors.heads, X.shape[2]
    attention = query.reshape(dim, heads, -1).transpose(1, 0, 2)
    if factors.key is not None:
        key = to_numpy(factors.key).reshape(dim, heads, -1).transpose(1, 0, 2)
        attention = attention @ key.transpose(0, 2, 1)
    projection = output.reshape(heads, -1, output.shape[1])
    if factors.value is not None:
        value = to_numpy(factors.value).reshape(dim, heads, -1).transpose(1, 0, 2)
        projection = value @ projection
    bias = None if factors.key_bias is None else to_numpy(factors.key_bias).T
    constant = None if factors.output_bias is None else to_numpy(factors.output_bias)
    found = oracles.attention_layer(
        X, attention, projection, bias, constant, case.mask, case.causal
    )
    return found.reshape(-1, output.shape[1])


def there(case):
    """Which rows are no padding."""
    if case.mask is None:
        return np.ones(case.X.shape[0] * case.X.shape[1], dtype=bool)
    return case.mask.reshape(-1)


def solved_problem(
    xp_array=np.asarray,
    n=200,
    tokens=4,
    heads=2,
    dim=5,
    rank=2,
    masked=False,
    causal=False,
    value_rank=2,
    rounded=None,
    **options,
):
    """Whitened examples of a layer, and the layer as factors of these ranks.

    `rounded` is a dtype that the outputs are rounded to.
    """
    layer = AttentionLayer.random(heads=heads, dim=dim, rank=rank, seed=1, **options)
    if value_rank is not None:
        layer = narrow(layer, value_rank)
    X = inputs.gaussian(n, tokens, dim, seed=2)
    mask = random_mask(np.random.default_rng(3), n, tokens) if masked else None
    case = solved_case(layer, X, mask, causal)
    if rounded is not None:
        case = replace(case, Y=case.Y.astype(rounded).astype(float))
    posed = case.problem(xp_array)
    attention, projection = halves(case.attention, rank), halves(layer.projection, value_rank)

    def beside(matrices):
        return matrices.transpose(1, 0, 2).reshape(dim, -1)

    scale = posed.output_scale
    value, output = (beside(projection[0]), projection[1]) if value_rank else (None, projection[0])
    arrays = {
        "query": beside(attention[0]),
        "key": beside(attention[1].transpose(0, 2, 1)) if rank else None,
        "key_bias": None if case.key_bias is None else case.key_bias.T,
        "value": value,
        "output": output.reshape(-1, output.shape[2]) / scale,
        "output_bias": np.zeros(output.shape[2])
        if layer.output_bias is None
        else layer.output_bias / scale,
    }
    arrays = {k: None if v is None else like(xp_array(v), posed.X) for k, v in arrays.items()}
    return posed, model.Factors(**arrays, heads=heads)


def halves(matrices, rank):
    """Factors of the nearest matrices of a rank; the matrices themselves where it is None."""
    if rank is None:
        return matrices, None
    left, sizes, right = np.linalg.svd(matrices, full_matrices=False)
    return left[:, :, :rank] * sizes[:, None, :rank], right[:, :rank]


def narrow(layer, rank):
    """The layer with projections of a rank."""
    value, output = halves(layer.projection, rank)
    return AttentionLayer(layer.attention, value @ output, layer.key_bias, layer.output_bias)


def near(factors, distance, seed=0):
    """The factors with every array moved by a relative distance."""
    rng = np.random.default_rng(seed)

    def moved(array):
        change = rng.standard_normal(tuple(array.shape))
        size = float(namespace(array).sum(array * array)) ** 0.5
        return array + like(change * (distance * size / np.linalg.norm(change)), array)

    return factors.map(moved)


def flat(factors):
    """All numbers of factors, in numpy."""
    return to_numpy(factors.flat())
