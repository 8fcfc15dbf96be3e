"""The command `onelayer conditions FILE`: of one layer, or of all layers of a pretrained model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import RenderableType
from rich.measure import Measurement
from rich.table import Table

from onelayer.cli.terminal import err, fail, out
from onelayer.io import pretrained, safetensors_files
from onelayer.layer import AttentionLayer
from onelayer.recovery.conditions import Condition, ConditionSurvey, conditions, survey_conditions

_WIDE = 120  # columns of a screen that has room for every column of a table
_ANY_WIDTH = 10_000
_SHOWN = 5  # arrays that are named of a file that holds something else
_OF_SURVEYS = ("median", "holds")
Surveys = dict[str, ConditionSurvey]


def conditions_command(
    file: Annotated[
        Path,
        typer.Argument(
            help="A layer that save() or onelayer recover wrote, or the safetensors file of a "
            "pretrained BERT or GPT-2."
        ),
    ],
    layer: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="One layer of a model, from 0; without it, all."),
    ] = None,
    family: Annotated[
        str | None,
        typer.Option(help="How a model names its weights: bert or gpt2; without it, as they are."),
    ] = None,
    heads: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="M", help="Heads of a layer of a model; without it, as in config.json."
        ),
    ] = None,
    survey: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Compare with N random layers of the same shape: of full rank and scale 2, or for "
            "a model of its head size and the median norm of its attention matrices.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random layers.")] = 0,
) -> None:
    """Show how far layers meet the conditions under which a layer provably can be learned.

    FILE holds one layer, or a pretrained model, of which all layers are measured: a row has what a
    condition needs and what every layer has.

    The exit status is 0 if all of them hold (in all layers), 1 if not and 2 if something is wrong
    with the call.

    Examples:

        onelayer conditions layer.safetensors

        onelayer conditions layer.safetensors --survey 100

        onelayer conditions model.safetensors --survey 20

        onelayer conditions model.safetensors --layer 3 --family gpt2 --heads 12
    """
    try:
        kind = None if _is_layer(file) else family or _family(file)
        if kind is not None:
            shown, all_hold = _of_model(_Model(file, kind, heads), layer, survey, seed)
        else:
            _refuse_options(file, {"--layer": layer, "--family": family, "--heads": heads})
            shown, all_hold = _of_layer(file, survey, seed)
    except (ValueError, OSError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail("interrupted", code=130)
    for part in shown:
        out.print(part, highlight=False)
    raise typer.Exit(0 if all_hold else 1)


def _is_layer(path: Path) -> bool:
    """Whether a file holds a layer of onelayer's own."""
    with safetensors_files.opened_safetensors(path) as file:
        return not {"attention", "projection"}.isdisjoint(file.keys())


def _family(path: Path) -> str:
    """The family of the model in a file."""
    family = pretrained.family_of(path)
    if family is None:
        with safetensors_files.opened_safetensors(path) as file:
            names = sorted(file.keys())
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise ValueError(
            f"{path} is no onelayer file: it holds {names[:_SHOWN]}{more}, expected 'attention' "
            "and 'projection', or else the weights of a pretrained model of the family "
            f"{' or '.join(pretrained.FAMILIES)}"
        )
    return family


def _refuse_options(path: Path, options: dict[str, int | str | None]) -> None:
    """Options that choose from a model mean nothing where there is one layer."""
    for option, value in options.items():
        if value is not None:
            raise ValueError(
                f"{option} is {value}, but {path} holds one layer that onelayer wrote: expected "
                "a pretrained model, or no such option"
            )


# One layer


def _of_layer(path: Path, samples: int | None, seed: int) -> tuple[list[RenderableType], bool]:
    """What is shown of a layer that onelayer wrote, and whether all conditions hold."""
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
    if samples is not None:
        shown.append(
            f"random: median over {samples} random layers of the same shape, and the share of them "
            "that meets the condition."
        )
    return shown, met == len(found)


def _survey(samples: int, seed: int, **shape: Any) -> Surveys:
    """The conditions of random layers of a shape, with a line of progress."""
    with err.status("Drawing random layers") as status:
        return survey_conditions(
            samples=samples,
            seed=seed,
            progress=lambda done: status.update(f"{done} of {samples} random layers measured"),
            **shape,
        )


def _layer_table(layer: AttentionLayer, found: dict[str, Condition], surveys: Surveys) -> Table:
    """One row a condition; where there are surveys, meanings are shown on wide screens only."""
    with_meaning = not surveys or out.width >= _WIDE
    table = Table(title=f"Conditions of {layer}", title_justify="left")
    table.add_column("condition", no_wrap=True)
    for column in ("measured", "needed"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("holds")
    _add_survey_columns(table, surveys)
    if with_meaning:
        table.add_column("meaning")
    for name, condition in found.items():
        cells = [
            name,
            f"{condition.measured:.3g}",
            _needed(condition),
            "[green]yes" if condition.holds else "[red]no",
            *_survey_cells(surveys, name),
        ]
        table.add_row(*cells, *[condition.meaning] * with_meaning)
    return table


def _needed(condition: Condition) -> str:
    return f"{'>=' if condition.at_least else '<='} {condition.needed:g}"


def _add_survey_columns(table: Table, surveys: Surveys) -> None:
    for column in _OF_SURVEYS if surveys else ():
        table.add_column(f"random:\n{column}", justify="right")


def _survey_cells(surveys: Surveys, name: str) -> list[str]:
    return [f"{surveys[name].median:.3g}", f"{surveys[name].share:.0%}"] if surveys else []


# All layers of a model


@dataclass(frozen=True)
class _Model:
    """Where the layers of a pretrained model are read from."""

    path: Path
    family: str
    heads: int | None

    def layer(self, number: int) -> AttentionLayer:
        return AttentionLayer.from_safetensors(self.path, number, self.family, self.heads)


@dataclass(frozen=True, eq=False)
class _Measured:
    """What is kept of a layer once it is measured: all layers at a time may be too large."""

    heads: int
    dim: int
    out_dim: int
    biased: bool
    norms: np.ndarray[Any, Any]
    found: dict[str, Condition]

    @classmethod
    def of(cls, layer: AttentionLayer) -> _Measured:
        norms = np.linalg.norm(layer.attention, axis=(1, 2))
        biased = layer.key_bias is not None
        return cls(layer.heads, layer.dim, layer.out_dim, biased, norms, conditions(layer))

    @property
    def met(self) -> int:
        return sum(condition.holds for condition in self.found.values())

    @property
    def all_hold(self) -> bool:
        return self.met == len(self.found)


def _of_model(
    model: _Model, number: int | None, samples: int | None, seed: int
) -> tuple[list[RenderableType], bool]:
    """What is shown of the layers of a model, and whether all conditions hold in all of them."""
    numbers = pretrained.layers_of(model.path, model.family) if number is None else [number]
    layers: dict[int, _Measured] = {}
    with err.status("Reading the model") as status:
        for each in numbers:
            layers[each] = _Measured.of(model.layer(each))
            status.update(f"{len(layers)} of {len(numbers)} layers measured")
    surveys, about = _survey_of_model(list(layers.values()), samples, seed)
    met = [str(each) for each, layer in layers.items() if layer.all_hold]
    listed = ", ".join(met) or "none"
    shown: list[RenderableType] = [
        _title(model, layers),
        *_model_tables(layers, surveys),
        f"Layers that meet all conditions: {listed} ({len(met)} of {len(layers)}).",
        *about,
    ]
    if any(layer.biased for layer in layers.values()):
        shown.append("Key biases, which the paper's layer has not, are passed over.")
    return shown, len(met) == len(layers)


def _survey_of_model(
    layers: list[_Measured], samples: int | None, seed: int
) -> tuple[Surveys, list[str]]:
    """The conditions of random layers that are like those of the model, and what to say of them."""
    if samples is None:
        return {}, []
    like = layers[0]  # the shape is the same in all layers
    rank, scale = like.dim // like.heads, float(np.median([layer.norms for layer in layers]))
    shape = {"heads": like.heads, "dim": like.dim, "rank": rank, "out_dim": like.out_dim}
    about = (
        f"random: median over {samples} random layers of the same shape with heads of rank {rank}, "
        f"whose attention matrices have the norm {scale:.3g} (the median of those above), and the "
        "share of them that meets the condition."
    )
    return _survey(samples, seed, scale=scale, **shape), [about]


def _title(model: _Model, layers: dict[int, _Measured]) -> str:
    like = next(iter(layers.values()))
    which = f"{len(layers)} layers" if len(layers) > 1 else f"layer {next(iter(layers))}"
    return (
        f"Conditions of {which} of {model.path.name} ({model.family}): {like.heads} heads of size "
        f"{like.dim // like.heads} in {like.dim} dimensions; ✗ where one fails"
    )


def _model_tables(layers: dict[int, _Measured], surveys: Surveys) -> list[Table]:
    """As few tables as the screen is wide enough for, the columns spread over them."""
    columns = [_layer_column(number, layer) for number, layer in layers.items()]
    columns += _survey_columns(surveys)
    found = next(iter(layers.values())).found
    for size in range(len(columns), 0, -1):
        parts = [columns[i : i + size] for i in range(0, len(columns), size)]
        tables = [_model_table(found, part) for part in parts]
        if all(_width(table) <= out.width for table in tables):
            break
    return tables


def _layer_column(number: int, layer: _Measured) -> list[str]:
    """A heading, a cell a condition and how many of them hold."""
    values = [_value(condition) for condition in layer.found.values()]
    return [f"layer {number}", *values, f"{layer.met} of {len(layer.found)}"]


def _survey_columns(surveys: Surveys) -> list[list[str]]:
    """The same of random layers, of which there is no count."""
    rows = [_survey_cells(surveys, name) for name in surveys]
    headings = [f"random:\n{column}" for column in _OF_SURVEYS] if surveys else []
    cells = zip(*rows, strict=True)
    return [[heading, *values, ""] for heading, values in zip(headings, cells, strict=True)]


def _model_table(found: dict[str, Condition], columns: list[list[str]]) -> Table:
    """One row a condition: its name, what is needed, and the columns."""
    table = Table()
    table.add_column("condition", no_wrap=True)
    for heading in ("needed", *(column[0] for column in columns)):
        table.add_column(heading, justify="right", no_wrap=True)
    for row, (name, condition) in enumerate(found.items(), start=1):
        table.add_row(name, _needed(condition), *(column[row] for column in columns))
    table.add_section()
    table.add_row("conditions that hold", "", *(column[-1] for column in columns))
    return table


def _width(table: Table) -> int:
    """The columns that a table takes where nothing is shortened."""
    return Measurement.get(out, out.options.update(max_width=_ANY_WIDTH), table).maximum


def _value(condition: Condition) -> str:
    """In colour, and with a sign where there is none."""
    colour, sign = ("green", "") if condition.holds else ("red", " ✗")
    return f"[{colour}]{condition.measured:.3g}{sign}"
