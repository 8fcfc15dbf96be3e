from onelayer.lab import grids


def test_every_model_has_its_own_largest_size():
    settings = {"model": ["rfa", "rfmlp"], "keys": [2, 4], "seeds": 2}
    cells = grids.grid_by_model({**settings, "attention_examples": 8, "network_examples": 64})
    assert len(cells) == 8
    assert {(cell["model"], cell["examples"]) for cell in cells} == {("rfa", 8), ("rfmlp", 64)}
    assert all(set(cell) == {"model", "keys", "seed", "examples"} for cell in cells)
