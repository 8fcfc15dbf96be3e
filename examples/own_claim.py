"""A claim of your own
===================

Define a claim of your own, then measure, judge and report it like the claims of the papers.

Theory bounds the error of random-feature attention for polynomials of a query and a key. This claim
asks whether the rate n^-1/2 also holds for a function with a kink: the average of ``|<β, x_i>|``
over the keys. A claim consists of a prediction, the cells to measure, and a rule for the verdict.
Cells run in several processes, and an interrupted run continues where it stopped.

::

    python examples/own_claim.py                      # writes kink.sqlite and kink.html
    python examples/own_claim.py --largest 256 --seeds 1
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

import onelayer as ol
from onelayer.lab import figures, outcomes, report
from onelayer.lab.claim import Check, Conjecture, Measured, Results, by_size
from onelayer.lab.run import Plan, run
from onelayer.lab.seeds import generator
from onelayer.lab.store import Store

RATE = -0.4  # largest exponent of the error in n with which the claim holds; predicted: -1/2


def measure(largest: int, dim: int, keys: int, heads: int, seed: int) -> Measured:
    """Measure the learning curve on the target with a kink, at five sizes that double."""
    sizes = [largest // 2**i for i in reversed(range(5))]
    X = ol.inputs.sphere(largest + 2000, keys + 1, dim, generator(seed, "inputs"))
    y = np.abs(X[:, 1:, 0]).mean(axis=1)
    paper = {"alpha": "loo", "fit_intercept": False, "standardize": False}
    model = ol.RandomFeatureAttention(heads, **paper, random_state=generator(seed, "model"))
    train, test = slice(largest), slice(largest, None)
    curve = ol.learning_curve(model, X[train], y[train], X[test], y[test], sizes)
    return {"sizes": sizes, "errors": curve.test_error[:, 0].tolist()}


def medians(results: Results) -> tuple[list[int], Any]:
    """Return the sample sizes and the median error at each of them."""
    return results.cells[0]["sizes"], np.median([cell["errors"] for cell in results], axis=0)


def judge(results: Results) -> list[Check]:
    sizes, errors = medians(results)
    rate = np.polyfit(np.log(sizes), np.log(errors), 1)[0]
    return [Check(f"the error falls as n^{RATE} or faster", f"n^{rate:.2f}", bool(rate <= RATE))]


def draw(results: Results, figure: Any) -> None:
    sizes, errors = medians(results)
    axes = figure.subplots()
    axes.plot(sizes, errors, "o-", color=figures.COLOURS[0], label="measured")
    line = errors[0] * (np.array(sizes) / sizes[0]) ** -0.5
    figures.predicted(axes, sizes, list(line), "predicted: $n^{-1/2}$")
    axes.set(xscale="log", yscale="log", xlabel="examples $n$", ylabel="test error / variance")
    axes.legend()


SETTINGS = by_size(largest=(1024, 4096, 4096), dim=8, keys=8, heads=300, seeds=3)
CLAIM = Conjecture(
    name="kink",
    title="A kink in the target does not slow attention down",
    source="a conjecture",
    prediction="The error on the average of |<β, x_i>| falls as n^-0.5 or faster.",
    rule=f"The exponent in n, fitted to the median errors at all sizes, is at most {RATE}.",
    sizes=SETTINGS,
    measure=measure,
    judge=judge,
    draw=draw,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--largest", type=int, default=4096, help="largest sample size")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--workers", type=int, default=2, help="number of processes")
    parser.add_argument("--folder", type=Path, default=Path(), help="output folder")
    options = parser.parse_args()
    store = Store(options.folder / "kink.sqlite")
    plan = Plan(CLAIM, "default", {"largest": options.largest, "seeds": options.seeds})
    run([plan], store, workers=options.workers)
    (entry,) = outcomes.of_plans(store, [plan])
    for check in entry.verdict.checks:
        print(f"{check.statement}: {check.measured}")
    print(f"The claim {entry.verdict.outcome}.")
    (options.folder / "kink.html").write_text(report.page([entry], outcomes.about(store)), "utf-8")
    draw(entry.results, plt.figure(figsize=(6, 4), layout="constrained"))
    plt.show()


if __name__ == "__main__":
    main()
