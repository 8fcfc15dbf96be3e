"""The command `onelayer conditions FILE`, for one layer or for all layers of a pretrained model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import RenderableType
from rich.table import Column, Table
from typer import Argument, Option

from onelayer.cli.terminal import err, out, plain_errors
from onelayer.io import pretrained, safetensors_files
from onelayer.layer import AttentionLayer
from onelayer.recovery.conditions import Condition, ConditionSurvey, conditions, survey_conditions

_WIDE = 120  # characters of a screen that has room for every column of a table
_LISTED = 5  # arrays of an unknown file that an error names
Surveys = dict[str, ConditionSurvey]

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
        if _is_layer(file):
            _refuse_options(file, {"--layer": layer, "--family": family, "--heads": heads})
            shown, all_hold = _of_layer(file, survey, seed)
        else:
            family = family or _detected_family(file)
            numbers = pretrained.layers_of(file, family) if layer is None else [layer]
            layers = {}
            with err.status("Reading the model") as status:
                for number in numbers:
                    read = AttentionLayer.from_safetensors(file, number, family, heads)
                    layers[number] = _Summary.of(read)
                    status.update(f"{len(layers)} of {len(numbers)} layers measured")
            shown, all_hold = _of_model(f"{file.name} ({family})", layers, survey, seed)
    for part in shown:
        out.print(part, highlight=False)
    raise typer.Exit(0 if all_hold else 1)


def _is_layer(path: Path) -> bool:
    """Whether a file holds a layer that onelayer wrote."""
    with safetensors_files.opened_safetensors(path) as file:
        return not {"attention", "projection"}.isdisjoint(file.keys())


def _detected_family(path: Path) -> str:
    family = pretrained.family_of(path)
    if family is None:
        with safetensors_files.opened_safetensors(path) as file:
            names = sorted(file.keys())
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        raise ValueError(
            f"{path} is no onelayer file: it holds {names[:_LISTED]}{more}, expected 'attention' "
            "and 'projection', or else the weights of a pretrained model of the family "
            f"{' or '.join(pretrained.FAMILIES)}"
        )
    return family


def _refuse_options(path: Path, options: dict[str, int | str | None]) -> None:
    """Refuse options for models, given with a file of one layer."""
    for option, value in options.items():
        if value is not None:
            raise ValueError(
                f"{option} is {value}, but {path} holds one layer that onelayer wrote: expected "
                "a pretrained model, or no such option"
            )


# Random layers


def _survey(samples: int, seed: int, **shape: Any) -> Surveys:
    """The conditions of random layers of a shape."""
    with err.status("Drawing random layers") as status:
        return survey_conditions(
            samples=samples,
            seed=seed,
            progress=lambda done: status.update(f"{done} of {samples} random layers measured"),
            **shape,
        )


def _survey_columns(surveys: Surveys) -> list[list[str]]:
    """Two columns of a table, each a heading and a text for every condition."""
    if not surveys:
        return []
    found = surveys.values()
    medians, shares = [f"{s.median:.3g}" for s in found], [f"{s.share:.0%}" for s in found]
    return [["random:\nmedian", *medians], ["random:\nholds", *shares]]


# One layer


def _of_layer(path: Path, samples: int | None, seed: int) -> tuple[list[RenderableType], bool]:
    """The output for a layer that onelayer wrote, and whether all conditions hold."""
    layer = AttentionLayer.load(path)
    found = conditions(layer)
    surveys: Surveys = {}
    if samples is not None:
        shape = {"heads": layer.heads, "dim": layer.dim, "out_dim": layer.out_dim}
        surveys = _survey(samples, seed, scale=2.0, **shape)
    met = sum(condition.holds for condition in found.values())
    shown: list[RenderableType] = [
        _layer_table(layer, found, surveys),
        f"{met} of {len(found)} conditions hold.",
    ]
    if surveys:
        shown.append(
            f"random: median over {samples} random layers of the same shape, and the share of them "
            "that meets the condition."
        )
    return shown, met == len(found)


def _layer_table(layer: AttentionLayer, found: dict[str, Condition], surveys: Surveys) -> Table:
    """One row a condition. Beside random layers, only wide screens show the meanings."""
    random = _survey_columns(surveys)
    with_meaning = not surveys or out.width >= _WIDE
    table = Table(
        Column("condition", no_wrap=True),
        Column("measured", justify="right", no_wrap=True),
        Column("needed", justify="right", no_wrap=True),
        "holds",
        *(Column(column[0], justify="right") for column in random),
        *["meaning"] * with_meaning,
        title=f"Conditions of {layer}",
        title_justify="left",
    )
    for row, (name, condition) in enumerate(found.items(), start=1):
        table.add_row(
            name,
            f"{condition.measured:.3g}",
            _needed(condition),
            "[green]yes" if condition.holds else "[red]no",
            *(column[row] for column in random),
            *[condition.meaning] * with_meaning,
        )
    return table


def _needed(condition: Condition) -> str:
    return f"{'>=' if condition.at_least else '<='} {condition.needed:g}"


# All layers of a model


@dataclass(frozen=True, eq=False)
class _Summary:
    """What is kept of a layer after it is measured: all layers at once may be too large."""

    heads: int
    dim: int
    out_dim: int
    biased: bool
    norms: np.ndarray[Any, Any]
    found: dict[str, Condition]

    @classmethod
    def of(cls, layer: AttentionLayer) -> _Summary:
        norms = np.linalg.norm(layer.attention, axis=(1, 2))
        biased = layer.key_bias is not None
        return cls(layer.heads, layer.dim, layer.out_dim, biased, norms, conditions(layer))

    @property
    def met(self) -> int:
        return sum(condition.holds for condition in self.found.values())


def _of_model(
    name: str, layers: dict[int, _Summary], samples: int | None, seed: int
) -> tuple[list[RenderableType], bool]:
    """The output for the layers of a model, and whether all conditions hold in all of them."""
    first = next(iter(layers.values()))  # all layers of a model have one shape
    head_size = first.dim // first.heads
    which = f"{len(layers)} layers" if len(layers) > 1 else f"layer {next(iter(layers))}"
    met = [str(number) for number, layer in layers.items() if layer.met == len(layer.found)]
    listed = f"{', '.join(met) or 'none'} ({len(met)} of {len(layers)})"
    notes = [f"Layers that meet all conditions: {listed}."]
    surveys: Surveys = {}
    if samples is not None:
        scale = float(np.median([layer.norms for layer in layers.values()]))
        shape = {"heads": first.heads, "dim": first.dim, "rank": head_size}
        surveys = _survey(samples, seed, scale=scale, out_dim=first.out_dim, **shape)
        notes.append(
            f"random: median over {samples} random layers of the same shape with heads of rank "
            f"{head_size}, whose attention matrices have the norm {scale:.3g} (the median of those "
            "above), and the share of them that meets the condition."
        )
    if any(layer.biased for layer in layers.values()):
        notes.append("Key biases, which the paper's layer does not have, are ignored.")
    title = (
        f"Conditions of {which} of {name}: {first.heads} heads of size {head_size} in {first.dim} "
        "dimensions; ✗ where one fails"
    )
    return [title, *_model_tables(layers, surveys), *notes], len(met) == len(layers)


def _model_tables(layers: dict[int, _Summary], surveys: Surveys) -> list[Table]:
    """As few tables as fit on the screen, with the columns distributed over them."""
    columns = [_layer_column(number, layer) for number, layer in layers.items()]
    columns += [[*column, ""] for column in _survey_columns(surveys)]
    found = next(iter(layers.values())).found
    unbounded = out.options.update(max_width=10_000)
    for size in range(len(columns), 0, -1):
        parts = [columns[i : i + size] for i in range(0, len(columns), size)]
        tables = [_model_table(found, part) for part in parts]
        if all(out.measure(t, options=unbounded).maximum <= out.width for t in tables):
            break
    return tables


def _layer_column(number: int, layer: _Summary) -> list[str]:
    """A heading, a text for every condition, and how many of them hold."""
    return [
        f"layer {number}",
        *(
            f"[green]{condition.measured:.3g}"
            if condition.holds
            else f"[red]{condition.measured:.3g} ✗"
            for condition in layer.found.values()
        ),
        f"{layer.met} of {len(layer.found)}",
    ]


def _model_table(found: dict[str, Condition], columns: list[list[str]]) -> Table:
    """One row a condition: its name, what is needed, and the columns."""
    names = ["condition", *found, "conditions that hold"]
    needed = ["needed", *map(_needed, found.values()), ""]
    table = Table(
        Column("condition", no_wrap=True),
        *(Column(column[0], justify="right", no_wrap=True) for column in (needed, *columns)),
    )
    *rows, last = list(zip(names, needed, *columns, strict=True))[1:]
    for row in rows:
        table.add_row(*row)
    table.add_section()
    table.add_row(*last)
    return table
