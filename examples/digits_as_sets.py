"""Digits as sets of patches
=========================

Learn from images as sets of patches with one attention layer, beside models on pixels.

Each 8 x 8 image of scikit-learn's digits is split into sixteen 2 x 2 patches. There are two tasks,
the slant of the handwriting (regression) and the digit (classification), each on whole images and
on partial images, where every patch is missing with probability 30 %. Each model is trained and
tested on the same kind of images.

A token is a patch minus the average patch at its position, followed by a one-hot code for the
position. The mask removes missing patches. The query is the sum of the tokens weighted by their
ink, so it encodes where there is more ink than usual. Models on pixels get a vector of 64 pixels.
Missing pixels are replaced by the average of that pixel, and cross-validation decides whether to
add indicators of missing pixels.

::

    python examples/digits_as_sets.py
    python examples/digits_as_sets.py --examples 150
"""

import argparse
import time

import matplotlib.pyplot as plt
import numpy as np
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.impute import MissingIndicator, SimpleImputer
from sklearn.linear_model import Ridge, RidgeClassifier
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import FeatureUnion, Pipeline
from sklearn.svm import SVC, SVR

import onelayer as ol


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--examples", type=int, default=1797, help="number of images to use")
    pixels, digit = load_digits(return_X_y=True)
    images = pixels.reshape(-1, 8, 8)[: parser.parse_args().examples] / 16
    train, test = train_test_split(np.arange(len(images)), test_size=1 / 3, random_state=0)
    tasks = {"slant": slant(images, train), "digit": digit}
    kinds = {"whole": views(images, train), "partial": views(partial(images), train)}

    table = Table(title=f"Error in %, {len(train)} training and {len(test)} test images")
    for column in ("model", *(f"{task}\n{kind}" for task in tasks for kind in kinds), "seconds"):
        table.add_column(column, justify="left" if column == "model" else "right")
    errors = {(task, kind): {} for task in tasks for kind in kinds}  # of every test image by model
    for name, view, regressor, classifier in models():
        start = time.perf_counter()
        for (task, kind), found in errors.items():
            estimator = regressor if task == "slant" else classifier
            y, seen = tasks[task], kinds[kind][view]
            estimator.fit(y=y[train], **{key: array[train] for key, array in seen.items()})
            predicted = estimator.predict(**{key: array[test] for key, array in seen.items()})
            squares = (predicted - y[test]) ** 2 / y[test].var()
            found[name] = 100.0 * (squares if task == "slant" else predicted != y[test])
        figures = [f"{found[name].mean():.2f}" for found in errors.values()]
        table.add_row(name, *figures, f"{time.perf_counter() - start:.1f}")
    console = Console()
    console.print(table)
    console.print("Slant: squared error relative to the variance. Digit: misclassified images.")
    for (task, kind), found in errors.items():
        console.print(f"- {task} of {kind} images: {verdict(found)}")
    draw(errors)


def models():
    """Yield the name, the input view, the slant regressor and the digit classifier."""
    paper = {"fit_intercept": False, "standardize": False}  # tokens are already centred and scaled
    options = {"heads": 1000, "alpha": "loo", "random_state": 0, **paper}
    for name, view, more in [
        ("attention, no places", "patches", {}),
        ("attention, one-hot positions", "patches", {"positions": "onehot"}),
        ("attention, places in tokens", "tokens", {}),
        ("attention, places and bias=1", "tokens", {"bias": 1.0}),
    ]:
        regressor = ol.RandomFeatureAttention(**options, **more)
        yield name, view, regressor, ol.RandomFeatureAttentionClassifier(**options, **more)
    kernel = {"alpha": "loo", **paper}
    regressor = ol.AttentionKernelRidge(**kernel)
    yield "attention, kernel", "tokens", regressor, KernelClassifier(**kernel)
    penalty = {"alpha": np.logspace(-3, 3, 13)}
    yield "Ridge", "flat", tuned(Ridge(), penalty), tuned(RidgeClassifier(), penalty)
    machine = {"C": [3, 30, 300], "gamma": [0.02, 0.1]}
    yield "SVM", "flat", tuned(SVR(epsilon=0.01), machine), tuned(SVC(), machine)
    forest = {"n_estimators": 300, "n_jobs": -1, "random_state": 0}
    regressor = RandomForestRegressor(max_features=1 / 3, **forest)
    yield "random forest", "flat", filled(regressor), filled(RandomForestClassifier(**forest))


class KernelClassifier(ol.AttentionKernelRidge):
    """Kernel ridge regression on one-hot targets; predicts the class with the largest output."""

    def fit(self, X, y, mask):
        return super().fit(X, np.eye(10)[y], mask=mask)

    def predict(self, X, mask):
        return super().predict(X, mask=mask).argmax(axis=1)


def filled(model):
    """Return a pipeline that imputes missing pixels, adds missing indicators and fits the model."""
    parts = [("pixels", SimpleImputer()), ("missing", MissingIndicator(features="all"))]
    return Pipeline([("seen", FeatureUnion(parts)), ("model", model)])


def tuned(model, grid):
    """Return a grid search over the model's parameters and the weight of missing indicators."""
    weights = [{"missing": 0.0}, {"missing": 0.25}]
    parameters = {f"model__{name}": values for name, values in grid.items()}
    return GridSearchCV(filled(model), {**parameters, "seen__transformer_weights": weights}, cv=3)


def draw(errors):
    """Draw the errors of all models: a panel per task, whole beside partial images."""
    tasks = dict.fromkeys(task for task, _ in errors)
    _, panels = plt.subplots(1, len(tasks), figsize=(8, 4), sharey=True, layout="constrained")
    for axes, task in zip(panels, tasks, strict=True):
        for kind, marker in (("whole", "o"), ("partial", "s")):
            found = {name: error.mean() for name, error in errors[task, kind].items()}
            axes.plot(found.values(), found.keys(), marker, label=f"{kind} images")
        axes.set(title=task, xlabel="error in %", xlim=(0, None))
        axes.grid(alpha=0.25)
    panels[0].invert_yaxis()
    panels[-1].legend()
    plt.show()


def slant(images, train):
    """Horizontal shift of the ink per row in pixels, standardized on the training images."""
    ink = images / images.sum(axis=(1, 2), keepdims=True)
    down, across = (
        place - np.sum(ink * place, axis=(1, 2), keepdims=True) for place in np.mgrid[:8, :8]
    )
    shift = np.sum(ink * down * across, axis=(1, 2)) / np.sum(ink * down**2, axis=(1, 2))
    return (shift - shift[train].mean()) / shift[train].std()


def partial(images):
    """Replace a random 30 % of the patches by NaN."""
    missing = np.random.default_rng(0).random((len(images), 4, 4)) < 0.3
    return np.where(np.kron(missing, np.ones((2, 2))), np.nan, images)


def views(images, train):
    """Input views: flat pixels, patches alone, and tokens (patches with one-hot positions)."""
    patches = images.reshape(-1, 4, 2, 4, 2).swapaxes(2, 3).reshape(-1, 16, 4)
    there = np.pad(~np.isnan(patches[:, :, 0]), ((0, 0), (1, 0)), constant_values=True)
    patches = np.nan_to_num(patches - np.nanmean(patches[train], axis=0))
    tokens = np.concatenate([patches, np.tile(np.eye(16), (len(images), 1, 1))], axis=2)
    found = {"flat": {"X": images.reshape(-1, 64)}}
    for name, keys in [("patches", patches), ("tokens", tokens)]:
        ink = patches.mean(axis=2, keepdims=True)
        query = np.sum(ink * keys, axis=1, keepdims=True) / 4
        found[name] = {"X": np.concatenate([query, keys], axis=1), "mask": there}
    return found


def verdict(errors):
    """Compare the best attention model with the others, at two standard errors."""
    attention = [name for name in errors if name.startswith("attention")]
    best = min(attention, key=lambda name: errors[name].mean())
    standing = {"ahead of": [], "level with": [], "behind": []}
    for name in [name for name in errors if name not in attention]:
        gain = errors[name] - errors[best]
        margin = 2 * gain.std() / len(gain) ** 0.5
        ahead, behind = gain.mean() > margin, gain.mean() < -margin
        standing["ahead of" if ahead else "behind" if behind else "level with"].append(name)
    parts = [f"{place} {' and '.join(names)}" for place, names in standing.items() if names]
    return f"{best} is {', '.join(parts)}"


if __name__ == "__main__":
    main()
