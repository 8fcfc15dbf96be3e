import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from cases import solved_case, whitened

from onelayer import AttentionLayer, inputs, recover
from onelayer.array.backend import to_numpy
from onelayer.io import safetensors_files
from onelayer.recovery.gauss_newton import varpro
from onelayer.recovery.reasons import Reason
from onelayer.recovery.strategies import checkpoint


def examples(n=400, bias=False, seed=0):
    layer = AttentionLayer.random(heads=2, dim=4, bias=bias, seed=seed)
    X = inputs.boolean(n, 3, 4, seed=1)
    return layer, X, layer(X)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "best.safetensors"


# Writing


def test_a_checkpoint_is_the_layer_that_was_found(path):
    _, X, Y = examples(bias=True)
    found = recover(X, Y, heads=2, bias=True, checkpoint=path)
    kept = AttentionLayer.load(path)
    np.testing.assert_array_equal(kept.attention, found.layer.attention)
    np.testing.assert_array_equal(kept.projection, found.layer.projection)
    np.testing.assert_array_equal(kept.key_bias, found.layer.key_bias)


def fit_with(error, fit, examples=400):
    """A fit as if it had this error on so many examples."""
    return replace(fit, loss=error**2, batches=replace(fit.batches, examples=examples))


@pytest.fixture
def kept(path, monkeypatch):
    """When a checkpointer has written, of fits that it was offered at some seconds."""
    layer, X, _ = examples()
    case = solved_case(layer, X)
    now = [0.0]
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: now[0])

    def times(offers, **options):
        checkpointer = checkpoint.Checkpointer(path, case.problem(), **options)
        for second, *offer in offers:
            now[0] = float(second)
            checkpointer.offer(fit_with(offer[0], case.fit(), *offer[1:]))
            if path.exists():
                path.unlink()
                yield second

    return times


def test_only_better_layers_are_written_and_not_too_often(kept):
    offers = [(0, 0.5), (5, 0.4), (11, 0.6), (12, 0.3), (13, 0.2), (23, 0.2)]
    assert list(kept(offers)) == [0, 11, 23]


def test_fits_to_more_examples_may_have_a_larger_error_and_to_fewer_must_have_a_smaller(kept):
    offers = [(0, 0.5, 50), (20, 0.6, 50), (40, 0.6, 90), (60, 0.55, 50), (80, 2.0, 100)]
    assert list(kept([*offers, (100, 0.19, 50)])) == [0, 40, 100]


def test_the_file_that_a_search_goes_on_from_is_not_written_again(kept):
    assert list(kept([(0, 0.5), (20, 0.6), (40, 0.4)], resumed=True)) == [40]


def test_layers_that_are_no_fits_are_made_where_they_are_better(path):
    layer, X, _ = examples()
    case = solved_case(layer, X)
    fit, made = case.fit(), []
    checkpointer = checkpoint.Checkpointer(path, case.problem())

    def parts(error):
        made.append(error)
        return fit.theta * (1 + error), fit.weights

    for error, count in ((0.5, 50), (0.6, 50), (0.4, 50), (0.9, 400), (0.5, 50)):
        checkpointer.offer_layer(error, count, lambda error=error: parts(error))
    assert made == [0.5, 0.4, 0.9]  # more examples may have a larger error
    checkpointer.flush()
    kept = AttentionLayer.load(path)
    np.testing.assert_allclose(kept.attention, 1.9 * layer.attention, atol=1e-9)


def test_a_good_checkpoint_is_not_replaced_by_worse(path):
    layer, X, Y = examples(n=45)
    layer.save(path)
    before = path.read_bytes()
    noisy = Y + np.random.default_rng(0).standard_normal(Y.shape)
    options = {"restarts": 0, "max_steps": 1, "method": "refine"}
    found = recover(X, noisy, heads=2, checkpoint=path, resume=True, **options)
    assert not found.converged
    assert path.read_bytes() == before


def test_a_full_disk_is_no_reason_to_give_up(path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors_files, "write_whole", full)
    _, X, Y = examples()
    with pytest.warns(UserWarning, match="was not written: .* No space left on device"):
        found = recover(X, Y, heads=2, checkpoint=path)
    assert found.reason is Reason.EXACT


@pytest.mark.parametrize("bias", [False, True])
def test_the_way_back_to_whitened_coordinates(xp_array, bias):
    layer, X, Y = examples(bias=bias)
    X = X * [1.0, 2.0, 0.5, 3.0]
    posed = whitened(xp_array(X), xp_array(Y), None, False, bias)
    fit = varpro.fit(posed.batches(2), posed.heads_of(layer))
    back = posed.heads_of(posed.layer(fit.theta, fit.weights))
    np.testing.assert_allclose(to_numpy(back), to_numpy(fit.theta), atol=1e-12)


# Going on


@pytest.mark.parametrize("options", [{}, {"bias": True}, {"heads": "auto"}])
def test_a_search_goes_on_from_its_checkpoint(path, options):
    options = {"heads": 2, **options}
    layer, X, Y = examples(bias=options.get("bias", False))
    recover(X, Y, method="refine", checkpoint=path, max_steps=4, **options)
    found = recover(X, Y, method="refine", checkpoint=path, resume=True, **options)
    assert found.reason is Reason.EXACT
    assert found.layer.distance(layer).attention.max() < 1e-9
    assert found.trace[1].stage.startswith("resumed")
    plain = recover(X, Y, method="refine", **options)
    assert found.trace[1].error < 0.9 * plain.trace[1].error


def test_a_finished_search_is_finished_again_at_once(path):
    _, X, Y = examples()
    first = recover(X, Y, heads=2, method="refine", checkpoint=path)
    again = recover(X, Y, heads=2, method="refine", checkpoint=path, resume=True)
    assert again.converged
    assert len(again.trace) < len(first.trace)
    assert again.trace[1].error < 1e-11


def test_a_search_goes_on_with_more_examples(path):
    layer, X, Y = examples()
    recover(X, Y, heads=2, checkpoint=path)
    X = inputs.gaussian(600, 5, 4, seed=9)
    found = recover(X, layer(X), heads=2, checkpoint=path, resume=True)
    assert found.trace[2].stage.startswith("resumed")
    assert found.trace[2].error < 1e-9


def test_automatic_methods_keep_checkpoints_too(path):
    _, X, Y = examples()
    found = recover(X, Y, heads=2, checkpoint=path)
    assert found.trace[0].note == "refine, since a checkpoint is kept"


def test_what_an_interrupted_search_came_to_is_kept(path):
    _, X, Y = examples()
    errors = []

    def interrupting(row):
        errors.append(row.error)
        if len(errors) == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        recover(X, Y, heads=2, method="refine", checkpoint=path, progress=interrupting)
    off = np.linalg.norm(AttentionLayer.load(path)(X) - Y) / np.linalg.norm(Y)
    assert off < 2 * min(errors) < 0.2 * errors[1]  # that of the last step, not of the first


KILLED = """
import sys
import time
import numpy as np
import onelayer as ol
from onelayer.recovery.strategies import checkpoint
checkpoint._SECONDS_BETWEEN_WRITES = 0.0
layer = ol.AttentionLayer.random(heads=4, dim=16, scale=2.0, seed=0)
X = ol.inputs.boolean(3000, 4, 16, seed=1)
ol.recover(
    X,
    layer(X),
    heads=4,
    method="refine",
    checkpoint=sys.argv[1],
    progress=lambda row: time.sleep(60 * (row.step > 4)),
)
"""


@pytest.mark.slow
def test_a_killed_run_leaves_a_whole_file_and_resumes(path):
    run = subprocess.Popen([sys.executable, "-c", KILLED, path])
    deadline = time.monotonic() + 60
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    assert run.poll() is None
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    layer = AttentionLayer.random(heads=4, dim=16, scale=2.0, seed=0)
    X = inputs.boolean(3000, 4, 16, seed=1)
    found = recover(X, layer(X), heads=4, method="refine", checkpoint=path, resume=True)
    assert found.reason is Reason.EXACT
    assert found.trace[1].stage.startswith("resumed")


# Refusals


def test_an_old_checkpoint_is_not_overwritten(path):
    _, X, Y = examples()
    recover(X, Y, heads=2, checkpoint=path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="exists, expected resume=True to resume from it, or ano"):
        recover(X, Y, heads=2, checkpoint=path)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"resume": True}, ValueError, "resume is True and checkpoint None, expected a file"),
        ({"resume": 1}, TypeError, "resume is 1, expected True or False"),
        ({"checkpoint": 3}, TypeError, "checkpoint is 3, expected a path or None"),
        ({"checkpoint": "{}"}, ValueError, "is a folder, expected a file"),
        ({"checkpoint": "{}/no/x"}, ValueError, "is in a folder that does not exist"),
        ({"checkpoint": "{}/x", "resume": True}, ValueError, "does not exist, expected a file"),
        (
            {"checkpoint": "{}/x", "method": "sculpt"},
            ValueError,
            "checkpoint is given with method 'sculpt', which writes none",
        ),
    ],
)
def test_wrong_arguments_are_refused(tmp_path, options, error, message):
    _, X, Y = examples()
    if isinstance(options.get("checkpoint"), str):
        options = {**options, "checkpoint": options["checkpoint"].format(tmp_path)}
    with pytest.raises(error, match=message):
        recover(X, Y, **{"heads": 2, **options})


@pytest.mark.parametrize(
    ("made", "options", "message"),
    [
        ({"dim": 5}, {}, r"has dim, out_dim = \(5, 5\), expected \(4, 4\) as the examples have"),
        ({"heads": 1}, {}, "has 1 heads, expected at least 2"),
        ({"bias": True}, {}, "has biases, expected none as bias=False"),
        ({}, {"bias": True}, "has no biases, expected biases as bias=True"),
    ],
)
def test_checkpoints_of_other_layers_are_refused(path, made, options, message):
    AttentionLayer.random(**{"heads": 2, "dim": 4, "seed": 0, **made}).save(path)
    _, X, Y = examples()
    with pytest.raises(ValueError, match=message):
        recover(X, Y, heads=2, checkpoint=path, resume=True, **options)


def test_a_checkpoint_that_was_cut_short_is_refused(path):
    _, X, Y = examples()
    recover(X, Y, heads=2, checkpoint=path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match="is not a whole safetensors file"):
        recover(X, Y, heads=2, checkpoint=path, resume=True)
