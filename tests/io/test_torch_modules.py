import copy
import io
import pickle
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from stored_layers import assert_same, random_layer

from onelayer import AttentionLayer, inputs
from onelayer.array.backend import to_numpy


def multihead(packed=True, bias=True, batch_first=True, **options):
    """A random torch.nn.MultiheadAttention in float64, biases not zero."""
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(0)
    module = torch.nn.MultiheadAttention(6, 3, bias=bias, batch_first=batch_first, **options)
    module = module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(generator=generator)
    if not packed:  # torch itself does so only where kdim or vdim differ
        separate = module.in_proj_weight.detach().clone().chunk(3)
        module.register_parameter("in_proj_weight", None)
        module._qkv_same_embed_dim = False
        for name, weight in zip("qkv", separate, strict=True):
            module.register_parameter(f"{name}_proj_weight", torch.nn.Parameter(weight))
    return module


def by_module(module, X, mask=None, causal=False):
    """The outputs of a torch.nn.MultiheadAttention; its masks are True where ours are False."""
    import torch

    tokens = X.shape[1]
    padding = None if mask is None else ~torch.as_tensor(mask)
    later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1) if causal else None
    tensor = torch.as_tensor(X)
    tensor = tensor if module.batch_first else tensor.swapaxes(0, 1)
    outputs, _ = module(tensor, tensor, tensor, key_padding_mask=padding, attn_mask=later)
    return to_numpy(outputs if module.batch_first else outputs.swapaxes(0, 1))


MASK = np.array([[True, True, False, True], [True, False, False, False], [True] * 4])
every_mask = pytest.mark.parametrize("mask", [None, MASK], ids=["whole", "masked"])
every_order = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@every_mask
@every_order
def test_layer_from_torch_computes_what_the_module_does(packed, bias, batch_first, mask, causal):
    module = multihead(packed, bias, batch_first)
    layer = AttentionLayer.from_torch(module)
    X = inputs.gaussian(3, 4, 6)
    expected = by_module(module, X, mask, causal)
    np.testing.assert_allclose(layer(X, mask=mask, causal=causal), expected, rtol=0, atol=1e-10)
    assert (layer.heads, layer.dim, layer.out_dim) == (3, 6, 6)
    assert (layer.key_bias is not None) == bias


@pytest.mark.parametrize("part", ["in_proj_bias", "out_proj.bias"])
def test_either_bias_may_be_missing(part):
    module = multihead()
    owner = module.get_submodule(part.rpartition(".")[0])
    owner.register_parameter(part.rpartition(".")[2], None)
    X = inputs.gaussian(3, 4, 6)
    layer = AttentionLayer.from_torch(module)
    np.testing.assert_allclose(layer(X), by_module(module, X), rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_modules_are_read_without_further_rounding(dtype):
    torch = pytest.importorskip("torch")
    module = multihead().to(getattr(torch, dtype))
    layer = AttentionLayer.from_torch(module)
    assert layer.attention.dtype == np.float64
    assert_same(layer, AttentionLayer.from_torch(module.double()))


@every_mask
@every_order
@pytest.mark.parametrize("bias", [True, False])
def test_module_to_torch_computes_what_the_layer_does(bias, mask, causal):
    torch = pytest.importorskip("torch")
    layer = random_layer(bias=bias)
    X = inputs.gaussian(3, 4, 3)
    tensors = [None if a is None else torch.as_tensor(a) for a in (X, mask)]
    outputs = layer.to_torch()(*tensors, causal)
    expected = layer(X, mask=mask, causal=causal)
    np.testing.assert_allclose(to_numpy(outputs), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_to_torch_and_back_is_the_same_layer(xp_array, bias, dtype):
    pytest.importorskip("torch")
    layer = random_layer(bias=bias).to(xp_array(np.ones(1, dtype=dtype)))
    back = AttentionLayer.from_torch(layer.to_torch())
    assert_same(back, layer)
    assert back.attention.dtype == dtype


def test_multihead_module_to_layer_to_module():
    torch = pytest.importorskip("torch")
    module = multihead()
    X = inputs.gaussian(3, 4, 6)
    again = AttentionLayer.from_torch(module).to_torch()
    np.testing.assert_allclose(
        to_numpy(again(torch.as_tensor(X))), by_module(module, X), rtol=0, atol=1e-10
    )


def test_gradients_are_those_of_finite_differences():
    torch = pytest.importorskip("torch")
    module = random_layer().to_torch()
    X = torch.as_tensor(inputs.gaussian(2, 3, 3))
    mask = torch.tensor([[False, True, True], [True, True, False]])  # row 0 of example 0 is empty
    names = [name for name, _ in module.named_parameters()]

    def outputs(*values):
        parameters = dict(zip(names, values, strict=True))
        return torch.func.functional_call(module, parameters, (X, mask, True))

    assert len(names) == 4
    assert torch.autograd.gradcheck(outputs, tuple(module.parameters()))


def test_training_a_module_leaves_layers_alone():
    torch = pytest.importorskip("torch")
    layer = random_layer()
    module = layer.to_torch()
    read = AttentionLayer.from_torch(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1.0)
    assert_same(layer, random_layer())
    assert_same(read, random_layer())


def test_layer_of_tensors_passes_gradients_on():
    torch = pytest.importorskip("torch")
    X = torch.as_tensor(inputs.gaussian(2, 3, 3)).requires_grad_()
    mask = torch.tensor([[False, True, True], [True, True, False]])  # row 0 of example 0 is empty
    layer = random_layer().to(X)
    layer(X, mask, causal=True).sum().backward()
    expected = X.grad.clone()
    X.grad = None
    layer.to_torch()(X, mask, causal=True).sum().backward()
    torch.testing.assert_close(X.grad, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kdim": 4}, r"has embed_dim, kdim, vdim = \(6, 4, 6\), expected all equal"),
        ({"vdim": 5}, r"has embed_dim, kdim, vdim = \(6, 6, 5\), expected all equal"),
        ({"add_bias_kv": True}, r"adds keys of its own \(add_bias_kv or add_zero_attn\)"),
        ({"add_zero_attn": True}, r"adds keys of its own \(add_bias_kv or add_zero_attn\)"),
    ],
)
def test_modules_that_are_no_layer_over_one_set_of_tokens_are_refused(options, message):
    with pytest.raises(ValueError, match="module " + message):
        AttentionLayer.from_torch(multihead(**options))


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        (None, "NoneType"),
        ("bert", "str"),
        (SimpleNamespace(num_heads=2, embed_dim=4, out_proj=None), "SimpleNamespace"),
    ],
)
def test_other_modules_are_refused(module, kind):
    message = f"module is a {kind}, expected a torch.nn.MultiheadAttention or a module that to_t"
    with pytest.raises(TypeError, match=message):
        AttentionLayer.from_torch(module)


def test_modules_with_weights_that_are_not_finite_are_refused():
    torch = pytest.importorskip("torch")
    module = multihead()
    with torch.no_grad():
        module.out_proj.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"out_proj\.weight has 1 NaN or infinite entries"):
        AttentionLayer.from_torch(module)


def test_to_torch_without_torch_says_how_to_install_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "onelayer.io.torch_attention", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match="to_torch needs torch, which is not installed: pip ins"):
        random_layer().to_torch()


def pickled(module):
    return pickle.loads(pickle.dumps(module))


def saved(module):
    torch = pytest.importorskip("torch")
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [pickled, saved, copy.deepcopy])
@pytest.mark.parametrize("bias", [True, False])
def test_a_module_can_be_copied_pickled_and_saved(copied, bias):
    torch = pytest.importorskip("torch")
    layer = AttentionLayer.random(heads=2, dim=3, bias=bias, seed=0)
    module = layer.to_torch()
    again = copied(module)
    X = torch.as_tensor(inputs.gaussian(4, 3, 3))
    assert torch.equal(again(X, causal=True), module(X, causal=True))
    assert_same(AttentionLayer.from_torch(again), layer)
    with torch.no_grad():  # a copy has weights of its own
        again.attention.zero_()
    assert_same(AttentionLayer.from_torch(module), layer)


def test_a_layer_does_not_import_torch():
    code = "import sys, onelayer; onelayer.AttentionLayer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
