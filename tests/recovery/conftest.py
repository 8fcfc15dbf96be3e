"""What the tests of recovery from examples elsewhere share."""

from dataclasses import replace

import pytest
from recoveries import PARTS, PLACES
from threadpoolctl import threadpool_limits

from onelayer.recovery.strategies import settings


@pytest.fixture
def calm():
    """One thread: on a busy machine those of torch wait for each other in busy loops."""
    with threadpool_limits(1):
        yield


@pytest.fixture(params=PLACES)
def put(request):
    """A function that brings an array elsewhere, in so many parts; None stays None."""

    def brought(array, parts=PARTS):
        if array is None:
            return None
        return PLACES[request.param](array, -(-len(array) // parts), request)

    brought.name = request.param
    return brought


@pytest.fixture
def all_are_large(monkeypatch):
    """Every problem counts as large."""
    large = replace(settings.DEFAULT.large, operations=0.0)
    monkeypatch.setattr(settings, "DEFAULT", replace(settings.DEFAULT, large=large))
