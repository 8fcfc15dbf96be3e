"""The commands `onelayer demo` and `onelayer recover FILE`."""

from __future__ import annotations

import re
import zipfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.markup import escape
from rich.table import Table

import onelayer
from onelayer.cli.terminal import err, fail, out
from onelayer.data import cluster as clusters
from onelayer.data import files
from onelayer.io import safetensors_files
from onelayer.layer import AttentionLayer
from onelayer.recovery import display
from onelayer.recovery.api import Recovery, recover
from onelayer.recovery.certificate import Certificate


def demo(
    heads: Annotated[int, typer.Option(min=1, help="Heads of the layer to recover.")] = 8,
    dim: Annotated[int, typer.Option(min=2, help="Dimension of a token.")] = 32,
    examples: Annotated[
        int, typer.Option(min=2, help="Random examples to recover it from.")
    ] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of layer, inputs and search.")] = 0,
) -> None:
    """Make a random attention layer, recover it from its inputs and outputs, and compare.

    Examples:

        onelayer demo

        onelayer demo --heads 4 --dim 16 --examples 400 --seed 3
    """
    layer = AttentionLayer.random(heads=heads, dim=dim, scale=2.0, seed=seed)
    X = onelayer.inputs.boolean(examples, 4, dim, seed=seed + 1)
    out.print(
        f"A random layer with {heads} heads of {dim} x {dim}, seen only through "
        f"{examples} random examples of 4 tokens: what are its weights?"
    )
    try:
        with display.live(err) as listener:
            found = recover(X, layer(X), heads=heads, seed=seed, progress=listener)
    except KeyboardInterrupt:
        fail("interrupted", code=130)
    match = found.layer.distance(layer)
    table = Table(title="Recovered heads", title_justify="left")
    for column in ("head", "found as", "attention error", "projection error"):
        table.add_column(column, justify="right")
    for head in range(heads):
        table.add_row(
            str(head),
            str(match.permutation[head]),
            f"{match.attention[head]:.1e}",
            f"{match.projection[head]:.1e}",
        )
    out.print(table)
    _report(found)
    raise typer.Exit(0 if found.converged else 1)


def recover_command(
    file: Annotated[
        Path,
        typer.Argument(
            help="A .npz or .safetensors file with arrays X and Y, perhaps mask; or a folder with "
            "X.npy and Y.npy, a .zarr group, an .h5 or .hdf5 file, which are read block by block."
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Where to write the layer (safetensors).")
    ],
    heads: Annotated[str, typer.Option(help="The number of heads, or auto.")] = "auto",
    method: Annotated[
        str, typer.Option(help="refine (Gauss-Newton), sculpt (the six phases), or auto.")
    ] = "auto",
    polish: Annotated[
        bool, typer.Option(help="Make what the six phases found exact (sculpt).")
    ] = True,
    rank: Annotated[int | None, typer.Option(help="Rank of the attention matrices.")] = None,
    bias: Annotated[bool, typer.Option("--bias", help="Find key and output biases too.")] = False,
    causal: Annotated[bool, typer.Option("--causal", help="The layer is causal.")] = False,
    tol: Annotated[float, typer.Option(help="Relative error to stop at.")] = 1e-12,
    head_tol: Annotated[
        float, typer.Option(help="Largest error bar of a head that counts as recovered.")
    ] = 0.1,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the search.")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="The scheduler of a Dask cluster, whose machines all see FILE: a folder, .zarr, "
            ".h5 or .hdf5.",
        ),
    ] = None,
    restarts: Annotated[int, typer.Option(help="Further starts if the first fails.")] = 20,
    max_seconds: Annotated[float | None, typer.Option(help="Give up after so long.")] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Keep the best layer so far in this file, written every ten seconds at most.",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the checkpoint of a run that was ended.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Write the layer even if it is not to be believed.")
    ] = False,
) -> None:
    """Recover the attention layer behind examples X (n, tokens, dim) and Y (n, tokens, out_dim).

    The exit status is 0 if the layer was recovered, 1 if it was not (then nothing is written,
    unless with --force) and 2 if something is wrong with the call.

    Examples:

        onelayer recover examples.npz --heads 8 -o layer.safetensors

        onelayer recover examples.safetensors --heads 12 --rank 32 --bias -o layer.safetensors
            --checkpoint best.safetensors

        onelayer recover examples.safetensors --heads 12 --rank 32 --bias -o layer.safetensors
            --checkpoint best.safetensors --resume

        onelayer recover folder/ --method sculpt -o layer.safetensors

        onelayer recover examples.zarr --cluster tcp://scheduler:8786 -o layer.safetensors
    """
    if output.is_dir():
        fail(f"{output} is a folder, expected a file to write to")
    if output.exists() and file.exists() and output.samefile(file):
        fail(f"{output} holds the examples, expected another file to write to")
    if not output.parent.is_dir():
        fail(f"{output.parent} is no folder, expected one to write {output.name} to")
    _check_checkpoint(checkpoint, resume, output)
    try:
        with _using(cluster), display.live(err) as listener:
            arrays = _read(file, on_cluster=cluster is not None)
            found = recover(
                arrays["X"],
                arrays["Y"],
                heads=int(heads) if re.fullmatch("-?[0-9]+", heads) else heads,  # type: ignore[arg-type]
                method=method,  # type: ignore[arg-type]
                polish=polish,
                rank=rank,
                bias=bias,
                causal=causal,
                mask=arrays.get("mask"),
                tol=tol,
                head_tol=head_tol,
                seed=seed,
                device=device,
                restarts=restarts,
                max_seconds=max_seconds,
                checkpoint=checkpoint,
                resume=resume,
                progress=listener,
            )
        if found.converged or force:
            found.layer.save(output)
    except (ValueError, TypeError, OSError, ImportError) as error:
        fail(str(error))
    except KeyboardInterrupt:  # typer would end here without a word
        kept = checkpoint is not None and checkpoint.exists()
        what = f"--resume goes on from {checkpoint}" if kept else "nothing was written"
        fail(f"interrupted; {what}", code=130)
    _report(found)
    if found.converged or force:
        text = escape(f"Wrote {found.layer} to {output}.")
        out.print(text, highlight=False, soft_wrap=True)
    else:
        out.print("Nothing was written: the layer is not to be believed (--force writes it).")
    raise typer.Exit(0 if found.converged else 1)


def _using(address: str | None) -> AbstractContextManager[None]:
    """The cluster at an address, if there is one."""
    return nullcontext() if address is None else clusters.connected(address)


def _check_checkpoint(checkpoint: Path | None, resume: bool, output: Path) -> None:
    """What `recover` would refuse in the words of Python, and a layer that would be overwritten."""
    if checkpoint is None:
        if resume:
            fail("--resume is given without --checkpoint, expected the file to go on from")
    elif checkpoint.absolute() == output.absolute():
        fail(f"{output} is to hold the checkpoint and the layer, expected two files")
    elif checkpoint.exists() and not resume:
        fail(f"{checkpoint} exists, expected --resume to go on from it, or another file")


def _read(path: Path, on_cluster: bool) -> dict[str, Any]:
    """The arrays of a file or folder, with X and Y among them; large ones are yet to be read."""
    lazily = path.suffix in (*files.HDF5, files.ZARR)
    if lazily or (on_cluster and path.is_dir()):
        arrays = files.dask_arrays(path)
    elif on_cluster:
        raise ValueError(
            f"{path} cannot be read by the workers of a cluster, "
            "expected .zarr, .h5, .hdf5 or a folder"
        )
    elif path.is_dir():
        arrays = {file.stem: files.open_npy(file) for file in sorted(path.glob("*.npy"))}
    elif path.suffix == ".npz":
        arrays = _read_npz(path)
    elif path.suffix == ".safetensors":
        arrays = safetensors_files.read_safetensors(path)
    else:
        raise ValueError(
            f"{path} ends in {path.suffix!r}, "
            "expected .npz, .safetensors, .zarr, .h5, .hdf5 or a folder"
        )
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
    """The outcome and its certificate as a table."""
    proof = found.certificate
    sure = f"{proof.confidence:.0%} sure"
    table = Table(title="Certificate", title_justify="left", show_header=False)
    rows = [
        ("outcome", f"{'[green]' if found.converged else '[red]'}{found.reason}"),
        ("time", f"{found.seconds:.1f} s, {len(found.trace)} steps"),
        (f"errors of heads, {sure}", _bars(proof)),
        ("heads not determined", ", ".join(map(str, proof.undetermined_heads)) or "none"),
        ("inputs vary along", f"{proof.input_rank} of {found.layer.dim} directions"),
        ("error on the examples", f"{found.relative_error:.1e} (relative)"),
        ("error on held-out examples", f"{proof.error:.1e} ({proof.examples} examples)"),
        (
            f"unseen examples, {sure}",
            f"error above {proof.worst:.1e} with chance {proof.exceed_probability:.2g} at the most",
        ),
    ]
    if found.advice:
        rows.append(("advice", escape(found.advice)))
    elif found.reason.remedy:
        rows.append(("what to try", found.reason.remedy))
    for row in rows:
        table.add_row(*row)
    out.print(table)


def _bars(proof: Certificate) -> str:
    """The largest error bars of a head, in words."""
    largest = proof.attention_error.max(), proof.projection_error.max()
    attention, projection = (f"{bar:.1e}" if np.isfinite(bar) else "unknown" for bar in largest)
    return f"attention at most {attention}, projection at most {projection} (relative)"
