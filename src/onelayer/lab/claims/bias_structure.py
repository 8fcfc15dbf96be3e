"""The bias that helps is the one that weighs keys as the target does.

An open question of the paper. Conjecture: a bias W_0 helps as far as x_0 W_0 x_i is the correlation
in the target. The identity helps on (1/N) Σ_i <x_0, x_i>^q <β, x_i>, and half of it (in size,
coordinates or rank) helps in part. It does not help if the correlation is rotated to <x_0, S x_i>;
there W_0 = S helps as much (exactly so in distribution, since Gaussian heads are invariant under
rotations). The matching bias does no harm with any number of examples.
"""

from typing import Any

import numpy as np

from onelayer.lab import figures, rules
from onelayer.lab.claim import FIRST_PAPER, Check, Conjecture, Measured, Results, by_size
from onelayer.lab.learning_setup import errors_at, make_model
from onelayer.lab.seeds import generator
from onelayer.theory import targets

HELP = 0.8  # largest error with the matching bias, relative to none
NO_HELP = 0.95  # least relative error with a bias that does not match
ALIKE = 1.2  # the largest ratio of two shares that should be the same
NO_HARM = 1.05  # largest relative error with the matching bias at any sample size

Matrix = np.ndarray[Any, Any]

TARGETS = ("plain", "rotated")
PARTIAL = ("identity x 0.5", "sparse", "low rank")
BIASES = ["none", "identity", "identity x 2", *PARTIAL, "rotation"]
SETTINGS = by_size(
    bias=BIASES,
    examples=([100, 300, 1200], [150, 300, 600, 1200, 2400], [512, 1024, 2048, 4096, 8192]),
    power=1,
    dim=(8, 10, 16),
    keys=(8, 10, 16),
    heads=(200, 300, 1000),
    seeds=(3, 3, 5),
)


def measure(
    bias: str, examples: int, power: int, dim: int, keys: int, heads: int, seed: int
) -> Measured:
    """The test errors on the plain and on the rotated target."""
    rotation = _rotation(dim, generator(seed, "rotation"))
    centre = np.zeros((dim + 1, dim + 1))
    centre[:dim, :dim] = _on_tokens(bias, rotation, generator(seed, "bias"))
    learned = {
        "plain": targets.correlation_weighted(power, dim),
        "rotated": targets.rotated_correlation(power, dim, rotation),
    }
    return errors_at(
        make_model("rfa", heads, dim, seed, bias=centre), learned, keys, examples, seed
    )


def _on_tokens(bias: str, rotation: Matrix, rng: np.random.Generator) -> Matrix:
    """The bias on the coordinates of a token, (dim, dim)."""
    dim = len(rotation)
    half = dim // 2
    subspace = _rotation(dim, rng)[:, :half]
    coordinates = np.isin(np.arange(dim), rng.permutation(dim)[:half])
    known = {
        "none": np.zeros((dim, dim)),
        "identity": np.eye(dim),
        "identity x 2": 2 * np.eye(dim),
        "identity x 0.5": np.eye(dim) / 2,
        "sparse": np.diag(coordinates.astype(float)),
        "low rank": subspace @ subspace.T,
        "rotation": rotation,  # x_0 S x_i is what the rotated target weighs keys by
    }
    return known[bias]


def _rotation(dim: int, rng: np.random.Generator) -> Matrix:
    factor, triangle = np.linalg.qr(rng.standard_normal((dim, dim)))
    return np.asarray(factor * np.sign(np.diag(triangle)))


RULE = f"""Median test errors relative to those without a bias, at the sample size where the
identity helps most on the plain target. The matching bias leaves at most {HELP} on both targets,
the identity on the rotated target and the rotation on the plain one at least {NO_HELP}; the shares
of the two matches differ by a factor of at most {ALIKE}. On the plain target half the identity, the
identity on half of the coordinates and a projection of half rank lie strictly between the identity
and no bias, and twice the identity is below no bias. With every number of examples the identity
leaves at most {NO_HARM} on the plain target."""


def judge(results: Results) -> list[Check]:
    rules.require(results, "bias", BIASES)
    sizes = rules.at_least_two(results, "examples")
    help_at = {n: _relative(results.where(examples=n))["identity", "plain"] for n in sizes}
    best = min(help_at, key=help_at.__getitem__)
    relative = _relative(results.where(examples=best))
    match, restored = help_at[best], relative["rotation", "rotated"]
    wrong = relative["identity", "rotated"], relative["rotation", "plain"]
    partial = {bias: relative[bias, "plain"] for bias in PARTIAL}
    return [
        Check(
            "the identity helps on the plain target, the rotation on the rotated one",
            f"{match:.2f} and {restored:.2f} of the error without a bias, with {best} examples",
            max(match, restored) <= HELP,
        ),
        Check(
            "the identity does not help on the rotated target, nor the rotation on the plain one",
            f"{wrong[0]:.2f} and {wrong[1]:.2f} of it",
            min(wrong) >= NO_HELP,
        ),
        Check(
            "the right rotation helps on the rotated target as the identity does on the plain one",
            f"their shares have the ratio {restored / match:.2f}",
            1 / ALIKE <= restored / match <= ALIKE,
        ),
        Check(
            "half of the identity, in size, coordinates or rank, helps in part",
            ", ".join(f"{bias} {value:.2f}" for bias, value in partial.items()),
            all(match < value < 1 for value in partial.values()),
        ),
        Check(
            "twice the identity helps too",
            f"{relative['identity x 2', 'plain']:.2f} of the error without a bias",
            relative["identity x 2", "plain"] < 1,
        ),
        Check(
            "the identity does no harm on the plain target with any number of examples",
            ", ".join(f"{share:.2f} with {n}" for n, share in help_at.items()),
            max(help_at.values()) <= NO_HARM,
        ),
    ]


def _relative(results: Results) -> dict[tuple[str, str], float]:
    """By bias and target, the median error relative to that without a bias."""
    without = results.where(bias="none")
    return {
        (bias, target): error / without.median(target)
        for target in TARGETS
        for bias, error in results.medians(target, by="bias").items()
    }


def draw(results: Results, figure: figures.Figure) -> None:
    power = results.of("power")[0]
    shown = {
        f"plain target, $f_{{2,{power}}}$": (results, "plain"),
        f"rotated target, $f_{{3,{power}}}$": (results, "rotated"),
    }
    panels = figures.panels(figure, shown, "examples", by="bias", sharey=True)
    if match := results.where(bias="identity"):
        errors = match.medians("plain", by="examples")
        label = "rotation, predicted from the identity on the plain target"
        figures.predicted(panels[1], list(errors), list(errors.values()), label)


CLAIM = Conjecture(FIRST_PAPER, RULE, SETTINGS, measure, judge, draw)
