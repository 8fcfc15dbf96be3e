"""Cells of claims whose methods or models have settings of their own."""

from typing import Any

from onelayer.lab.claim import Parameters, Settings, Value, grid
from onelayer.lab.recovery_setup import METHODS

_OWN_EXAMPLES = {
    "rfa": "attention_examples",
    "brfa": "attention_examples",
    "rfmlp": "network_examples",
}


def grid_by_method(settings: Settings) -> list[dict[str, Value]]:
    """The cells of both methods; `sculpt_heads` are the `heads` of the method `sculpt` alone.

    >>> grid_by_method({"dim": 4, "sculpt_heads": 1, "refine_heads": [2, 3], "seeds": 1})
    [{'method': 'sculpt', 'dim': 4, 'heads': 1, 'seed': 0},
     {'method': 'refine', 'dim': 4, 'heads': 2, 'seed': 0},
     {'method': 'refine', 'dim': 4, 'heads': 3, 'seed': 0}]
    """
    cells = []
    for method in METHODS:
        own: dict[str, Any] = {"method": method}
        for name, value in settings.items():
            prefix, _, rest = name.partition("_")
            if prefix == method:
                own[rest] = value
            elif prefix not in METHODS:
                own[name] = value
        cells += grid(own)
    return cells


def grid_by_model(settings: Settings) -> list[Parameters]:
    """All combinations, with a number of examples of their own for attention and the network.

    >>> both = {"model": ["rfa", "rfmlp"], "attention_examples": 8, "network_examples": 64}
    >>> grid_by_model({**both, "seeds": 1})
    [{'model': 'rfa', 'seed': 0, 'examples': 8}, {'model': 'rfmlp', 'seed': 0, 'examples': 64}]
    """
    shared = {k: v for k, v in settings.items() if k not in _OWN_EXAMPLES.values()}
    largest: dict[Any, Any] = {model: settings[name] for model, name in _OWN_EXAMPLES.items()}
    return [{**cell, "examples": largest[cell["model"]]} for cell in grid(shared)]
