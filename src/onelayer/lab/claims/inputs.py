"""Recovery carries over from Boolean to Gaussian and sphere inputs.

The paper's theorem is for Boolean inputs; it says that its techniques extend to continuous ones
such as Gaussian. Conjecture: nothing in the six phases depends on the kind of inputs. With scores
of equal size they find heads as well on Gaussian and sphere inputs, and Gauss-Newton steps are
exact on all.
"""

from onelayer.lab import claim, figures, recovery_setup, rules
from onelayer.lab.claim import SECOND_PAPER, Check, Conjecture, Measured, Results, Undecided
from onelayer.lab.grids import grid_by_method
from onelayer.lab.recovery_setup import CLAIMED, EXACT, NEAR, Method
from onelayer.lab.seeds import generator
from onelayer.recovery.api import recover

WORSE = 4.0  # times the error of Boolean inputs, at most: as with 16 times fewer examples
ASKED = {"sculpt": NEAR, "refine": EXACT}
NAMES = {"sculpt": "six phases, not polished", "refine": "Gauss-Newton steps"}
MAX_STEPS = 200  # for Gauss-Newton steps: with enough examples they take 10 to 40
SETTINGS = claim.by_size(
    kind=["boolean", "gaussian", "sphere"],
    heads=(2, 2, 3),
    dim=(8, 8, 12),
    tokens=(3, 3, 2),
    sculpt_examples=(
        [4_000, 16_000],
        [4_000, 16_000, 64_000, 256_000],
        [64_000, 256_000, 1_024_000, 4_096_000],
    ),
    refine_examples=([25, 50, 100], [12, 25, 50, 100, 200], [50, 100, 200, 400, 800]),
    seeds=(2, 5, 10),
)


def measure(
    method: Method, kind: str, heads: int, dim: int, tokens: int, examples: int, seed: int
) -> Measured:
    """The error of the worst head, and whether the result is said to be right."""
    layer, X, Y = recovery_setup.instance(heads, dim, tokens, examples, seed, kind)
    search = generator(seed, "search")
    found = recover(X, Y, heads, method=method, seed=search, max_steps=MAX_STEPS, polish=False)
    return recovery_setup.ended(found, layer)


RULE = f"""With the most examples the median error of the worst head is at most {NEAR:g} (six
phases, not polished) and {EXACT:g} (Gauss-Newton steps) on inputs of every kind; that of the six
phases is at most {WORSE:g} times that on Boolean inputs; and no result that is said to be right is
off by more than {CLAIMED:.0%}."""


def judge(results: Results) -> list[Check]:
    errors = {
        method: part.where(examples=max(part.of("examples"))).medians("error", by="kind")
        for method, part in results.by("method")
    }
    sculpt = errors["sculpt"]
    others = {kind: error for kind, error in sculpt.items() if kind != "boolean"}
    if "boolean" not in sculpt or not others:
        raise Undecided("inputs of another kind are compared with boolean ones, both are needed")
    return [
        *(
            Check(
                f"{NAMES[method]}: heads within {ASKED[method]:g} on inputs of every kind",
                ", ".join(f"{kind} {error:.2g}" for kind, error in by_kind.items()),
                max(by_kind.values()) <= ASKED[method],
            )
            for method, by_kind in errors.items()
        ),
        Check(
            f"six phases: errors at most {WORSE:g} times that on Boolean inputs",
            ", ".join(f"{kind} {e / sculpt['boolean']:.2g} times" for kind, e in others.items()),
            max(others.values()) <= WORSE * sculpt["boolean"],
        ),
        rules.no_wrong_claims(results),
    ]


def draw(results: Results, figure: figures.Figure) -> None:
    both = figure.subplots(1, len(ASKED))
    for axes, (method, part) in zip(both, results.by("method"), strict=True):
        sizes = part.of("examples")
        figures.curves(axes, part, "examples", "error", by="kind")
        figures.level(axes, sizes, ASKED[method], "asked for")
        axes.set(xscale="log", yscale="log", xlabel="examples $n$", title=NAMES[method])
        axes.set_ylabel("error of the worst head")
        figures.tick_examples(axes, sizes)


CLAIM = Conjecture(SECOND_PAPER, RULE, SETTINGS, measure, judge, draw, grid_by_method)
