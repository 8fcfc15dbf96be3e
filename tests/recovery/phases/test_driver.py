import math
from dataclasses import dataclass, field, replace

import numpy as np
import oracles
import pytest
from cases import gathered

from onelayer import AttentionLayer, Reason, inputs
from onelayer.array.backend import namespace, to_numpy
from onelayer.recovery.gauss_newton import varpro
from onelayer.recovery.phases import driver
from onelayer.recovery.phases.affine_hull import ExtractHull
from onelayer.recovery.phases.candidates import SolveCandidates
from onelayer.recovery.phases.polytope import Polytope
from onelayer.recovery.phases.projection_sum import CrudeSum, RefinedSum
from onelayer.recovery.phases.sculpt import Sculpt
from onelayer.recovery.phases.state import (
    AffineHull,
    Phase,
    PhaseState,
    Sculpture,
    Step,
    SumEstimate,
)
from onelayer.recovery.strategies.sculpt import random_positions
from onelayer.recovery.trace import Log

STAGES = [
    "phase 1: crude sum of projections",
    "phase 2: sculpt",
    "phase 3: refined sum",
    "phase 4: sculpt again",
    "phase 5: span",
    "phase 6: candidates",
]
SCULPT = Sculpt()


def begin(layer, X, heads=2, fitted=500, as_array=np.asarray):
    """The state before the first phase: a twentieth of the examples held out to choose by."""
    rng = np.random.default_rng(0)
    n = len(X)
    held_out = np.sort(rng.choice(n, max(1, n // 20), replace=False))
    source = gathered(as_array(X), as_array(layer(X)), held_out)
    chosen = random_positions(source, fitted, rng)
    return PhaseState(source, source.take(chosen), source.take(held_out), heads)


def random_layer(seed=2, heads=2, **options):
    return AttentionLayer.random(heads=heads, dim=8, scale=3.0, seed=seed, **options)


def ran(state, max_steps=100, max_seconds=None, phases=driver.PHASES):
    """(the state after all phases, the trace)."""
    log = Log(max_steps, max_seconds)
    return driver.run(state, log, phases=phases), log.rows


def taken(phase, state):
    """(the state after one phase, what it measured)."""
    seen = []
    state = driver.run(state, Log(1, None), lambda *heard: seen.append(heard), (phase,))
    ((heard, step),) = seen
    assert (heard, step.state) == (phase, state)
    return state, step


def root(state):
    return np.linalg.pinv(to_numpy(state.examples.whitening))


def true_heads(layer, state):
    """The attention matrices as vectors, in the coordinates of the phases."""
    return (root(state) @ layer.attention @ root(state).T).reshape(layer.heads, -1)


def sum_error(layer, state):
    W = root(state) @ layer.projection.sum(axis=0) / state.examples.output_scale
    return oracles.relative_error(to_numpy(state.sum.projection_sum), W)


def distance(layer, state, centre, basis):
    """Of the farthest head from an affine hull, relative to the head."""
    heads = true_heads(layer, state)
    away = heads - centre
    away = away - (away @ basis.T) @ basis
    return float(np.max(np.linalg.norm(away, axis=1) / np.linalg.norm(heads, axis=1)))


def head_error(layer, state):
    """(attention, projection): the largest relative errors of the heads that were found."""
    fit = state.found.fit
    match = state.fitted.layer(fit.theta, fit.weights).to(np.zeros(1)).distance(layer)
    return match.attention.max(), match.projection.max()


def exact_space(layer, state):
    """The affine hull of two heads."""
    first, second = true_heads(layer, state)
    basis = (first - second)[None] / np.linalg.norm(first - second)
    return AffineHull(first - (first @ basis.T) @ basis, basis, gap=np.inf, error=0.0)


def sculpture_around(hull, closed=True, noise=0.01):
    """A polytope of random slabs around a hull, as if from phase 4; bounded if `closed`."""
    rng = np.random.default_rng(0)
    _, _, directions = np.linalg.svd(hull.basis)
    count = len(hull.centre)
    normals = rng.standard_normal((10 * count, count - len(hull.basis)))
    normals = normals @ directions[len(hull.basis) :]
    middle = normals @ hull.centre + noise * rng.standard_normal(10 * count)
    error = np.full(10 * count, noise)
    if closed:
        normals, middle = np.concatenate([normals, hull.basis]), np.append(middle, 0.0)
        error = np.append(error, 1.0)
    polytope = Polytope(normals, middle - 8 * error, middle + 8 * error, error)
    spectrum = polytope.spectrum()
    free = len(hull.basis)
    return Sculpture(polytope, spectrum, free, polytope.centre(spectrum, free), rejected=0.0)


# Each phase alone


class Walk:
    """The six phases one by one, each once: the state after every one and what it measured."""

    def __init__(self, seed, draw):
        self.layer = random_layer(seed)
        self.start = begin(self.layer, draw(20_000, 3, 8, seed=seed + 100))
        self.states, self.measured = [self.start], []
        for phase in (CrudeSum(), SCULPT, RefinedSum(), SCULPT, ExtractHull(), SolveCandidates()):
            state, measured = taken(phase, self.states[-1])
            self.states.append(state)
            self.measured.append(measured)

    def after(self, phase):
        return self.states[phase], self.measured[phase - 1]


@pytest.fixture(
    scope="module",
    params=[(0, inputs.boolean), (2, inputs.boolean), (1, inputs.gaussian)],
    ids=["boolean 0", "boolean 2", "gaussian 1"],
)
def walk(request):
    return Walk(*request.param)


@pytest.mark.slow
def test_no_phase_refuses_a_good_layer(walk):
    assert [state.refusal for state in walk.states] == [None] * 7
    assert all(0 < measured.error < math.inf for measured in walk.measured)
    assert all(measured.note for measured in walk.measured)


def test_a_phase_adds_to_the_state_and_takes_nothing_away(walk):
    names = ("sum", "sculpture", "hull", "found")
    known = [[getattr(state, name) is not None for name in names] for state in walk.states]
    assert known == [
        [False, False, False, False],
        [True, False, False, False],
        [True, True, False, False],
        [True, True, False, False],
        [True, True, False, False],
        [True, True, True, False],
        [True, True, True, True],
    ]
    for before, after in zip(walk.states, walk.states[1:], strict=False):
        assert after.examples is before.examples
        assert (after.fitted, after.other) == (before.fitted, before.other)


@pytest.mark.slow
def test_errors_of_the_sums_are_as_measured(walk):
    crude, measured = walk.after(1)
    assert measured.error == crude.sum.error
    assert measured.examples == 19_000
    assert 0.5 * sum_error(walk.layer, crude) < measured.error < 3 * sum_error(walk.layer, crude)
    refined, measured = walk.after(3)
    assert measured.error == refined.sum.error
    assert measured.examples == 19_000
    assert sum_error(walk.layer, refined) < measured.error < 0.05
    assert measured.error < 0.2 * crude.sum.error


def test_the_hull_is_as_near_as_measured(walk):
    state, measured = walk.after(4)
    sculpture = state.sculpture
    assert sculpture.free == 1
    basis = sculpture.spectrum.directions[:1]
    assert distance(walk.layer, state, sculpture.centre, basis) < measured.error < 0.15
    assert measured.error < 0.5 * walk.after(2)[1].error
    assert measured.examples == 19_000
    two_sided = int(sculpture.polytope.two_sided.sum())
    assert (
        f"{two_sided} slabs, {len(sculpture.polytope.error) - two_sided} one-sided" in measured.note
    )


def test_the_space_of_the_heads_is_as_near_as_measured(walk):
    state, measured = walk.after(5)
    hull = state.hull
    assert state.heads == hull.heads == 2
    assert measured.error == hull.error
    assert distance(walk.layer, state, hull.centre, hull.basis) < hull.error
    assert hull.gap > 3
    assert measured.examples == 19_000
    assert measured.note.startswith("1 free directions, gap ")


def test_heads_and_projections_are_as_near_as_their_space(walk):
    state, measured = walk.after(6)
    attention, projection = head_error(walk.layer, state)
    assert attention < 1.3 * state.hull.error  # measured: 0.3 to 1.2 times, mostly half of it
    assert projection < 0.03
    error = varpro.held_out_error(state.found.fit, state.other)
    assert measured.error == state.found.held_out_error == error < 0.05
    assert measured.examples == 500
    assert measured.note.startswith(f"{state.found.tuples} tuples of candidates")


def test_sculpting_rests_on_the_sum_alone():
    layer = random_layer()
    state = begin(layer, inputs.gaussian(5000, 3, 8, seed=0))
    W = root(state) @ layer.projection.sum(axis=0) / state.examples.output_scale
    state, measured = taken(SCULPT, replace(state, sum=SumEstimate(W, 1e-3, 1)))
    sculpture = state.sculpture
    basis = sculpture.spectrum.directions[: sculpture.free]
    assert sculpture.free == 1
    assert distance(layer, state, sculpture.centre, basis) < measured.error < 0.1
    assert state.sum.rows == 1


def test_the_sum_is_refined_from_the_sculpture_alone():
    layer = random_layer()
    state = begin(layer, inputs.boolean(5000, 3, 8, seed=0))
    sculpture = sculpture_around(exact_space(layer, state))
    state, measured = taken(RefinedSum(), replace(state, sculpture=sculpture))
    assert state.refusal is None
    assert sum_error(layer, state) < measured.error < 0.05


@pytest.mark.parametrize("solved", [True, False])
def test_the_sum_is_refined_at_the_least_point_or_else_at_the_middle_of_the_slabs(
    monkeypatch, solved
):
    layer = random_layer()
    state = begin(layer, inputs.boolean(2000, 3, 8, seed=0))
    state = replace(state, sculpture=sculpture_around(exact_space(layer, state)))
    least, middle = np.random.default_rng(0).standard_normal(64), state.sculpture.centre
    monkeypatch.setattr(Polytope, "minimum_norm", lambda polytope: least if solved else None)
    found, _ = taken(RefinedSum(), state)
    at_least, at_middle = (
        RefinedSum().estimate(state.examples, point.reshape(8, 8)) for point in (least, middle)
    )
    expected = at_least if solved else at_middle
    np.testing.assert_array_equal(found.sum.projection_sum, expected.projection_sum)
    assert found.sum.error == expected.error
    assert at_least.error != at_middle.error


@pytest.mark.parametrize("heads", [2, None])
def test_the_space_is_extracted_from_the_sculpture_alone(heads):
    layer = random_layer()
    state = begin(layer, inputs.boolean(50, 3, 8, seed=0), heads)
    sculpture = sculpture_around(exact_space(layer, state))
    state, _ = taken(ExtractHull(), replace(state, sculpture=sculpture))
    assert state.refusal is None
    assert state.heads == 2
    assert distance(layer, state, state.hull.centre, state.hull.basis) < 0.01


def test_heads_are_found_in_a_space_that_contains_them(xp_array):
    layer = random_layer()
    X = inputs.boolean(300, 3, 8, seed=0)
    state = begin(layer, X, fitted=150, as_array=xp_array)
    hull = exact_space(layer, state)
    state = replace(state, hull=hull, sculpture=sculpture_around(hull))
    state, measured = taken(SolveCandidates(refined=1), state)
    assert state.refusal is None
    assert namespace(state.found.fit.theta) is namespace(state.examples.whitening)
    assert max(head_error(layer, state)) < 1e-5
    assert measured.error < 1e-5


# All of them


@pytest.fixture(scope="module")
def good():
    layer = random_layer(3)
    return layer, *ran(begin(layer, inputs.boolean(20_000, 3, 8, seed=0), heads=None))


@pytest.mark.slow
def test_all_phases_are_in_the_trace_in_their_order(good):
    _, state, rows = good
    stages = [row.stage for row in rows]
    rounds = (len(rows) - 4) // 2
    assert 1 <= rounds <= 4
    assert stages == STAGES[:2] + STAGES[2:4] * rounds + STAGES[4:]
    assert [row.phase for row in rows] == [1, 2] + [3, 4] * rounds + [5, 6]
    assert [row.step for row in rows] == list(range(len(rows)))
    assert all(row.note for row in rows)
    assert [row.heads for row in rows] == [0] * (len(rows) - 2) + [2, 2]
    assert [row.error for row in rows[-2:]] == [state.hull.error, state.found.held_out_error]
    assert min(row.error for row in rows if row.stage == STAGES[2]) == state.sum.error


def test_a_good_layer_is_found_with_errors_as_measured(good):
    layer, state, rows = good
    assert state.refusal is None
    assert state.heads == 2  # though nobody said so
    by_stage = {row.stage: row.error for row in rows}
    assert sum_error(layer, state) < by_stage[STAGES[2]] < 0.02
    sculpture = state.sculpture
    basis = sculpture.spectrum.directions[: sculpture.free]
    assert distance(layer, state, sculpture.centre, basis) < by_stage[STAGES[3]]
    assert distance(layer, state, state.hull.centre, state.hull.basis) < by_stage[STAGES[4]]
    attention, projection = head_error(layer, state)
    assert attention < 1.3 * by_stage[STAGES[4]] < 0.15
    assert projection < 0.03
    assert by_stage[STAGES[5]] < 0.05


def test_the_listener_hears_of_each_phase_when_it_is_done():
    heard = []
    log = Log(2, None, listener=heard.append)
    driver.run(begin(random_layer(), inputs.boolean(1000, 3, 8)), log)
    assert heard == log.rows
    assert [row.stage for row in heard] == STAGES[:2]


@pytest.fixture(scope="module")
def small():
    """A layer, inputs, and where the phases lead with them."""
    layer, X = random_layer(), inputs.gaussian(3000, 3, 8, seed=0)
    return layer, X, *ran(begin(layer, X, fitted=100))


@pytest.mark.slow
def test_phases_repeat_to_the_last_bit(small):
    layer, X, state, rows = small
    again, same_rows = ran(begin(layer, X, fitted=100))
    assert [row.error for row in same_rows] == [row.error for row in rows]
    weights = [run.found.fit.weights.tobytes() for run in (state, again)]
    assert weights[0] == weights[1]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "array_api_strict"])
def test_phases_run_on_other_backends(small, backend):
    layer, X, _, expected = small
    as_array = pytest.importorskip(backend).asarray
    state, rows = ran(begin(layer, X, fitted=100, as_array=as_array))
    assert [row.stage for row in rows] == [row.stage for row in expected]
    errors = [[row.error for row in trace] for trace in (rows, expected)]
    np.testing.assert_allclose(*errors, rtol=1e-4)
    assert namespace(state.found.fit.theta) is namespace(as_array(X))
    assert namespace(state.sum.projection_sum) is namespace(as_array(X))


@dataclass(frozen=True)
class Made(Phase):
    """A phase that measures given errors one after the other, as those of the sum if so asked."""

    number: int = 7
    name: str = "made"
    errors: tuple[float, ...] = (0.0,)
    of_sum: bool = False
    refuses: bool = False
    done: list[int] = field(default_factory=list)

    def step(self, state):
        error = self.errors[len(self.done)]
        self.done.append(1)
        if self.of_sum:
            state = replace(state, sum=SumEstimate(None, error, 1))
        return Step(state, 1, error, "", self.refuses)


@pytest.mark.parametrize(
    ("errors", "rounds", "least"),
    [
        ((0.2, 0.1, 0.05, 0.02, 0.01), 4, 0.02),
        ((0.39, 0.38), 2, 0.38),
        ((0.2, 0.19), 2, 0.19),
        ((0.001,), 1, 0.001),
        ((0.2, 0.001), 2, 0.001),
        ((0.2, 0.3), 2, 0.2),  # a round that makes the sum worse is discarded
    ],
)
def test_sum_and_polytope_are_made_again_while_the_sum_is_poor_and_gets_better(
    errors, rounds, least
):
    refined = Made(number=3, errors=errors, of_sum=True)
    again = Made(number=4, errors=(0.0,) * 4)
    phases = (Made(number=1, errors=(0.4,), of_sum=True), driver.Rounds((refined, again)))
    state, rows = ran(PhaseState(None, None, None, heads=2), phases=phases)
    assert [row.phase for row in rows] == [1] + [3, 4] * rounds
    assert [row.error for row in rows if row.phase == 3] == list(errors[:rounds])
    assert state.sum.error == least


def test_a_phase_that_only_measures_is_one_more_entry_of_the_list():
    before = PhaseState(None, None, None, heads=2)
    state, (row,) = ran(before, phases=(Made(errors=(0.5,)),))
    assert state is before
    assert (row.phase, row.stage, row.error) == (7, "phase 7: made", 0.5)


def test_a_phase_refuses_with_its_own_reason_and_ends_all():
    class Refusing(Made):
        refusal = Reason.NO_CANDIDATES

    state, rows = ran(
        PhaseState(None, None, None, heads=2), phases=(Refusing(refuses=True), Made(number=8))
    )
    assert state.refusal is Reason.NO_CANDIDATES
    assert [row.phase for row in rows] == [7]


# Refusals


def reached(state):
    """What the state knows."""
    names = ("sum", "sculpture", "hull", "found")
    return [name for name in names if getattr(state, name) is not None]


def assert_refused(state, rows, reason, stage):
    """For this reason, after this stage, whose row says what was the matter."""
    assert state.refusal is reason
    assert reason.remedy
    assert rows[-1].stage == stage
    assert rows[-1].note


@pytest.mark.parametrize("out_dim", [1, 2])
def test_outputs_narrower_than_the_tokens_are_many_show_no_agreement(out_dim):
    layer = random_layer(out_dim=out_dim)
    state, rows = ran(begin(layer, inputs.boolean(200, 3, 8)))
    assert_refused(state, rows, Reason.AGREEMENT_HIDDEN, STAGES[0])
    assert len(rows) == 1
    assert rows[0].note == f"3 tokens, outputs of dimension {out_dim}"
    assert rows[0].error == math.inf
    assert reached(state) == []


def test_outputs_that_are_all_zero_show_no_agreement():
    layer = random_layer()
    layer = AttentionLayer(layer.attention, 0 * layer.projection)
    state, rows = ran(begin(layer, inputs.boolean(200, 3, 8)))
    assert_refused(state, rows, Reason.AGREEMENT_HIDDEN, STAGES[0])
    assert rows[0].error == math.inf


def test_outputs_as_wide_as_the_tokens_are_many_are_wide_enough():
    layer = random_layer(out_dim=3)
    state, _ = taken(CrudeSum(), begin(layer, inputs.boolean(200, 3, 8)))
    assert state.refusal is None


@pytest.mark.parametrize("n", [20, 40, 60])
def test_far_too_few_examples_agree_on_too_little(n):
    state, rows = ran(begin(random_layer(), inputs.boolean(n, 3, 8)))
    assert_refused(state, rows, Reason.TOO_FEW_AGREEMENTS, STAGES[1])
    assert [row.error < math.inf for row in rows] == [True, False]
    assert reached(state) == ["sum"]


def test_tokens_that_leave_a_direction_out_have_no_large_margins_along_it():
    layer = random_layer()
    X = inputs.gaussian(4000, 3, 8)
    X[:2000, :, 7] = 0.0
    X[2000:] *= 0.02  # of these no margin is large
    state = begin(layer, X)
    state = replace(state, sculpture=sculpture_around(exact_space(layer, state)))
    state, measured = taken(RefinedSum(), state)
    assert state.refusal is Reason.NO_LARGE_MARGINS
    assert measured.error == math.inf
    assert "sculpture" in reached(state)


def test_a_direction_that_no_token_has_is_not_looked_along():
    layer = random_layer()
    X = inputs.gaussian(500, 3, 8)
    X[..., 7] = 0.0
    state = begin(layer, X)
    assert state.examples.dim == 7
    state = replace(state, sculpture=sculpture_around(exact_space(layer, state)))
    state, measured = taken(RefinedSum(), state)
    assert state.refusal is None
    assert measured.error < math.inf
    assert state.sum.projection_sum.shape == (7, 8)


@pytest.mark.parametrize("max_steps", [1, 2])
def test_phases_end_when_the_steps_are_spent(max_steps):
    state, rows = ran(begin(random_layer(), inputs.boolean(1000, 3, 8)), max_steps)
    assert_refused(state, rows, Reason.BUDGET_SPENT, STAGES[max_steps - 1])
    assert len(rows) == max_steps
    assert reached(state) == ["sum", "sculpture"][:max_steps]


def test_phases_do_not_begin_when_the_seconds_are_spent():
    state, rows = ran(begin(random_layer(), inputs.boolean(100, 3, 8)), max_seconds=1e-9)
    assert state.refusal is Reason.BUDGET_SPENT
    assert rows == []
    assert reached(state) == []


@pytest.mark.slow
def test_more_heads_than_there_are_find_no_span():
    state, rows = ran(begin(random_layer(), inputs.gaussian(5000, 3, 8), heads=3))
    assert_refused(state, rows, Reason.SPAN_NOT_FOUND, STAGES[4])
    assert reached(state) == ["sum", "sculpture", "hull"]
    assert state.hull.heads == 3
    assert state.hull.gap < 2
    assert rows[-1].error > 0.5


@pytest.mark.slow
def test_fewer_heads_than_there_are_do_not_explain():
    state, rows = ran(begin(random_layer(), inputs.gaussian(5000, 3, 8), heads=1))
    assert [row.stage for row in rows][-2:] == STAGES[4:]
    assert state.hull.heads == 1
    assert state.found.held_out_error > 0.3


def test_a_body_without_ends_has_no_candidates():
    layer = random_layer()
    state = begin(layer, inputs.boolean(50, 3, 8))
    hull = exact_space(layer, state)
    state = replace(state, hull=hull, sculpture=sculpture_around(hull, closed=False))
    state, measured = taken(SolveCandidates(), state)
    assert state.refusal is Reason.NO_CANDIDATES
    assert measured.error == math.inf
    assert measured.note == "no grid in the polytope"
    assert reached(state) == ["sculpture", "hull"]


def test_nothing_is_done_after_a_refusal():
    before = replace(
        begin(random_layer(), inputs.boolean(100, 3, 8)), refusal=Reason.NO_LARGE_MARGINS
    )
    state, rows = ran(before)
    assert state is before
    assert rows == []
