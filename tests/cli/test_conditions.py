"""`onelayer conditions` of all layers of a pretrained model; of one layer: in test_cli.py."""

import numpy as np
import pytest
import safetensors.numpy
from command_line import assert_refused, run, words
from models import DIM, HEADS, write_model

import onelayer
from onelayer import AttentionLayer
from onelayer.cli import terminal
from onelayer.io import pretrained
from onelayer.recovery.condition_results import Condition


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path)


def table_in(text):
    """The heading of a table that is not split, and its rows by their first cell."""
    lines = [line for line in text.splitlines() if line.startswith(("┃", "│"))]
    cells = [[c.strip() for c in line.strip("┃│").replace("┃", "│").split("│")] for line in lines]
    *_, heading = (row for row in cells if row[0] == "condition")
    rows = {row[0]: row[1:] for row in cells[cells.index(heading) + 1 :]}
    return heading, rows


def shown(condition):
    return f"{condition.measured:.3g}{'' if condition.holds else ' ✗'}"


@pytest.mark.parametrize("family", ["bert", "gpt2"])
@pytest.mark.parametrize("options", [(), ("--family",)])
def test_every_layer_of_a_model_is_measured(tmp_path, family, options):
    path = write_model(tmp_path, family)
    result = run("conditions", path, *(options and ("--family", family)))
    assert result.stderr == ""
    layers = [AttentionLayer.from_safetensors(path, i, family) for i in range(3)]
    found = [onelayer.conditions(layer) for layer in layers]
    heading, rows = table_in(result.stdout)
    assert heading == ["condition", "needed", "layer 0", "layer 1", "layer 2"]
    assert list(rows) == [*found[0], "conditions that hold"]
    for name, condition in found[0].items():
        needed = f"{'>=' if condition.at_least else '<='} {condition.needed:g}"
        assert rows[name] == [needed, *(shown(each[name]) for each in found)]
    counts = [f"{sum(c.holds for c in each.values())} of 12" for each in found]
    assert rows["conditions that hold"] == ["", *counts]
    met = [str(i) for i, count in enumerate(counts) if count == "12 of 12"]
    said = f"Layers that meet all conditions: {', '.join(met) or 'none'} ({len(met)} of 3)."
    assert said in words(result.stdout)
    assert f"3 layers of model.safetensors ({family}): 3 heads of size 2" in words(result.stdout)
    assert result.exit_code == (0 if len(met) == 3 else 1)


def test_one_layer_of_a_model(model):
    result = run("conditions", model, "--layer", 2)
    found = onelayer.conditions(AttentionLayer.from_safetensors(model, 2))
    heading, rows = table_in(result.stdout)
    assert heading == ["condition", "needed", "layer 2"]
    assert [row[1] for row in rows.values()][:-1] == list(map(shown, found.values()))
    assert "Conditions of layer 2 of model.safetensors" in words(result.stdout)


def test_the_exit_status_is_0_where_all_hold_in_all_layers(model, monkeypatch):
    everything = {"scale": Condition(2.0, 1.5, at_least=True, meaning="")}
    monkeypatch.setattr("onelayer.cli.conditions.conditions", lambda _: everything)
    result = run("conditions", model)
    assert result.exit_code == 0
    assert "Layers that meet all conditions: 0, 1, 2 (3 of 3)." in words(result.stdout)


def test_a_model_beside_random_layers_of_its_head_size_and_norm(model):
    result = run("conditions", model, "--survey", 7, "--seed", 3)
    assert result.stderr == ""
    layers = [AttentionLayer.from_safetensors(model, i) for i in range(3)]
    scale = float(np.median([np.linalg.norm(layer.attention, axis=(1, 2)) for layer in layers]))
    survey = onelayer.survey_conditions(
        HEADS, DIM, rank=2, samples=7, seed=3, scale=scale, out_dim=DIM
    )
    heading, rows = table_in(result.stdout)
    assert heading[-2:] == ["median", "holds"]
    for name, found in survey.items():
        assert rows[name][-2:] == [f"{found.median:.3g}", f"{found.share:.0%}"]
    text = words(result.stdout)
    assert "median over 7 random layers of the same shape with heads of rank 2" in text
    assert f"the norm {scale:.3g} (the median of those above)" in text
    assert run("conditions", model, "--survey", 7, "--seed", 3).stdout == result.stdout


def test_biases_are_ignored_and_it_is_said(tmp_path):
    plain = run("conditions", write_model(tmp_path))
    biased = run("conditions", write_model(tmp_path, bias=True))
    assert "Key biases, which the paper's layer does not have, are ignored." in words(biased.stdout)
    assert "biases" not in plain.stdout


def test_a_narrow_screen_has_several_tables(model, monkeypatch):
    monkeypatch.setattr(terminal.out, "width", 60)
    result = run("conditions", model, "--survey", 2)
    assert result.exit_code == 1
    assert "…" not in result.stdout
    assert result.stdout.count("projection independence") > 1
    assert max(map(len, result.stdout.splitlines())) <= 60
    for layer in range(3):
        assert result.stdout.count(f"layer {layer}") == 1


# What is refused


def test_a_layer_that_is_not_there(model):
    said = f"layer is 3, expected one of 0, 1, 2, which {model} has"
    assert_refused(run("conditions", model, "--layer", 3), said)
    result = run("conditions", model, "--layer", -1)
    assert result.exit_code == 2
    assert "--layer" in result.stderr


def test_a_family_that_is_not_the_models(model):
    assert_refused(
        run("conditions", model, "--family", "gpt2"),
        f"{model} holds a model of the family 'bert', expected 'gpt2' as was asked for",
    )
    assert_refused(
        run("conditions", model, "--family", "llama"),
        "family is 'llama', expected one of bert, gpt2; rotary or relative positions",
    )


def test_the_number_of_heads_may_be_given(tmp_path):
    path = write_model(tmp_path, config=False)
    assert_refused(run("conditions", path), "the number of heads is not among the weights")
    result = run("conditions", path, "--heads", 2)
    assert result.exit_code in (0, 1)
    assert "2 heads of size 3 in 6 dimensions" in words(result.stdout)
    assert_refused(run("conditions", path, "--heads", 4), "dimension 6 and 4 heads, expected a")


@pytest.mark.parametrize("option", ["--layer", "--heads"])
def test_options_of_models_mean_nothing_to_a_layer(tmp_path, option):
    path = tmp_path / "layer.safetensors"
    AttentionLayer.random(heads=2, dim=4).save(path)
    assert_refused(
        run("conditions", path, option, 1),
        f"{option} is 1, but {path} holds one layer that onelayer wrote: expected a pretrained "
        "model, or no such option",
    )
    said = f"--family is bert, but {path} holds one layer that onelayer wrote"
    assert_refused(run("conditions", path, "--family", "bert"), said)


def test_models_of_another_kind(tmp_path):
    path = tmp_path / "model.safetensors"
    name = "model.layers.0.self_attn.q_proj.weight"
    safetensors.numpy.save_file({name: np.ones((2, 2))}, path)
    assert_refused(
        run("conditions", path),
        f"{path} holds {name!r} as Llama and others do, expected weights that are named as in one "
        "of bert, gpt2: rotary or relative positions",
    )


def test_a_file_of_many_other_arrays_is_not_listed_to_the_end(tmp_path):
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({f"part.{i}": np.ones(1) for i in range(9)}, path)
    assert_refused(
        run("conditions", path),
        f"{path} is not a onelayer file: it holds ['part.0', 'part.1', 'part.2', 'part.3', "
        "'part.4'] and 4 more, expected 'attention' and 'projection', or else the weights "
        "of a pretrained model of the family bert or gpt2",
    )


def test_several_models_in_one_file(tmp_path):
    path = write_model(tmp_path)
    tensors = safetensors.numpy.load_file(path)
    twice = {f"{side}.{name}": a for side in ("query", "passage") for name, a in tensors.items()}
    safetensors.numpy.save_file(twice, path)
    assert_refused(run("conditions", path), "holds several models, under ", "expected one")


def test_help_shows_how_a_model_is_measured():
    text = words(run("conditions", "--help").stdout)
    assert "onelayer conditions model.safetensors --survey 20" in text
    assert "onelayer conditions model.safetensors --layer 3 --family gpt2 --heads 12" in text


# What a file holds


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_family_and_layers_of_a_file(tmp_path, family):
    path = write_model(tmp_path, family, layers=11)
    assert pretrained.family_of(path) == family
    assert pretrained.layers_of(path, family) == list(range(11))
    safetensors.numpy.save_file({"weight": np.ones(2)}, path)
    assert pretrained.family_of(path) is None
