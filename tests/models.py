"""Files of made-up pretrained models."""

import json

import numpy as np
import safetensors.numpy

DIM, HEADS = 6, 3
_PARTS = {
    "bert": {
        "encoder.layer.{}.attention.self.query": (DIM, DIM),
        "encoder.layer.{}.attention.self.key": (DIM, DIM),
        "encoder.layer.{}.attention.self.value": (DIM, DIM),
        "encoder.layer.{}.attention.output.dense": (DIM, DIM),
    },
    "gpt2": {"h.{}.attn.c_attn": (DIM, 3 * DIM), "h.{}.attn.c_proj": (DIM, DIM)},
}
_SETTING = {"bert": "num_attention_heads", "gpt2": "n_head"}


def write_model(folder, family="bert", layers=3, config=True, bias=False):
    """The path of a model with random weights, written to a folder."""
    rng = np.random.default_rng(0)
    tensors = {"embeddings.weight": np.ones((2, DIM))}
    for layer in range(layers):
        for part, shape in _PARTS[family].items():
            tensors[part.format(layer) + ".weight"] = rng.standard_normal(shape)
            if bias:
                tensors[part.format(layer) + ".bias"] = rng.standard_normal(shape[::-1][0])
    if config:
        settings = json.dumps({_SETTING[family]: HEADS})
        (folder / "config.json").write_text(settings, "utf-8")
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return folder / "model.safetensors"
