import argparse
import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
import scripts

FOLDER = Path(__file__).parents[1] / "benchmarks"


def table(script, *arguments):
    """The cells of the table that a benchmark prints, row by row, and what it tells meanwhile."""
    printed, told = scripts.output(FOLDER / script, *arguments)
    return scripts.cells(printed), told


@pytest.fixture(scope="module")
def benchmark_module():
    """benchmarks/recovery.py as a module."""
    pytest.importorskip("torch")
    return scripts.module(FOLDER / "recovery.py")


@pytest.fixture(scope="module")
def conditions_module():
    """benchmarks/conditions.py as a module; it imports another of the benchmarks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        yield importlib.import_module("conditions")


def test_recovery_is_timed_beside_its_peers():
    pytest.importorskip("torch")
    arguments = ["--seeds", "1", "--sizes", "4,3,2,1", "--budget", "3"]
    (header, row), told = table("recovery.py", *arguments)
    assert header == ["d, k, m, scale", "examples", "recover", "Adam", "L-BFGS", "faster by"]
    assert row[:2] == ["4, 3, 2, 1", "85"]
    assert row[2].endswith("(1/1)")
    assert 0 < float(row[2].split()[0]) < 60
    for peer in row[3:5]:
        assert peer.endswith(("(1/1)", "(0/1)"))
    assert float(row[5].removeprefix("> ")) > 0
    assert "seed 0: recover" in told


def test_successes_are_counted_against_equations_per_unknown():
    arguments = ["--seeds", "1", "--sizes", "4,3,1,1", "6,4,2,2", "--ratios", "0.6", "6"]
    (header, *rows), told = table("samples.py", *arguments, "--restarts", "1")
    assert header == ["d, k, m, scale", "0.6", "6", "seconds", "wrong claims"]
    assert [row[0] for row in rows] == ["4, 3, 1, 1", "6, 4, 2, 2"]
    for row in rows:
        assert row[1:3] == ["0", "1"]
        assert float(row[3]) > 0
        assert row[4] == "0"
    assert "at 6: 1 of 1" in told


def test_learning_curves_are_timed_beside_scikit_learn_and_the_machine():
    sizes = ["--heads", "20", "--largest", "64", "--dim", "4", "--keys", "4", "--product", "64"]
    (header, *rows), told = table("learning_curves.py", *sizes)
    assert header == [
        "model",
        "stage",
        "seconds",
        "of the limit",
        "Ridge by size",
        "ratio",
        "peak",
    ]
    stages = ["features", "Gram matrix", "factor", "total"]
    assert [row[:2] for row in rows] == [[m, s] for m in ("rfa", "brfa", "rfmlp") for s in stages]
    for row in rows:
        assert float(row[2]) >= 0
        assert row[3].endswith("%")
        assert float(row[4]) >= 0
        assert float(row[5]) >= 0
    for total in rows[3::4]:
        assert 0.01 < float(total[6].removesuffix(" GB")) < 2
    assert "one large product: " in told


def test_sample_sizes_are_compared_with_the_prediction():
    sizes = ["--seeds", "1", "--largest", "64", "--heads", "10", "--keys", "2", "4", "--dim", "4"]
    rows, told = table("sample_sizes.py", *sizes)
    assert [row[0] for row in rows] == [
        "keys", "2", "4", "target", "f_{1,1}", "f_{2,1}", "f_{2,2}", "f_{2,3}", "f_{2,4}"
    ]  # fmt: skip
    assert [row[4] for row in rows[1:3]] == ["1.00", "1.50"]
    for row in rows[4:]:
        assert float(row[3]) == pytest.approx(float(row[2]) / float(row[1]), rel=0.05)
    assert "brfa, 4 keys, seed 0 done" in told


def test_phases_are_timed_and_compared_with_the_truth():
    rows, told = table("sculpt.py", "--quick")
    header, *rows = rows
    assert header[:5] == ["m, d, k, n", "phase", "runs", "examples", "seconds"]
    assert header[5:] == ["measured error", "true error", "ended"]
    phases = [row for row in rows if row[0] == "1, 7, 2, 4000" and len(row) == len(header)]
    names = [row[1] for row in phases]
    assert [name[0] for name in names] == [*"1234567", "r"]
    true = dict(zip(names, (float(row[6].split()[0]) for row in phases), strict=True))
    assert true["3 refined sum"] < 0.01 < true["1 crude sum of projections"]
    assert true["4 sculpt again"] < 0.05 < true["2 sculpt"]
    assert true["6 candidates"] < 0.05
    assert max(true["7 polished"], true["refine alone"]) < 1e-9
    assert [row[7] for row in phases[-2:]] == ["1 exact"] * 2
    refused = [row for row in rows if row[0] == "2, 6, 2, 2000" and len(row) == len(header)]
    assert refused[-2][7].removeprefix("1 ").isidentifier()
    successes = [row for row in rows if len(row) == 5 and row[0] == "1, 7, 2, 4000"]
    assert successes == [["1, 7, 2, 4000", "0", "1", "0", "1 too_few_agreements"]]
    needed = [row for row in rows if row[0] in ("1", "2")]
    assert needed[0][:3] == ["1", "1/1", "4,000"]
    assert needed[1][:3] in (["2", "1/1", "4,000"], ["2", "0/1", "inf"])
    assert "1, 7, 2, 4000 seed 0: 1 crude sum" in told


def test_conditions_are_degraded_until_a_phase_refuses():
    tiny = ["--seeds", "1", "--examples", "4000", "--dim", "7", "--tokens", "2", "--refined", "400"]
    steps = ["--families", "scale", "--steps", "3", "0.5"]
    (header, *rows), told = table("conditions.py", *steps, *tiny)
    ways = ["unpolished", "error", "polished", "error", "refine", "error"]
    assert header == ["family", "step", "measured", "refused", *ways, "verdict"]
    good, bad = rows
    assert good[:4] == ["scale", "3", "scale 3, largest scale 3", "1/1 -"]
    assert good[4] in ("1/1 approximate", "1/1 coarse")  # in so few dimensions
    assert float(good[5].split()[0]) < 0.3
    assert good[6] == good[8] == "1/1 exact"
    assert bad[:3] == ["scale", "0.5", "scale 0.5, largest scale 0.5"]
    assert bad[3].removeprefix("1/1 ") in set("123456")
    assert bad[4] == bad[6]
    assert bad[10] == good[10] == "-"
    assert "scale 0.5 seed 0: unpolished" in told


# The parts of a row


def test_a_family_starts_with_a_layer_that_meets_the_conditions(conditions_module):
    options = argparse.Namespace(dim=8, tokens=3, scale=3.0, examples=5)
    for name in ("distance", "norm-ratio", "sum-conditioning", "attention-independence", "noise"):
        family = conditions_module.FAMILIES[name]
        layer, X, Y = conditions_module.instance(family, family.steps[0], 0, options)
        failed = {n for n, c in conditions_module.ol.conditions(layer).items() if not c.holds}
        assert not failed
        assert X.shape == Y.shape
        assert bool(np.allclose(layer(X), Y)) == (name != "noise")


def test_the_condition_of_a_family_degrades_with_its_steps(conditions_module):
    options = argparse.Namespace(dim=8, tokens=3, scale=3.0, examples=1)
    families = conditions_module.FAMILIES
    for name in ("distance", "norm-ratio", "effective-rank", "scale", "sum-conditioning",
                 "projection-independence", "attention-independence", "low-rank"):  # fmt: skip
        family = families[name]
        measured = []
        for step in family.steps:
            layer, _, _ = conditions_module.instance(family, step, 0, options)
            measured.append(conditions_module.ol.conditions(layer)[family.conditions[0]].measured)
        changes = np.diff(measured)
        assert np.all(changes < 0) or np.all(changes > 0), name


def test_a_claim_that_is_wrong_is_told_by_the_exit_status(conditions_module, monkeypatch, capsys):
    wrong = conditions_module.Result("exact", converged=True, error=0.5)
    monkeypatch.setattr(conditions_module, "result", lambda *given, **how: wrong)
    monkeypatch.setattr(sys, "argv", ["", "--families", "scale", "--steps", "1"])
    with pytest.raises(SystemExit, match="1"):
        conditions_module.main()
    assert "WRONG unpolished 3/3" in capsys.readouterr().out


def test_claims_are_judged_by_what_can_be_asked_of_them(conditions_module):
    def judged(error, noisy=False, **how):
        run = conditions_module.Result("", error=error, **{"converged": True, **how})
        return conditions_module.verdict([dict.fromkeys(conditions_module.WAYS, run)], noisy)

    assert judged(1e-4) == judged(0.05, noisy=True) == judged(0.5, converged=False) == "-"
    assert judged(0.05) == "WRONG polished 1/1, WRONG refine 1/1"
    assert judged(0.2, noisy=True).count("WRONG") == 3
    assert "CRASHED refine 1/1" in judged(np.inf, converged=False, crashed=True)


def test_a_run_that_raises_is_recorded(conditions_module):
    layer = conditions_module.ol.AttentionLayer.random(heads=1, dim=2)
    X = np.ones((1, 2, 2))
    run = conditions_module.result(layer, X, layer(X), heads=1, method="refine")
    assert run.crashed
    assert run.reason.startswith("ValueError: X has 1 example")


def test_the_exponent_in_the_number_of_heads_is_fitted(conditions_module):
    fitted_growth = sys.modules["sculpt"].fitted_growth
    told = fitted_growth({m: 10.0 ** (0.5 * m**3) for m in (1, 2, 3)}, 10)
    assert told.startswith("Fitted: n = (dk)^(0.50 m^3.00)")
    assert "Too few" in fitted_growth({1: 2000.0}, 10)


def test_a_peer_that_never_arrives_counts_with_its_budget(benchmark_module):
    runs = {"recover": [2.0, 4.0, np.inf], "Adam": [np.inf] * 3, "L-BFGS": [np.inf] * 3}
    options = argparse.Namespace(budget=30.0, equations=8.0)
    row = benchmark_module.row((8, 4, 2, 1.0), options, runs)
    assert row == ["8, 4, 2, 1", "64", "3 (2/3)", "inf (0/3)", "inf (0/3)", "> 10.0"]


def test_the_ratio_is_to_the_better_peer(benchmark_module):
    runs = {"recover": [2.0], "Adam": [30.0], "L-BFGS": [9.0]}
    options = argparse.Namespace(budget=60.0, equations=8.0)
    assert benchmark_module.row((8, 4, 2, 1.0), options, runs)[-1] == "4.5"


def test_examples_make_up_the_equations_asked_for(benchmark_module):
    d, k, m = 16, 4, 8
    n = benchmark_module.examples_for((d, k, m, 3.0), 4.0)
    assert n * k * d == 4 * 2 * m * d * d


def test_peers_compute_the_same_layer(benchmark_module):
    torch = benchmark_module.torch
    layer = benchmark_module.ol.AttentionLayer.random(heads=2, dim=3, out_dim=4)
    X = benchmark_module.ol.inputs.gaussian(5, 3, 3)
    theta = torch.tensor(layer.attention.transpose(1, 0, 2).reshape(3, 6))
    outputs = benchmark_module.forward(
        torch.tensor(X), theta, torch.tensor(layer.projection.reshape(6, 4))
    )
    np.testing.assert_allclose(outputs.numpy().reshape(5, 3, 4), layer(X), atol=1e-12)


@pytest.mark.parametrize("stepper", ["adam", "lbfgs"])
def test_peers_arrive_and_give_up(benchmark_module, stepper):
    ol = benchmark_module.ol
    layer = ol.AttentionLayer.random(heads=1, dim=2, scale=1.0)
    X = ol.inputs.gaussian(60, 3, 2, seed=1)
    steps = {
        "adam": lambda parameters: benchmark_module.adam_steps(parameters, 0.03),
        "lbfgs": benchmark_module.lbfgs_steps,
    }[stepper]
    seconds = benchmark_module.descend(X, layer(X), layer, steps, 0, 10.0)
    assert 0 < seconds < 10
    assert benchmark_module.descend(X, layer(X), layer, steps, 0, 1e-9) == np.inf
