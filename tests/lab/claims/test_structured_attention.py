import lab_cases
import numpy as np
import pytest

from onelayer import inputs, recover
from onelayer.lab import layer_families
from onelayer.lab.claims import known, structured_attention
from onelayer.lab.seeds import generator

NAME = "structured-attention"
INPUTS = ["boolean", "gaussian"]
NEEDED = {"sculpt": 5000, "refine": 40}


def predicted(structure, method, inputs, dim, **parameters):
    """Structure costs nothing, and a rank that is known saves examples as it saves unknowns."""
    needed = NEEDED.get(method)
    if needed is None:
        rank = int(structure.removeprefix("rank "))
        saved = (2 * dim * rank - rank**2 + dim**2) / (2 * dim**2)
        needed = round(NEEDED["refine"] * saved)
    return {"needed": needed, "error": 0.0, "wrong": 0, "failed": 1, "reason": "coarse"}


def changed(change, **where):
    """As predicted but for the cells with these parameters."""

    def measured(**parameters):
        here = all(parameters[name] == value for name, value in where.items())
        return predicted(**parameters) | (change if here else {})

    return measured


def test_structure_that_costs_nothing_is_as_predicted():
    assert lab_cases.judged(NAME, predicted) == ("holds", [])
    assert lab_cases.judged(NAME, predicted, size="default") == ("holds", [])


@pytest.mark.parametrize(
    ("measured", "statement"),
    [
        (
            changed({"needed": 20_001}, structure="diagonal", method="sculpt", inputs="boolean"),
            "the six phases on boolean inputs find every structure from at most 4 times",
        ),
        (
            changed({"needed": None}, structure="rank 1", method="sculpt", inputs="gaussian"),
            "the six phases on gaussian inputs find every structure from at most 4 times",
        ),
        (
            changed({"needed": 57}, structure="diagonal", method="refine"),
            "Gauss-Newton steps find every structure from at most 1.41 times",
        ),
        (
            changed({"needed": 33}, structure="rank 1", method="refine with rank"),
            "a rank that is known saves Gauss-Newton steps examples",
        ),
        (
            changed({"wrong": 1}, structure="rank 1", method="refine"),
            "no layer that is called converged is wrong",
        ),
    ],
)
def test_every_part_of_the_rule_can_fail(measured, statement):
    outcome, (failed,) = lab_cases.judged(NAME, measured, inputs=INPUTS)
    assert outcome == "fails"
    assert failed.startswith(statement)


@pytest.mark.parametrize(
    ("structures", "lost", "why"),
    [
        (["full"], {}, "structured attention is compared with full, and one of them is missing"),
        (["rank 1"], {}, "structured attention is compared with full, and one of them is missing"),
        (
            ["full", "rank 1"],
            {"structure": "full", "method": "refine"},
            "Gauss-Newton steps do not find full matrices, with which to compare",
        ),
    ],
)
def test_without_anything_to_compare_there_is_no_verdict(structures, lost, why):
    measured = changed({"needed": None}, **lost) if lost else predicted
    results = lab_cases.made_up(NAME, measured, structure=structures)
    verdict = known()[NAME].verdict(results)
    assert (verdict.outcome, verdict.why) == ("undecided", why)


def test_unknown_structures_are_refused():
    claim = known()[NAME]
    with pytest.raises(ValueError, match="structure is 'round', expected full, diagonal, 'N blo"):
        claim.cells(claim.settings("quick", {"structure": ["round"]}))


@pytest.mark.parametrize(
    ("structure", "entries", "rank"),
    [("full", 36, 6), ("2 blocks", 18, 6), ("diagonal", 6, 6), ("rank 2", 36, 2)],
)
def test_layers_have_the_structure_that_is_named(structure, entries, rank):
    shape = layer_families.LayerShape(2, 6, 3.0)
    layer = structured_attention._layer(structure, shape, generator(0, "layer"))
    assert [int(np.sum(head != 0)) for head in layer.attention] == [entries] * 2
    assert set(np.linalg.matrix_rank(layer.attention)) == {rank}


@pytest.mark.slow
def test_the_examples_needed_are_the_fewest_before_a_failure(monkeypatch):
    monkeypatch.setattr(structured_attention, "SEARCH", {"restarts": 0, "max_steps": 60})
    tiny = {"sculpt_dim": 7, "sculpt_examples": 2000, "refine_dim": 4, "refine_examples": 24}
    results = lab_cases.measured(NAME, structure=["full", "rank 1"], inputs=["gaussian"], **tiny)
    assert [(c["structure"], c["method"], c["inputs"], c["dim"]) for c in results] == [
        ("full", "sculpt", "gaussian", 7),
        ("full", "refine", "boolean", 4),
        ("rank 1", "sculpt", "gaussian", 7),
        ("rank 1", "refine", "boolean", 4),
        ("rank 1", "refine with rank", "boolean", 4),
    ]
    assert [cell["wrong"] for cell in results] == [0] * 5
    (told,) = results.where(method="refine with rank")
    assert 10 <= told["needed"] < 24
    assert told["failed"] == pytest.approx(told["needed"] / 2**0.25, abs=1)

    layer = layer_families.low_rank(1, layer_families.LayerShape(2, 4, 3.0), generator(0, "layer"))
    X = inputs.boolean(24, 3, 4, generator(0, "inputs"))
    for count, exact in ((told["needed"], True), (told["failed"], False)):
        how = {"method": "refine", "rank": 1, "seed": generator(0, "search")}
        found = recover(X[:count], layer(X[:count]), 2, **how, **structured_attention.SEARCH)
        assert (found.layer.distance(layer).attention.max() < 1e-6) == exact
