"""Suggestions for misspelt names: one wording wherever a user types one."""

import re

import pytest

import onelayer as ol
from onelayer.array import backend
from onelayer.lab import claims
from onelayer.spelling import did_you_mean, one_of


@pytest.mark.parametrize(
    ("got", "known", "meant"),
    [
        ("expresivity", ["depth", "expressivity"], "expressivity"),
        ("RFA", ["rfa", "brfa"], "rfa"),  # case is no difference
        ("Fist", ["first", "mean", None], "first"),
        ("nonsense", ["depth", "expressivity"], None),
        ("", ["depth"], None),
        (None, ["depth"], None),
        (3, ["3"], None),
    ],
)
def test_the_nearest_name_is_suggested_if_there_is_one(got, known, meant):
    assert did_you_mean(got, known) == ("" if meant is None else f"; did you mean {meant!r}?")


@pytest.mark.parametrize("value", ["refine", None])
def test_a_known_value_is_returned(value):
    assert one_of(value, "method", ["refine", None]) is value


@pytest.mark.parametrize("value", ["REFINE", 1, ["refine"], "", None])
def test_any_other_value_is_refused(value):
    message = f"method is {value!r}, expected one of 'auto', 'refine'"
    with pytest.raises(ValueError, match=re.escape(message)):
        one_of(value, "method", ["auto", "refine"])


X = ol.inputs.boolean(20, 3, 4, seed=0)
Y = ol.AttentionLayer.random(heads=2, dim=4, seed=0)(X)


def attention(**options):
    return ol.RandomFeatureAttention(heads=4, **options).fit(X, X[:, 0, 0])


@pytest.mark.parametrize(
    ("call", "meant"),
    [
        (lambda: ol.recover(X, Y, 2, method="scuplt"), "sculpt"),
        (lambda: ol.recover(X, Y, "atuo"), "auto"),
        (lambda: attention(query="lsat"), "last"),
        (lambda: attention(positions="sinusodial"), "sinusoidal"),
        (lambda: attention(alpha="lo"), "loo"),
        (lambda: attention(device="cdua"), "cuda"),
        (lambda: backend.check_device("CUDA0x"), "cuda"),
        (lambda: ol.attention_kernel(X, query="frist"), "first"),
        (lambda: ol.AttentionLayer.from_safetensors("none", family="bret"), "bert"),
        (lambda: ol.theory.sample_size("rfmpl", 1, dim=3, keys=2), "rfmlp"),
        (lambda: ol.targets.ordered_sum(3, weights="alternatin"), "alternating"),
        (lambda: claims.named(["expresivity"]), "expressivity"),
        (lambda: claims.named(["six_phases"]), "six-phases"),
        (lambda: claims.known()["keys"].settings("quick", {"seed": 2}), "seeds"),
    ],
)
def test_a_misspelt_option_says_what_may_have_been_meant(call, meant):
    with pytest.raises(ValueError, match=rf"; did you mean '{meant}'\?"):
        call()


@pytest.mark.parametrize(
    ("name", "meant"), [("recovr", "recover"), ("attentionlayer", "AttentionLayer")]
)
def test_a_misspelt_public_name_says_what_may_have_been_meant(name, meant):
    message = rf"module 'onelayer' has no attribute '{name}'; did you mean '{meant}'\?$"
    with pytest.raises(AttributeError, match=message):
        getattr(ol, name)
