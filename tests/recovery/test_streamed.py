"""What is recovered from examples that live elsewhere is what is recovered from them in memory."""

import os
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import places
import pytest
from recoveries import (
    JOBS,
    ON_CLUSTER,
    PARTS,
    PLACES,
    assert_same,
    bits,
    in_blocks,
    in_order,
    in_torch,
    solved,
)

from onelayer import AttentionLayer, Reason, inputs, recover
from onelayer.array.backend import to_numpy
from onelayer.data import chunks, dask
from onelayer.data.chunks import InMemory, Streamed
from onelayer.data.dask import OnCluster
from onelayer.recovery import api as driver
from onelayer.recovery import validation

pytestmark = pytest.mark.usefixtures("calm")

# One of each kind: others are read as functions are, chunk by chunk.
in_few_places = pytest.mark.parametrize("put", ["function", "torch", "cluster"], indirect=True)


def chunks_of(X, Y, mask=None):
    """The chunks of checked examples."""
    return validation.examples(X, Y, mask).source.chunks


def test_places_are_what_they_are_called(put):
    X = np.ones((30, 2, 3))
    found = chunks_of(put(X), put(X), put(np.ones((30, 2), dtype=bool)))
    kind = {"memory": InMemory, "torch": InMemory, "cluster": OnCluster}.get(put.name, Streamed)
    assert type(found) is kind
    assert len(found) == 1 if kind is InMemory else len(found) >= PARTS


# The same layer


SLOW_ON_CLUSTER = ("steps", "heads", "noise")  # for thousands of passes
WITH_ALL_JOBS = ("function", "torch")


def jobs(place):
    if place == "cluster":
        return [name for name in (*JOBS, *ON_CLUSTER) if name not in SLOW_ON_CLUSTER]
    return JOBS if place in WITH_ALL_JOBS else ["everything", "rank", "sculpt"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("put", "name"),
    [(place, name) for place in PLACES for name in jobs(place)],
    indirect=["put"],
)
def test_the_layer_is_the_same_everywhere(put, name):
    job = solved(name)
    found = recover(put(job.X), put(job.Y), mask=put(job.mask), **job.options)
    assert_same(found, job.expected)
    assert [row.stage for row in found.trace][:1] == [row.stage for row in job.expected.trace][:1]


@pytest.mark.slow
def test_jobs_end_as_they_should():
    names = (*JOBS, *ON_CLUSTER)
    reasons = {name: solved(name).expected.reason for name in names}
    special = {
        "noise": Reason.NOISE_FLOOR,
        "unpolished": Reason.APPROXIMATE,
        "one noisy head": Reason.LOCAL_MINIMUM,  # noise is told by further starts alone
    }
    assert reasons == {name: special.get(name, Reason.EXACT) for name in names}
    for name in set(names) - set(special):
        match = solved(name).expected.layer.distance(solved(name).layer)
        assert max(match.attention.max(), match.projection.max(), match.output_bias) < 1e-9


@pytest.mark.slow
@in_few_places
@pytest.mark.parametrize("name", ["plain", "everything", "sculpt"])
def test_nothing_need_be_kept_between_passes(put, monkeypatch, name):
    job = solved(name)
    monkeypatch.setattr(chunks, "KEPT_BYTES", 1)
    monkeypatch.setattr(dask, "_CLUSTER_SHARE", 0.0)
    found = recover(put(job.X), put(job.Y), mask=put(job.mask), **job.options)
    assert_same(found, job.expected)


@pytest.mark.parametrize("parts", [1, 2, 160])
@pytest.mark.parametrize("name", ["plain", "everything"])
def test_the_size_of_the_blocks_does_not_matter(parts, name):
    job = solved(name)
    X, Y, mask = (
        None if one is None else places.by_function(one, 160 // parts)
        for one in (job.X, job.Y, job.mask)
    )
    assert_same(recover(X, Y, mask=mask, **job.options), job.expected)


@pytest.mark.slow
@in_few_places
def test_examples_that_would_not_fit_in_memory_are_sculpted(put, monkeypatch):
    job = solved("sculpt")
    monkeypatch.setattr(driver, "KEPT_BYTES", 2**10)
    found = recover(put(job.X), put(job.Y), heads=2)
    assert found.trace[0].note == "sculpt, since the examples take 0.0 GB in memory"
    assert_same(replace(found, trace=found.trace[1:]), job.expected)


@pytest.mark.parametrize(
    ("put", "kept"), [("function", True), ("function", False), ("cluster", True)], indirect=["put"]
)
def test_results_repeat_to_the_last_bit(put, monkeypatch, kept):
    job = solved("few steps")
    if not kept:
        monkeypatch.setattr(chunks, "KEPT_BYTES", 1)
    given = {"X": put(job.X), "Y": put(job.Y), "mask": put(job.mask)}
    first, second = (recover(**given, **job.options) for _ in range(2))
    assert bits(first.layer) == bits(second.layer)


# Of all kinds


@pytest.mark.slow
@in_few_places
@pytest.mark.parametrize("method", ["refine", "sculpt"])
def test_outputs_may_be_computed_where_the_inputs_are(put, method):
    job = solved("plain" if method == "refine" else "sculpt")
    X = put(job.X)
    Y = job.layer(X)
    assert_same(recover(X, Y, **job.options), job.expected)


@pytest.mark.slow
@pytest.mark.parametrize("elsewhere", ["X", "Y", "mask"])
@pytest.mark.parametrize("by", [places.by_function, places.in_dask])
def test_one_of_them_may_be_elsewhere_alone(by, elsewhere):
    job = solved("everything")
    given = {"X": job.X, "Y": job.Y.tolist(), "mask": job.mask.tolist()}
    given[elsewhere] = by(getattr(job, elsewhere))
    assert_same(recover(**given, **job.options), job.expected)


def test_a_large_file_may_stand_beside_arrays(tmp_path, monkeypatch):
    job = solved("everything")
    monkeypatch.setattr("onelayer.data.chunks.CHUNK_BYTES", job.Y.nbytes // 2)
    Y = places.on_disk(job.Y, tmp_path)
    assert_same(recover(job.X.tolist(), Y, mask=job.mask, **job.options), job.expected)


@pytest.mark.slow
def test_dask_arrays_may_be_cut_differently(cluster):
    da = pytest.importorskip("dask.array")
    job = solved("everything")
    X = da.from_array(job.X, chunks=((0, 70, 1, 0, 89), 2, 3))
    Y = da.from_array(job.Y, chunks=(33, 1, 4))
    mask = da.from_array(job.mask, chunks=(160, 2))
    assert_same(recover(X, Y, mask=mask, **job.options), job.expected)


def changed_block(change):
    """Functions for X and Y of a job, the second block of both changed."""
    job = solved("plain")
    X, Y = (list(places.by_function(array, 60)()) for array in (job.X, job.Y))
    X[1], Y[1] = change(X[1]), change(Y[1])
    return in_order(X), in_order(Y)


CHANGES = {
    "fortran": np.asfortranarray,
    "backwards": lambda block: block[::-1].copy()[::-1],
    "read only": lambda block: np.broadcast_to(block, block.shape),
    "other bytes": lambda block: block.astype(">f8"),
    "strided": lambda block: np.repeat(block, 2, axis=0)[::2],
    "nested lists": lambda block: block.tolist(),
    "tensors": in_torch,
    "with gradients": lambda block: in_torch(block).requires_grad_(),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_blocks_of_any_kind_stand_beside_each_other(kind):
    job = solved("plain")
    assert_same(recover(*changed_block(CHANGES[kind]), **job.options), job.expected)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_answers_are_of_the_kind_of_the_first_block(kind):
    job = solved("plain")
    first, second = (job.X, in_torch(job.X)) if kind == "numpy" else (in_torch(job.X), job.X)
    found = recover(in_order([first[:50], second[50:]]), job.Y, **job.options)
    assert_same(found, job.expected)
    assert type(found.layer.attention) is type(first)


@in_few_places
@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int64"])
def test_whole_numbers_are_taken_as_numbers(put, dtype):
    numbers = np.random.default_rng(0).permutation(2**12)[:200]  # none twice: in memory it is once
    X = (numbers[:, None] >> np.arange(12) & 1).reshape(200, 3, 4).astype(dtype)
    if put.name.startswith("torch") and dtype == "uint16":
        pytest.skip("torch cannot compute with them")
    Y = AttentionLayer.random(heads=2, dim=4)(X.astype(float))
    assert_same(recover(put(X), put(Y), heads=2), recover(X, Y, heads=2))


@in_few_places
def test_half_precision_is_widened(put):
    layer = AttentionLayer.random(heads=2, dim=4)
    X = inputs.gaussian(160, 3, 4).astype(np.float16)
    Y = layer(X.astype(float))
    found = recover(put(X), put(Y), heads=2)
    assert_same(found, recover(X, Y, heads=2))
    assert to_numpy(found.layer.attention).dtype == np.float64


@in_few_places
def test_single_precision_stays_single(put):
    job = solved("plain")
    X, Y = (array.astype(np.float32) for array in (job.X, job.Y))
    options = {"heads": 2, "tol": 1e-6}
    found, expected = recover(put(X), put(Y), **options), recover(X, Y, **options)
    assert found.reason is expected.reason is Reason.EXACT
    assert to_numpy(found.layer.attention).dtype == np.float32
    np.testing.assert_allclose(
        to_numpy(found.layer.attention), expected.layer.attention, rtol=0, atol=1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize("narrow", [0, 1])
def test_one_block_of_double_precision_makes_all_double(narrow):
    job = solved("plain")
    X, Y = (list(places.by_function(array, 80)()) for array in (job.X, job.Y))
    X[narrow], Y[narrow] = X[narrow].astype(np.float32), Y[narrow].astype(np.float32)
    options = {"heads": 2, "restarts": 1}  # rounding of one block is noise to the other
    found = recover(in_order(X), in_order(Y), **options)
    assert_same(found, recover(np.concatenate(X), np.concatenate(Y), **options))
    assert found.layer.attention.dtype == np.float64


@in_few_places
@pytest.mark.parametrize("device", [None, "cpu"])
def test_the_cpu_is_a_device(put, device):
    job = solved("plain")
    found = recover(put(job.X), put(job.Y), **job.options, device=device)
    assert_same(found, job.expected)


# Chunks of which nothing is left


def cut_around(positions, n):
    """Where to cut so that each of these positions is a chunk of its own."""
    return sorted({0, n, *positions, *(position + 1 for position in positions)})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["everything", "sculpt", "unpolished"])
def test_a_chunk_that_is_held_out_as_a_whole_does_no_harm(name):
    job = solved(name)
    n = len(job.X)
    rng = np.random.default_rng(0)  # as `recover` draws
    if name == "everything":
        held_out = rng.permutation(n)[:5]
    else:
        held_out = np.sort(rng.choice(n, n // 20, replace=False))[:5]
    cuts = cut_around(held_out.tolist(), n)
    X, Y, mask = (None if a is None else in_blocks(a, cuts) for a in (job.X, job.Y, job.mask))
    assert_same(recover(X, Y, mask=mask, **job.options), job.expected)


def test_a_chunk_that_is_held_out_as_a_whole_does_no_harm_on_a_cluster(cluster):
    job = solved("plain")
    held_out = np.random.default_rng(0).permutation(len(job.X))[:2]
    lengths = tuple(np.diff(cut_around(held_out.tolist(), len(job.X))).tolist())
    X, Y = (places.in_dask(array, lengths) for array in (job.X, job.Y))
    assert_same(recover(X, Y, **job.options), job.expected)


# Workers that die


def read_and_killed(cluster, job, folder, loads):
    """What is found if a worker is killed after so many reads of a block of X, if it was."""
    folder.mkdir()
    X = places.dying_once(job.X, folder / "killed", loads, rows=-(-len(job.X) // PARTS))
    found = recover(X, places.in_dask(job.Y, len(job.Y) // 2), **job.options)
    cluster.wait_for_workers(2, timeout=30)
    return found, (folder / "killed").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "loads"), [("plain", 7), ("sculpt", 11)])
def test_a_worker_that_dies_while_it_reads_changes_nothing(cluster, tmp_path, name, loads):
    job = solved(name)
    whole, nobody_died = read_and_killed(cluster, job, tmp_path / "whole", 10**6)
    broken, died = read_and_killed(cluster, job, tmp_path / "broken", loads)
    assert (nobody_died, died) == (False, True)
    assert bits(broken.layer) == bits(whole.layer)
    assert steps(broken) == steps(whole)
    assert_same(whole, job.expected)


def steps(found):
    """The trace without the times."""
    return [replace(row, seconds=0.0) for row in found.trace]


@pytest.mark.slow
def test_a_worker_that_dies_with_all_it_holds_changes_nothing(cluster):
    job = solved("few steps")
    X, Y = (places.in_dask(array, 5) for array in (job.X, job.Y))
    workers = sorted(cluster.run(os.getpid).values())

    def kill(row):
        if row.step == 2:
            os.kill(workers[0], signal.SIGKILL)

    whole, broken = (recover(X, Y, **job.options, progress=progress) for progress in (None, kill))
    cluster.wait_for_workers(2, timeout=30)
    assert workers[0] not in cluster.run(os.getpid).values()
    assert [row.stage for row in broken.trace] == ["span of the inputs"] + ["start"] * 3
    assert broken.trace[1].examples == 10  # all but those held out
    assert bits(broken.layer) == bits(whole.layer)
    assert steps(broken) == steps(whole)


# Memory


SCRIPT = """
import sys
import numpy as np
from onelayer import recover
from onelayer.data import chunks

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024

chunks.CHUNK_BYTES = chunks.KEPT_BYTES = 2 * 2**20
X, Y = (np.load(path, mmap_mode="r") for path in sys.argv[1:])
for method in ("sculpt", "refine"):
    options = {"heads": 1, "method": method, "tol": 1e-6, "polish": False}
    recover(X[:3000].copy(), Y[:3000].copy(), **options)  # all that is imported on the way
    with open("/proc/self/clear_refs", "w") as forget:
        forget.write("5")
    before = peak()
    found = recover(X, Y, **options)
    print(found.converged, found.trace[-1].examples, peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peaks of memory are read from /proc")
def test_memory_is_bounded_whatever_the_size_of_the_files(tmp_path):
    n = 200_000
    layer = AttentionLayer.random(heads=1, dim=8, seed=0)
    X = inputs.gaussian(n, 2, 8)
    for name, array in (("X", X), ("Y", layer(X))):
        np.save(tmp_path / f"{name}.npy", array)
    assert X.nbytes > 24 * 2**20
    command = [sys.executable, "-c", SCRIPT, *(str(tmp_path / f"{name}.npy") for name in "XY")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    sculpted, refined = (line.split() for line in result.stdout.splitlines())
    assert sculpted[:2] == ["True", "3000"]
    assert refined[:2] == ["True", str(n - 2000)]
    for *_, grown in (sculpted, refined):
        assert float(grown) < 25  # megabytes, of 49 in the files
