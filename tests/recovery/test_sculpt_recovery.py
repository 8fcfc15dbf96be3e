"""recover(method="sculpt"), and what method="auto" makes of it."""

from dataclasses import replace

import numpy as np
import pytest

from onelayer import AttentionLayer, Reason, hard_instance, inputs, recover
from onelayer.array import backend, threads
from onelayer.recovery import api as driver
from onelayer.recovery import display
from onelayer.recovery.strategies import refine


def examples(n=20_000, tokens=3, heads=2, dim=8, draw=inputs.boolean, seed=0, **options):
    scale = 3.0 * (dim if draw is inputs.sphere else 1)
    layer = AttentionLayer.random(heads=heads, dim=dim, scale=scale, seed=seed, **options)
    X = draw(n, tokens, dim, seed=seed + 100)
    return layer, X, layer(X)


@pytest.fixture(scope="module")
def good():
    """A layer that goes through all phases, its examples, and what was found without polishing."""
    layer, X, Y = examples()
    return layer, X, Y, recover(X, Y, heads=2, method="sculpt", polish=False)


def worst(found, layer):
    match = found.layer.distance(layer)
    return max(match.attention.max(), match.projection.max())


def bits(layer):
    return [backend.to_numpy(array).tobytes() for array in layer.arrays().values()]


def stages(found):
    return [row.stage for row in found.trace]


# What is found


@pytest.mark.slow
def test_heads_are_found_without_polishing(good):
    layer, _, _, found = good
    assert found.converged
    assert found.reason is Reason.APPROXIMATE
    assert 1e-4 < worst(found, layer) < 0.05
    assert found.certificate.error < 0.05
    assert found.relative_error < 0.05


def test_the_trace_has_the_six_phases_in_their_order(good):
    found = good[3]
    phases = [row.phase for row in found.trace]
    rounds = (len(phases) - 4) // 2
    expected = [1, 2, *[3, 4] * rounds, 5, 6]
    assert rounds >= 1
    assert phases == expected
    assert all(row.note and 0 < row.error < np.inf for row in found.trace)
    assert [row.step for row in found.trace] == list(range(len(found.trace)))
    seconds = [row.seconds for row in found.trace]
    assert seconds == sorted(seconds)


@pytest.mark.slow
def test_polishing_makes_heads_exact(good):
    layer, X, Y, rough = good
    found = recover(X, Y, heads=2, method="sculpt")
    assert found.reason is Reason.EXACT
    assert worst(found, layer) < 1e-9
    assert stages(found)[: len(rough.trace)] == stages(rough)
    assert set(stages(found)[len(rough.trace) :]) == {"polish"}


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "dim", "tokens", "n"), [(1, 6, 3, 5000), (3, 8, 2, 120_000)])
def test_every_number_of_heads_known_or_not(heads, dim, tokens, n):
    # Gaussian: of Boolean examples of two tokens in 8 dimensions there are too few.
    layer, X, Y = examples(n, tokens, heads, dim, inputs.gaussian, seed=1)
    known = recover(X, Y, heads=heads, method="sculpt", polish=False)
    counted = recover(X, Y, heads="auto", method="sculpt", polish=False)
    assert counted.layer.heads == heads
    for found in (known, counted):
        assert found.reason is Reason.APPROXIMATE
        assert worst(found, layer) < 0.1
    assert counted.trace[0].heads == 0
    assert counted.trace[-1].heads == heads


@pytest.mark.slow
@pytest.mark.parametrize("draw", [inputs.gaussian, inputs.sphere])
def test_continuous_inputs(draw):
    layer, X, Y = examples(draw=draw)
    found = recover(X, Y, heads="auto", method="sculpt", polish=False)
    assert found.reason is Reason.APPROXIMATE
    assert worst(found, layer) < 0.05


@pytest.mark.slow
def test_torch_tensors_are_taken_and_given_back(good):
    torch = pytest.importorskip("torch")
    layer, X, Y, _ = good
    found = recover(torch.as_tensor(X), torch.as_tensor(Y), heads=2, method="sculpt")
    assert isinstance(found.layer.attention, torch.Tensor)
    assert worst(found, layer) < 1e-9


@pytest.mark.slow
def test_memory_mapped_files_of_small_numbers_give_the_same_layer(good, tmp_path):
    _, X, Y, found = good
    np.save(tmp_path / "X.npy", X.astype(np.int8))
    np.save(tmp_path / "Y.npy", Y)
    mapped = [np.load(tmp_path / name, mmap_mode="r") for name in ("X.npy", "Y.npy")]
    again = recover(*mapped, heads=2, method="sculpt", polish=False)
    assert again.layer.attention.dtype == np.float64
    assert bits(again.layer) == bits(found.layer)


@pytest.mark.slow
def test_the_rank_is_kept(good):
    layer, X, Y = examples(rank=4)
    found = recover(X, Y, heads=2, rank=4, method="sculpt", polish=False)
    values = np.linalg.svd(found.layer.attention, compute_uv=False)
    assert np.all(values[:, 4:] < 1e-12 * values[:, :1])
    assert worst(found, layer) < 0.1


@pytest.mark.slow
def test_outputs_wider_than_the_inputs(good):
    layer, X, Y = examples(out_dim=11)
    found = recover(X, Y, heads=2, method="sculpt")
    assert found.reason is Reason.EXACT
    assert worst(found, layer) < 1e-9


@pytest.mark.slow
def test_noise_is_polished_down_to():
    layer, X, Y = examples()
    noise = 1e-3 * np.random.default_rng(1).standard_normal(Y.shape)
    found = recover(X, Y + noise, heads=2, method="sculpt")
    assert found.reason is Reason.NOISE_FLOOR
    assert worst(found, layer) < 0.01


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bits(good):
    _, X, Y, found = good
    again = recover(X, Y, heads=2, method="sculpt", polish=False)
    other = recover(X, Y, heads=2, method="sculpt", polish=False, seed=1)
    assert bits(again.layer) == bits(found.layer) != bits(other.layer)


@pytest.mark.slow
def test_the_number_of_threads_does_not_matter(good):
    _, X, Y, found = good
    with threads.single_threaded_blas(0):
        again = recover(X, Y, heads=2, method="sculpt", polish=False)
    np.testing.assert_allclose(again.layer.attention, found.layer.attention, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_the_arguments_are_left_as_they_were(good):
    _, X, Y, _ = good
    before = X.tobytes(), Y.tobytes()
    recover(X, Y, heads=2, method="sculpt", polish=False)
    assert (X.tobytes(), Y.tobytes()) == before


@pytest.mark.slow
def test_a_weak_head_is_found_by_polishing_where_its_number_is_not_known():
    layer, X, _ = examples(n=10_000, dim=6, seed=1)
    layer = AttentionLayer(layer.attention, layer.projection * [[[1.0]], [[0.01]]])
    rough = recover(X, layer(X), heads="auto", method="sculpt", polish=False)
    assert not (rough.converged and rough.layer.heads < 2)
    found = recover(X, layer(X), heads="auto", method="sculpt")
    assert found.reason is Reason.EXACT
    assert worst(found, layer) < 1e-6
    short = recover(X, layer(X), heads=1, method="sculpt")
    assert short.reason is Reason.TOO_FEW_HEADS


# What is not found is not called found


@pytest.mark.slow
@pytest.mark.parametrize("polish", [True, False])
@pytest.mark.parametrize("heads", [1, 3])
def test_the_wrong_number_of_heads_is_not_believed(good, heads, polish):
    _, X, Y, _ = good
    found = recover(X, Y, heads=heads, method="sculpt", polish=polish)
    assert not found.converged
    assert found.reason.remedy
    assert found.layer.heads == heads


@pytest.mark.slow
@pytest.mark.parametrize("n", [20, 200, 1000])
def test_few_examples_are_not_enough(n):
    _, X, Y = examples(n=n)
    found = recover(X, Y, heads=2, method="sculpt", polish=False)
    assert not found.converged
    assert found.reason.remedy.startswith("use")


def test_outputs_narrower_than_the_tokens_cannot_show_agreement():
    _, X, Y = examples(n=500, out_dim=2)
    found = recover(X, Y, heads=2, method="sculpt")
    assert found.reason is Reason.AGREEMENT_HIDDEN
    assert found.trace[0].note == "3 tokens, outputs of dimension 2"
    assert found.layer.heads == 2


def test_single_tokens_say_nothing():
    _, X, Y = examples(n=500, tokens=1)
    found = recover(X, Y, heads=1, method="sculpt")
    assert found.reason is Reason.TOO_FEW_AGREEMENTS


@pytest.mark.parametrize("zero", ["inputs", "outputs", "both"])
def test_zeros_say_nothing(zero):
    _, X, Y = examples(n=500)
    X, Y = X * (zero == "outputs"), Y * (zero == "inputs")
    found = recover(X, Y, heads=2, method="sculpt")
    assert not found.converged
    assert np.isfinite(found.layer.attention).all()


def test_nothing_but_noise_is_no_layer():
    X = inputs.boolean(5000, 3, 6, seed=1)
    Y = np.random.default_rng(2).standard_normal(X.shape)
    assert not recover(X, Y, heads=2, method="sculpt", polish=False).converged


@pytest.mark.slow
@pytest.mark.parametrize(("parity", "dim"), [(3, 6), (5, 16)])
@pytest.mark.parametrize("method", ["sculpt", "refine"])
def test_parities_resist(parity, dim, method):
    layer = hard_instance(parity=parity, dim=dim)
    X = inputs.boolean(1000, 3, dim, seed=1)
    found = recover(X, layer(X), heads=parity, method=method, restarts=1, max_steps=40)
    assert not found.converged
    assert found.reason.remedy


def test_steps_can_be_limited(good):
    _, X, Y, _ = good
    found = recover(X, Y, heads=2, method="sculpt", max_steps=2)
    assert found.reason is Reason.BUDGET_SPENT
    assert len(found.trace) == 2
    assert not found.converged


def test_seconds_can_be_limited(good):
    _, X, Y, _ = good
    found = recover(X, Y, heads=2, method="sculpt", max_seconds=1e-9)
    assert found.reason is Reason.BUDGET_SPENT


# The choice of method


def notes(found):
    return [row.note for row in found.trace if row.stage == "auto"]


def test_examples_that_fit_in_memory_are_refined():
    _, X, Y = examples(n=300, dim=4)
    found = recover(X, Y, heads=2)
    assert found.trace[0].stage == "auto"
    assert notes(found) == ["refine, since the examples fit in memory"]
    assert not any(row.phase for row in found.trace)


@pytest.mark.slow
def test_examples_that_do_not_fit_in_memory_are_sculpted(good, monkeypatch):
    layer, X, Y, _ = good
    monkeypatch.setattr(driver, "KEPT_BYTES", 2**20)
    found = recover(X, Y, heads=2)
    assert notes(found) == ["sculpt, since the examples take 0.0 GB in memory"]
    assert found.reason is Reason.EXACT
    assert worst(found, layer) < 1e-9


REFINE = refine.refine


def stuck(run):
    """Gauss-Newton steps that end in a local minimum."""
    return replace(REFINE(run), reason=Reason.LOCAL_MINIMUM, converged=False)


@pytest.mark.slow
def test_a_local_minimum_is_escaped_by_sculpting(good, monkeypatch):
    layer, X, Y, _ = good
    monkeypatch.setattr(refine, "refine", stuck)
    found = recover(X, Y, heads=2)
    assert notes(found) == [
        "refine, since the examples fit in memory",
        "sculpt, since refine ended in a local minimum",
    ]
    assert found.reason is Reason.EXACT
    assert worst(found, layer) < 1e-9


@pytest.mark.parametrize("options", [{"n": 300}, {"out_dim": 2}])
def test_what_cannot_be_sculpted_is_not_tried(options, monkeypatch):
    _, X, Y = examples(**{"n": 4000, **options})
    monkeypatch.setattr(refine, "refine", stuck)
    found = recover(X, Y, heads=2, restarts=0, max_steps=30)
    assert found.reason is Reason.LOCAL_MINIMUM
    assert notes(found) == ["refine, since the examples fit in memory"]


def test_what_can_only_be_refined_is_though_it_does_not_fit_in_memory(monkeypatch):
    _, X, Y = examples(n=300, dim=4, bias=True)
    monkeypatch.setattr(driver, "KEPT_BYTES", 2**10)
    found = recover(X, Y, heads=2, bias=True)
    assert notes(found) == ["refine, since sculpt does not apply"]
    assert found.converged


@pytest.mark.slow
def test_where_both_methods_fail_the_trace_says_whose_layer_it_is(monkeypatch):
    _, X, Y = examples(n=4000, tokens=4)
    monkeypatch.setattr(refine, "refine", stuck)
    found = recover(X, Y, heads=3, restarts=0, max_steps=40)
    assert found.reason is Reason.LOCAL_MINIMUM
    assert notes(found)[-1].startswith("what refine found, since sculpt ended with ")


# The door


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"bias": True}, ValueError, "method='sculpt' was asked for with bias, expected neither"),
        ({"causal": True}, ValueError, "method='sculpt' was asked for with causal, expected neit"),
        ({"mask": np.ones((40, 2))}, ValueError, "method='sculpt' was asked for with mask, expec"),
        ({"heads": 3}, ValueError, "heads is 3, expected at most 2 for method='sculpt' with token"),
        ({"polish": 1}, TypeError, "polish is 1, expected True or False"),
        ({"bias": "yes"}, TypeError, "bias is 'yes', expected True or False"),
        ({"causal": None}, TypeError, "causal is None, expected True or False"),
    ],
)
def test_options_that_cannot_be_are_refused(options, error, message):
    X = np.ones((40, 2, 3))
    with pytest.raises(error, match=message):
        recover(X, X, **{"heads": 1, "method": "sculpt", **options})


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((19, 2, 3), "X has 19 examples, expected at least 20 for method='sculpt'"),
        ((30, 2, 49), "X has tokens of dimension 49, expected at most 48 for method='sculpt', whi"),
    ],
)
def test_shapes_that_cannot_be_sculpted_are_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        recover(np.ones(shape), np.ones(shape), heads=1, method="sculpt")


# Progress


@pytest.mark.slow
def test_a_display_is_told_of_every_pass_over_the_examples(monkeypatch):
    _, X, Y = examples(n=20_000)
    told = []
    report = display.Display.report

    def listen(self, stage, share):
        told.append((stage, share))
        report(self, stage, share)

    monkeypatch.setattr(display.Display, "report", listen)
    recover(X, Y, heads=2, method="sculpt", polish=False, progress=True)
    assert {stage for stage, _ in told} >= {
        "whitening",
        "phase 1: crude sum of projections",
        "phase 2: sculpt",
        "phase 3: refined sum",
        "phase 4: sculpt again",
    }
    assert all(0 <= share <= 1 for _, share in told)
    assert told[-1][1] == 1
