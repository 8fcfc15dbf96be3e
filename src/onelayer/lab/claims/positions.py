"""Positional encodings make attention see the order of its keys.

An open question of the paper. Conjecture: with a positional encoding random-feature attention
learns targets that depend on the order of the keys, which it cannot learn without one. One-hot
positions make such a target of degree 1 a polynomial of degree 2 in the token and its position;
encodings that are added to the token mix with it and help less. On targets that do not depend on
the order, positions cost examples.
"""

from onelayer.lab import figures, learning_setup, rules
from onelayer.lab.claim import FIRST_PAPER, Check, Conjecture, Measured, Results, by_size
from onelayer.lab.learning_setup import ORDER_TEST_EXAMPLES, errors_at, make_model
from onelayer.theory import targets

ENCODINGS = ["sinusoidal", "learned-random", "onehot"]
ORDERED = ("one position", "alternating sum")
BLIND = "average"  # f_{1,1}, which does not depend on the order

ABOVE = 0.95  # least error without positions relative to the floor; below 1 for sampling error
BELOW = 0.9  # largest error with any encoding, relative to the floor
FAR_BELOW = 0.5  # largest error with one-hot positions, relative to the floor
LEARNED = 0.1  # largest error on the target that needs no positions
OCTAVES = [128, 256, 512, 1024, 2048, 4096, 8192]
SETTINGS = by_size(
    positions=["none", *ENCODINGS],
    examples=([64, 256, 1024], OCTAVES[:5], OCTAVES[1:]),
    dim=(8, 16, 16),
    keys=(4, 4, 16),
    heads=(100, 300, 1000),
    seeds=(2, 5, 5),
)


def measure(positions: str, examples: int, dim: int, keys: int, heads: int, seed: int) -> Measured:
    """The test errors on two targets that depend on the order, and on one that does not."""
    encoding = None if positions == "none" else positions
    model = make_model("rfa", heads, dim, seed, positions=encoding)
    learned = {name: learning_setup.ORDERED[name](dim) for name in ORDERED}
    learned[BLIND] = targets.average_power(1, dim)
    return errors_at(model, learned, keys, examples, seed, test_examples=ORDER_TEST_EXAMPLES)


RULE = f"""Median test errors with the most examples, on the key at position 1 and on the
alternating sum, relative to the exact least error of functions that are invariant to the order (1 -
1/N, and 1 for an even number of keys): at least {ABOVE} without positions, at most {BELOW} with
every encoding, at most {FAR_BELOW} with one-hot positions. On f_{{1,1}} every encoding leaves more
than none does, and at most {LEARNED} of the variance."""


def judge(results: Results) -> list[Check]:
    rules.require(results, "positions", ["none", *ENCODINGS])
    most = results.where(examples=max(results.of("examples")))
    checks = []
    for target in ORDERED:
        floor, error = _floor(results, target), most.medians(target, by="positions")
        checks += [
            Check(
                f"{target}: without positions no error is below {floor:.3g}",
                f"{error['none']:.3g}",
                error["none"] >= ABOVE * floor,
            ),
            Check(
                f"{target}: every encoding falls below it",
                ", ".join(f"{encoding} {error[encoding]:.2g}" for encoding in ENCODINGS),
                all(error[encoding] <= BELOW * floor for encoding in ENCODINGS),
            ),
            Check(
                f"{target}: one-hot positions fall to at most half of it",
                f"{error['onehot']:.2g}",
                error["onehot"] <= FAR_BELOW * floor,
            ),
        ]
    price = {p: most.where(positions=p).median(BLIND) for p in ("none", *ENCODINGS)}
    cost = Check(
        "positions cost something on f_{1,1}, which needs none, and still it is learned",
        ", ".join(f"{encoding} {error:.2g}" for encoding, error in price.items()),
        all(price["none"] < price[encoding] <= LEARNED for encoding in ENCODINGS),
    )
    return [*checks, cost]


def _floor(results: Results, target: str) -> float:
    return learning_setup.order_floor(target, results.of("dim")[0], results.of("keys")[0])


def draw(results: Results, figure: figures.Figure) -> None:
    shown = {target: (results, target) for target in ORDERED}
    shown[f"{BLIND}, $f_{{1,1}}$"] = results, BLIND
    panels = figures.panels(figure, shown, "examples", by="positions", sharex=True)
    for axes, target in zip(panels, ORDERED, strict=False):
        figures.level(axes, results.of("examples"), _floor(results, target), "blind to order")
        axes.set_yscale("linear")


CLAIM = Conjecture(FIRST_PAPER, RULE, SETTINGS, measure, judge, draw)
