"""Draw how phase 4 of the six phases shows the affine hull of the heads.

For each layer the singular values of the slabs are drawn in ascending order. A small value belongs
to a direction in which the polytope is long. Layers of m heads have m - 1 such directions.

    python docs/figures/explain_free_directions.py      # writes explain-free-directions.svg
"""

import argparse
from functools import partial
from pathlib import Path

import numpy as np

import onelayer as ol
from onelayer.lab import figures
from onelayer.recovery import validation
from onelayer.recovery.options import Options
from onelayer.recovery.phases import driver
from onelayer.recovery.run import RecoveryRun
from onelayer.recovery.strategies import sculpt
from onelayer.recovery.trace import Log

SHAPES = [(1, 8, 3, 100_000), (2, 8, 3, 100_000), (3, 12, 2, 250_000)]  # heads, dim, tokens, n
SHOWN = 12  # singular values


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--share", type=float, default=1.0, help="share of the examples")
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent)
    options = parser.parse_args()
    spectra = {}
    for heads, dim, tokens, examples in SHAPES:
        layer = ol.AttentionLayer.random(heads, dim, scale=3.0, seed=0)
        X = ol.inputs.boolean(int(options.share * examples), tokens, dim, seed=1)
        spectra[heads, dim, tokens, len(X)] = singular_values(X, layer(X), heads)
    path = options.output / "explain-free-directions.svg"
    path.write_bytes(figures.drawn(partial(draw, spectra)))
    for (heads, *_), values in spectra.items():
        ratio = values[heads - 1] / values[heads - 2] if heads > 1 else np.inf
        print(f"{heads} heads: {heads - 1} free directions, gap {ratio:.3g}")


def singular_values(X, Y, heads):
    """Singular values of the slabs of the last polytope, ascending."""
    run = RecoveryRun(
        validation.examples(X, Y, None), Options(heads), Log(100, None), np.random.default_rng(0)
    )
    state, _ = sculpt.begin(run)
    state = driver.run(state, run.log)
    if state.sculpture is None:
        raise SystemExit(f"phase 2 found too few slabs in {len(X):,} examples")
    return state.sculpture.spectrum.values


def draw(spectra, figure):
    figure.set_size_inches(7.0, 2.6)
    panels = figure.subplots(1, len(spectra), sharey=True)
    for axes, ((heads, dim, tokens, examples), values) in zip(panels, spectra.items(), strict=True):
        shown = values[:SHOWN] / values[-1]
        order = np.arange(1, len(shown) + 1)
        free = order < heads
        axes.plot(order[~free], shown[~free], "o", color=figures.COLOURS[0], markersize=4)
        axes.plot(order[free], shown[free], "s", color=figures.COLOURS[1], markersize=5)
        many = "head" if heads == 1 else "heads"
        axes.set_title(f"{heads} {many}: {heads - 1} free", fontsize=9)
        axes.set(yscale="log", xticks=[1, 4, 8, 12], ylim=(0.008, 1), xlim=(0, SHOWN + 1))
        axes.set_xlabel(f"number\n$d={dim}$, $k={tokens}$, $n={examples:,}$")
    panels[0].set_ylabel("singular value / largest")
    panels[0].set_yticks([0.01, 0.1, 1], ["0.01", "0.1", "1"])


if __name__ == "__main__":
    main()
