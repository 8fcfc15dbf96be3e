"""Kernel matrices of examples of every form and kind, on every device."""

import re

import kernel_kinds
import numpy as np
import pytest
from example_sets import gaussian, ragged, random_mask

import onelayer as ol
from onelayer.array import backend
from onelayer.data.sets import as_sets
from onelayer.features.activations.relu import RELU
from onelayer.features.kernels import base
from onelayer.features.kernels.attention import AttentionKernel

X, Z = gaussian(6, 4, 3), gaussian(5, 3, 3, seed=1)
MASK, Z_MASK = (random_mask(np.random.default_rng(0), *A.shape[:2]) for A in (X, Z))
SETS = ragged([2, 4, 3, 5], dim=3)
BIAS = gaussian(4, 4, seed=2)
OPPOSITE_QUERIES = X * np.where(np.arange(4) == 0, -1, 1)[:, None]

KERNELS = {
    "attention": ol.attention_kernel,
    "biased attention": lambda *given, **named: ol.attention_kernel(*given, bias=BIAS, **named),
    "network": ol.mlp_kernel,
}
FORMS = {
    "itself": ((X,), {}),
    "two sides": ((X, Z), {}),
    "opposite": ((9 * X, 9 * np.concatenate([OPPOSITE_QUERIES, -X])), {}),
    "masked": ((X, Z), {"mask": MASK, "Z_mask": Z_MASK}),
    "padded": ((SETS.X,), {"mask": SETS.mask}),
    "lists": ((SETS.examples, list(Z)), {}),
    "rows": ((X[:, 0], Z[:, 0]), {}),
    "a view": ((X[::-2], Z[:, ::-1]), {}),
    "float32": ((X.astype("f4"), Z), {}),
}

each_kernel = pytest.mark.parametrize("kernel", KERNELS.values(), ids=list(KERNELS))
each_form = pytest.mark.parametrize("form", FORMS)


def kernel_of_kind(kernel, form, kind, **named):
    """The kernel of examples and masks that `kind` has turned into its own."""

    def turned(value):
        if isinstance(value, list):
            return [kind(example) for example in value]
        return kind(np.ascontiguousarray(value))

    given, masks = FORMS[form]
    masks = {name: turned(mask) for name, mask in masks.items()}
    return kernel(*map(turned, given), **masks, **named)


def assert_alike(found, expected):
    assert str(found.dtype).endswith("float64")
    found = backend.to_numpy(found)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13 * np.abs(expected).max())


def expected_kernel(kernel, form):
    given, masks = FORMS[form]
    return kernel(*given, **masks)


@each_kernel
@each_form
def test_a_kernel_is_of_the_kind_of_its_examples(xp_array, kernel, form):
    expected = expected_kernel(kernel, form)
    found = kernel_of_kind(kernel, form, xp_array)
    assert backend.namespace(found) is backend.namespace(xp_array(X))
    assert_alike(found, expected)


@pytest.mark.parametrize("order", [1, -1])
@each_kernel
def test_both_sides_need_not_be_of_one_kind(xp_array, kernel, order):
    kinds = [np.asarray, xp_array][::order]
    found = kernel(kinds[0](X), kinds[1](Z))
    assert backend.namespace(found) is backend.namespace(kinds[0](X))
    assert_alike(found, kernel(X, Z))


@each_kernel
def test_the_device_of_the_processor_changes_nothing(xp_array, kernel):
    expected = kernel(X, Z)
    found = kernel(xp_array(X), xp_array(Z), device="cpu")
    assert backend.namespace(found) is backend.namespace(xp_array(X))
    np.testing.assert_array_equal(backend.to_numpy(found), expected)


@each_kernel
def test_devices_that_are_not_there_are_refused_at_the_door(kernel):
    pytest.importorskip("torch")
    with pytest.raises(ValueError, match=r"device='abacus' is unknown, expected 'cpu' or 'cuda'"):
        kernel("no examples at all", device="abacus")
    message = "device='cuda:77' was asked for, but torch sees no such GPU here"
    with pytest.raises(ValueError, match=re.escape(message)):
        kernel("no examples at all", device="cuda:77")


@pytest.mark.skipif(kernel_kinds.has_gpu(), reason="there is a GPU")
@each_kernel
def test_a_gpu_that_is_not_there_is_refused(kernel):
    pytest.importorskip("torch")
    with pytest.raises(ValueError, match="device='cuda' was asked for, but torch sees no such GPU"):
        kernel(X, device="cuda")


@pytest.mark.skipif(not kernel_kinds.has_gpu(), reason="torch sees no GPU here")
@each_kernel
@each_form
def test_a_gpu_gives_the_same_to_whoever_asks(xp_array, kernel, form):
    found = kernel_of_kind(kernel, form, xp_array, device="cuda")
    assert backend.device(found) == backend.device(xp_array(X))
    assert_alike(found, expected_kernel(kernel, form))
    there = kernel_of_kind(kernel, form, kernel_kinds.converter("cuda"))
    assert backend.device(there).type == "cuda"
    assert_alike(there, expected_kernel(kernel, form))


@pytest.fixture
def computed_in_torch(monkeypatch):
    """Tensors on a CPU are computed in torch as on a GPU, and none is made without its device.

    Such a tensor would be on the CPU also where the examples are on a GPU: here it is on a device
    of no numbers, "meta", which no result of a function of torch may be on.
    """
    torch = pytest.importorskip("torch")

    class NothingElsewhere(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, given=(), named=None):
            found = function(*given, **(named or {}))
            assert getattr(found, "device", None) != torch.device("meta"), function
            return found

    monkeypatch.setattr(backend, "gpu_or_numpy", lambda array: array)
    with torch.device("meta"), NothingElsewhere():
        with pytest.raises(AssertionError):
            torch.zeros(1)
        yield lambda array: torch.asarray(array, device="cpu")


@each_kernel
@each_form
def test_torch_computes_where_the_examples_are(computed_in_torch, kernel, form):
    found = kernel_of_kind(kernel, form, computed_in_torch)
    assert found.device.type == "cpu"
    assert_alike(found, expected_kernel(kernel, form))


@each_kernel
@each_form
def test_examples_in_numpy_go_to_the_device_and_the_kernel_comes_back(
    computed_in_torch, kernel, form, monkeypatch
):
    """The same way as to a GPU, to which tensors on a CPU stand in here."""
    expected = expected_kernel(kernel, form)
    computed, whole = [], base.matrix

    def matrix(*arguments):
        found = whole(*arguments)
        computed.append(backend.is_foreign(found))
        return found

    monkeypatch.setattr(backend, "check_device", lambda device: None)
    monkeypatch.setattr(backend, "place", lambda array, device: computed_in_torch(array.copy()))
    monkeypatch.setattr(base, "matrix", matrix)
    found = kernel_of_kind(kernel, form, np.asarray, device="cuda")
    assert computed == [True]
    assert isinstance(found, np.ndarray)
    assert_alike(found, expected)


def test_the_matrix_of_tensors_is_symmetric_and_tracked_tile_by_tile(computed_in_torch):
    many = gaussian(300, 3, 2)
    seen = []

    def track(parts, stage):
        seen.extend(parts)
        return iter(parts)

    kernel = AttentionKernel(BIAS[:3, :3], "first", RELU)
    expected = base.matrix(kernel, as_sets(many), None, track)
    found = base.matrix(kernel, as_sets(computed_in_torch(many)), None, track)
    assert len(seen) == 2 * 3
    np.testing.assert_array_equal(found.numpy(), found.numpy().T)
    assert_alike(found, expected)


def test_tokens_that_overflow_are_refused_in_torch(computed_in_torch):
    message = r"kernels overflow in torch.float64: X has entries up to .*e\+1\d\d"
    with pytest.raises(ValueError, match=message):
        ol.attention_kernel(computed_in_torch(X * 1e120))
    with pytest.raises(ValueError, match=message):
        ol.mlp_kernel(computed_in_torch(X * 1e170))


def test_no_graph_of_operations_is_kept():
    torch = pytest.importorskip("torch")
    found = ol.attention_kernel(torch.asarray(X).requires_grad_(True))
    assert not found.requires_grad
