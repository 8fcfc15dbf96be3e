import numpy as np
import pytest

from onelayer.recovery.queries.oracle import Oracle, QueriesSpentError

X = np.random.default_rng(0).normal(size=(3, 2, 4))


def refusal(function, kind=ValueError):
    """The message with which an oracle of this function is refused."""
    with pytest.raises(kind) as refused:
        Oracle(function).ask(X)
    return str(refused.value)


def test_inputs_and_used_entries_are_counted():
    oracle = Oracle(lambda X: X[:, :, :3] + 1)
    np.testing.assert_array_equal(oracle.ask(X), X[:, :, :3] + 1)
    assert (oracle.queries, oracle.scalars, oracle.returned) == (5, 18, 30)  # one is asked twice
    assert oracle.ask(X, rows=1).shape == (3, 1, 3)
    assert (oracle.queries, oracle.scalars, oracle.returned) == (8, 27, 48)


def test_answers_are_float64_and_inputs_are_copies():
    def overwriting(X):
        X *= 2
        return X.astype(np.float32)

    given = X.copy()
    answer = Oracle(overwriting).ask(given)
    assert answer.dtype == np.float64
    np.testing.assert_array_equal(given, X)


@pytest.mark.parametrize(("dtype", "least"), [(np.float32, 2**-25), (np.float16, 2**-13)])
def test_rounding_of_outputs_is_noise(dtype, least):
    many = np.random.default_rng(1).normal(size=(50, 3, 4))
    oracle = Oracle(lambda X: X.astype(dtype))
    oracle.ask(many)
    assert least / 2 < oracle.noise < 20 * least


def test_repetitions_that_differ_a_little_are_noise():
    rng = np.random.default_rng(2)
    oracle = Oracle(lambda X: X * (1 + 1e-4 * rng.standard_normal(X.shape)))
    oracle.ask(X)
    assert 1e-5 < oracle.noise < 1e-3


def test_an_oracle_that_is_not_deterministic_is_refused():
    rng = np.random.default_rng(3)
    message = refusal(lambda X: X * (rng.random(X.shape) < 0.5))
    assert "two outputs for the same input that differ by" in message
    assert "expected a deterministic function: a torch module wants .eval()" in message


def test_torch_tensors_are_outputs_too():
    torch = pytest.importorskip("torch")
    layer = torch.nn.Linear(4, 2, dtype=torch.float64)
    with torch.no_grad():
        answer = Oracle(lambda X: layer(torch.as_tensor(X))).ask(X)
        np.testing.assert_array_equal(answer, layer(torch.as_tensor(X)).numpy())


def test_what_an_oracle_raises_is_passed_on():
    def broken(_X):
        raise RuntimeError("no such module")

    assert refusal(broken) == (
        "oracle raised RuntimeError: no such module; it was called with an array of shape "
        "(1, 2, 4) and dtype float64, expected outputs (n, tokens, out_dim)"
    )


def test_outputs_that_are_no_arrays_are_refused():
    assert refusal(lambda X: (X, None), TypeError) == (
        "oracle returned tuple, expected an array (n, tokens, out_dim)"
    )


@pytest.mark.parametrize("dtype", ["int64", "complex128", "bool", "object"])
def test_outputs_of_another_dtype_are_refused(dtype):
    assert refusal(lambda X: X.astype(dtype), TypeError) == (
        f"oracle returned an array of dtype {dtype}, expected real floating-point numbers"
    )


@pytest.mark.parametrize(
    ("change", "shape"),
    [(lambda X: X[0], (2, 4)), (lambda X: X[:, :1], (1, 1, 4)), (lambda X: X[..., :0], (1, 2, 0))],
)
def test_outputs_of_another_shape_are_refused(change, shape):
    assert refusal(change) == (
        f"oracle returned an array of shape {shape} for inputs of shape (1, 2, 4), "
        "expected (1, 2, out_dim)"
    )


def test_the_dimension_of_outputs_may_not_change():
    oracle = Oracle(lambda X: X[:, :, : X.shape[1]])
    oracle.ask(X)
    with pytest.raises(ValueError, match=r"of shape \(2, 3, 3\) for .* expected \(2, 3, 2\)"):
        oracle.ask(np.ones((2, 3, 4)))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_outputs_that_are_not_finite_are_refused(bad):
    message = refusal(lambda X: np.where(X.flat[0] == X, bad, X))
    assert message.startswith("oracle returned 1 infinite or missing values (NaN) of 8 for inputs")
    assert message.endswith("expected finite numbers")


def test_no_input_is_asked_beyond_the_limit():
    calls = []
    oracle = Oracle(lambda X: calls.append(len(X)) or X, max_queries=6)
    oracle.ask(X)
    assert oracle.allows(1)
    assert not oracle.allows(2)
    with pytest.raises(QueriesSpentError):
        oracle.ask(X)
    assert sum(calls) == 5
