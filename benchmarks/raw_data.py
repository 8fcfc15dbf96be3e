"""Does R² depend on offsets of the targets and on the scales of columns?

Every estimator is fitted with its defaults to examples in memory, from a function that yields
blocks and from a file. The peer is scikit-learn's `RidgeCV` after a `StandardScaler`, on flattened
tokens. The first column is R² on centred and scaled data (accuracy for the classifier). The other
columns show its change if

- the targets have an offset of 10³ or 10⁶ of their standard deviations;
- all columns of the tokens are scaled by 10⁻⁶ or 10⁶, or each by its own factor in between;
- the columns have means of up to 10⁶ of their standard deviations;
- a constant column with value 1 or 10⁶ is added.

The last column is the largest change.

    python benchmarks/raw_data.py
    python benchmarks/raw_data.py --examples 60 --heads 10
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from sklearn.linear_model import RidgeCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler

import onelayer as ol
from onelayer.data import chunks

TOKENS, DIM = 6, 5
SCALES = np.logspace(-6, 6, DIM)  # of columns with different scales
CASES: dict[str, Callable[..., Any]] = {
    "as it is": lambda X, y: (X, y),
    "y + 10³": lambda X, y: (X, y + 1e3),
    "y + 10⁶": lambda X, y: (X, y + 1e6),
    "X 10⁻⁶": lambda X, y: (1e-6 * X, y),
    "X 10⁶": lambda X, y: (1e6 * X, y),
    "X mixed": lambda X, y: (SCALES * X, y),
    "X shifted": lambda X, y: (X + SCALES, y),
    "constant 1": lambda X, y: (with_constant(X, 1.0), y),
    "constant 10⁶": lambda X, y: (with_constant(X, 1e6), y),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--examples", type=int, default=300, help="training examples, and as many test examples"
    )
    parser.add_argument("--heads", type=int, default=200)
    options = parser.parse_args()
    table = Table(title=f"R² on {options.examples} examples, and its changes")
    for column in ("estimator", "examples", *CASES, "largest"):
        table.add_column(column, justify="left" if column in ("estimator", "examples") else "right")
    with tempfile.TemporaryDirectory() as folder:
        for row in rows(options, Path(folder)):
            table.add_row(*row)
    Console().print(table)


def rows(options: argparse.Namespace, folder: Path) -> Iterator[list[str]]:
    X = ol.inputs.gaussian(2 * options.examples, TOKENS, DIM, seed=1)
    chunks.CHUNK_BYTES = X.nbytes // 16  # so that files are read in several chunks
    y = targets(X)
    for name, estimator in estimators(options.heads).items():
        # scikit-learn's estimators need arrays in memory
        storages = STORAGE if name != "RidgeCV" else {"memory": STORAGE["memory"]}
        for storage, store in storages.items():
            scores = {
                case: score(estimator, *change(X, y), lambda a, store=store: store(a, folder))
                for case, change in CASES.items()
                if not (name == "classifier" and case.startswith("y"))
            }
            yield [name, storage, *figures(scores)]


def figures(scores: dict[str, float]) -> list[str]:
    """The score of the first case, the changes in the other cases, and the largest change."""
    known = scores["as it is"]
    changes = {case: value - known for case, value in scores.items() if case != "as it is"}
    cells = [f"{abs(changes[case]):.4f}" if case in changes else "" for case in list(CASES)[1:]]
    return [f"{known:.4f}", *cells, f"{max(map(abs, changes.values())):.4f}"]


def estimators(heads: int) -> dict[str, Any]:
    seeded = {"random_state": 0}
    return {
        "attention": ol.RandomFeatureAttention(heads, **seeded),
        "attention, few heads": ol.RandomFeatureAttention(max(1, heads // 8), **seeded),
        "attention, no query": ol.RandomFeatureAttention(heads, query="none", **seeded),
        "attention, alpha=0.1": ol.RandomFeatureAttention(heads, alpha=0.1, **seeded),
        "network": ol.RandomFeatureMLP(heads * (DIM + 1), **seeded),
        "kernel": ol.AttentionKernelRidge(),
        "classifier": ol.RandomFeatureAttentionClassifier(heads, **seeded),
        "RidgeCV": make_pipeline(
            FunctionTransformer(lambda X: X.reshape(len(X), -1)),
            StandardScaler(),
            RidgeCV(np.logspace(-3, 3, 13)),
        ),
    }


def score(estimator: Any, X: Any, y: Any, store: Callable[[Any], Any]) -> float:
    """R² or accuracy on the second half of the examples."""
    if isinstance(estimator, ol.RandomFeatureAttentionClassifier):
        y = y > np.median(y)
    half = len(X) // 2
    model = estimator.fit(store(X[:half]), store(y[:half]))
    return float(model.score(store(X[half:]), store(y[half:])))


def targets(X: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A mean over the keys with noise, scaled to variance 1."""
    values = X[:, 1:, 0].mean(axis=1) + 0.5 * X[:, 1:, 1].mean(axis=1)
    values += 0.2 * values.std() * np.random.default_rng(2).standard_normal(len(X))
    return (values - values.mean()) / values.std()


def with_constant(X: np.ndarray[Any, Any], value: float) -> np.ndarray[Any, Any]:
    return np.concatenate([X, np.full((*X.shape[:2], 1), value)], axis=2)


def by_function(array: np.ndarray[Any, Any], _folder: Path) -> Callable[[], Iterator[Any]]:
    blocks = np.array_split(array, 7)
    return lambda: iter(blocks)


def on_disk(array: np.ndarray[Any, Any], folder: Path) -> np.ndarray[Any, Any]:
    path = folder / f"{len(list(folder.iterdir()))}.npy"
    np.save(path, array)
    return np.load(path, mmap_mode="r")


STORAGE: dict[str, Callable[..., Any]] = {
    "memory": lambda array, _folder: array,
    "function": by_function,
    "file": on_disk,
}


if __name__ == "__main__":
    main()
