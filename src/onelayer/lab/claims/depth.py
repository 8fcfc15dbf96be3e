"""More layers of frozen random heads learn functions of three tokens.

An open question of the paper. Conjecture: one layer expresses averages of functions of two tokens;
a second one, also random and frozen, makes functions of three tokens learnable, such as two hops
(1/N²) Σ_{ij} <x_0, x_i> <x_i, x_j> <β, x_j>, at a cost on functions of two. Most of two hops is
still an average over single keys; the rest, the three-token part, is exactly out of reach for one
layer.
"""

from itertools import pairwise

from onelayer.array.backend import Array
from onelayer.lab import figures, rules
from onelayer.lab.claim import FIRST_PAPER, Check, Conjecture, Measured, Results, by_size
from onelayer.lab.learning_setup import errors_at, make_model
from onelayer.theory import targets
from onelayer.theory.targets import Target

HELPS = 0.9  # largest error of deeper layers, relative to one layer
ABOVE = 0.95  # least error of one layer relative to its exact floor; below 1 for sampling error
SHOWN = {
    "three tokens": "two hops",
    "three-token part": "two hops, three-token part",
    "f_{2,1}": "$f_{2,1}$, two tokens",
    "f_{1,1}": "$f_{1,1}$, one token",
}
SETTINGS = by_size(
    depth=([1, 2], [1, 2, 3], [1, 2, 3]),
    examples=([125, 500, 2000], [125, 500, 2000, 8000], [128, 512, 2048, 8192]),
    dim=(4, 4, 16),
    keys=(4, 4, 16),
    heads=(100, 400, 1000),
    seeds=(3, 3, 5),
)


def measure(depth: int, examples: int, dim: int, keys: int, heads: int, seed: int) -> Measured:
    """The test errors on targets of three tokens, of two and of one."""
    learned = (
        targets.three_token(dim),
        three_token_part(dim),
        targets.correlation_weighted(1, dim),
        targets.average_power(1, dim),
    )
    model = make_model("rfa", heads, dim, seed, depth=depth)
    return errors_at(model, dict(zip(SHOWN, learned, strict=True)), keys, examples, seed)


def three_token_part(dim: int) -> Target:
    """What is left of x_0ᵀ A² β, A = (1/N) Σ_i x_i x_iᵀ, without all averages of F(x_0, x_i).

    With C_i = x_i x_iᵀ - I/d, of mean 0, it is (1/N²) Σ_{i≠j} x_0ᵀ C_i C_j β: the rest has at most
    one C_i a term. Since E C² = c I, c = (d - 1)/d², and E C M C = (d - 2)/(d² (d + 2)) M for
    symmetric M of trace 0, its variance is N(N-1)/N⁴ · (c² + c (d - 2)/(d² (d + 2))) / d.
    """
    whole, pairs = targets.three_token(dim), targets.correlation_weighted(1, dim)
    query = targets.query_only(1, dim)

    def evaluate(tokens: Array, mask: Array | None) -> Array:
        keys = tokens.shape[1] - 1
        return (
            whole.evaluate(tokens, mask)
            - (1 + 2 * (keys - 1) / dim) / keys * pairs.evaluate(tokens, mask)
            + (keys - 1) / (keys * dim**2) * query.evaluate(tokens, mask)
        )

    def moments(keys: int) -> tuple[float, float]:
        square = (dim - 1) / dim**2
        crossed = (dim - 2) / (dim**2 * (dim + 2))
        return 0.0, (keys - 1) / keys**3 * square * (square + crossed) / dim

    return Target("three-token part", dim, 2, evaluate, moments, least_keys=2)


def out_of_reach(results: Results) -> float:
    """The share of the variance of the three-token target that no average of pairs explains."""
    dim, keys = results.of("dim")[0], results.of("keys")[0]
    return three_token_part(dim).variance(keys) / targets.three_token(dim).variance(keys)


RULE = f"""Median test errors with the most examples: depth 1 leaves at least {ABOVE} of the
three-token part, and of two hops at least {ABOVE} of that part's share of the variance; some larger
depth leaves at most {HELPS} of the part, and of two hops at most {HELPS} of what depth 1 leaves;
the error on f_{{2,1}} rises with every layer."""


def judge(results: Results) -> list[Check]:
    depths = rules.at_least_two(results, "depth")
    rules.require(results, "depth", [1])
    most = results.where(examples=max(results.of("examples")))
    error = {name: [most.where(depth=depth).median(name) for depth in depths] for name in SHOWN}
    text = {
        name: f"{' / '.join(f'{value:.3g}' for value in values)} at depth "
        f"{' / '.join(map(str, depths))}"
        for name, values in error.items()
    }
    floor = out_of_reach(results)
    whole, part, pairs = error["three tokens"], error["three-token part"], error["f_{2,1}"]
    return [
        Check(
            f"one layer learns nothing of the three-token part, {floor:.2g} of the variance",
            f"{part[0]:.3g} of the part, {whole[0]:.2g} of the target left",
            part[0] >= ABOVE and whole[0] >= ABOVE * floor,
        ),
        Check(
            f"more layers learn at least {1 - HELPS:.1g} of it",
            text["three-token part"],
            min(part[1:]) <= HELPS,
        ),
        Check(
            "more layers leave less of the whole three-token target",
            text["three tokens"],
            min(whole[1:]) <= HELPS * whole[0],
        ),
        Check(
            "each layer has its price on the two-token target f_{2,1}",
            text["f_{2,1}"],
            all(after > before for before, after in pairwise(pairs)),
        ),
    ]


def draw(results: Results, figure: figures.Figure) -> None:
    figure.set_size_inches(7.0, 4.6)
    panels = figure.subplots(2, 2, sharex=True).ravel()
    sizes = results.of("examples")
    floors = {"three tokens": out_of_reach(results), "three-token part": 1.0}
    for axes, (name, title) in zip(panels, SHOWN.items(), strict=True):
        figures.curves(axes, results, "examples", name, by="depth", label="depth {}".format)
        if name in floors:
            figures.level(axes, sizes, floors[name], "floor of one layer, exact")
        figures.log_ticks(axes, sizes)
        axes.set(yscale="log", title=title)
        axes.set_ylim(top=1.2)
    panels[1].set(yscale="linear", ylim=(0, 1.2))
    for axes in panels[2:]:
        axes.set_xlabel("examples $n$")
    for axes in panels[::2]:
        axes.set_ylabel("test error / variance")


CLAIM = Conjecture(FIRST_PAPER, RULE, SETTINGS, measure, judge, draw)
