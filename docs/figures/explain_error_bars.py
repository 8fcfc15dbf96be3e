"""Draw the error bars of recovered heads beside their true errors.

Layers of two heads are recovered from outputs with noise or rounding of many sizes, on three kinds
of inputs. Every head is a point; below the line its error is smaller than its bar.

    python docs/figures/explain_error_bars.py      # writes explain-error-bars.svg
"""

import argparse
from functools import partial
from pathlib import Path

import numpy as np

import onelayer as ol
from onelayer.lab import figures

DIM, TOKENS, HEADS, EXAMPLES = 8, 4, 2, 400
ACCEPTED = 0.1  # default of `head_tol`
NOISES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)  # relative to the outputs


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=6, help="layers for each kind and noise")
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent)
    options = parser.parse_args()
    points = {name: [] for name in kinds(np.random.default_rng(0))}
    for seed in range(options.seeds):
        for noise in NOISES:
            rng = np.random.default_rng([seed, round(1 / noise)])
            layer = ol.AttentionLayer.random(HEADS, DIM, seed=rng, bias=True)
            for name, X in kinds(rng).items():
                points[name] += heads_of(layer, X, noise, rng)
    points = {name: np.array(found) for name, found in points.items()}
    path = options.output / "explain-error-bars.svg"
    path.write_bytes(figures.drawn(partial(draw, points)))
    bars, errors = np.concatenate(list(points.values())).T
    for kind, some in [("finite", bars < np.inf), (f"at most {ACCEPTED}", bars <= ACCEPTED)]:
        within = np.mean(errors[some] <= bars[some])
        print(f"{some.sum()} heads with bars that are {kind}: {within:.1%} within them")


def kinds(rng):
    """Inputs by name."""
    X = rng.standard_normal((EXAMPLES, TOKENS, DIM))
    return {
        "Gaussian": X,
        "after LayerNorm": (X - X.mean(-1, keepdims=True)) / X.std(-1, keepdims=True),
        "deviations 1 to 0.01": X * np.geomspace(1, 0.01, DIM),
    }


def heads_of(layer, X, noise, rng):
    """Bars and true errors of the heads recovered from noisy outputs, with finite bars."""
    Y = layer(X)
    Y = Y + noise * np.sqrt(np.mean((Y - Y.mean((0, 1))) ** 2)) * rng.standard_normal(Y.shape)
    found = ol.recover(X, Y, heads=HEADS, bias=True, restarts=2)
    match = found.layer.distance(layer, inputs=X)
    bars = found.certificate.attention_error[match.permutation]
    pairs = zip(bars, match.attention, strict=True)
    return [(bar, error) for bar, error in pairs if np.isfinite(bar)]


def draw(points, figure):
    figure.set_size_inches(4.6, 3.6)
    axes = figure.subplots()
    for number, (name, found) in enumerate(points.items()):
        colour, marker = figures.style(number)
        axes.plot(*found.T, marker, color=colour, markersize=3.5, alpha=0.7, label=name)
    ends = np.concatenate(list(points.values()))[:, 0]
    figures.predicted(axes, [ends.min(), ends.max()], [ends.min(), ends.max()], "error = bar")
    axes.axvline(ACCEPTED, color="black", linestyle=":", linewidth=1, label="head_tol")
    axes.set(xscale="log", yscale="log", xlabel="error bar of a head", ylabel="its true error")
    axes.legend()


if __name__ == "__main__":
    main()
