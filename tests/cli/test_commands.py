import errno
import io
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from command_line import assert_refused, run, run_alone, run_and_interrupt, words

import onelayer
from onelayer import AttentionLayer, inputs
from onelayer.cli import main, terminal
from onelayer.io import safetensors_files

OTHER = b"a file that was there before"


@pytest.fixture
def layer():
    return AttentionLayer.random(heads=2, dim=4)


@pytest.fixture
def examples(layer):
    X = inputs.boolean(150, 3, 4, seed=1)
    return {"X": X, "Y": layer(X)}


@pytest.fixture
def file(tmp_path, examples):
    """An .npz file with the examples."""
    return npz(tmp_path / "examples.npz", **examples)


@pytest.fixture
def output(tmp_path):
    return tmp_path / "layer.safetensors"


def npz(path, **arrays):
    np.savez(path, **arrays)
    return path


def assert_no_rubbish(folder, *names):
    """The folder holds these files and no temporary ones."""
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)


# The demonstration


def test_demo_recovers_a_layer_and_says_how_well():
    result = run("demo", "--heads", 2, "--dim", 4, "--examples", 120, "--seed", 3)
    assert result.exit_code == 0
    text = words(result.stdout)
    assert "2 heads of 4 x 4" in text
    assert "120 random examples" in text
    assert "attention error" in text
    assert "projection error" in text
    assert "exact: the layer explains the examples" in text
    assert "heads not determined none" in text
    table = [line for line in result.stdout.splitlines() if re.match(r"^│\s+[01] │", line)]
    assert len(table) == 2
    errors = [float(number) for line in table for number in re.findall(r"\d\.\de[+-]\d+", line)]
    assert len(errors) == 4
    assert max(errors) < 1e-6


@pytest.mark.slow
def test_demo_that_fails_says_so():
    result = run("demo", "--heads", 3, "--dim", 4, "--examples", 6)
    assert result.exit_code == 1
    text = words(result.stdout)
    assert "too_few_examples" in text
    assert "advice Use more examples" in text


@pytest.mark.slow
def test_demo_runs_on_its_own():
    result = run_alone("demo", "--heads", 2, "--dim", 4, "--examples", 100)
    assert result.returncode == 0
    assert result.stderr == ""
    assert "Recovered heads" in result.stdout
    assert "\x1b" not in result.stdout


@pytest.mark.parametrize("option", [("--heads", 0), ("--dim", 1), ("--examples", 1)])
def test_demo_refuses_what_cannot_be(option):
    result = run("demo", *option)
    assert result.exit_code == 2
    assert option[0] in result.stderr


# Recovery from files


def test_layer_behind_an_npz_file_is_recovered(file, layer, output):
    result = run("recover", file, "-o", output, "--heads", 2)
    assert result.exit_code == 0
    found = AttentionLayer.load(output)
    match = found.distance(layer)
    assert max(match.attention.max(), match.projection.max()) < 1e-9
    text = words(result.stdout)
    assert f"Wrote {found} to {output}" in text
    assert "exact" in text
    assert "held-out examples" in text
    assert "95% sure" in text


def test_layer_behind_a_safetensors_file_is_recovered(tmp_path, examples, layer, output):
    file = tmp_path / "examples.safetensors"
    safetensors.numpy.save_file(examples, file)
    result = run("recover", file, "--output", output)  # the number of heads is found
    assert result.exit_code == 0
    assert AttentionLayer.load(output).distance(layer).attention.max() < 1e-9


@pytest.mark.slow
def test_compressed_and_single_precision_files_do_too(tmp_path, examples, layer, output):
    file = tmp_path / "examples.npz"
    np.savez_compressed(file, **{name: a.astype(np.float32) for name, a in examples.items()})
    assert run("recover", file, "-o", output, "--heads", 2).exit_code == 0
    found = AttentionLayer.load(output)
    assert found.attention.dtype == np.float32
    assert found.distance(layer).attention.max() < 1e-5


def test_all_options_reach_the_recovery(tmp_path, output):
    layer = AttentionLayer.random(heads=2, dim=4, rank=2, bias=True)
    X = inputs.gaussian(200, 3, 4, seed=1)
    mask = np.ones((200, 3), dtype=bool)
    mask[::2, 2] = False
    Y = layer(X, mask=mask, causal=True)
    Y[~mask] = 99.0
    file = npz(tmp_path / "examples.npz", X=X, Y=Y, mask=mask)
    options = "--heads 2 --rank 2 --bias --causal --tol 1e-10 --seed 4 --device cpu --restarts 3"
    result = run("recover", file, "-o", output, *options.split(), "--max-seconds", 60)
    assert result.exit_code == 0
    found = AttentionLayer.load(output)
    assert found.distance(layer).attention.max() < 1e-6
    assert set(np.linalg.matrix_rank(found.attention, tol=1e-8)) == {2}
    assert found.output_bias is not None


def test_an_old_layer_is_replaced(file, output):
    output.write_bytes(OTHER)
    assert run("recover", file, "-o", output, "--heads", 2).exit_code == 0
    assert AttentionLayer.load(output).heads == 2
    assert_no_rubbish(output.parent, file.name, output.name)


@pytest.mark.slow
def test_the_installed_command_is_this_one(file, output):
    script = Path(sys.executable).with_name("onelayer")
    result = subprocess.run(
        [script, "recover", file, "-o", output, "--heads", "2"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0
    assert result.stderr == ""
    assert AttentionLayer.load(output).heads == 2


def test_what_is_not_to_be_believed_is_not_written(file, output):
    output.write_bytes(OTHER)
    result = run("recover", file, "-o", output, "--heads", 1, "--restarts", 1)
    assert result.exit_code == 1
    assert output.read_bytes() == OTHER
    text = words(result.stdout)
    assert "Nothing was written" in text
    assert "advice Ask for more heads" in text
    assert_no_rubbish(output.parent, file.name, output.name)


def test_what_is_not_to_be_believed_is_written_by_force(file, output):
    result = run("recover", file, "-o", output, "--heads", 1, "--restarts", 1, "--force")
    assert result.exit_code == 1
    assert AttentionLayer.load(output).heads == 1
    assert "Wrote" in result.stdout


def test_time_that_runs_out_is_told(tmp_path, output):
    X = inputs.gaussian(400, 4, 8)
    Y = np.random.default_rng(1).standard_normal(X.shape)
    file = npz(tmp_path / "noise.npz", X=X, Y=Y)
    result = run("recover", file, "-o", output, "--heads", 4, "--max-seconds", 1e-6)
    assert result.exit_code == 1
    assert "budget_spent" in result.stdout
    assert not output.exists()


# Conditions


def rows_of(table):
    """The cells of a table's rows, by the first of them."""
    lines = [line for line in table.splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    return {row[0]: row[1:] for row in cells}


@pytest.fixture
def sound(tmp_path):
    """The file of a layer that meets all conditions."""
    parts = np.stack([np.roll(np.diag([1.0, 0.9, 0.8, 0.7]), part, axis=0) for part in range(2)])
    layer = AttentionLayer(2 * parts, parts * np.array([1.0, 0.5])[:, None, None])
    layer.save(tmp_path / "sound.safetensors")
    return tmp_path / "sound.safetensors"


@pytest.fixture
def unsound(tmp_path):
    """The file of a layer that fails some."""
    onelayer.hard_instance(parity=3, dim=5).save(tmp_path / "unsound.safetensors")
    return tmp_path / "unsound.safetensors"


def test_conditions_that_hold(sound):
    result = run("conditions", sound)
    assert result.exit_code == 0
    assert result.stderr == ""
    assert "Conditions of AttentionLayer(heads=2, dim=4, out_dim=4)" in result.stdout
    assert "12 of 12 conditions hold." in result.stdout
    found = onelayer.conditions(AttentionLayer.load(sound))
    rows = rows_of(result.stdout)
    assert list(rows) == list(found)
    for name, condition in found.items():
        sign = ">=" if condition.at_least else "<="
        needed = f"{sign} {condition.needed:g}"
        assert rows[name] == [f"{condition.measured:.3g}", needed, "yes", condition.meaning]


def test_conditions_that_do_not_hold(unsound):
    result = run("conditions", unsound)
    assert result.exit_code == 1
    found = onelayer.conditions(AttentionLayer.load(unsound))
    rows = rows_of(result.stdout)
    assert {name: row[2] == "yes" for name, row in rows.items()} == {
        name: condition.holds for name, condition in found.items()
    }
    assert rows["largest scale"][:3] == ["52.9", "<= 10", "no"]
    assert f"{sum(c.holds for c in found.values())} of 12 conditions hold." in result.stdout


def test_conditions_beside_those_of_random_layers(unsound):
    result = run("conditions", unsound, "--survey", 7, "--seed", 3)
    assert result.exit_code == 1
    assert result.stderr == ""
    text = words(result.stdout)
    assert "random: random:" in text
    assert "median over 7 random layers of the same shape" in text
    survey = onelayer.survey_conditions(3, 5, samples=7, seed=3, out_dim=1)
    rows = rows_of(result.stdout)
    assert list(rows) == list(survey)
    for name, found in survey.items():
        assert rows[name][3:5] == [f"{found.median:.3g}", f"{found.share:.0%}"]
        assert len(rows[name]) == 6
    assert run("conditions", unsound, "--survey", 7, "--seed", 3).stdout == result.stdout
    assert run("conditions", unsound, "--survey", 7, "--seed", 4).stdout != result.stdout


def test_a_narrow_screen_shows_numbers_and_names_whole(sound, monkeypatch):
    monkeypatch.setattr(terminal.out, "width", 80)
    result = run("conditions", sound, "--survey", 3)
    assert result.exit_code == 0
    assert result.stderr == ""
    assert "…" not in result.stdout
    assert "projection independence" in result.stdout
    assert "meaning" not in result.stdout
    assert "meaning" in run("conditions", sound).stdout
    monkeypatch.setattr(terminal.out, "width", 60)
    assert "…" not in run("conditions", sound, "--survey", 3).stdout


def test_a_layer_that_was_recovered_can_be_judged(file, output):
    assert run("recover", file, "-o", output, "--heads", 2).exit_code == 0
    result = run("conditions", output)
    assert result.exit_code in (0, 1)
    assert rows_of(result.stdout)["scale"][0] == "2"


def test_conditions_of_a_file_that_is_not_there(tmp_path):
    path = tmp_path / "none.safetensors"
    assert_refused(run("conditions", path), "No such file or directory", str(path))


def test_conditions_of_a_folder(tmp_path):
    assert_refused(run("conditions", tmp_path), str(tmp_path))


def test_conditions_of_a_file_that_holds_no_layer(tmp_path, file, sound):
    assert_refused(run("conditions", file), "is not a whole safetensors file")
    sound.write_bytes(sound.read_bytes()[:-9])
    assert_refused(run("conditions", sound), "is not a whole safetensors file")
    safetensors.numpy.save_file({"X": np.ones(3)}, tmp_path / "other.safetensors")
    assert_refused(
        run("conditions", tmp_path / "other.safetensors"),
        "is not a onelayer file: it holds ['X'], expected 'attention' and 'projection'",
    )
    wrong = {"attention": np.ones((2, 3, 3)), "projection": np.ones((2, 4, 3))}
    safetensors.numpy.save_file(wrong, tmp_path / "wrong.safetensors")
    assert_refused(
        run("conditions", tmp_path / "wrong.safetensors"),
        "does not hold a valid layer: projection has shape (2, 4, 3), expected (2, 3, out_dim)",
    )


@pytest.mark.parametrize("option", [("--survey", 0), ("--survey", "many"), ("--seed", -1)])
def test_conditions_refuse_what_cannot_be(sound, option):
    result = run("conditions", sound, *option)
    assert result.exit_code == 2
    assert option[0] in result.stderr
    assert result.stdout == ""


# Refusals


def test_a_file_that_is_not_there(tmp_path, output):
    file = tmp_path / "none.npz"
    assert_refused(run("recover", file, "-o", output), "No such file or directory", str(file))
    assert_refused(run("recover", file.with_suffix(".safetensors"), "-o", output), "No such file")


@pytest.mark.parametrize("name", ["examples.csv", "examples", "examples.npz.txt"])
def test_a_file_of_another_kind(tmp_path, output, name):
    (tmp_path / name).write_bytes(OTHER)
    assert_refused(
        run("recover", tmp_path / name, "-o", output),
        name,
        "expected .npz, .safetensors, .zarr, .h5, .hdf5 or a folder",
    )


@pytest.mark.parametrize("size", [0, 10, 1000, -30])
def test_a_file_cut_short(file, output, size):
    file.write_bytes(file.read_bytes()[:size])
    assert_refused(run("recover", file, "-o", output), "is not a whole .npz file of plain arrays")
    assert not output.exists()


def test_a_safetensors_file_cut_short(tmp_path, examples, output):
    file = tmp_path / "examples.safetensors"
    file.write_bytes(safetensors.numpy.save(examples)[:-9])
    assert_refused(run("recover", file, "-o", output), "is not a whole safetensors file")


@pytest.mark.slow
def test_a_damaged_compressed_file(tmp_path, layer, output):
    X = inputs.gaussian(50, 3, 4)
    file = tmp_path / "examples.npz"
    np.savez_compressed(file, X=X, Y=layer(X))
    whole = file.read_bytes()
    for start in range(60, 400, 10):  # the header of X and the first of its numbers
        damaged = bytearray(whole)
        damaged[start : start + 10] = bytes(byte ^ 0xFF for byte in whole[start : start + 10])
        file.write_bytes(damaged)
        assert_refused(
            run("recover", file, "-o", output), "is not a whole .npz file of plain arrays"
        )


def test_a_file_that_asks_for_more_memory_than_there_is(tmp_path, output):
    header = io.BytesIO()
    shape = (10**6, 10**6, 10)
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<f8", "fortran_order": False, "shape": shape}
    )
    file = tmp_path / "examples.npz"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("X.npy", header.getvalue())
        archive.writestr("Y.npy", header.getvalue())
    assert_refused(run("recover", file, "-o", output), str(file))


def test_a_single_array_under_the_name_of_an_npz_file(tmp_path, output):
    file = tmp_path / "examples.npz"
    with open(file, "wb") as opened:
        np.save(opened, np.ones((4, 2, 3)))
    assert_refused(run("recover", file, "-o", output), "is not a whole .npz file of plain arrays")


def test_pickles_are_not_opened(tmp_path, examples, output):
    class Bomb:
        def __reduce__(self):
            return Path.touch, (tmp_path / "exploded",)

    file = npz(tmp_path / "examples.npz", X=np.array([Bomb()], dtype=object), Y=examples["Y"])
    assert_refused(
        run("recover", file, "-o", output), "is not a whole .npz file of plain arrays", "pickle"
    )
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("missing", ["X", "Y"])
@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_a_file_without_the_arrays(tmp_path, examples, output, missing, suffix):
    del examples[missing]
    examples["Z"] = np.ones(3)
    file = tmp_path / f"examples.{suffix}"
    if suffix == "npz":
        np.savez(file, **examples)
    else:
        safetensors.numpy.save_file(examples, file)
    assert_refused(
        run("recover", file, "-o", output), str(sorted(examples)), "expected arrays X and Y"
    )


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"X": np.ones((4, 3))}, "X has shape (4, 3), expected three axes (examples, tokens, dim)"),
        ({"X": np.full((4, 2, 3), np.nan)}, "X has 24 NaN or infinite entries, expected finite"),
        ({"Y": np.ones((5, 2, 3))}, "Y has 5 rows, expected 4: one for each example of X"),
        ({"Y": np.ones((4, 2, 3)) * 1j}, "Y has dtype complex128, expected real numbers"),
        ({"X": np.full((4, 2, 3), "a")}, "X has dtype <U1, expected real numbers"),
        ({"mask": np.ones((4, 9))}, "mask has shape (4, 9), expected (4, 2): one entry per token"),
    ],
)
def test_arrays_that_do_not_fit(tmp_path, output, arrays, message):
    plain = {"X": np.ones((4, 2, 3)), "Y": np.ones((4, 2, 3))}
    file = npz(tmp_path / "examples.npz", **{**plain, **arrays})
    assert_refused(run("recover", file, "-o", output), message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--heads", "four"), "heads is 'four', expected a whole number or 'auto'"),
        (("--heads", "2.5"), "heads is '2.5', expected a whole number or 'auto'"),
        (("--heads", ""), "heads is '', expected a whole number or 'auto'"),
        (("--heads", "--5"), "heads is '--5', expected a whole number or 'auto'"),
        (("--heads", "²"), "heads is '²', expected a whole number or 'auto'"),
        (("--heads", "0"), "heads is 0, expected a whole number of at least 1"),
        (("--heads", "-1"), "heads is -1, expected a whole number of at least 1"),
        (("--rank", "0"), "rank is 0, expected a whole number of at least 1"),
        (("--rank", "9"), "rank is 9, expected at most 4, the dimension of a token"),
        (("--tol", "0"), "tol is 0.0, expected a finite number above 0"),
        (("--restarts", "-1"), "restarts is -1, expected a whole number of at least 0"),
        (("--max-seconds", "-2"), "max_seconds is -2.0, expected a finite number above 0"),
        (("--device", "tpu"), "device='tpu' is unknown, expected 'cpu' or 'cuda'"),
    ],
)
def test_options_that_cannot_be(file, output, options, message):
    assert_refused(run("recover", file, "-o", output, *options), message)
    assert not output.exists()


def test_an_output_folder_that_is_not_there(file, tmp_path, monkeypatch):
    monkeypatch.setattr("onelayer.cli.recovery.recover", None)  # it must be told before the work
    target = tmp_path / "none" / "layer.safetensors"
    assert_refused(run("recover", file, "-o", target), str(target.parent), "expected", target.name)


def test_an_output_that_is_a_folder(file, tmp_path, monkeypatch):
    monkeypatch.setattr("onelayer.cli.recovery.recover", None)
    folder = tmp_path / "layer.safetensors"
    folder.mkdir()
    assert_refused(run("recover", file, "-o", folder), str(folder))
    assert_no_rubbish(tmp_path, file.name, folder.name)


@pytest.mark.parametrize("name", ["[bold]red[/bold].npz", "[/b].npz", "a[link].npz"])
def test_names_that_look_like_markup_are_only_names(tmp_path, examples, output, name):
    folder = tmp_path / "a[" / "x"
    folder.mkdir(parents=True)
    file = folder / name.replace("/", "_") if name != "[/b].npz" else folder.parent / "b].npz"
    assert_refused(run("recover", file, "-o", output), str(file))
    npz(file, **examples)
    target = file.with_suffix(".safetensors")
    result = run("recover", file, "-o", target, "--heads", 2)
    assert result.exit_code == 0
    assert str(target) in result.stdout.replace("\n", "")


def test_a_disk_that_is_full(file, output, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    output.write_bytes(OTHER)
    monkeypatch.setattr(safetensors_files.os, "fsync", full)
    result = run("recover", file, "-o", output, "--heads", 2)
    assert result.exit_code == 2
    assert "No space left on device" in words(result.stderr)
    assert output.read_bytes() == OTHER
    assert_no_rubbish(output.parent, file.name, output.name)


@pytest.mark.slow
def test_refusals_in_a_process_of_its_own_have_no_trace(tmp_path):
    result = run_alone("recover", tmp_path / "none.npz", "-o", tmp_path / "layer.safetensors")
    assert_refused(result, "No such file or directory")


# Interruption


@pytest.mark.slow
def test_interruption_ends_in_one_line_and_leaves_files_whole(tmp_path, output):
    X = inputs.gaussian(2000, 4, 16)
    Y = np.random.default_rng(1).standard_normal(X.shape)
    file = npz(tmp_path / "noise.npz", X=X, Y=Y)
    output.write_bytes(OTHER)
    arguments = ("recover", file, "-o", output, "--heads", 4, "--restarts", 10_000)
    status, printed, text = run_and_interrupt(b"error", *arguments)
    assert status == 130
    assert printed == b""
    assert "Traceback" not in text
    assert text.count("onelayer: interrupted") == 1
    assert text.endswith("onelayer: interrupted; nothing was written")
    assert output.read_bytes() == OTHER
    assert_no_rubbish(tmp_path, file.name, output.name)


def test_interruption_is_told_without_a_terminal_too(file, output, monkeypatch, capsys):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("onelayer.cli.recovery.recover", interrupted)
    monkeypatch.setattr(sys, "argv", ["onelayer", "recover", str(file), "-o", str(output)])
    with pytest.raises(SystemExit) as exit_status:
        main()
    assert exit_status.value.code == 130
    assert capsys.readouterr().err.strip() == "onelayer: interrupted; nothing was written"


@pytest.mark.slow
def test_interruption_of_a_survey(sound):
    status, printed, text = run_and_interrupt(
        b"of 1000000 random layers measured", "conditions", sound, "--survey", 1_000_000
    )
    assert status == 130
    assert printed == b""
    assert "Traceback" not in text
    assert text.endswith("onelayer: interrupted")


# Help


def test_the_version_is_shown():
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout.strip() == onelayer.__version__


@pytest.mark.parametrize("arguments", [(), ("--help",)])
def test_help_names_the_commands(arguments):
    text = words(run(*arguments).output)
    assert "recover" in text
    assert "demo" in text
    assert "conditions" in text


@pytest.mark.parametrize(
    ("name", "example"),
    [
        ("demo", "onelayer demo --heads 4 --dim 16 --examples 400 --seed 3"),
        ("recover", "onelayer recover examples.npz --heads 8 -o layer.safetensors"),
        ("conditions", "onelayer conditions layer.safetensors --survey 100"),
    ],
)
def test_help_shows_examples(name, example):
    result = run(name, "--help")
    assert result.exit_code == 0
    assert example in words(result.stdout)


@pytest.mark.parametrize(
    "command",
    [(), ("demo",), ("recover",), ("conditions",), ("report",), ("export",), ("claims",)]
    + [("claims", name) for name in ("list", "show", "run")],
)
def test_help_shows_no_type_for_flags(command):
    text = words(run(*command, "--help").stdout)
    assert "--help Show this message and exit." in text
    assert "<bool>" not in text
    assert "BOOLEAN" not in text


def test_a_layer_may_have_any_name_and_the_format_is_told(file, tmp_path):
    output = tmp_path / "layer.txt"
    result = run("recover", file, "--heads", 2, "-o", output)
    assert result.exit_code == 0
    assert result.stdout.rstrip().endswith("layer.txt, a safetensors file.")
    assert AttentionLayer.load(output).heads == 2


def test_options_that_are_not_known_are_refused():
    result = run("recover", "examples.npz", "-o", "x.safetensors", "--nonsense")
    assert result.exit_code == 2
    assert "--nonsense" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_examples_are_not_overwritten(tmp_path, examples):
    path = tmp_path / "examples.safetensors"
    safetensors.numpy.save_file(examples, path)
    before = path.read_bytes()
    assert_refused(run("recover", path, "-o", path, "--heads", 2), "holds the examples")
    assert path.read_bytes() == before


# Other methods and other places


@pytest.fixture
def folder(tmp_path):
    """A folder with the examples of a layer that can be sculpted, and the layer."""
    layer = AttentionLayer.random(heads=2, dim=8, scale=3.0)
    X = inputs.boolean(20_000, 3, 8, seed=1)
    place = tmp_path / "examples"
    place.mkdir()
    np.save(place / "X.npy", X.astype(np.int8))
    np.save(place / "Y.npy", layer(X))
    return place, layer


@pytest.mark.slow
@pytest.mark.parametrize(("option", "error"), [("--polish", 1e-9), ("--no-polish", 0.05)])
def test_a_folder_of_arrays_is_sculpted(folder, output, option, error):
    place, layer = folder
    result = run("recover", place, "--method", "sculpt", option, "-o", output)
    assert result.exit_code == 0
    reason = "exact" if option == "--polish" else "approximate"
    assert f"outcome {reason}:" in words(result.stdout)
    found = AttentionLayer.load(output)
    assert found.distance(layer).attention.max() < error


def test_a_method_that_is_none_is_refused(file, output):
    result = run("recover", file, "--method", "guess", "-o", output)
    assert_refused(result, "method is 'guess', expected one of 'auto', 'refine', 'sculpt'")


def test_a_folder_without_outputs_is_refused(folder, output):
    place, _ = folder
    (place / "Y.npy").unlink()
    assert_refused(run("recover", place, "-o", output), "holds ['X'], expected arrays X and Y")


@pytest.mark.parametrize("kept", [0, 5, 1000])
def test_an_array_that_was_cut_short_is_refused(folder, output, kept):
    place, _ = folder
    whole = (place / "Y.npy").read_bytes()
    (place / "Y.npy").write_bytes(whole[:kept])
    result = run("recover", place, "-o", output)
    assert_refused(result, "Y.npy is not a whole .npy file of a plain array")
    assert not output.exists()
