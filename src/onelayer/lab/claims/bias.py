"""A bias towards keys like the query helps where keys count by their likeness.

On f_{2,q} = (1/N) Σ_i <x_0, x_i>^q <β, x_i> the bound on attention whose heads have the identity as
bias (BRFA) lacks the factor d^q of the bound without bias (RFA), so BRFA should have the smaller
error for every q. On f_{1,1}, which does not depend on the query, the bias should not help.
"""

from onelayer.lab import figures, learning_setup, rules
from onelayer.lab.claim import FIRST_PAPER, Check, Claim, Measured, Result, Results, by_size
from onelayer.lab.learning_setup import learning_curve, make_model
from onelayer.theory import targets

HELPS = 0.9  # largest ratio of errors with and without bias, at some sample size
HURTS = 1.1  # largest ratio with the most examples
FEWEST = 64  # examples: with fewer only noise is compared
LINEAR = "f_{1,1}"  # does not depend on the query
WEIGHTED = {power: f"f_{{2,{power}}}" for power in (1, 2, 3, 4)}
SETTINGS = by_size(
    model=["rfa", "brfa"],
    dim=(6, 8, 16),
    keys=(6, 8, 16),
    heads=(300, 800, 1000),
    examples=(2048, 4096, 8192),
    seeds=(3, 4, 5),
)


def measure(model: str, dim: int, keys: int, heads: int, examples: int, seed: int) -> Measured:
    """The learning curves of all targets, one size an octave."""
    chosen = [targets.average_power(1, dim)]
    chosen += [targets.correlation_weighted(power, dim) for power in WEIGHTED]
    sizes = learning_setup.sizes_up_to(examples, least=FEWEST, per_octave=1)
    curve = learning_curve(make_model(model, heads, dim, seed), chosen, keys, sizes, seed)
    return {"sizes": sizes, **learning_setup.errors_by_target(curve, chosen)}


RULE = f"""Median over the seeds of the ratio of the test error of BRFA to that of RFA on the same
examples, at sample sizes {FEWEST}, {2 * FEWEST}, {4 * FEWEST} and so on: for each of q = 1, 2, 3, 4
at most {HELPS} at some size, and at most {HURTS} at the largest; on f_{{1,1}} above {HELPS} at
every size."""


def judge(results: Results) -> list[Check]:
    rules.require(results, "model", ["rfa", "brfa"])
    ratios = _ratios(results)
    most = max(ratios.of("examples"))
    last = {t: ratios.where(examples=most).median(t) for t in WEIGHTED.values()}
    best = {  # the least ratio over the sample sizes, and its size
        t: min((ratio, n) for n, ratio in ratios.medians(t, by="examples").items())
        for t in (LINEAR, *WEIGHTED.values())
    }
    return [
        *(
            Check(
                f"the bias helps on {target} somewhere: at most {HELPS} of the error without",
                f"at best {best[target][0]:.3g}, at n = {best[target][1]}",
                best[target][0] <= HELPS,
            )
            for target in WEIGHTED.values()
        ),
        Check(
            f"with the most examples it hurts on none: at most {HURTS} of the error without",
            f"at n = {most} " + ", ".join(f"{t}: {ratio:.3g}" for t, ratio in last.items()),
            max(last.values()) <= HURTS,
        ),
        Check(
            f"it helps nowhere on {LINEAR}, which does not depend on the query",
            f"at best {best[LINEAR][0]:.2g} of the error without, at n = {best[LINEAR][1]}",
            best[LINEAR][0] > HELPS,
        ),
    ]


def _ratios(results: Results) -> Results:
    """The error with the bias over that without, for every target, size and seed."""
    points = rules.curve_points(results)
    ratios = []
    for biased in points.where(model="brfa"):
        at = {"examples": biased["examples"], "seed": biased["seed"]}
        (plain,) = points.where(model="rfa", **at)
        ratios.append(Result(at, {t: biased[t] / plain[t] for t in biased.measured}))
    return Results(tuple(ratios))


def draw(results: Results, figure: figures.Figure) -> None:
    axes = figure.subplots()
    ratios = _ratios(results)
    for number, target in enumerate([LINEAR, *WEIGHTED.values()]):
        figures.curve(axes, ratios, "examples", target, f"${target}$", number)
    figures.level(axes, ratios.of("examples"), HELPS, "asked for, somewhere")
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="examples $n$", ylabel="error BRFA / error RFA")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


CLAIM = Claim(FIRST_PAPER, RULE, SETTINGS, measure, judge, draw)
