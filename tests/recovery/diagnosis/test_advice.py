"""What is said to the caller, and the second opinion that it rests on."""

from types import SimpleNamespace

import numpy as np
import pytest

from onelayer import AttentionLayer, Reason, inputs, recover
from onelayer.array.rounding import Rounding
from onelayer.recovery.certificate import Certificate
from onelayer.recovery.diagnosis.advice import advice
from onelayer.recovery.diagnosis.second_opinion import SecondOpinion
from onelayer.recovery.diagnosis.suspicions import Suspicion

FLOAT64 = Rounding("float64", 1e-16)


def certificate(attention=(1e-3, 1e-3), projection=(1e-3, 1e-3), nested=(1e-3,) * 4, **options):
    values = {
        "input_rank": 4,
        "noise": 1e-2,
        "examples": 100,
        "error": 1e-2,
        "worst": 0.1,
        "error_bound": 0.03,
        "exceed_probability": 0.03,
        "confidence": 0.95,
        "smallest_singular_value": 0.1,
    }
    bars = (np.array(one) for one in (attention, projection, nested))
    return Certificate(*bars, **{**values, **options})


def said(reason=Reason.HEADS_NOT_DETERMINED, rounding=FLOAT64, opinion=None, **options):
    return advice(reason, certificate(**options), 4, 0.1, rounding, 1.0, opinion)


# Heads that are uncertain


def test_nothing_is_said_where_all_is_well():
    assert said(Reason.EXACT) == said(Reason.NOISE_FLOOR) == ""


def test_uncertain_heads_are_named_with_their_bars():
    words = said(attention=(0.2, 3.0), projection=(0.5, 1e-3))
    assert (
        "Errors may exceed 10 % for head 0 (up to 50 %), head 1 (up to 3 times its size)." in words
    )


def test_heads_that_are_certain_are_not_named():
    words = said(attention=(0.2, 1e-3))
    assert "head 0 (up to 20 %)" in words
    assert "head 1" not in words


def test_free_heads_call_for_fewer_heads():
    words = said(attention=(np.inf, 1e-3), nested=(np.inf,) * 4)
    assert "head 0 (not determined)" in words
    assert "The examples do not determine them" in words
    assert "Ask for fewer heads" in words


def test_directions_with_too_little_signal_are_counted():
    words = said(attention=(0.2, 0.3), nested=(1e-3, 1e-2, 0.2, 0.3))
    assert "too little signal along 2 of their 4 directions" in words
    assert "while outputs are noisy (relative error 1.0e-02)" in words


def test_heads_that_hardly_answer_call_for_other_scores():
    words = said(attention=(0.2, 0.3), nested=(0.2,) * 4, smallest_singular_value=1e-4)
    assert "Outputs hardly change with these heads" in words
    assert "larger inputs" in words


def test_plain_noise_calls_for_more_examples():
    words = said(attention=(0.2, 0.3), nested=(0.2,) * 4)
    assert "The reason is that outputs are noisy (relative error 1.0e-02): give more exa" in words


def test_rounding_is_told_from_noise():
    options = {"attention": (0.2, 0.3), "nested": (0.2,) * 4}
    assert "outputs are rounded to float16" in said(rounding=Rounding("float16", 5e-3), **options)
    assert "outputs are noisy" in said(rounding=Rounding("float16", 1e-3), **options)


def test_directions_that_inputs_do_not_have_are_counted():
    words = said(Reason.EXACT, input_rank=3)
    assert words == ("The inputs vary along 3 of 4 directions: heads are found on their span.")


def test_where_there_is_nothing_else_to_say_the_remedy_is_said():
    words = said(Reason.BUDGET_SPENT)
    assert words == "Raise max_steps or max_seconds."


# The second opinion


def opinion(**options):
    return SecondOpinion(SimpleNamespace(), False, False, None, **options)


def test_a_better_model_is_said_first_and_then_the_suspicions():
    seen = opinion(
        better="Pass bias=True.", suspicions=[Suspicion("bias", "Odd.")], left_over="Left over."
    )
    assert said(Reason.WRONG_MODEL, opinion=seen) == "Pass bias=True. Odd."
    seen.better = ""
    assert said(Reason.WRONG_MODEL, opinion=seen) == "Odd. Left over."


def test_layers_that_are_found_are_not_doubted():
    assert said(Reason.EXACT, opinion=opinion(suspicions=[Suspicion("bias", "Odd.")])) == ""


@pytest.mark.parametrize(
    ("kind", "suspicious"), [("bias", False), ("positions", True), ("axes", True), ("window", True)]
)
def test_some_suspicions_speak_against_the_model(kind, suspicious):
    assert opinion(suspicions=[Suspicion(kind, "")]).suspicious == suspicious


def forgotten(option, seed=0):
    layer = AttentionLayer.random(heads=2, dim=8, scale=2.0, seed=seed, bias=option == "bias")
    X = inputs.gaussian(300, 4, 8, seed=seed + 1)
    return X, layer(X, causal=option == "causal")


@pytest.mark.slow
@pytest.mark.parametrize("option", ["bias", "causal"])
@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_what_was_forgotten_is_named(option, noise):
    X, Y = forgotten(option)
    Y = Y + noise * np.random.default_rng(5).standard_normal(Y.shape)
    found = recover(X, Y, heads=2)
    assert found.reason is Reason.WRONG_MODEL
    assert not found.converged
    assert f"pass {option}=True" in found.advice
    stages = {row.stage for row in found.trace}
    assert not any(stage.startswith(("grow", "restart")) for stage in stages)  # it ends at once
    assert any(stage.startswith("trial with") for stage in stages)


@pytest.mark.slow
def test_a_mask_that_was_wrong_is_named():
    X, Y = forgotten("nothing")
    found = recover(X, Y, heads=2, causal=True)
    assert found.reason is Reason.WRONG_MODEL
    assert "pass causal=False" in found.advice


@pytest.mark.slow
def test_axes_that_are_exchanged_are_named():
    X, Y = forgotten("nothing")
    found = recover(X.transpose(1, 0, 2), Y.transpose(1, 0, 2), heads=2, restarts=1)
    assert not found.converged
    assert "X.transpose(1, 0, 2)" in found.advice


@pytest.mark.slow
def test_outputs_that_have_nothing_to_do_with_the_inputs_are_named():
    X = inputs.gaussian(300, 3, 4, seed=0)
    found = recover(X, np.random.default_rng(1).standard_normal(X.shape), heads=1, restarts=2)
    assert not found.converged
    assert "cannot be predicted from the inputs" in found.advice


@pytest.mark.slow
def test_what_predicts_the_rest_is_said():
    layer = AttentionLayer.random(heads=2, dim=4, seed=0)
    X = inputs.boolean(400, 3, 4, seed=1)
    found = recover(X, np.tanh(2 * layer(X)), heads=2, restarts=4)
    assert not found.converged
    assert "can be predicted" in found.advice


def test_layers_of_the_model_asked_for_are_not_called_wrong():
    """A first start that is stuck is no reason to believe in biases."""
    layer = AttentionLayer.random(heads=2, dim=4)
    X = inputs.gaussian(160, 3, 4, seed=1)
    X[..., 3] = 0.0
    assert recover(X, layer(X), heads=2).reason is Reason.EXACT
