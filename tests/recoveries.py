"""Recoveries of which the examples can be brought to any place, and what is found in memory."""

from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import places
import pytest
from cases import random_mask

from onelayer import AttentionLayer, inputs, recover
from onelayer.array.backend import to_numpy

PARTS = 3  # in which the examples of most tests come


# Places


class Anew:
    """Blocks that can be gone through again and again."""

    def __init__(self, array, rows):
        self.blocks = places.by_function(array, rows)

    def __iter__(self):
        return self.blocks()


def fresh_path(request, suffix):
    folder = request.getfixturevalue("tmp_path")
    return folder / f"{len(list(folder.iterdir()))}{suffix}"


def in_zarr(array, rows, request):
    zarr, da = pytest.importorskip("zarr"), pytest.importorskip("dask.array")
    path = fresh_path(request, ".zarr")
    cut = (rows, 1, *array.shape[2:])  # along the tokens too
    stored = zarr.create_array(path, shape=array.shape, dtype=array.dtype, chunks=cut)
    stored[...] = array
    return da.from_zarr(str(path))


def in_hdf5(array, rows, request):
    h5py, da = pytest.importorskip("h5py"), pytest.importorskip("dask.array")
    file = h5py.File(fresh_path(request, ".h5"), "w")
    request.addfinalizer(file.close)
    return da.from_array(file.create_dataset("array", data=array), chunks=(rows, *array.shape[1:]))


def in_file(array, rows, request):
    """A file that is large: its pieces are of about so many examples."""
    patch = request.getfixturevalue("monkeypatch")
    if array.ndim == 3:
        patch.setattr("onelayer.data.chunks.CHUNK_BYTES", 2 * rows * array[0].nbytes)
    return places.on_disk(array, request.getfixturevalue("tmp_path"))


def in_torch(array, *_):
    return pytest.importorskip("torch").as_tensor(array)


def on_cluster(array, rows, request):
    request.getfixturevalue("cluster")
    return places.in_dask(array, rows)


PLACES = {
    "memory": lambda array, *_: array,
    "function": lambda array, rows, _: places.by_function(array, rows),
    "iterable": lambda array, rows, _: Anew(array, rows),
    "file": in_file,
    "dask": lambda array, rows, _: places.in_dask(array, rows),
    "zarr": in_zarr,
    "hdf5": in_hdf5,
    "torch": in_torch,
    "torch function": lambda array, rows, _: places.by_function(in_torch(array), rows),
    "cluster": on_cluster,
}


def in_blocks(array, cuts):
    return lambda: (array[start:stop] for start, stop in pairwise(cuts))


def in_order(blocks):
    return lambda: iter(blocks)


# Recoveries


@dataclass(frozen=True)
class Job:
    """A layer, examples of it, and what `recover` is told of it."""

    n: int = 160
    tokens: int = 3
    layer: dict[str, Any] = field(default_factory=dict)
    causal: bool = False
    masked: bool = False
    noise: float = 0.0
    seed: int = 4  # with which Gauss-Newton steps on few of the examples suffice
    options: dict[str, Any] = field(default_factory=dict)


SCULPTED = {"n": 4000, "tokens": 2, "seed": 1, "layer": {"dim": 5, "scale": 3.0, "seed": 2}}
JOBS = {
    "plain": Job(),
    "steps": Job(seed=6),  # on all examples
    "bias": Job(layer={"bias": True}, options={"bias": True}),
    "causal": Job(causal=True),
    "mask": Job(masked=True),
    "everything": Job(layer={"bias": True}, causal=True, masked=True, options={"bias": True}),
    "rank": Job(layer={"rank": 1, "dim": 5}, options={"rank": 1}),
    "heads": Job(options={"heads": "auto"}),
    "noise": Job(noise=1e-3),
    "auto": Job(options={"method": "auto"}),
    "sculpt": Job(**SCULPTED, options={"method": "sculpt"}),
    "unpolished": Job(**SCULPTED, options={"method": "sculpt", "polish": False}),
}
SMALL = {"heads": 1, "dim": 2, "seed": 1}
# On a cluster a pass takes some 50 ms: with few of them over all examples.
ON_CLUSTER = {
    "one head": Job(layer={"heads": 1}, options={"heads": "auto"}),
    "one noisy head": Job(60, 2, SMALL, noise=1e-3, seed=3, options={"restarts": 0}),
}
# All steps are on all examples, which are too few to begin with a part of them.
FEW_STEPS = Job(14, 2, SMALL, noise=0.1, options={"restarts": 0, "max_steps": 4})


@cache
def solved(name):
    """Of a job: X, Y, the mask, options, the layer, and what is found in memory."""
    job = {**JOBS, **ON_CLUSTER, "few steps": FEW_STEPS}[name]
    layer = AttentionLayer.random(**{"heads": 2, "dim": 4, "seed": 0, **job.layer})
    X = inputs.gaussian(job.n, job.tokens, layer.dim, seed=job.seed)
    mask = random_mask(np.random.default_rng(2), job.n, job.tokens) if job.masked else None
    Y = layer(X, mask=mask, causal=job.causal)
    Y = Y + job.noise * np.random.default_rng(3).standard_normal(Y.shape)
    options = {"heads": layer.heads, "method": "refine", "causal": job.causal, **job.options}
    expected = recover(X, Y, mask=mask, **options)
    return SimpleNamespace(X=X, Y=Y, mask=mask, options=options, layer=layer, expected=expected)


def assert_same(found, expected):
    """The same layer and the same words, to 1e-10."""
    assert found.reason is expected.reason
    mine, theirs = (result.layer.arrays() for result in (found, expected))
    assert mine.keys() == theirs.keys()
    for name, array in theirs.items():
        size = abs(to_numpy(array)).max()
        np.testing.assert_allclose(to_numpy(mine[name]), to_numpy(array), rtol=0, atol=1e-10 * size)
    assert found.relative_error == pytest.approx(expected.relative_error, abs=1e-10)
    assert found.certificate.error == pytest.approx(expected.certificate.error, abs=1e-10)
    assert found.certificate.examples == expected.certificate.examples
    firsts = ([row.examples for row in one.trace[:3]] for one in (found, expected))
    assert next(firsts) == next(firsts)


def bits(layer):
    return {name: to_numpy(array).tobytes() for name, array in layer.arrays().items()}
