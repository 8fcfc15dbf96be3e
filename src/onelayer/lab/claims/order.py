"""Attention without positions learns what does not depend on order, and no more.

Attention without positions is invariant to the order of the keys. On a target Σ_i w_i <β, x_i> its
error therefore falls to that of the mean over all orders and never below: 1 - (Σ_i w_i)² / (N Σ_i
w_i²) of the variance, which is 1 - 1/N for one position and 1 for an alternating sum over an even
number of keys. A random-feature network on all tokens side by side sees the order and learns these
targets.
"""

from onelayer.lab import figures, learning_setup, rules
from onelayer.lab.claim import FIRST_PAPER, Check, Claim, Measured, Results, by_size
from onelayer.lab.learning_setup import ORDER_TEST_EXAMPLES, ORDERED, errors_at, make_model

ABOVE = 0.95  # least error of attention relative to the floor; below 1 for sampling error
NEAR = 1.1  # largest error of attention relative to the floor, with the most examples
LEARNED = 0.1  # largest error of the network, with the most examples
OCTAVES = [128, 256, 512, 1024, 2048]
SETTINGS = by_size(
    model=["rfa", "rfmlp"],
    examples=([64, 256, 1024], OCTAVES, [*OCTAVES, 4096, 8192]),
    dim=(8, 8, 16),
    keys=(8, 8, 16),
    heads=(100, 300, 1000),
    seeds=(3, 5, 5),
)


def measure(model: str, examples: int, dim: int, keys: int, heads: int, seed: int) -> Measured:
    """The test errors on all targets."""
    learned = {name: target(dim) for name, target in ORDERED.items()}
    estimator = make_model(model, heads, dim, seed)
    return errors_at(estimator, learned, keys, examples, seed, test_examples=ORDER_TEST_EXAMPLES)


RULE = f"""Median test errors on the key at position 1 and on the alternating and the increasing
sum: those of RFA are at no sample size below {ABOVE} of the exact floor, and with the most examples
at most {NEAR} of it; that of RFMLP, with the same number of trained parameters, is then at most
{LEARNED} of the variance."""


def judge(results: Results) -> list[Check]:
    rules.require(results, "model", ("rfa", "rfmlp"))
    rfa, rfmlp = results.where(model="rfa"), results.where(model="rfmlp")
    most = max(results.of("examples"))
    checks = []
    for target in ORDERED:
        floor = learning_setup.order_floor(target, results.of("dim")[0], results.of("keys")[0])
        errors = rfa.medians(target, by="examples")
        learned = rfmlp.where(examples=most).median(target)
        least, last = min(errors.values()), errors[most]
        checks += [
            Check(
                f"{target}: attention comes down to {floor:.3g}, and not below",
                f"{last:.3g} with {most} examples, never below {least:.3g}",
                least >= ABOVE * floor and last <= NEAR * floor,
            ),
            Check(
                f"{target}: a network on all tokens learns it",
                f"{learned:.2g} with {most} examples",
                learned <= LEARNED,
            ),
        ]
    return checks


def draw(results: Results, figure: figures.Figure) -> None:
    shown = {target: (results, target) for target in ORDERED}
    panels = figures.panels(figure, shown, "examples", "model", str.upper, sharex=True, sharey=True)
    for axes, target in zip(panels, ORDERED, strict=True):
        floor = learning_setup.order_floor(target, results.of("dim")[0], results.of("keys")[0])
        figures.level(axes, results.of("examples"), floor, "blind to order, exact")


CLAIM = Claim(FIRST_PAPER, RULE, SETTINGS, measure, judge, draw)
