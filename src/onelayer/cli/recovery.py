"""The commands `onelayer demo` and `onelayer recover FILE`."""

from __future__ import annotations

import re
import zipfile
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.markup import escape
from rich.table import Column, Table
from typer import Argument, Option

from onelayer import inputs
from onelayer.cli.terminal import check_folder, err, fail, out, plain_errors, say
from onelayer.data import dask as clusters
from onelayer.data import files
from onelayer.io import safetensors_files
from onelayer.layer import AttentionLayer
from onelayer.recovery import display
from onelayer.recovery.api import recover
from onelayer.recovery.result import Recovery

_FILE = (
    "A .npz or .safetensors file with arrays X, Y and perhaps mask and observed; or a folder with "
    "X.npy and Y.npy, a .zarr group, an .h5 or .hdf5 file, which are read block by block."
)
_METHOD = "refine (Gauss-Newton), sculpt (the six phases), or auto."
_CLUSTER = (
    "Scheduler of a Dask cluster. All of its machines need to see FILE, a folder, .zarr, .h5 or "
    ".hdf5."
)
_CHECKPOINT = "Save the best layer so far to this file, at most every ten seconds."
_FORCE = "Write the layer even without convergence."


def demo(
    heads: Annotated[int, Option(min=1, help="Heads of the layer to recover.")] = 8,
    dim: Annotated[int, Option(min=2, help="Dimension of a token.")] = 32,
    examples: Annotated[int, Option(min=2, help="Number of random examples.")] = 1000,
    seed: Annotated[int, Option(min=0, help="Seed of layer, inputs and search.")] = 0,
) -> None:
    """Recover a random attention layer from its inputs and outputs, and compare the two.

    Examples:

        onelayer demo

        onelayer demo --heads 4 --dim 16 --examples 400 --seed 3
    """
    layer = AttentionLayer.random(heads=heads, dim=dim, scale=2.0, seed=seed)
    X = inputs.boolean(examples, 4, dim, seed=seed + 1)
    out.print(
        f"A random layer with {heads} heads of {dim} x {dim}, seen only through "
        f"{examples} random examples of 4 tokens: what are its weights?"
    )
    with plain_errors(), display.live(err) as listener:
        found = recover(X, layer(X), heads=heads, seed=seed, progress=listener)
    match = found.layer.distance(layer)
    names = ("head", "found as", "attention error", "projection error")
    columns = (Column(name, justify="right") for name in names)
    table = Table(*columns, title="Recovered heads", title_justify="left")
    errors = zip(match.permutation, match.attention, match.projection, strict=True)
    for head, (index, attention, projection) in enumerate(errors):
        table.add_row(str(head), str(index), f"{attention:.1e}", f"{projection:.1e}")
    out.print(table)
    _report(found)
    raise typer.Exit(0 if found.converged else 1)


def recover_command(
    file: Annotated[Path, Argument(help=_FILE)],
    output: Annotated[Path, Option("--output", "-o", help="The file to write (safetensors).")],
    heads: Annotated[str, Option(help="The number of heads, or auto.")] = "auto",
    rank: Annotated[int | None, Option(help="Rank of the attention matrices.")] = None,
    bias: Annotated[bool, Option("--bias", help="Recover key and output biases too.")] = False,
    causal: Annotated[bool, Option("--causal", help="The layer is causal.")] = False,
    method: Annotated[str, Option(help=_METHOD)] = "auto",
    polish: Annotated[bool, Option(help="Refine the result of the six phases (sculpt).")] = True,
    tol: Annotated[float, Option(help="Relative error at which to stop.")] = 1e-12,
    head_tol: Annotated[float, Option(help="Largest error bar of a recovered head.")] = 0.1,
    seed: Annotated[int, Option(min=0, help="Seed of the search.")] = 0,
    device: Annotated[str | None, Option(help="cpu or cuda.")] = None,
    cluster: Annotated[str | None, Option(metavar="ADDRESS", help=_CLUSTER)] = None,
    restarts: Annotated[int, Option(help="Further starts if the first one fails.")] = 20,
    max_seconds: Annotated[float | None, Option(help="Time limit in seconds.")] = None,
    checkpoint: Annotated[Path | None, Option(metavar="FILE", help=_CHECKPOINT)] = None,
    resume: Annotated[bool, Option("--resume", help="Continue from the checkpoint.")] = False,
    force: Annotated[bool, Option("--force", help=_FORCE)] = False,
) -> None:
    """Recover the attention layer behind examples X (n, tokens, dim) and Y (n, tokens, out_dim).

    The exit status is 0 if the layer was recovered, 1 if it was not (then nothing is written,
    unless with --force) and 2 if something is wrong with the call.

    Examples:

        onelayer recover examples.npz --heads 8 -o layer.safetensors

        onelayer recover examples.safetensors --heads 12 --rank 32 --bias -o layer.safetensors
            --checkpoint best.safetensors --resume

        onelayer recover folder/ --method sculpt -o layer.safetensors

        onelayer recover examples.zarr --cluster tcp://scheduler:8786 -o layer.safetensors
    """
    options = locals()  # those of `recover`, once the others are taken out
    for name in ("file", "output", "cluster", "force"):
        del options[name]
    if re.fullmatch("-?[0-9]+", heads):
        options["heads"] = int(heads)
    with plain_errors():
        _check_files(file, output, checkpoint, resume)
        found = _recover(file, cluster, options)
        if found.converged or force:
            found.layer.save(output)
    _report(found)
    if found.converged or force:
        kind = "" if output.suffix == ".safetensors" else ", a safetensors file"
        say(f"Wrote {found.layer} to {output}{kind}.")
    else:
        say("Nothing was written: the recovery did not converge (--force writes the layer).")
    raise typer.Exit(0 if found.converged else 1)


def _recover(file: Path, cluster: str | None, options: dict[str, Any]) -> Recovery:
    """Recover the layer behind a file, perhaps on a cluster."""
    connected = nullcontext() if cluster is None else clusters.connected(cluster)
    try:
        with connected, display.live(err) as listener:
            arrays = _read(file, on_cluster=cluster is not None)
            mask, observed = arrays.get("mask"), arrays.get("observed")
            examples = {"X": arrays["X"], "Y": arrays["Y"], "mask": mask, "observed": observed}
            return recover(**examples, progress=listener, **options)
    except KeyboardInterrupt:
        checkpoint = options["checkpoint"]
        kept = checkpoint is not None and checkpoint.exists()
        what = f"--resume continues from {checkpoint}" if kept else "nothing was written"
        fail(f"interrupted; {what}", code=130)


def _check_files(file: Path, output: Path, checkpoint: Path | None, resume: bool) -> None:
    """Refuse files that could not be written, or would overwrite others."""
    if output.is_dir():
        raise ValueError(f"{output} is a folder, expected a file to write to")
    if output.exists() and file.exists() and output.samefile(file):
        raise ValueError(f"{output} holds the examples, expected another file to write to")
    check_folder(output)
    if checkpoint is None:
        if resume:
            raise ValueError(
                "--resume is given without --checkpoint, expected the file to continue from"
            )
    elif checkpoint.absolute() == output.absolute():
        raise ValueError(f"{output} is to hold the checkpoint and the layer, expected two files")
    elif checkpoint.exists() and not resume:
        raise ValueError(
            f"{checkpoint} exists, expected --resume to continue from it, or another file"
        )


def _read(path: Path, on_cluster: bool) -> dict[str, Any]:
    """The arrays of a file or folder, with X and Y among them; large ones are read later."""
    if path.suffix in (*files.HDF5, files.ZARR) or (on_cluster and path.is_dir()):
        arrays = files.dask_arrays(path)
    elif on_cluster:
        expected = "expected .zarr, .h5, .hdf5 or a folder"
        raise ValueError(f"{path} cannot be read by the workers of a cluster, {expected}")
    elif path.is_dir():
        arrays = {file.stem: files.open_npy(file) for file in sorted(path.glob("*.npy"))}
    elif path.suffix == ".npz":
        arrays = _read_npz(path)
    elif path.suffix == ".safetensors":
        arrays = safetensors_files.read_safetensors(path)
    else:
        expected = "expected .npz, .safetensors, .zarr, .h5, .hdf5 or a folder"
        raise ValueError(f"{path} ends in {path.suffix!r}, {expected}")
    if not {"X", "Y"} <= arrays.keys():
        raise ValueError(f"{path} holds {sorted(arrays)}, expected arrays X and Y")
    return arrays


def _read_npz(path: Path) -> dict[str, Any]:
    try:
        with zipfile.ZipFile(path), open(path, "rb") as file:
            archive = np.load(file, allow_pickle=False)
            return {name: archive[name] for name in archive.files}
    except FileNotFoundError:
        raise
    except Exception as error:  # damaged archives raise anything from zlib.error to MemoryError
        raise ValueError(f"{path} is not a whole .npz file of plain arrays: {error}") from error


def _report(found: Recovery) -> None:
    """Print the outcome of a recovery and its certificate."""
    proof = found.certificate
    sure = f"{proof.confidence:.0%} sure"
    largest = proof.attention_error.max(), proof.projection_error.max()
    attention, projection = (f"{bar:.1e}" if np.isfinite(bar) else "unknown" for bar in largest)
    rows = {
        "outcome": f"{'[green]' if found.converged else '[red]'}{found.reason}",
        "time": f"{found.seconds:.1f} s, {len(found.trace)} steps",
        f"errors of heads, {sure}": f"attention at most {attention}, "
        f"projection at most {projection} (relative)",
        "heads not determined": ", ".join(map(str, proof.undetermined_heads)) or "none",
        "inputs vary along": f"{proof.input_rank} of {found.layer.dim} directions",
        "error on the examples": f"{found.relative_error:.1e} (relative)",
        "error on held-out examples": f"{proof.error:.1e} ({proof.examples} examples)",
        f"unseen examples, {sure}": f"error above {proof.worst:.1e} with probability "
        f"at most {proof.exceed_probability:.2g}",
    }
    if found.advice:
        rows["advice"] = escape(found.advice)
    elif found.reason.remedy:
        rows["what to try"] = found.reason.remedy
    table = Table(title="Certificate", title_justify="left", show_header=False)
    for row in rows.items():
        table.add_row(*row)
    out.print(table)
