import os
import re
import sys
import warnings

import numpy as np
import pytest

import onelayer as ol
from onelayer.array.backend import to_numpy

torch = pytest.importorskip("torch")

DIM, HEADS = 8, 2


def encoder(batch_first=True, norm_first=False, layers=2, dropout=0.5):
    """A random encoder in float64 with biases that are not zero, in training mode."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(
        DIM, HEADS, 12, dropout, batch_first=batch_first, norm_first=norm_first
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about nested tensors, which not all encoders can use
        model = torch.nn.TransformerEncoder(layer, layers).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    return model


class Model(torch.nn.Module):
    """Attention with a residual connection in place, called by any names."""

    def __init__(self, attention, times=1):
        super().__init__()
        self.attention, self.times = attention, times

    def forward(self, tokens, other=None, **options):
        for _ in range(self.times):
            other = tokens if other is None else other
            outputs, _ = self.attention(tokens, other, other, **options)
            outputs += tokens  # in place: what is recorded must be a copy
            tokens *= 0
        return outputs


def multihead(**options):
    torch.manual_seed(1)
    return torch.nn.MultiheadAttention(DIM, HEADS, dropout=0.5, **options).double()


def tokens(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, DIM, dtype=torch.float64, generator=generator)


def assert_outputs(found, layer, causal=False):
    X, Y, mask = found
    there = np.ones(X.shape[:2], bool) if mask is None else mask
    expected = layer(X, mask=mask, causal=causal)
    np.testing.assert_allclose(Y[there], to_numpy(expected)[there], rtol=0, atol=1e-12)
    assert not X[~there].any()
    assert not Y[~there].any()


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_outputs_are_those_of_the_layer_computed_from_the_weights(batch_first, need_weights):
    attention = multihead(batch_first=batch_first)
    X = tokens(5, 3)
    given = X.clone() if batch_first else X.swapaxes(0, 1).clone()
    found = ol.capture(Model(attention), "attention", [(given, None)])
    np.testing.assert_array_equal(found[0], X)
    assert found[2] is None
    assert_outputs(found, ol.AttentionLayer.from_torch(attention))


@pytest.mark.parametrize("added", [False, True], ids=["boolean", "added"])
@pytest.mark.parametrize("batch_first", [False, True])
def test_padding_of_the_module_becomes_the_mask(batch_first, added):
    attention = multihead(batch_first=batch_first)
    X = tokens(3, 4)
    padding = torch.tensor([[0, 0, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()
    given = torch.zeros(3, 4).double().masked_fill(padding, -torch.inf) if added else padding
    batch = {"tokens": X if batch_first else X.swapaxes(0, 1), "key_padding_mask": given}
    found = ol.capture(Model(attention), "attention", [batch])
    np.testing.assert_array_equal(found[2], ~padding)
    assert_outputs(found, ol.AttentionLayer.from_torch(attention))


def test_a_single_example_without_a_batch_axis_is_a_batch_of_one():
    attention = multihead(batch_first=True)
    padding = torch.tensor([False, True, False])
    batch = {"tokens": tokens(3), "key_padding_mask": padding}
    found = ol.capture(Model(attention), "attention", [batch])
    assert found[0].shape == (1, 3, DIM)
    np.testing.assert_array_equal(found[2], [[True, False, True]])
    assert_outputs(found, ol.AttentionLayer.from_torch(attention))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
def test_encoder_layers_are_recorded_in_spite_of_their_fast_path(norm_first, training):
    model = encoder(norm_first=norm_first).train(training)
    model.layers[1].linear1.train(not training)  # a mixture is restored too
    state = {name: module.training for name, module in model.named_modules()}
    padding = torch.tensor([[False, False, False, True]]).expand(5, 4)
    assert torch.backends.mha.get_fastpath_enabled()
    batches = [(tokens(5, 4),), {"src": tokens(5, 4, seed=1), "src_key_padding_mask": padding}]
    found = ol.capture(model, "layers.1.self_attn", batches)
    assert torch.backends.mha.get_fastpath_enabled()
    assert {name: module.training for name, module in model.named_modules()} == state
    assert found[0].shape == (10, 4, DIM)
    np.testing.assert_array_equal(found[2].sum(1), [4] * 5 + [3] * 5)
    assert_outputs(found, ol.AttentionLayer.from_torch(model.layers[1].self_attn))


def test_batches_of_different_lengths_are_padded_to_the_longest():
    model = encoder()
    batches = [tokens(2, 3), tokens(1, 5, seed=1), tokens(3, 4, seed=2)]
    found = ol.capture(model, "layers.0.self_attn", batches)
    assert found[0].shape == (6, 5, DIM)
    np.testing.assert_array_equal(found[2].sum(1), [3, 3, 5, 4, 4, 4])
    np.testing.assert_array_equal(found[0][0, :3], batches[0][0])
    assert_outputs(found, ol.AttentionLayer.from_torch(model.layers[0].self_attn))


def test_the_limit_ends_the_pass_and_cuts_the_last_batch():
    model = encoder()

    def batches():
        yield tokens(4, 3)
        yield tokens(4, 3, seed=1)
        raise AssertionError("a batch too many")

    X, Y, mask = ol.capture(model, "layers.0.self_attn", batches(), limit=6)
    assert (X.shape, Y.shape, mask) == ((6, 3, DIM), (6, 3, DIM), None)


def hooks(model):
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()
    )


def test_the_model_is_left_as_it_was_after_an_error():
    model = encoder()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def batches():
        assert hooks(model) == 2
        yield tokens(2, 3)
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        ol.capture(model, "layers.0.self_attn", batches())
    assert hooks(model) == 0
    assert torch.is_grad_enabled()
    assert torch.backends.mha.get_fastpath_enabled()
    assert all(module.training for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_fast_path_that_was_disabled_stays_disabled():
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        ol.capture(encoder(), "layers.0.self_attn", [tokens(2, 3)])
        assert not torch.backends.mha.get_fastpath_enabled()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_returned_as_single(dtype):
    model = Model(multihead(batch_first=True).to(getattr(torch, dtype)))
    X = tokens(2, 3).to(getattr(torch, dtype))
    found, outputs, _ = ol.capture(model, "attention", [X.clone()])
    assert found.dtype == outputs.dtype == np.float32
    np.testing.assert_array_equal(found, X.float())


def test_a_layer_put_into_a_model_is_recorded_too():
    layer = ol.AttentionLayer.random(heads=2, dim=DIM, out_dim=5, seed=0)
    model = torch.nn.Sequential(torch.nn.Identity(), layer.to_torch())
    found = ol.capture(model, "1", [tokens(2, 3)])
    assert_outputs(found, layer)
    mask = torch.tensor([[True, False, True], [True, True, True]])
    alone = ol.capture(layer.to_torch(), "", [{"X": tokens(2, 3), "mask": mask}])
    np.testing.assert_array_equal(alone[2], mask)
    assert_outputs(alone, layer)


# Files


def test_examples_in_a_folder_are_those_in_memory(tmp_path):
    model = encoder()
    batches = [tokens(2, 3), tokens(1, 5, seed=1)]
    expected = ol.capture(model, "layers.0.self_attn", batches)
    found = ol.capture(model, "layers.0.self_attn", batches, to=tmp_path / "examples")
    for got, array in zip(found, expected, strict=True):
        np.testing.assert_array_equal(got, array)
    assert sorted(os.listdir(tmp_path / "examples")) == ["X.npy", "Y.npy", "mask.npy"]


def test_an_interrupted_pass_writes_nothing(tmp_path):
    def batches():
        yield tokens(2, 3)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ol.capture(encoder(), "layers.0.self_attn", batches(), to=tmp_path / "examples")
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_the_command_recovers_the_layer_from_the_folder(tmp_path):
    from command_line import run

    model = Model(multihead(batch_first=True))
    some = ({"tokens": tokens(100, 3 + seed % 3, seed=seed)} for seed in range(6))
    ol.capture(model, "attention", some, to=tmp_path / "examples")
    output = tmp_path / "layer.safetensors"
    options = ("--heads", "2", "--rank", "4", "--bias", "-o", str(output))
    result = run("recover", str(tmp_path / "examples"), *options)
    assert result.exit_code == 0, result.output
    match = ol.AttentionLayer.load(output).distance(ol.AttentionLayer.from_torch(model.attention))
    assert max(match.attention.max(), match.projection.max()) < 1e-8


# Refusals


def refused(message, model, name, batches, error=ValueError, **options):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        ol.capture(model, name, batches, **options)


def test_names_that_are_not_there_are_refused():
    refused(
        "name is 'layers.0.self_atn', expected the name of a module of the model, such as "
        "'layers.0.self_attn', 'layers.1.self_attn'; did you mean 'layers.0.self_attn'?",
        encoder(),
        "layers.0.self_atn",
        [tokens(2, 3)],
    )
    refused(
        "name is 3, expected the name of a module of the model",
        torch.nn.Linear(2, 2),
        3,
        [tokens(2, 3)],
    )


@pytest.mark.parametrize(
    ("name", "kind", "near"),
    [
        ("layers.1", "TransformerEncoderLayer", "'layers.1.self_attn'"),
        (
            "layers.1.self_attn.out_proj",
            "NonDynamicallyQuantizableLinear",
            "'layers.1.self_attn'",
        ),
        (
            "layers.0.linear1",
            "Linear",
            "'layers.0.self_attn', 'layers.1.self_attn', 'layers.2.self_attn', ...",
        ),
    ],
)
def test_modules_that_are_no_attention_are_refused(name, kind, near):
    refused(
        f"{name!r} is a {kind}, expected torch.nn.MultiheadAttention, a module that to_torch "
        f"made, or an attention module as in BERT, GPT-2 or Llama, such as {near}",
        encoder(layers=4),
        name,
        [tokens(2, 3)],
    )


@pytest.mark.parametrize("shape", [(2, 3), (2, 4)], ids=["same-shape", "other-shape"])
def test_cross_attention_is_refused(shape):
    refused(
        "'attention' was called with keys that differ from the queries, expected self-attention: "
        "queries, keys and values of the same tokens",
        Model(multihead(batch_first=True)),
        "attention",
        [(tokens(2, 3), tokens(*shape, seed=1))],
    )


def test_modules_that_add_keys_are_refused():
    refused(
        "module adds keys of its own (add_bias_kv or add_zero_attn), expected neither",
        Model(multihead(batch_first=True, add_zero_attn=True)),
        "attention",
        [tokens(2, 3)],
    )


def test_padding_with_other_numbers_is_refused():
    batch = {"tokens": tokens(2, 3), "key_padding_mask": torch.full((2, 3), -1.0).double()}
    refused(
        "'attention' was called with a key_padding_mask that has entries other than 0 and -inf, "
        "expected tokens or padding",
        Model(multihead(batch_first=True)),
        "attention",
        [batch],
    )


@pytest.mark.parametrize(("times", "words"), [(0, "never"), (2, "2 times")])
def test_a_module_has_to_be_called_once_a_batch(times, words):
    refused(
        f"the model called 'attention' {words} in one batch, expected one call: examples of one "
        "layer, each of them once",
        Model(multihead(batch_first=True), times) if times else Silent(),
        "attention",
        [tokens(2, 3)],
    )


class Silent(torch.nn.Module):
    """A model that has attention and does not call it."""

    def __init__(self):
        super().__init__()
        self.attention = multihead()

    def forward(self, tokens):
        return tokens


@pytest.mark.parametrize("to", [None, "examples"])
def test_no_batches_are_refused(tmp_path, to):
    refused(
        "batches is empty, expected at least one batch of examples",
        encoder(),
        "layers.0.self_attn",
        [],
        to=to and tmp_path / to,
    )
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("batches", "kind"), [(tokens(2, 3), "Tensor"), ({"src": tokens(2, 3)}, "dict"), ("ab", "str")]
)
def test_a_single_batch_is_refused(batches, kind):
    message = f"batches is a {kind}, expected an iterable of batches: for a single batch, a list"
    refused(f"{message} of it", encoder(), "layers.0.self_attn", batches, TypeError)


def test_other_arguments_are_checked():
    name, some = "layers.0.self_attn", [tokens(2, 3)]
    refused("batches is a int, expected an iterable of batches", encoder(), name, 3, TypeError)
    refused("model is a list, expected a torch.nn.Module", [], name, some, TypeError)
    message = "limit is 0, expected a whole number of at least 1"
    refused(message, encoder(), name, some, limit=0)
    batch = {"src": tokens(2, 3), "past_key_values": object()}
    message = (
        "a batch has past_key_values, expected whole sequences: "
        "the keys of earlier calls are not among the inputs of the module"
    )
    refused(message, encoder(), name, [batch])


def test_without_torch_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match="capture needs torch, which is not installed: pip inst"):
        ol.capture(None, "attention", [])
