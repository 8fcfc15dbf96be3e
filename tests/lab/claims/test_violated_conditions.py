import lab_cases
import pytest

from onelayer import conditions, recover
from onelayer.lab import layer_families
from onelayer.lab.claims import known, violated_conditions
from onelayer.lab.recovery_setup import worst_head
from onelayer.lab.seeds import generator

NAME = "violated-conditions"
FOUND = {
    "stopped": None,
    "violated": [],
    **{f"{way} converged": True for way in ("phases", "polished", "refine")},
    **{f"{way} reason": "exact" for way in ("phases", "polished", "refine")},
    "phases error": 0.01,
    "polished error": 1e-12,
    "refine error": 1e-12,
}
REFUSED = FOUND | {
    "stopped": 5,
    "violated": ["distance"],
    "phases error": 0.8,
    "phases converged": False,
    "polished error": 0.8,
    "polished converged": False,
}
CHANGES = {"family": ["distance", "noise"]}  # of all settings


def predicted(family, step, **parameters):
    """Errors grow as a condition is violated, until a phase refuses."""
    if step == layer_families.FAMILIES[family].steps[-1]:
        return REFUSED
    first = step == layer_families.FAMILIES[family].steps[0]
    return FOUND if first else FOUND | {"violated": ["distance"], "phases error": 0.03}


def judged(measured, **changes):
    return lab_cases.judged(NAME, measured, **CHANGES | changes)


def at(place, family="distance", **changes):
    """As predicted but for one of the three steps of a family."""

    def measured(**parameters):
        found = predicted(**parameters)
        wanted = layer_families.FAMILIES[family].thinned(3)[place]
        here = (parameters["family"], parameters["step"]) == (family, wanted)
        return found | changes if here else found

    return measured


def test_errors_that_grow_until_a_phase_refuses_are_as_predicted():
    assert judged(predicted) == ("holds", [])


@pytest.mark.parametrize(
    ("measured", "statement"),
    [
        (
            at(0, **{"phases error": 0.11, "phases converged": False}),
            "of the layers that meet all conditions, the six phases find 90%",
        ),
        (
            at(0, **{"polished error": 2e-3, "polished converged": False}),
            "of the layers that meet all conditions, polishing then gives 90%",
        ),
        (
            at(1, **{"phases error": 0.11}),
            "the six phases: no layer that is called converged is wrong",
        ),
        (
            at(1, **{"phases error": None}),
            "the six phases: no layer that is called converged is wrong",
        ),
        (
            at(1, **{"polished error": 2e-3}),
            "the six phases, polished: no layer that is called converged is wrong",
        ),
        (
            at(1, **{"refine error": 2e-3}),
            "Gauss-Newton steps alone: no layer that is called converged is wrong",
        ),
        (
            at(1, "noise", **{"refine error": 0.11}),
            "Gauss-Newton steps alone: no layer that is called converged is wrong",
        ),
        (
            at(2, **FOUND | {"violated": ["distance"], "phases error": 0.019}),
            "every family's worst step has 2 times the error of its first, or is refused",
        ),
    ],
)
def test_every_part_of_the_rule_can_fail(measured, statement):
    outcome, (failed,) = judged(measured)
    assert outcome == "fails"
    assert failed.startswith(statement)


@pytest.mark.parametrize(
    "measured",
    [
        at(1, **{"phases error": 0.5, "phases converged": False}),
        at(1, "noise", **{"refine error": 0.09, "polished error": 0.09}),
        at(0, "noise", **{"phases error": 0.5, "phases converged": False}),
        at(2, **FOUND | {"violated": ["distance"], "phases error": 0.021}),
    ],
)
def test_what_the_rule_does_not_ask_for(measured):
    assert judged(measured) == ("holds", [])


def test_a_wrong_claim_is_told_with_its_step():
    results = lab_cases.made_up(NAME, at(1, **{"phases error": 0.5}), **CHANGES)
    (check,) = (check for check in known()[NAME].judge(results) if not check.holds)
    assert check.measured == "distance 20: 0.5"


@pytest.mark.parametrize(
    ("measured", "changes", "why"),
    [
        (predicted, {"steps": 1}, "the family distance has one step, which shows no change"),
        (
            lambda **parameters: REFUSED,
            {},
            "no layer meets all conditions, so that none has to be found",
        ),
    ],
)
def test_results_that_allow_no_verdict(measured, changes, why):
    results = lab_cases.made_up(NAME, measured, **CHANGES | changes)
    verdict = known()[NAME].verdict(results)
    assert (verdict.outcome, verdict.why) == ("undecided", why)


def test_cells_are_the_steps_of_every_family():
    claim = known()[NAME]
    cells = claim.cells(claim.settings("quick", CHANGES | {"steps": 9, "seeds": 2}))
    found = [(cell["family"], cell["step"]) for cell in cells if cell["seed"] == 1]
    assert found == [
        (n, s) for n in ("distance", "noise") for s in layer_families.FAMILIES[n].steps
    ]
    with pytest.raises(ValueError, match="family is 'none', expected one of distance, opposite"):
        claim.cells(claim.settings("quick", {"family": ["none"]}))


def test_a_condition_that_fails_by_rounding_alone_holds():
    layer, _, _ = layer_families.instance(
        layer_families.FAMILIES["small-scale"], 1.5, 8, 3, 3.0, 1, seed=0
    )
    assert conditions(layer)["scale"].measured == pytest.approx(1.5, abs=1e-12)
    assert violated_conditions._violated(layer) == []


@pytest.mark.slow
def test_a_good_layer_is_found_and_a_flat_one_refused():
    tiny = {"dim": 7, "tokens": 2, "sculpt_examples": 4000, "refine_examples": 400}
    good, flat = lab_cases.measured(NAME, family=["small-scale"], steps=2, **tiny)
    assert (good["step"], good["violated"], good["stopped"]) == (3.0, [], None)
    assert good["phases error"] < 0.3
    assert good["polished reason"] == good["refine reason"] == "exact"
    assert max(good["polished error"], good["refine error"]) < 1e-9
    assert (flat["step"], flat["violated"]) == (0.5, ["scale"])
    assert flat["stopped"] in range(1, 6)
    assert flat["refine converged"]

    # What is refused is not polished, and asking for it makes no difference.
    layer, X, Y = layer_families.instance(
        layer_families.FAMILIES["small-scale"], 0.5, 7, 2, 3.0, 4000, seed=0
    )
    found = recover(X, Y, heads=2, method="sculpt", seed=generator(0, "search"))
    assert found.reason.name.lower() == flat["phases reason"] == flat["polished reason"]
    assert worst_head(found.layer, layer) == flat["phases error"] == flat["polished error"]
