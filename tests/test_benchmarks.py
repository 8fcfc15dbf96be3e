import argparse
import importlib
import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import scripts
from models import write_model

import onelayer as ol

FOLDER = Path(__file__).parents[1] / "benchmarks"
needs_bars = pytest.mark.skipif(
    "advice" not in {*dir(ol.Recovery), *ol.Recovery.__dataclass_fields__},
    reason="recoveries come without bars and advice",
)


def table(script, *arguments):
    """The cells of the table that a benchmark prints, row by row, and its progress messages."""
    printed, progress = scripts.output(FOLDER / script, *arguments)
    return scripts.cells(printed), progress


@pytest.fixture(scope="module")
def benchmark_module():
    """benchmarks/recovery.py as a module."""
    pytest.importorskip("torch")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        return scripts.module(FOLDER / "recovery.py")


@pytest.fixture
def peers(benchmark_module):
    """benchmarks/peers.py as a module."""
    return benchmark_module.peers


@pytest.mark.slow
def test_recovery_is_timed_beside_its_peers():
    pytest.importorskip("torch")
    arguments = ["--seeds", "1", "--sizes", "4,3,2,1", "--budget", "0.5"]
    (header, *rows), progress = table("recovery.py", *arguments)
    assert header[:5] == ["d, k, m, scale", "examples", "certified", "head error", "recover"]
    assert header[5:] == ["minibatch Adam", "Adam", "L-BFGS", "faster by"]
    assert rows[0][:2] == ["4, 3, 2, 1", "85"]
    assert [row[3] for row in rows] == ["0.01", "1e-05", "1e-10"]
    for ours in (rows[0][2], *(row[4] for row in rows)):
        assert ours.endswith("(1/1)")
        assert 0 < float(ours.split()[0]) < 60
    for row in rows:
        assert all(peer.endswith(("(1/1)", "(0/1)")) for peer in row[5:8])
        assert float(row[8].removeprefix("> ")) >= 0  # a peer may win at this size
    assert rows[2][5] == "- (0/1)"  # in float32
    assert "seed 0: certified" in progress


@pytest.mark.slow
def test_layers_of_a_model_and_random_ones_are_recovered(tmp_path):
    pytest.importorskip("torch")
    arguments = ["--model", write_model(tmp_path, bias=True), "--layers", "0", "2"]
    arguments += ["--random", "2", "--shape", "2,5,2", "--examples", "900", "--amplitudes", "0.8"]
    found, progress = table("real_layers.py", *arguments, "--seeds", "1", "--device", "cpu")
    (header, *rows), (times_header, *times) = found[:4], found[4:]
    assert header[:6] == ["layer", "inputs", "examples", "seed", "outcome", "seconds"]
    assert [row[0] for row in rows] == ["0", "2", "random, scale 2"]
    for row, heads in zip(rows, ("3/3", "3/3", "2/2"), strict=True):
        assert row[1:5] == ["±0.8", "900", "1", "exact"]
        assert row[6] == heads
        assert float(row[7]) < 1e-6
        assert all(float(cell) > 0 for cell in row[8:])
    assert times_header[4:] == ["method", "0.01", "1e-05", "1e-10"]
    for row, recovered in zip(times, rows, strict=True):
        assert row[:5] == [*recovered[:4], "recover"]
        assert float(row[5]) == float(row[6]) > 0
    assert "random, scale 2, ±0.8, 900, 1, exact" in progress


@pytest.mark.slow
def test_layers_are_recovered_from_text_beside_peers(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    model = write_encoder(tmp_path)
    np.save(tmp_path / "windows.npy", np.random.default_rng(0).integers(0, 60, (400, 16)))
    arguments = ["--model", model, "--layers", "1", "--examples", "300", "--seeds", "1"]
    arguments += ["--inputs", "text", "--windows", tmp_path / "windows.npy", "--device", "cpu"]
    arguments += ["--peers", "adam", "l-bfgs", "--budget", "0.2", "--batch", "32"]
    (_, row, _, *times), _ = table("real_layers.py", *arguments)
    assert row[:5] == ["1", "text × 1", "300", "1", "exact"]
    assert row[6] == "2/2"
    assert [row[4] for row in times] == ["recover", "minibatch Adam", "Adam", "L-BFGS"]
    assert all(float(cell) > 0 for cell in times[0][5:])
    assert all(row[-1] == "-" for row in times[1:])  # in float32


def write_encoder(folder):
    """The path of a whole encoder with random weights, written to a folder."""
    encoders = scripts.module(Path(__file__).with_name("test_real_transformer.py"))
    settings = {"num_attention_heads": encoders.HEADS, "layer_norm_eps": encoders.EPSILON}
    (folder / "config.json").write_text(json.dumps(settings), "utf-8")
    (folder / "vocab.txt").write_text("\n".join(encoders.WORDS), "utf-8")
    safetensors.numpy.save_file(encoders.random_weights(), folder / "model.safetensors")
    return folder / "model.safetensors"


@pytest.mark.slow
@pytest.mark.parametrize("unchecked", [False, True])
def test_output_entries_of_chosen_queries_are_counted(unchecked):
    arguments = ["--seeds", "1", "--sizes", "4,2", "3,1,1", *["--unchecked"] * unchecked]
    (header, *rows), progress = table("queries.py", *arguments)
    assert header[:6] == ["d, H, e", "unknowns", "papers", "used", "returned", "inputs"]
    assert [row[:3] for row in rows] == [["4, 2, 4", "64", "125"], ["3, 1, 1", "12", "12"]]
    for row in rows:
        unknowns, _, used, returned, inputs = (int(cell.replace(",", "")) for cell in row[1:6])
        assert unknowns <= used < returned
        assert 0 < inputs < returned
        assert float(row[6]) < (1e-4 if unchecked else 1e-8)
        assert row[8] == "1/1"
    assert "4, 2, 4, seed 0: " in progress


def test_successes_are_counted_against_equations_per_unknown():
    arguments = ["--seeds", "1", "--sizes", "4,3,1,1", "6,4,2,2", "--ratios", "0.6", "6"]
    (header, *rows), progress = table("samples.py", *arguments, "--restarts", "1")
    assert header == ["d, k, m, scale", "0.6", "6", "seconds", "wrong claims"]
    assert [row[0] for row in rows] == ["4, 3, 1, 1", "6, 4, 2, 2"]
    for row in rows:
        assert row[1:3] == ["0", "1"]
        assert float(row[3]) > 0
        assert row[4] == "0"
    assert "at 6: 1 of 1" in progress


@pytest.mark.slow
@needs_bars
def test_bars_are_compared_with_true_errors(tmp_path):
    out = ["--out", tmp_path / "bars.jsonl"]
    arguments = ["bars", "--runs", "4", "--dims", "4", "--max-seconds", "0.5", "--jobs", "1", *out]
    rows, progress = table("certainty.py", *arguments)
    assert rows[0] == ["reason", "converged", "refused"]
    total = next(row for row in rows if row[0] == "all")
    assert int(total[1]) + int(total[2]) == 4
    covered = next(row for row in rows if row[0] == "converged")
    assert int(covered[1]) >= 1
    assert all(cell.endswith("%") for cell in covered[2:5])
    families = {row[0]: row[1:] for row in rows if len(row) == 7}
    assert families["inputs: boolean"][:3] == ["1", "1", "0"]
    assert families["combination"][0] == "1"
    assert "4/4 run 3, combination: " in progress
    assert "raised" not in progress
    again, progress = table("certainty.py", *arguments)
    assert again == rows
    assert progress.startswith("4 of 4 runs are in ")


@pytest.mark.slow
@needs_bars
def test_misfits_and_right_models_are_counted():
    sizes = ["--dims", "4", "--examples", "60", "90", "--max-seconds", "0.5", "--jobs", "1"]
    rows, progress = table("certainty.py", "models", "--runs", "2", *sizes)
    header = ["kind", "runs", "converged", "cause named", "seconds", "most", "reasons of refusals"]
    assert rows[0] == header
    assert [row[0] for row in rows[1:3]] == ["causal forgotten", "mask forgotten"]
    assert rows[3][:5] == ["kind", "runs", "converged", "bars in reach", "coverage"]
    assert [row[:2] for row in rows[4:6]] == [["right, bias", "1"], ["right, plain", "1"]]
    assert "4/4 run 3, right, bias: " in progress
    assert "raised" not in progress


@pytest.mark.slow
def test_learning_curves_are_timed_beside_scikit_learn_and_the_machine():
    sizes = ["--heads", "20", "--largest", "64", "--dim", "4", "--keys", "4", "--product", "64"]
    (header, *rows), progress = table("learning_curves.py", "--models", "rfa", "rfmlp", *sizes)
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
    assert [row[:2] for row in rows] == [[m, s] for m in ("rfa", "rfmlp") for s in stages]
    for row in rows:
        assert float(row[2]) >= 0
        assert row[3].endswith("%")
        assert float(row[4]) >= 0
        assert float(row[5]) >= 0
    for total in rows[3::4]:
        assert 0.01 < float(total[6].removesuffix(" GB")) < 2
    assert "one large product: " in progress


@pytest.mark.slow
def test_phases_are_timed_and_compared_with_the_truth():
    rows, progress = table("sculpt.py", "--quick")
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
    assert "1, 7, 2, 4000 seed 0: 1 crude sum" in progress


@pytest.mark.slow
def test_memory_and_time_are_measured_as_files_grow():
    arguments = ["--sizes", "3000", "--heads", "4", "--chunk", "0.1"]
    (header, *rows), progress = table("scale.py", "disk", *arguments)
    assert header[:4] == ["job", "examples", "file, GB", "seconds"]
    assert header[4:] == ["s per million", "peak, GB", "result"]
    assert [row[:2] for row in rows] == [["ridge", "3,000"], ["sculpt", "3,000"]]
    for row in rows:
        assert float(row[3]) > 0
        assert 0.01 < float(row[5]) < 2
    assert rows[0][6].startswith("|v| = ")
    assert ", " in rows[1][6]
    assert "ridge, 3,000 examples" in progress


def test_a_cluster_is_timed_beside_one_process():
    pytest.importorskip("distributed")
    sizes = ["--examples", "4000", "--heads", "4", "--chunk", "0.3", "--workers", "1"]
    (header, *rows), progress = table("scale.py", "cluster", *sizes, "--jobs", "ridge")
    assert header[:4] == ["job", "workers", "one process, s", "cluster, s"]
    assert header[4:] == ["overhead", "empty pass, ms"]
    assert [row[:2] for row in rows] == [["ridge", "1"]]
    for row in rows:
        assert float(row[2]) > 0
        assert float(row[3]) > 0
        assert row[4][0] in "+-"
        assert float(row[5]) > 0
    assert "ridge, 1 worker ..." in progress


def test_a_device_is_timed_beside_its_own_limit():
    pytest.importorskip("torch")
    sizes = ["--largest", "64", "--curve-heads", "20", "--size", "4", "3", "2", "--product", "64"]
    (header, *rows), progress = table("scale.py", "gpu", "--device", "cpu", *sizes)
    assert header == ["job", "seconds", "limit, s", "of the limit", "result"]
    jobs = ["rfa", "brfa", "rfmlp", "three curves", "Gram matrix", "recover 4, 3, 2"]
    assert [row[0] for row in rows] == jobs
    for row in rows:
        assert float(row[1]) >= 0
        assert row[3].endswith("%")
    assert float(rows[-1][4].removeprefix("heads to ")) < 1e-9
    assert "recovery of 2 heads in 4 dimensions" in progress


# Problems and records of certainty.py


@pytest.fixture
def certainty(monkeypatch):
    """benchmarks/certainty.py as a module, with those it imports."""
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("certainty")


@pytest.fixture
def trials(certainty):
    """benchmarks/trials.py as a module."""
    return importlib.import_module("trials")


def record(converged=True, **errors):
    """A run with one head, everything exact but what is given."""
    names = ("attention_error", "attention_bar", "projection_error", "projection_bar")
    return {"converged": converged, **{name: [errors.get(name, 0.0)] for name in names}}


def test_wrong_is_far_beyond_the_bar_and_beyond_one_per_cent(certainty):
    assert certainty.is_wrong(record(attention_error=0.04, attention_bar=0.01))
    assert certainty.is_wrong(record(projection_error=None, projection_bar=0.01))
    assert not certainty.is_wrong(record(attention_error=0.02, attention_bar=0.01))
    assert not certainty.is_wrong(record(attention_error=0.009, attention_bar=0.001))
    assert not certainty.is_wrong(record(attention_error=5.0, attention_bar=None))
    assert not certainty.is_wrong(record(False, attention_error=0.04, attention_bar=0.01))


def test_coverage_is_that_of_heads_with_finite_bars(certainty):
    records = [
        record(attention_error=0.01, attention_bar=0.02),
        record(attention_error=0.01, attention_bar=0.005),
        record(attention_error=0.01, attention_bar=None),
    ]
    heads, shares, quantiles = certainty.coverage(records)
    assert (heads, shares) == (2, ["50.0 %", "100.0 %", "50.0 %"])
    assert quantiles[1] == "1.25"


def test_bars_follow_their_heads(trials):
    layer = ol.AttentionLayer.random(heads=2, dim=3)

    class Found:
        class certificate:
            attention_error, projection_error = np.array([0.1, np.inf]), np.array([0.3, 0.4])

        class layer:
            @staticmethod
            def distance(other, inputs):
                found = ol.AttentionLayer(layer.attention[::-1], layer.projection[::-1])
                return found.distance(other)

    compared = trials.compare(Found, layer, None)
    assert compared["attention_bar"] == [None, 0.1]
    assert compared["projection_bar"] == [0.4, 0.3]
    assert compared["attention_error"] == [0.0, 0.0]


def test_a_line_that_was_cut_off_is_removed(trials, tmp_path):
    path = tmp_path / "folder" / "runs.jsonl"
    trials.append(path, {"run": 0})
    with path.open("a") as file:
        file.write('{"run": 1, "fam')
    assert trials.read(path) == [{"run": 0}]
    trials.append(path, {"run": 1})
    assert trials.read(path) == [{"run": 0}, {"run": 1}]


def test_problems_are_functions_of_their_number(certainty):
    families, misfits = certainty.families, certainty.misfits
    for run in range(len(families.SINGLE) * 4 // 3 + 4):
        once, again = families.problem(run, (4,)), families.problem(run, (4,))
        assert once.labels == again.labels
        assert np.isfinite(once.Y).all()
        np.testing.assert_array_equal(once.X, again.X)
        np.testing.assert_array_equal(once.Y, again.Y)
    for run in range(2 * len(misfits.KINDS)):
        once, again = (misfits.misfit(run, (4,), (20, 30)) for _ in range(2))
        assert np.isfinite(once.Y).all()
        np.testing.assert_array_equal(once.Y, again.Y)


def test_scores_have_the_scale_asked_for(certainty):
    layer = ol.AttentionLayer.random(heads=2, dim=4, bias=True)
    X = 0.01 * ol.inputs.gaussian(300, 5, 4)
    scaled = certainty.families.with_score_scale(layer, X, 1.5)
    scores = np.einsum("nad,mde,nbe->mnab", X, scaled.attention, X)
    scores += np.einsum("md,nbd->mnb", scaled.key_bias, X)[:, :, None]
    deviation = (scores - scores.mean(axis=-1, keepdims=True)).std(axis=(1, 2, 3))
    np.testing.assert_allclose(deviation, 1.5)


def test_bfloat16_is_rounded_as_torch_does(certainty):
    torch = pytest.importorskip("torch")
    Y = np.random.default_rng(0).standard_normal((50, 3, 4)) * 100
    rounded = certainty.families.rounded(Y, "bfloat16", None)
    expected = torch.as_tensor(Y.astype(np.float32)).bfloat16().float().numpy()
    np.testing.assert_array_equal(rounded, expected)


def test_attention_from_scores_is_that_of_the_layer(certainty):
    layer = ol.AttentionLayer.random(heads=2, dim=4)
    X = ol.inputs.gaussian(5, 3, 4)
    scores = [X @ theta @ X.swapaxes(1, 2) for theta in layer.attention]
    outputs = certainty.misfits.attended(X, scores, layer.projection)
    np.testing.assert_allclose(outputs, layer(X), atol=1e-12)


# The parts of a row


def test_the_exponent_in_the_number_of_heads_is_fitted(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    fitted_growth = importlib.import_module("sculpt").fitted_growth
    fitted = fitted_growth({m: 10.0 ** (0.5 * m**3) for m in (1, 2, 3)}, 10)
    assert fitted.startswith("Fitted: n = (dk)^(0.50 m^3.00)")
    assert "Too few" in fitted_growth({1: 2000.0}, 10)


def row_at_1e_5(benchmark_module, equations, **seconds):
    """The cells of recover, the peers and the ratio, from seconds to all errors by method."""
    targets = benchmark_module.peers.TARGETS
    names = {"recover": "recover", "minibatch": "minibatch Adam", "adam": "Adam", "lbfgs": "L-BFGS"}
    runs = {
        names[name]: [dict.fromkeys(targets, one) for one in times]
        for name, times in seconds.items()
    }
    runs["certified"] = runs["recover"]
    options = argparse.Namespace(budget=30.0, equations=equations)
    return benchmark_module.rows((8, 4, 2, 1.0), options, runs)[1][3:]


def test_a_peer_that_never_arrives_counts_with_its_budget(benchmark_module):
    never = {name: [np.inf] * 3 for name in ("minibatch", "adam", "lbfgs")}
    row = row_at_1e_5(benchmark_module, 8.0, recover=[2.0, 4.0, np.inf], **never)
    assert row == ["1e-05", "3 (2/3)", "- (0/3)", "- (0/3)", "- (0/3)", "> 10.0"]


def test_the_ratio_is_to_the_best_peer(benchmark_module):
    times = {"recover": [2.0], "minibatch": [20.0], "adam": [30.0], "lbfgs": [9.0]}
    assert row_at_1e_5(benchmark_module, 8.0, **times)[-1] == "4.5"


def test_examples_make_up_the_equations_asked_for(benchmark_module):
    d, k, m = 16, 4, 8
    n = benchmark_module.examples_for((d, k, m, 3.0), 4.0)
    assert n * k * d == 4 * 2 * m * d * d


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("ranks", [(None, None), (2, None), (2, 2)])
def test_peers_compute_the_layer_that_they_say(peers, ranks, bias):
    torch = peers.torch
    layer = ol.AttentionLayer.random(heads=2, dim=3, out_dim=4, bias=bias)
    X = ol.inputs.gaussian(50, 3, 3)
    problem = peers.Problem(X, layer(X), layer, *ranks, bias=bias)
    data = peers.Data(problem, torch.float64)
    model = peers.Model(problem, data)
    with torch.no_grad():
        for one in model.parameters():
            one.add_(torch.randn_like(one))
    outputs = model(data.X) * data.deviation + data.mean
    found = model.layer(data)
    np.testing.assert_allclose(outputs.detach().numpy(), found(X), atol=1e-12)
    assert found.attention.shape == layer.attention.shape


@pytest.mark.slow
@pytest.mark.parametrize("method", ["minibatch Adam", "Adam", "L-BFGS"])
def test_peers_arrive_and_give_up(peers, method):
    layer = ol.AttentionLayer.random(heads=1, dim=2, scale=1.0)
    X = ol.inputs.gaussian(60, 3, 2, seed=1)
    problem = peers.Problem(X, layer(X), layer, batch=32)
    times = list(peers.race(method, problem, 10.0).values())
    assert 0 < times[0] <= times[1] < 10
    assert np.isinf(times[2]) == (method == "minibatch Adam")  # in float32
    assert peers.race(method, problem, 1e-9)[1e-10] == np.inf


def test_times_of_runs_double_up_to_the_budget(peers):
    assert peers.horizons(0.8) == [0.1, 0.2, 0.4, 0.8]
    assert peers.horizons(0.01) == [0.01]
    assert len(peers.horizons(1e6)) == 8


@pytest.mark.slow
def test_offsets_and_scales_are_shown_not_to_matter():
    (header, *rows), _ = table("raw_data.py", "--examples", "30", "--heads", "4")
    assert header[:4] == ["estimator", "examples", "as it is", "y + 10³"]
    assert {row[0] for row in rows} > {"attention", "network", "kernel", "classifier", "RidgeCV"}
    assert [row[1] for row in rows[:3]] == ["memory", "function", "file"]
    for row in rows:
        assert all(float(cell) < 1e-3 for cell in row[3:] if cell)
