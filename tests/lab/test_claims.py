"""What all claims have in common; what each measures and when it holds is tested in claims/."""

import json
import re
from pathlib import Path

import pytest

from onelayer.lab import claims
from onelayer.lab.claim import FIRST_PAPER, SECOND_PAPER, SIZES

KNOWN = claims.known()


@pytest.fixture(params=KNOWN)
def claim(request):
    return KNOWN[request.param]


def test_a_claim_has_the_name_of_its_file_and_a_test_of_its_own(claim):
    module = claim.measure.__module__.rpartition(".")[2]
    assert re.fullmatch("[a-z]+(-[a-z]+)*", claim.name)
    assert claim.name == module.replace("_", "-")
    assert (Path(__file__).parent / "claims" / f"test_{module}.py").is_file()


def test_a_claim_says_what_it_is_about(claim):
    assert claim.source in (FIRST_PAPER, SECOND_PAPER)
    assert 10 < len(claim.title) < 100
    for text in (claim.prediction, claim.rule):
        assert len(text) > 60
        assert text.endswith((".", ".)"))
    assert re.search(r"\d", claim.rule), "a rule has a number in it"


def test_all_sizes_have_the_same_settings(claim):
    assert list(claim.sizes) == list(SIZES)
    names = {frozenset(settings) for settings in claim.sizes.values()}
    assert len(names) == 1


@pytest.mark.parametrize("size", SIZES)
def test_cells_are_scalars_with_a_seed_each_once(claim, size):
    cells = [dict(cell) for cell in claim.cells(claim.settings(size))]
    assert cells
    texts = [json.dumps(cell, sort_keys=True, allow_nan=False) for cell in cells]
    assert len(set(texts)) == len(texts)
    for cell in cells:
        assert isinstance(cell["seed"], int)
        assert all(
            value is None or isinstance(value, bool | int | float | str) for value in cell.values()
        )


def test_more_seeds_are_more_cells_of_the_same_kind(claim):
    few, more = (
        [dict(c) for c in claim.cells(claim.settings("quick", {"seeds": n}))] for n in (1, 2)
    )
    assert len(more) > len(few)
    assert all(cell in more for cell in few)
    assert {cell["seed"] for cell in more} == {0, 1}


def test_claims_are_found_by_name():
    assert claims.named([]) == list(KNOWN.values())
    assert [c.name for c in claims.named(["noise", "heads", "noise"])] == ["noise", "heads"]
    with pytest.raises(ValueError, match="there is no claim 'nose', expected one of "):
        claims.named(["nose"])


def test_both_papers_are_there_in_full():
    asked = {
        "expressivity", "sample-size", "keys", "bias", "kernel-limit", "excess-risk",
        "bias-structure", "positions", "depth", "order", "double-descent", "learned-attention",
        "six-phases", "heads",
        "conditions-random", "conditions-real", "structured-attention", "violated-conditions",
        "inputs", "noise", "hard-instances",
    }  # fmt: skip
    assert asked <= set(KNOWN)
