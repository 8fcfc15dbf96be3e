import lab_fakes
import numpy as np
import pytest

from onelayer.lab.claim import Check, Result, Results, Undecided, grid


@pytest.fixture
def claim():
    return lab_fakes.claim(lab_fakes.double, number=[0, 1], share=0.5, name="fake", kind="plain")


def results(*values):
    return Results(
        tuple(Result({"number": i, "seed": 0}, {"value": v}) for i, v in enumerate(values))
    )


# Settings


def test_settings_are_changed_in_kind(claim):
    changed = claim.settings("quick", {"number": 7, "share": 1, "kind": "bent", "seeds": 3})
    assert changed == {"number": [7], "share": 1.0, "kind": "bent", "seeds": 3}
    assert isinstance(changed["share"], float)
    assert claim.settings("quick")["number"] == [0, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 3}, "fake has no setting 'dim', expected one of number, seeds, share, kind"),
        ({"number": "many"}, "fake: number is 'many', expected a value like 0"),
        ({"number": [1, 2.5]}, "fake: number is 2.5, expected a value like 0"),
        ({"number": True}, "fake: number is True, expected a value like 0"),
        ({"share": [1, 2]}, r"fake: share is \[1, 2\], expected one value"),
        ({"share": False}, "fake: share is False, expected a value like 0.5"),
        ({"share": float("inf")}, "fake: share is inf, expected a value like 0.5"),
        ({"kind": 3}, "fake: kind is 3, expected a value like 'plain'"),
        ({"number": []}, r"fake: number is \[\], expected at least one value"),
    ],
)
def test_settings_that_do_not_fit_are_refused(claim, change, message):
    with pytest.raises(ValueError, match=message):
        claim.settings("quick", change)


@pytest.mark.parametrize("seeds", [0, -1, 1.5, True, "two", 10**9])
def test_a_number_of_seeds_is_a_number(seeds):
    with pytest.raises(ValueError, match="expected a whole number from 1 to 10000"):
        grid({"seeds": seeds})


# Results


def test_results_are_chosen_by_parameters_in_the_order_of_the_grid():
    cells = grid({"model": ["rfmlp", "rfa"], "heads": [9, 3], "seeds": 2})
    found = Results(tuple(Result(c, {"error": c["heads"] + c["seed"]}) for c in cells))
    assert found.of("model") == ["rfmlp", "rfa"]
    assert [(heads, len(part)) for heads, part in found.by("heads")] == [(9, 4), (3, 4)]
    part = found.where(model="rfa", heads=3)
    np.testing.assert_array_equal(part.numbers("error"), [3, 4])
    assert len(found.where(model="other")) == 0
    assert [cell["error"] for cell in part] == [3, 4]
    assert [cell["heads"] for cell in part] == [3, 3]


def test_what_was_not_reached_is_infinite_or_what_the_caller_says():
    np.testing.assert_array_equal(results(1, None).numbers("value"), [1, np.inf])
    np.testing.assert_array_equal(results(None, 2).numbers("value", missing=-1), [-1, 2])


# Verdicts


def test_a_verdict_holds_if_all_checks_do(claim):
    assert claim.verdict(results(1, 2)).outcome == "holds"
    verdict = claim.verdict(results(1, 200))
    assert verdict.outcome == "fails"
    assert [check.holds for check in verdict.checks] == [False]


@pytest.mark.parametrize(
    ("others", "why"),
    [
        (["not run"] * 3, "of 5 cells 3 not run"),
        (["failed", "not run", "not run"], "of 5 cells 2 not run and 1 failed"),
        (["failed"], "of 3 cells 1 failed"),
    ],
)
def test_a_verdict_is_undecided_until_all_cells_are_measured(claim, others, why):
    verdict = claim.verdict([*results(1, 2), *(Result({}, status=status) for status in others)])
    assert (verdict.outcome, verdict.checks, verdict.why) == ("undecided", (), why)


def test_a_rule_may_say_what_it_misses(claim, monkeypatch):
    def judge(found):
        raise Undecided("one number is not enough")

    object.__setattr__(claim, "judge", judge)
    verdict = claim.verdict(results(1))
    assert (verdict.outcome, verdict.why) == ("undecided", "one number is not enough")


def test_a_rule_that_breaks_is_no_verdict(claim):
    verdict = claim.verdict(Results((Result({"seed": 0}, {"other": 1}),)))
    assert (verdict.outcome, verdict.why) == ("undecided", "the rule broke: KeyError: 'value'")


def test_a_rule_without_checks_is_no_verdict(claim):
    object.__setattr__(claim, "judge", lambda found: [])
    assert claim.verdict(results(1)).outcome == "undecided"
    object.__setattr__(claim, "judge", lambda found: [Check("a", "b", True)])
    assert claim.verdict(results(1)).outcome == "holds"
