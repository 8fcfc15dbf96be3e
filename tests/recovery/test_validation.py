import numpy as np
import pytest

from onelayer.array.backend import namespace, to_numpy
from onelayer.recovery import validation


def tokens(n=40, dim=4, dtype=float):
    return np.ones((n, 2, dim), dtype=dtype)


def admitted(X, Y, mask=None):
    """X, Y and the mask as they are inside."""
    (chunk,) = validation.examples(X, Y, mask).source.chunks.values
    assert chunk.start == 0
    return chunk.arrays


def given(*sizes, mask=None, **options):
    """Checked examples of this size."""
    X = tokens(*sizes, **options)
    return validation.examples(X, X, mask)


# Examples


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int64", "float32", "float64"])
def test_examples_pass_as_they_are(xp_array, dtype):
    given = xp_array(tokens(dtype=dtype)), xp_array(tokens(dtype="float32"))
    X, Y, mask = admitted(*given)
    assert (X.dtype, Y.dtype) == (given[0].dtype, given[1].dtype)
    assert np.shares_memory(to_numpy(X), to_numpy(given[0]))
    assert np.shares_memory(to_numpy(Y), to_numpy(given[1]))
    assert mask is None


def test_examples_on_disk_stay_there(tmp_path):
    for name in "XY":
        np.save(tmp_path / f"{name}.npy", tokens(dtype=np.int8))
    given = [np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in "XY"]
    X, Y, _ = admitted(*given)
    assert X is given[0]
    assert Y is given[1]


def test_outputs_and_mask_join_the_inputs(xp_array):
    X, Y, mask = admitted(xp_array(tokens()), tokens(dtype=np.int8), np.ones((40, 2)))
    assert namespace(Y) is namespace(X)
    assert namespace(mask) is namespace(X)
    assert to_numpy(Y).dtype == np.int8
    assert to_numpy(mask).dtype == bool


def test_examples_leave_their_gradients_behind():
    torch = pytest.importorskip("torch")
    given = [torch.ones((3, 2, 4), requires_grad=True) for _ in range(2)]
    X, Y, _ = admitted(*given)
    assert not X.requires_grad
    assert not Y.requires_grad


@pytest.mark.parametrize(
    ("size", "said"), [(1e100, r"1e\+100"), (1e-100, "1e-100"), (-1e200, r"1e\+200")]
)
def test_entries_whose_scores_are_not_representable_are_refused(xp_array, size, said):
    message = rf"X has entries up to {said}, expected between 1e-100 and 1e\+100: scale it"
    with pytest.raises(ValueError, match=message):
        validation.examples(xp_array(size * tokens()), xp_array(tokens()), None)


@pytest.mark.parametrize("size", [9e99, 2e-100, 0.0])
def test_entries_within_reason_pass(size):
    X, _, _ = admitted(size * tokens(), tokens())
    assert X.max() == size


def test_what_a_look_showed_is_kept():
    mask = np.array([[True, True], [True, False], [False, True]])
    found = validation.examples(-3.0 * np.ones((3, 2, 4)), 0.5 * np.ones((3, 2, 5)), mask)
    assert found.shape == (3, 2, 4, 5)
    assert found.largest == (3.0, 0.5)
    assert (found.rows, found.masked) == (4, True)
    whole = validation.examples(np.ones((3, 2, 4)), np.ones((3, 2, 5)), None)
    assert (whole.rows, whole.masked) == (6, False)


# The method


@pytest.mark.parametrize("name", ["auto", "refine", "sculpt"])
def test_the_methods_have_these_names(name):
    assert name in validation.METHODS
    validation.method(name)


@pytest.mark.parametrize("name", ["Sculpt", "", None, 1, ["auto"]])
def test_other_methods_are_refused(name):
    with pytest.raises(
        ValueError, match=r"method is .*, expected one of 'auto', 'refine', 'sculpt'"
    ):
        validation.method(name)


# What can be sculpted


@pytest.mark.parametrize("heads", [1, 4, "auto"])
@pytest.mark.parametrize("n", [20, 1000])
def test_plain_layers_can_be_sculpted(heads, n):
    options = {"bias": False, "causal": False}
    assert validation.why_not_sculpt(given(n), heads, **options) is None


@pytest.mark.parametrize("name", ["mask", "bias", "causal"])
def test_what_only_refine_can_do_is_refused(name):
    options = {"bias": name == "bias", "causal": name == "causal"}
    mask = np.ones((40, 2)) if name == "mask" else None
    message = (
        f"method='sculpt' was asked for with {name}, expected neither biases nor masks: "
        "method='refine' finds such layers"
    )
    assert validation.why_not_sculpt(given(mask=mask), 2, **options) == message


@pytest.mark.parametrize("n", [2, 19])
def test_too_few_examples_are_not_sculpted(n):
    message = f"X has {n} examples, expected at least 20 for method='sculpt'"
    assert validation.why_not_sculpt(given(n), 2) == message


def test_tokens_of_one_number_are_not_sculpted():
    assert validation.why_not_sculpt(given(dim=2), 1) is None
    message = "X has tokens of dimension 1, expected at least 2 for method='sculpt'"
    for heads in (1, "auto"):
        assert validation.why_not_sculpt(given(dim=1), heads) == message


def test_large_dimensions_are_not_sculpted():
    assert validation.why_not_sculpt(given(20, dim=48), 2) is None
    message = (
        "X has tokens of dimension 49, expected at most 48 for method='sculpt', which works with "
        "dim² x dim² matrices: method='refine' does not"
    )
    assert validation.why_not_sculpt(given(20, dim=49), 2) == message


def test_more_heads_than_a_body_can_show_are_not_sculpted():
    assert validation.why_not_sculpt(given(dim=6), 9) is None
    message = "heads is 10, expected at most 9 for method='sculpt' with tokens of dimension 6"
    assert validation.why_not_sculpt(given(dim=6), 10) == message


@pytest.mark.parametrize(
    ("Y", "shapes"),
    [
        ((np.ones((4, 3, 2)), np.ones((4, 3, 3))), r"\(4, 3, 2\), \(4, 3, 3\)"),
        ((np.ones((4, 3, 2)), None), r"\(4, 3, 2\), NoneType"),
        ((np.ones((4, 3, 2)),), r"\(4, 3, 2\)"),
    ],
)
def test_what_a_module_of_torch_returns_is_refused_with_a_hint(Y, shapes):
    message = (
        rf"Y is a tuple of {shapes}, expected one array \(examples, tokens, dim\); "
        r"torch.nn.MultiheadAttention returns \(outputs, weights\): give Y\[0\]$"
    )
    with pytest.raises(TypeError, match=message):
        validation.examples(np.ones((4, 3, 2)), Y, None)


def test_examples_may_be_a_tuple():
    X = np.arange(24.0).reshape(4, 3, 2)
    assert validation.examples(tuple(X), tuple(X), None).shape == (4, 3, 2, 2)
