"""Each head multiplies what the provable learner needs, not what Gauss-Newton needs.

The six phases rest on rows on which all heads agree, which become exponentially rare in the number
m of heads. The paper's bound on the time, and so on the examples, is (dk)^{O(m³)}, and exponential
time is unavoidable in the worst case. Conjecture: on random layers of fewer heads than dimensions
Gauss-Newton steps need a constant times the examples that counting unknowns asks for, at most
linear in m. (With two tokens and nearly as many heads as dimensions they are known to end in local
minima.)
"""

import math
from itertools import pairwise

from onelayer.lab import figures, recovery_setup, rules
from onelayer.lab.claim import SECOND_PAPER, Check, Claim, Measured, Results, Undecided, by_size
from onelayer.lab.grids import grid_by_method
from onelayer.lab.recovery_setup import NEAR, Method, fewest_examples, worst_head
from onelayer.lab.seeds import generator
from onelayer.recovery.api import recover

GROWTH = 4.0  # at least, of the examples of the six phases with each further head
COUNTS = 4.0  # at most, of the examples of Gauss-Newton steps over those that counting asks for
FIRST_EXAMPLES = 250  # of the six phases; Gauss-Newton steps start with those of counting
STEP = {"sculpt": 2.0, "refine": math.sqrt(2)}  # from one number of examples to the next
MAX_STEPS = 100  # with enough examples a search takes 10 to 40
SETTINGS = by_size(
    dim=(8, 12, 16),
    sculpt_heads=([1, 2], [1, 2, 3], [1, 2, 3, 4]),
    sculpt_tokens=2,
    sculpt_largest=(32_000, 512_000, 8_192_000),
    refine_heads=([1, 4], [1, 2, 4, 8], [1, 2, 4, 8]),
    refine_tokens=([2, 4], [2, 4], [2, 3, 4]),
    refine_largest=(400, 1_000, 4_000),
    seeds=(2, 3, 5),
)


def measure(method: Method, heads: int, dim: int, tokens: int, largest: int, seed: int) -> Measured:
    """The first number of examples that is enough for all heads, or None."""
    count = fewest_examples(heads, dim, tokens, dim)
    size = FIRST_EXAMPLES if method == "sculpt" else count
    while (examples := math.ceil(size)) <= largest:
        layer, X, Y = recovery_setup.instance(heads, dim, tokens, examples, seed)
        search = generator(seed, "search")
        found = recover(X, Y, heads, method=method, seed=search, max_steps=MAX_STEPS, polish=False)
        error = worst_head(found.layer, layer)
        if error <= NEAR:
            return {"examples": examples, "of_count": examples / count, "error": error}
        size *= STEP[method]
    return {"examples": None, "of_count": None, "error": None}


RULE = f"""Medians over seeds of the first number of examples with all heads within {NEAR:.0%};
numbers grow by factors of 2 for the six phases and of √2 for Gauss-Newton steps. Each head
multiplies the examples of the six phases by at least {GROWTH:g}. Gauss-Newton steps need at most
{COUNTS:g} times the examples whose outputs, and scores, are as many as the unknowns."""


def judge(results: Results) -> list[Check]:
    sculpt = medians(results.where(method="sculpt"), "examples")
    if len(sculpt) < 2:
        raise Undecided("growth takes two numbers of heads at least")
    if not math.isfinite(max(sculpt.values())):
        raise Undecided("the six phases did not succeed with the largest number of examples")
    growth = [(b / a) ** (1 / (m - h)) for (h, a), (m, b) in pairwise(sculpt.items())]
    # The q of log n ~ m^q.
    exponent = rules.exponent(list(sculpt), [math.log(n) for n in sculpt.values()])
    refine = results.where(method="refine")
    counts = {tokens: medians(part, "of_count") for tokens, part in refine.by("tokens")}
    return [
        Check(
            f"each further head takes the six phases at least {GROWTH:g} times the examples",
            " → ".join(f"{n:,.0f}" for n in sculpt.values())
            + f" for {', '.join(map(str, sculpt))} heads: log n as m^{exponent:.2f}",
            min(growth) >= GROWTH,
        ),
        Check(
            f"Gauss-Newton steps need at most {COUNTS:g} times the examples of counting",
            rules.by_tokens(counts),
            max(max(times.values()) for times in counts.values()) <= COUNTS,
        ),
    ]


def medians(results: Results, what: str) -> dict[int, float]:
    """Over seeds, by number of heads, the fewest first; infinite where it was not reached."""
    return dict(sorted(results.medians(what, by="heads").items()))


def draw(results: Results, figure: figures.Figure) -> None:
    axes = figure.subplots()
    sculpt, refine = (results.where(method=method) for method in recovery_setup.METHODS)
    needed = medians(sculpt, "examples")
    (tokens,) = sculpt.of("tokens")
    figures.curve(axes, sculpt, "heads", "examples", f"six phases, {tokens} tokens", 0)
    fewest = min(needed)
    if math.isfinite(needed[fewest]):
        grown = [needed[fewest] * GROWTH ** (heads - fewest) for heads in needed]
        figures.predicted(axes, list(needed), grown, f"{GROWTH:g} times with each head", 0)
    for number, (tokens, part) in enumerate(refine.by("tokens"), start=1):
        figures.curve(axes, part, "heads", "examples", f"Gauss-Newton, {tokens} tokens", number)
        (dim,) = part.of("dim")
        most = [COUNTS * fewest_examples(m, dim, tokens, dim) for m in part.of("heads")]
        figures.predicted(axes, part.of("heads"), most, f"{COUNTS:g} times the count", number)
    axes.set(yscale="log", xlabel="heads $m$", ylabel="examples needed")
    axes.set_xticks(sorted(results.of("heads")))
    figure.legend(loc="outside right center")


CLAIM = Claim(SECOND_PAPER, RULE, SETTINGS, measure, judge, draw, grid_by_method)
