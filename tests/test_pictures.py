"""The program that draws the pictures of the documentation."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib")
PROGRAM = Path(__file__).parents[1] / "docs" / "figures" / "make_pictures.py"


@pytest.fixture
def program():
    spec = importlib.util.spec_from_file_location("make_pictures", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_panels_show_true_heads_above_recovered_ones(program):
    weights = np.random.default_rng(0).random((2, 3, 4, 4))
    figure = program.draw_attention(weights, [1, 2, 8], ["[CLS]", "a", "b", "[SEP]"])
    panels = [axes for axes in figure.axes if axes.images]
    shown = np.stack([axes.images[0].get_array() for axes in panels])
    np.testing.assert_array_equal(shown, weights.reshape(6, 4, 4))
    assert [axes.get_title() for axes in panels[:3]] == ["head 1", "head 2", "head 8"]
    assert [text.get_text() for text in figure.texts] == ["true", "recovered"]
    assert [label.get_text() for label in panels[0].get_yticklabels()][:2] == ["[CLS]", "a"]


@pytest.mark.slow
def test_curves_are_written_as_svg_and_png(program, monkeypatch, tmp_path, capsys):
    small = {"DIM": 3, "HEADS": 5, "KEYS": (2, 3), "SEEDS": 2, "TESTED": 20, "SIZES": [8, 16]}
    for name, value in small.items():
        monkeypatch.setattr(program, name, value)
    program.main(["curves", "-o", str(tmp_path)])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "learning-curves.png",
        "learning-curves.svg",
    ]
    printed = capsys.readouterr().out.splitlines()
    models = ["attention, 2 keys", "attention, 3 keys", "network, 2 keys", "network, 3 keys"]
    assert [line.partition(":")[0] for line in printed[:-1]] == models


@pytest.mark.slow
def test_the_figure_of_a_page_is_saved_and_its_files_are_not(program, monkeypatch, tmp_path):
    before = Path.cwd()
    (tmp_path / "tutorials").mkdir()
    page = """```python
from matplotlib.figure import Figure

figure = Figure()
open("left.txt", "w").close()
print("unseen")
```"""
    for name in ("theory", "recovery", "estimators"):
        (tmp_path / "tutorials" / f"{name}.md").write_text(page + "\n", "utf-8")
    monkeypatch.setattr(program, "DOCS", tmp_path)
    program.main(["tutorials", "-o", str(tmp_path / "out")])
    names = {path.name for path in (tmp_path / "out").iterdir()}
    pages = ("theory", "recovery", "estimators")
    assert names == {f"tutorial-{name}.{kind}" for name in pages for kind in ("svg", "png")}
    assert Path.cwd() == before


def test_a_picture_that_does_not_exist_is_refused(program, capsys):
    with pytest.raises(SystemExit) as ended:
        program.main(["curve"])
    assert ended.value.code == 2
    expected = "unknown picture 'curve', expected one of attention, curves, tutorials"
    assert expected in capsys.readouterr().err
