"""Time and memory for examples in files, the overhead of a cluster, and the speed on a GPU.

    python benchmarks/scale.py disk        # from files: time and peak memory against n
    python benchmarks/scale.py cluster     # one and two Dask workers, compared with one process
    python benchmarks/scale.py gpu         # the paper's learning curves and a recovery, on a GPU
    python benchmarks/scale.py disk --sizes 20000 40000 --heads 10

`disk`: a ridge regression on the features of 100 heads, and the six phases for two heads, each on
files of n examples that are read 64 MB at a time. Time should grow with n, and peak memory should
not. Every job runs in a new process, whose peak memory is measured.

`cluster`: the same jobs on files of which each worker reads its own chunks of 64 MB, compared with
one process with as many threads as there are workers. An empty pass reads every chunk and computes
nothing.

`gpu`: seconds, and the limit: the time of the necessary operations at the speed of one large
product, measured in the same run on the same device and in the same precision.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import learning_curves as curves
import numpy as np
from rich.console import Console
from rich.table import Table

import onelayer as ol
from onelayer.array import backend, linalg
from onelayer.data import chunks, sources
from onelayer.features.solvers.design import Panels

JOBS = RIDGE, SCULPT, REFINE = ["ridge", "sculpt", "refine"]
GIGA = 1e9
log = Console(stderr=True, highlight=False).print


def main() -> None:
    options = arguments()
    chunks.CHUNK_BYTES = int(options.chunk * 1e6)
    if options.measure:
        print(json.dumps(run_task(json.loads(options.measure))))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for table in PARTS[options.part](options, Path(folder)):
            Console().print(table)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=list(PARTS))
    sizes = [625_000, 1_250_000, 2_500_000, 5_000_000]
    parser.add_argument("--sizes", type=int, nargs="+", default=sizes, help="examples, disk")
    parser.add_argument("--examples", type=int, default=2_000_000, help="cluster")
    parser.add_argument("--heads", type=int, default=100, help="heads of the ridge regression")
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=JOBS, help="cluster")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="cluster")
    parser.add_argument("--chunk", type=float, default=64.0, help="MB in a chunk")
    parser.add_argument("--folder", help="folder for temporary files")
    parser.add_argument("--largest", type=int, default=8192, help="sample size, gpu")
    parser.add_argument("--curve-heads", type=int, default=1000, help="gpu")
    parser.add_argument("--size", type=int, nargs=3, default=[64, 4, 16], help="d, k, m, gpu")
    parser.add_argument("--product", type=int, default=16384, help="size of the large product, gpu")
    parser.add_argument("--device", default="cuda", help="gpu")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    return parser.parse_args()


# The jobs


def write_examples(job: str, n: int, folder: Path) -> Path:
    """Write the examples of a job to X.npy and Y.npy in a folder, block by block."""
    path = folder / f"{job}-{n}"
    path.mkdir()
    layer = ol.AttentionLayer.random(heads=2, dim=8, seed=0)
    target = ol.targets.correlation_weighted(1, 8)
    shapes = ((n, 5, 8), (n,)) if job == RIDGE else ((n, 2, 8), (n, 2, 8))
    X, Y = (
        np.lib.format.open_memmap(path / name, mode="w+", dtype=dtype, shape=shape)
        for name, dtype, shape in zip(("X.npy", "Y.npy"), ("f4", "f8"), shapes, strict=True)
    )
    for i, start in enumerate(range(0, n, 100_000)):
        count = min(n - start, 100_000)
        if job == RIDGE:
            tokens = ol.inputs.sphere(count, 5, 8, seed=i)
            outputs = target(tokens)
        else:
            tokens = ol.inputs.boolean(count, 2, 8, seed=i)
            outputs = layer(tokens)
        X[start : start + count], Y[start : start + count] = tokens, outputs
    return path


def run_job(job: str, X: Any, Y: Any, heads: int) -> str:
    """Run a job on examples of any storage; returns a short description of the result."""
    if job == RIDGE:
        paper = {"fit_intercept": False, "standardize": False}
        model = ol.RandomFeatureAttention(heads, alpha=1e-3, random_state=0, **paper).fit(X, Y)
        return f"|v| = {np.linalg.norm(model.coef_):.6g}"
    found = ol.recover(X, Y, heads=2, method=job)
    return f"{found.reason.name.lower()}, {found.relative_error:.0e}"


# From disk


def disk(options: argparse.Namespace, folder: Path) -> Iterator[Table]:
    """Time and peak memory against n."""
    table = Table(title=f"From files, read {options.chunk:g} MB at a time")
    for column in ("job", "examples", "file, GB", "seconds", "s per million", "peak, GB", "result"):
        table.add_column(column, justify="left" if column in ("job", "result") else "right")
    for job in (RIDGE, SCULPT):
        for n in options.sizes:
            log(f"{job}, {n:,} examples ...")
            path = write_examples(job, n, folder)
            size = sum(file.stat().st_size for file in path.iterdir())
            found = measured(options, job, path)
            table.add_row(
                job,
                f"{n:,}",
                f"{size / GIGA:.2f}",
                f"{found['seconds']:.2f}",
                f"{found['seconds'] / n * 1e6:.1f}",
                f"{found['peak']:.2f}",
                found["result"],
            )
            for file in path.iterdir():
                file.unlink()
    yield table


def measured(
    options: argparse.Namespace, job: str, path: Path, threads: int | None = None
) -> dict[str, Any]:
    """Seconds, result and peak memory of a job in a new process."""
    environment = dict(os.environ)
    if threads is not None:
        environment |= {"OPENBLAS_NUM_THREADS": str(threads)}
    task = json.dumps({"job": job, "path": str(path), "heads": options.heads})
    command = [sys.executable, __file__, "disk", "--measure", task, "--chunk", str(options.chunk)]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def run_task(task: dict[str, Any]) -> dict[str, Any]:
    X, Y = (np.load(Path(task["path"]) / name, mmap_mode="r") for name in ("X.npy", "Y.npy"))
    seconds, result = timed(lambda: run_job(task["job"], X, Y, task["heads"]))
    status = Path("/proc/self/status").read_text("utf-8")
    peak = int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) * 1024 / GIGA
    return {"seconds": seconds, "result": result, "peak": peak}


# On a cluster


def cluster(options: argparse.Namespace, folder: Path) -> Iterator[Table]:
    """Dask workers with one thread each, compared with one process with as many threads."""
    table = Table(title=f"{options.examples:,} examples, chunks of {options.chunk:g} MB")
    for column in ("job", "workers", "one process, s", "cluster, s", "overhead", "empty pass, ms"):
        table.add_column(column, justify="left" if column == "job" else "right")
    for job in options.jobs:
        path = write_examples(job, options.examples, folder)
        for workers in options.workers:
            log(f"{job}, {workers} worker{'s' * (workers > 1)} ...")
            alone = measured(options, job, path, threads=workers)
            seconds, result, empty = on_cluster(job, path, workers, options)
            if result != alone["result"]:
                raise SystemExit(f"{job}: {result} on the cluster, {alone['result']} without")
            table.add_row(
                job,
                str(workers),
                f"{alone['seconds']:.2f}",
                f"{seconds:.2f}",
                f"{seconds / alone['seconds'] - 1:+.0%}",
                f"{1000 * empty:.0f}",
            )
    yield table


def on_cluster(
    job: str, path: Path, workers: int, options: argparse.Namespace
) -> tuple[float, str, float]:
    """Seconds and result of a job on local workers, and seconds of an empty pass."""
    from distributed import Client, LocalCluster

    local = LocalCluster(workers, threads_per_worker=1, dashboard_address=":0")
    with local as running, Client(running) as client:
        client.run(__import__, "onelayer")  # do not measure the import
        found = ol.files.dask_arrays(path)
        X, Y = found["X"], found["Y"]
        source = sources.source({"X": X, "Y": Y})
        nothing = source.chunks.map(len)
        empty = min(timed(lambda: nothing.reduce(operator.add))[0] for _ in range(3))
        seconds, result = timed(lambda: run_job(job, X, Y, options.heads))
    return seconds, result, empty


# On a GPU


def gpu(options: argparse.Namespace, _folder: Path) -> Iterator[Table]:
    """The paper's learning curves and a recovery."""
    import torch

    backend.check_device(options.device)
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else "the CPU"
    speed = {
        dtype: product_speed(torch.zeros((), dtype=dtype, device=device), options.product)
        for dtype in (torch.float32, torch.float64)
    }
    single, double = speed.values()
    table = Table(
        title=f"{name}: {single / 1e12:.3g} TFLOP/s in float32, {double / 1e12:.3g} in float64"
    )
    for column in ("job", "seconds", "limit, s", "of the limit", "result"):
        table.add_column(column, justify="left" if column in ("job", "result") else "right")
    for row in [*curve_rows(options, single, double), recovery_row(options, double)]:
        job, seconds, limit, result = row
        table.add_row(job, f"{seconds:.3f}", f"{limit:.3f}", f"{limit / seconds:.0%}", result)
    yield table


def curve_rows(
    options: argparse.Namespace, single: float, double: float
) -> Iterator[tuple[str, float, float, str]]:
    """Rows for learning curves of the paper's models, and for the Gram matrix alone."""
    n, heads, dim = options.largest, options.curve_heads, 16
    paper = argparse.Namespace(largest=n, heads=heads, dim=dim, keys=16)
    X, Y = curves.data(paper)
    total, limits = 0.0, 0.0
    for name in curves.MODELS:
        log(f"{name} ...")
        model = curves.estimator(name, heads, dim, 1e-3).set_params(device=options.device)
        work = partial(ol.learning_curve, model, *curves.split(X, Y, paper), curves.sizes_up_to(n))
        work()  # the first call loads libraries
        seconds, curve = timed(work)
        p = heads * (dim + 1)
        features = n * curves.feature_operations(model, paper)
        limit = features / double + (n * n * p + n**3 / 3) / single
        total, limits = total + seconds, limits + limit
        yield name, seconds, limit, f"least error {curve.test_error.min():.2g}"
    yield "three curves", total, limits, ""
    model = curves.estimator("rfa", heads, dim, 1e-3)
    design = curves.design_of(model, backend.place(X[:n], options.device)).single()
    seconds = gram_seconds(design)
    yield "Gram matrix", seconds, n * n * design.columns / single, "half of it, float32"


def recovery_row(options: argparse.Namespace, double: float) -> tuple[str, float, float, str]:
    """Row for the recovery of a random layer from eight equations per unknown."""
    dim, tokens, heads = options.size
    layer = ol.AttentionLayer.random(heads, dim, scale=2.0, seed=0)
    n = int(np.ceil(8 * 2 * heads * dim * dim / (tokens * dim)))
    X = ol.inputs.boolean(n, tokens, dim, seed=1)
    Y = layer(X)
    log(f"recovery of {heads} heads in {dim} dimensions ...")
    ol.recover(X[: n // 2], Y[: n // 2], heads=heads, device=options.device, max_steps=3)
    seconds, found = timed(lambda: ol.recover(X, Y, heads=heads, device=options.device))
    rows, columns = n * tokens, heads * dim
    products = sum(row.products for row in found.trace)
    forward = 2 * rows * columns * (dim + 2 * tokens)  # scores, and attended tokens
    product = 2 * forward + 8 * rows * columns * dim  # J and its transpose, and H twice each
    step = forward + 2 * rows * columns * columns + 8 * rows * columns * dim
    limit = (products * product + len(found.trace) * step) / double
    error = found.layer.distance(layer).attention.max()
    return f"recover {dim}, {tokens}, {heads}", seconds, limit, f"heads to {error:.0e}"


def product_speed(reference: Any, size: int) -> float:
    """Operations per second of one large product: the best of five."""
    xp = backend.namespace(reference)
    matrix = backend.like(np.random.default_rng(0).standard_normal((size, size)), reference)
    other = xp.asarray(matrix.mT, copy=True)

    def product() -> None:
        synchronise(matrix @ other)

    return 2 * size**3 / min(timed(product)[0] for _ in range(5))


def gram_seconds(design: Panels) -> float:
    """Seconds to compute Φ Φᵀ, without the features."""
    kernel = backend.zeros((design.rows, design.rows), design.sample)
    took = 0.0
    for part in design.column_panels():
        panel = design.by_columns(part)
        synchronise(panel)
        took += timed(lambda panel=panel: synchronise(linalg.add_gram(kernel, panel)))[0]
    return took


def synchronise(array: Any) -> None:
    """Wait until the array is computed: operations on a GPU are asynchronous."""
    float(array[0, 0])


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


PARTS = {"disk": disk, "cluster": cluster, "gpu": gpu}

if __name__ == "__main__":
    main()
