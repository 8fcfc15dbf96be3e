import numpy as np
import pytest
from factorings import flat, near, solved_problem
from fits import assert_close

from onelayer.array.backend import to_numpy
from onelayer.recovery.factored import gauss_newton, model
from onelayer.recovery.factored.decoupling import Decoupling

VARIANTS = [
    {},
    {"bias": True},
    {"masked": True, "causal": True},
    {"out_dim": 4},  # as many as values
    {"rank": None},
]


def decoupled(xp_array=np.asarray, error=1e-6, **options):
    posed, factors = solved_problem(xp_array, **options)
    parts = posed.parts(64)
    return Decoupling.of(factors, parts, error), factors, parts


@pytest.mark.parametrize("variant", VARIANTS)
def test_decoupled_factors_compute_decoupled_outputs(xp_array, variant):
    between, true, parts = decoupled(xp_array, **variant)
    factors = near(true, 0.1)
    entered = between.enter(factors)
    for part, inside in zip(parts, between.parts(parts), strict=True):
        residuals = model.forward(factors, part).residuals @ between.outputs
        assert_close(model.forward(entered, inside).residuals, to_numpy(residuals), 1e-6)
    assert_close(between.leave(entered).flat(), flat(factors), 1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_decoupled_output_is_one_value_of_unit_size(variant):
    between, factors, parts = decoupled(error=1e-9, **variant)
    entered = between.enter(factors)
    expected = np.eye(*factors.output.shape)
    np.testing.assert_allclose(entered.output, expected, atol=1e-6)
    rows = [
        model.counted(model.forward(entered, part).attended, part) for part in between.parts(parts)
    ]
    for head in model.split_heads(np.concatenate(rows), factors.heads):
        np.testing.assert_allclose(head.T @ head / len(head), np.eye(head.shape[1]), atol=1e-5)


def test_what_lies_below_the_error_is_not_inverted():
    _, factors, parts = decoupled()
    small = np.diag([1.0, 1.0, 1.0, 1e-6])
    weak = model.Factors(**{**vars(factors), "output": small @ factors.output})
    for error, largest in ((1e-3, 1e4), (1e-9, 1e8)):
        found = np.linalg.svd(Decoupling.of(weak, parts, error).outputs, compute_uv=False)
        assert 0.01 * largest < found.max() < largest


@pytest.mark.parametrize("options", [{"out_dim": 3}, {"value_rank": None}])
def test_more_values_than_outputs_are_not_decoupled(options):
    assert decoupled(**options)[0] is None


def test_steps_go_on_where_decoupled_ones_do_not_help(monkeypatch):
    posed, factors = solved_problem(n=60)
    parts, calls = posed.parts(64), []
    plain = gauss_newton.step

    def noted(*given, by_head=False):
        calls.append(by_head)
        return None if by_head else plain(*given)

    monkeypatch.setattr(gauss_newton, "step", noted)
    states = []
    gauss_newton.run(
        near(factors, 0.02), parts, 1e-6, np.random.default_rng(0), states.append, lambda: False
    )
    assert states[-1].loss ** 0.5 <= 1e-6
    assert calls == [True, False] * (len(states) - 1)
