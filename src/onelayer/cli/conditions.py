"""The command `onelayer conditions FILE`, for one layer or for all layers of a pretrained model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import JustifyMethod
from rich.table import Table
from typer import Argument, Option

from onelayer.cli.terminal import err, out, plain_errors
from onelayer.io import pretrained, safetensors_files
from onelayer.layer import AttentionLayer
from onelayer.recovery.condition_results import Condition
from onelayer.recovery.conditions import conditions, survey_conditions

_WIDE = 120  # characters of a screen that has room for every column of a table
_LISTED = 5  # arrays of an unknown file that an error names
Columns = dict[str, list[str]]  # of a table, by heading
Shown = Table | str

_FILE = (
    "A layer that save() or onelayer recover wrote, or the safetensors file of a pretrained BERT "
    "or GPT-2."
)
_LAYER = "One layer of a model, from 0; default: all."
_FAMILY = "How a model names its weights: bert or gpt2; default: detected."
_HEADS = "Heads of a layer of a model; default: as in config.json."
_SURVEY = (
    "Compare with N random layers of the same shape: of full rank and scale 2, or for a model of "
    "its head size and the median norm of its attention matrices."
)


def conditions_command(
    file: Annotated[Path, Argument(help=_FILE)],
    layer: Annotated[int | None, Option(min=0, metavar="N", help=_LAYER)] = None,
    family: Annotated[str | None, Option(help=_FAMILY)] = None,
    heads: Annotated[int | None, Option(min=1, metavar="M", help=_HEADS)] = None,
    survey: Annotated[int | None, Option(min=1, metavar="N", help=_SURVEY)] = None,
    seed: Annotated[int, Option(min=0, help="Seed of the random layers.")] = 0,
) -> None:
    """Show how far layers meet the conditions under which a layer can provably be learned.

    FILE holds one layer, or a pretrained model, of which all layers are measured. A row has what a
    condition needs and what every layer has. The exit status is 0 if all conditions hold in all
    layers, 1 if not, and 2 if something is wrong with the call.

    Examples:

        onelayer conditions layer.safetensors

        onelayer conditions layer.safetensors --survey 100

        onelayer conditions model.safetensors --survey 20

        onelayer conditions model.safetensors --layer 3 --family gpt2 --heads 12
    """
    with plain_errors():
        with safetensors_files.opened_safetensors(file) as arrays:
            names = sorted(arrays.keys())
        if {"attention", "projection"} & set(names):
            for option, value in {"--layer": layer, "--family": family, "--heads": heads}.items():
                if value is not None:
                    raise ValueError(
                        f"{option} is {value}, but {file} holds one layer that onelayer wrote: "
                        "expected a pretrained model, or no such option"
                    )
            shown, all_hold = _of_layer(AttentionLayer.load(file), survey, seed)
        else:
            family = family or _detected_family(file, names)
            numbers = pretrained.layers_of(file, family) if layer is None else [layer]
            shown, all_hold = _of_model(file, family, heads, numbers, survey, seed)
    for part in shown:
        out.print(part, highlight=False)
    raise typer.Exit(0 if all_hold else 1)


def _detected_family(path: Path, names: list[str]) -> str:
    family = pretrained.family_of(path)
    if family is None:
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        raise ValueError(
            f"{path} is not a onelayer file: it holds {names[:_LISTED]}{more}, expected "
            "'attention' and 'projection', or else the weights of a pretrained model of the family "
            f"{' or '.join(pretrained.FAMILIES)}"
        )
    return family


def _of_layer(layer: AttentionLayer, samples: int | None, seed: int) -> tuple[list[Shown], bool]:
    """The output for one layer, and whether all conditions hold."""
    found = conditions(layer)
    met = sum(condition.holds for condition in found.values())
    random, notes = _survey(layer, samples, seed, scale=2.0, rank=None)
    names, title = {"condition": list(found)}, f"Conditions of {layer}"
    columns = {
        "measured": [f"{condition.measured:.3g}" for condition in found.values()],
        "needed": _needed(found),
        "holds": ["[green]yes" if c.holds else "[red]no" for c in found.values()],
        **random,
    }
    if random and out.width < _WIDE:
        tables = _fitting_tables(names, columns, title)
    else:
        meanings = {"meaning": [condition.meaning for condition in found.values()]}
        tables = [_table(names | columns | meanings, title)]
    return [*tables, f"{met} of {len(found)} conditions hold.", *notes], met == len(found)


def _of_model(
    file: Path, family: str, heads: int | None, numbers: list[int], samples: int | None, seed: int
) -> tuple[list[Shown], bool]:
    """The output for layers of a model, and whether all conditions hold in all of them."""
    found: dict[int, dict[str, Condition]] = {}
    norms, biased = [], False
    with err.status("Reading the model") as status:
        for number in numbers:  # one by one: all layers at once may be too large
            layer = AttentionLayer.from_safetensors(file, number, family, heads)
            found[number] = conditions(layer)
            norms.append(np.linalg.norm(layer.attention, axis=(1, 2)))
            biased = biased or layer.key_bias is not None
            status.update(f"{len(found)} of {len(numbers)} layers measured")
    # All layers of a model have one shape.
    rank, scale = layer.dim // layer.heads, float(np.median(norms))
    random, notes = _survey(layer, samples, seed, scale=scale, rank=rank)
    which = f"{len(found)} layers" if len(found) > 1 else f"layer {numbers[0]}"
    met = [str(number) for number, of in found.items() if all(c.holds for c in of.values())]
    asked = found[numbers[0]]
    fixed = {"condition": [*asked, "conditions that hold"], "needed": [*_needed(asked), ""]}
    columns = {f"layer {number}": _column(list(of.values())) for number, of in found.items()}
    columns |= {heading: [*texts, ""] for heading, texts in random.items()}
    shown: list[Shown] = [
        f"Conditions of {which} of {file.name} ({family}): {layer.heads} heads of size {rank} in "
        f"{layer.dim} dimensions; ✗ where one fails",
        *_fitting_tables(fixed, columns),
        f"Layers that meet all conditions: {', '.join(met) or 'none'} "
        f"({len(met)} of {len(found)}).",
        *notes,
    ]
    if biased:
        shown.append("Key biases, which the paper's layer does not have, are ignored.")
    return shown, len(met) == len(found)


def _column(found: list[Condition]) -> list[str]:
    """The values of one layer, and how many conditions hold."""
    texts = [f"[green]{c.measured:.3g}" if c.holds else f"[red]{c.measured:.3g} ✗" for c in found]
    return [*texts, f"{sum(c.holds for c in found)} of {len(found)}"]


def _survey(
    like: AttentionLayer, samples: int | None, seed: int, scale: float, rank: int | None
) -> tuple[Columns, list[str]]:
    """Columns for random layers of the same shape, and what they are; empty without samples."""
    if samples is None:
        return {}, []
    with err.status("Drawing random layers") as status:
        found = survey_conditions(
            like.heads,
            like.dim,
            rank=rank,
            samples=samples,
            seed=seed,
            scale=scale,
            out_dim=like.out_dim,
            progress=lambda done: status.update(f"{done} of {samples} random layers measured"),
        ).values()
    note = f"random: median over {samples} random layers of the same shape"
    if rank is not None:
        note += f" with heads of rank {rank}, whose attention matrices have the norm {scale:.3g} "
        note += "(the median of those above)"
    note += ", and the share of them that meets the condition."
    medians, shares = [f"{s.median:.3g}" for s in found], [f"{s.share:.0%}" for s in found]
    return {"random:\nmedian": medians, "random:\nholds": shares}, [note]


def _needed(found: dict[str, Condition]) -> list[str]:
    return [f"{'>=' if c.at_least else '<='} {c.needed:g}" for c in found.values()]


def _table(columns: Columns, title: str | None = None) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in columns:
        is_text, wraps = heading in ("condition", "holds", "meaning"), ("holds", "meaning")
        justify: JustifyMethod = "left" if is_text else "right"
        table.add_column(heading, justify=justify, no_wrap=heading not in wraps)
    for row in zip(*columns.values(), strict=True):
        if row[0] == "conditions that hold":
            table.add_section()
        table.add_row(*row)
    return table


def _fitting_tables(fixed: Columns, columns: Columns, title: str | None = None) -> list[Table]:
    """As few tables as fit on the screen, each with the fixed columns and some of the others."""
    unbounded = out.options.update(max_width=10_000)
    names = list(columns)
    for size in range(len(names), 0, -1):
        parts = [names[i : i + size] for i in range(0, len(names), size)]
        tables = [_table(fixed | {name: columns[name] for name in part}, title) for part in parts]
        if all(out.measure(t, options=unbounded).maximum <= out.width for t in tables):
            break
    return tables
