"""`capture` on models of the package transformers, with small random configurations."""

from importlib.util import find_spec

import numpy as np
import pytest

import onelayer as ol
from onelayer.array.backend import to_numpy

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of its own dependencies
    pytest.mark.skipif(not find_spec("transformers"), reason="needs transformers"),
]

DIM, HEADS, WORDS, LENGTH = 16, 4, 50, 6
SIZES = {
    "hidden_size": DIM,
    "num_attention_heads": HEADS,
    "num_hidden_layers": 2,
    "intermediate_size": 24,
    "vocab_size": WORDS,
    "pad_token_id": 0,
}
OF_BART = {
    "d_model": DIM,
    "vocab_size": WORDS,
    "pad_token_id": 0,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
}
OF_GPT2 = {"n_embd": DIM, "n_head": HEADS, "n_layer": 2, "vocab_size": WORDS}
OF_DISTILBERT = {"dim": DIM, "n_heads": HEADS, "n_layers": 2, "hidden_dim": 24}
MODELS = {  # the name of the attention module and of the output projection inside, and sizes
    "Bert": ("encoder.layer.1.attention", "output.dense", SIZES),
    "Roberta": ("encoder.layer.1.attention", "output.dense", SIZES),
    "DistilBert": ("transformer.layer.1.attention", "out_lin", OF_DISTILBERT),
    "GPT2": ("h.1.attn", "c_proj", OF_GPT2),
    "Llama": ("layers.1.self_attn", "o_proj", SIZES | {"num_key_value_heads": 2}),
    "Mistral": ("layers.1.self_attn", "o_proj", SIZES | {"num_key_value_heads": 2}),
    "Qwen2": ("layers.1.self_attn", "o_proj", SIZES | {"num_key_value_heads": 2}),
    "Phi3": ("layers.1.self_attn", "o_proj", SIZES | {"num_key_value_heads": 2}),
    "GPTNeoX": ("layers.1.attention", "dense", SIZES),
    "Bart": ("encoder.layers.1.self_attn", "out_proj", OF_BART),
}
CAUSAL = {"GPT2", "Llama", "Mistral", "Qwen2", "Phi3", "GPTNeoX"}
every_model = pytest.mark.parametrize("family", MODELS)
every_kind = pytest.mark.parametrize("attention", ["sdpa", "eager"])


def model_of(family, attention="sdpa"):
    """A random model in float64 and training mode, with biases that are not zero."""
    import transformers  # takes seconds

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**MODELS[family][2])
    config._attn_implementation = attention
    model = getattr(transformers, f"{family}Model")(config).double().train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 or name.endswith("bias"):  # not those of normalisations
                parameter.normal_(std=0.3)
    return model


def words(examples, length=LENGTH, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, WORDS, (examples, length), generator=generator)


PADDED = {
    "none": torch.ones(4, LENGTH, dtype=torch.int64),
    "right": torch.tensor([[1] * LENGTH, [1, 1, 1, 1, 0, 0], [1] * 5 + [0], [1, 0, 0, 0, 0, 0]]),
    "left": torch.tensor([[1] * LENGTH, [0, 0, 1, 1, 1, 1], [0] + [1] * 5, [0, 0, 0, 0, 0, 1]]),
}
every_padding = pytest.mark.parametrize("side", PADDED)


def by_hooks(model, name, output, batch):
    """Inputs of the attention module and outputs of the projection in it, by plain hooks."""
    found = []
    module = model.get_submodule(name)
    into = module.register_forward_pre_hook(
        lambda _, args, kwargs: found.append(args[0] if args else kwargs["hidden_states"]),
        with_kwargs=True,
    )
    out = module.get_submodule(output).register_forward_hook(lambda *given: found.append(given[2]))
    with torch.no_grad():
        model.eval()(**batch)
    into.remove()
    out.remove()
    return [to_numpy(array) for array in found]


@every_model
@every_kind
@every_padding
def test_inputs_outputs_and_padding_are_those_of_the_model(family, attention, side):
    model = model_of(family, attention)
    name, output, _ = MODELS[family]
    batch = {"input_ids": words(4), "attention_mask": PADDED[side]}
    X, Y, mask = ol.capture(model, name, [batch])
    assert all(module.training for module in model.modules())
    tokens, outputs = by_hooks(model, name, output, batch)
    there = to_numpy(PADDED[side]) == 1
    if side == "none":
        assert mask is None
    else:
        np.testing.assert_array_equal(mask, there)
    np.testing.assert_array_equal(X[there], tokens[there])
    np.testing.assert_array_equal(Y[there], outputs[there])


@pytest.mark.parametrize("family", ["Bert", "GPT2"])
@every_kind
def test_outputs_are_those_of_the_layer_computed_from_the_weights(tmp_path, family, attention):
    model, name = model_of(family, attention), MODELS[family][0]
    model.save_pretrained(tmp_path)
    layer = ol.AttentionLayer.from_safetensors(
        tmp_path / "model.safetensors", layer=1, family=family.lower()
    )
    padded = {"input_ids": words(4, seed=1), "attention_mask": PADDED["left"]}
    X, Y, mask = ol.capture(model, name, [(words(4),), padded, words(2, 3)])
    assert X.shape == (10, LENGTH, DIM)
    expected = layer(X, mask=mask, causal=family in CAUSAL)
    np.testing.assert_allclose(Y[mask], expected[mask], rtol=0, atol=1e-10)


def test_a_captured_layer_is_recovered_and_put_back(tmp_path):
    model, name = model_of("Bert"), MODELS["Bert"][0]
    batches = (words(100, seed=seed) for seed in range(5))
    X, Y, mask = ol.capture(model, name, batches, limit=450)
    assert len(X) == 450
    found = ol.recover(X, Y, heads=HEADS, rank=DIM // HEADS, bias=True, mask=mask)
    assert found.converged
    module = model.eval().get_submodule(name)
    with torch.no_grad():
        before = model(words(4, seed=9)).last_hidden_state
        module.self, module.output.dense = Recovered(found.layer), torch.nn.Identity()
        after = model(words(4, seed=9)).last_hidden_state
    np.testing.assert_allclose(after, before, rtol=0, atol=1e-8)


class Recovered(torch.nn.Module):
    """A layer in place of the attention and the output projection of BERT."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer.to_torch()

    def forward(self, hidden_states, **options):
        return self.layer(hidden_states), None


def refused(message, model, name, *batches):
    with pytest.raises(ValueError, match=message):
        ol.capture(model, name, batches)


def test_cross_attention_is_refused():
    name = "decoder.layers.0.encoder_attn"
    batch = {"input_ids": words(4), "decoder_input_ids": words(4, 3, seed=1)}
    refused(f"'{name}' was called with key_value_states that differ", model_of("Bart"), name, batch)


def test_cross_attention_of_gpt2_is_no_self_attention():
    import transformers

    config = transformers.GPT2Config(**OF_GPT2, add_cross_attention=True)
    model = transformers.GPT2Model(config)
    refused("'h.0.crossattention' is a GPT2Attention, expected", model, "h.0.crossattention")


@pytest.mark.parametrize(
    ("name", "kind"),
    [("encoder.layer.1", "BertLayer"), ("encoder.layer.1.attention.self", "BertSelfAttention")],
)
def test_modules_around_and_inside_attention_are_refused(name, kind):
    message = f"'{name}' is a {kind}, expected .* such as 'encoder.layer.1.attention'$"
    refused(message, model_of("Bert"), name, words(2))


def test_masks_that_are_no_tensors_are_refused():
    model = model_of("Bert")
    attention = model.get_submodule("encoder.layer.1.attention")
    attention.register_forward_pre_hook(
        lambda _, args, kwargs: ((*args[:1], "later", *args[2:]), kwargs), with_kwargs=True
    )
    message = (
        r"was called with an attention_mask of type str and shape \(\), expected a tensor "
        r"\(2, 6\) or \(2, 1, 6, 6\): load the model with attn_implementation='sdpa'"
    )
    refused(message, model, "encoder.layer.1.attention", words(2))
