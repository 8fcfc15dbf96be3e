"""The command `onelayer conditions FILE`, for one layer or for all layers of a pretrained model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import JustifyMethod
from rich.table import Table
from typer import Argument, Option

from onelayer.cli.terminal import err, out, plain_errors
from onelayer.io import pretrained, safetensors_files
from onelayer.layer import AttentionLayer
from onelayer.recovery.conditions import Condition, conditions, survey_conditions

_WIDE = 120  # characters of a screen that has room for every column of a table
_LISTED = 5  # arrays of an unknown file that an error names
_TEXTS = ("condition", "holds", "meaning")  # headings of columns that are no numbers
Columns = dict[str, list[str]]  # of a table, by heading
Shown = Table | str

_FILE = (
    "A layer that save() or onelayer recover wrote, or the safetensors file of a pretrained BERT "
    "or GPT-2."
)
_FAMILY = "How a model names its weights: bert or gpt2; default: detected."
_HEADS = "Heads of a layer of a model; default: as in config.json."
_SURVEY = (
    "Compare with N random layers of the same shape: of full rank and scale 2, or for a model of "
    "its head size and the median norm of its attention matrices."
)
ModelFile = Annotated[Path, Argument(help=_FILE)]
LayerNumber = Annotated[
    int | None, Option(min=0, metavar="N", help="One layer of a model, from 0; default: all.")
]
FamilyName = Annotated[str | None, Option(help=_FAMILY)]
HeadCount = Annotated[int | None, Option(min=1, metavar="M", help=_HEADS)]
SurveySize = Annotated[int | None, Option(min=1, metavar="N", help=_SURVEY)]
SurveySeed = Annotated[int, Option(min=0, help="Seed of the random layers.")]


def conditions_command(
    file: ModelFile,
    layer: LayerNumber = None,
    family: FamilyName = None,
    heads: HeadCount = None,
    survey: SurveySize = None,
    seed: SurveySeed = 0,
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
            layers = {}
            with err.status("Reading the model") as status:
                for number in numbers:
                    read = AttentionLayer.from_safetensors(file, number, family, heads)
                    layers[number] = _MeasuredLayer.of(read)
                    status.update(f"{len(layers)} of {len(numbers)} layers measured")
            shown, all_hold = _of_model(f"{file.name} ({family})", layers, survey, seed)
    for part in shown:
        out.print(part, highlight=False)
    raise typer.Exit(0 if all_hold else 1)


def _detected_family(path: Path, names: list[str]) -> str:
    family = pretrained.family_of(path)
    if family is None:
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        raise ValueError(
            f"{path} is no onelayer file: it holds {names[:_LISTED]}{more}, expected 'attention' "
            "and 'projection', or else the weights of a pretrained model of the family "
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


@dataclass(frozen=True, eq=False)
class _MeasuredLayer:
    """What is kept of a layer after it is measured: all layers at once may be too large."""

    heads: int
    dim: int
    out_dim: int
    biased: bool
    norms: np.ndarray[Any, Any]
    found: dict[str, Condition]

    @classmethod
    def of(cls, layer: AttentionLayer) -> _MeasuredLayer:
        norms = np.linalg.norm(layer.attention, axis=(1, 2))
        biased = layer.key_bias is not None
        return cls(layer.heads, layer.dim, layer.out_dim, biased, norms, conditions(layer))

    @property
    def met(self) -> int:
        return sum(condition.holds for condition in self.found.values())

    @property
    def column(self) -> list[str]:
        """What every condition has, and how many of them hold."""
        values = [
            f"[green]{c.measured:.3g}" if c.holds else f"[red]{c.measured:.3g} ✗"
            for c in self.found.values()
        ]
        return [*values, f"{self.met} of {len(self.found)}"]


def _of_model(
    name: str, layers: dict[int, _MeasuredLayer], samples: int | None, seed: int
) -> tuple[list[Shown], bool]:
    """The output for the layers of a model, and whether all conditions hold in all of them."""
    like = next(iter(layers.values()))  # all layers of a model have one shape
    rank, scale = like.dim // like.heads, float(np.median([s.norms for s in layers.values()]))
    random, notes = _survey(like, samples, seed, scale=scale, rank=rank)
    which = f"{len(layers)} layers" if len(layers) > 1 else f"layer {next(iter(layers))}"
    met = [str(number) for number, layer in layers.items() if layer.met == len(layer.found)]
    names = [*like.found, "conditions that hold"]
    fixed = {"condition": names, "needed": [*_needed(like.found), ""]}
    columns = {f"layer {number}": layer.column for number, layer in layers.items()}
    columns |= {heading: [*texts, ""] for heading, texts in random.items()}
    shown: list[Shown] = [
        f"Conditions of {which} of {name}: {like.heads} heads of size {rank} in {like.dim} "
        "dimensions; ✗ where one fails",
        *_fitting_tables(fixed, columns),
        f"Layers that meet all conditions: {', '.join(met) or 'none'} "
        f"({len(met)} of {len(layers)}).",
        *notes,
    ]
    if any(layer.biased for layer in layers.values()):
        shown.append("Key biases, which the paper's layer does not have, are ignored.")
    return shown, len(met) == len(layers)


def _survey(
    like: AttentionLayer | _MeasuredLayer,
    samples: int | None,
    seed: int,
    scale: float,
    rank: int | None,
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
        justify: JustifyMethod = "left" if heading in _TEXTS else "right"
        table.add_column(heading, justify=justify, no_wrap=heading not in ("holds", "meaning"))
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
