"""`onelayer recover --checkpoint FILE --resume`."""

import numpy as np
import pytest
from command_line import assert_refused, run, words

from onelayer import AttentionLayer, inputs


@pytest.fixture
def examples(tmp_path):
    """A file of examples, and the layer behind them."""
    layer = AttentionLayer.random(heads=2, dim=4, seed=0)
    X = inputs.boolean(300, 3, 4, seed=1)
    path = tmp_path / "examples.npz"
    np.savez(path, X=X, Y=layer(X))
    return path, layer


def test_a_run_goes_on_from_its_checkpoint(examples, tmp_path):
    path, layer = examples
    best, output = tmp_path / "best.safetensors", tmp_path / "layer.safetensors"
    call = ["recover", path, "--heads", 2, "-o", output, "--checkpoint", best]
    assert run(*call, "--max-seconds", 1e-9).exit_code == 1
    assert not output.exists()
    assert AttentionLayer.load(best).heads == 2
    assert run(*call, "--resume").exit_code == 0
    assert AttentionLayer.load(output).distance(layer).attention.max() < 1e-9


def test_wrong_calls_are_refused_in_one_line(examples, tmp_path):
    path, layer = examples
    best, output = tmp_path / "best.safetensors", tmp_path / "layer.safetensors"
    call = ["recover", path, "--heads", 2, "-o", output]
    assert_refused(run(*call, "--resume"), "--resume is given without --checkpoint, expected the")
    assert_refused(
        run(*call, "--checkpoint", output),
        f"{output} is to hold the checkpoint and the layer, expected two files",
    )
    assert_refused(
        run(*call, "--checkpoint", best, "--resume"), f"checkpoint {best} does not exist"
    )
    layer.save(best)
    assert_refused(
        run(*call, "--checkpoint", best),
        f"{best} exists, expected --resume to continue from it, or another file",
    )


def test_the_help_shows_how(tmp_path):
    told = words(run("recover", "--help").stdout)
    assert "--checkpoint best.safetensors --resume" in told
