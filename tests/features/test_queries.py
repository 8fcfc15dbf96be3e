import numpy as np
import places
import pytest
from example_sets import ragged, random_mask
from hypothesis import given
from hypothesis import strategies as st

import onelayer as ol
from onelayer import inputs
from onelayer.array.backend import to_numpy
from onelayer.features import queries

X, X_TEST = inputs.sphere(60, 5, 3), inputs.sphere(20, 5, 3, seed=1)
MAKERS = {
    "attention": lambda **o: ol.RandomFeatureAttention(20, alpha=0.01, random_state=0, **o),
    "deep": lambda **o: ol.RandomFeatureAttention(20, alpha=0.01, depth=2, random_state=0, **o),
    "kernel": lambda **o: ol.AttentionKernelRidge(alpha=0.01, **o),
    "biased kernel": lambda **o: ol.AttentionKernelRidge(bias=1.0, alpha=0.01, **o),
}


def by_hand(tokens, there, query):
    """The query and the keys of one example, as lists of tokens."""
    tokens = [token for token, is_there in zip(tokens, there, strict=True) if is_there]
    if query == "first":
        return tokens[0], tokens[1:]
    if query == "last":
        return tokens[-1], tokens[:-1]
    if query == "mean":
        return sum(tokens) / len(tokens), tokens
    return np.zeros_like(tokens[0]), tokens


@pytest.mark.parametrize("query", queries.KINDS)
@given(data=st.data())
def test_the_query_comes_first_and_then_the_keys(xp_array, query, data):
    n, count = data.draw(st.integers(1, 5)), data.draw(st.integers(2, 5))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    tokens = rng.standard_normal((n, count, 3))
    masked = data.draw(st.booleans())
    mask = random_mask(rng, n, count) if masked else np.ones((n, count), dtype=bool)
    found, there = queries.with_query_first(
        xp_array(tokens), xp_array(mask) if masked else None, query
    )
    found = to_numpy(found)
    there = np.ones(found.shape[:2], dtype=bool) if there is None else to_numpy(there)
    assert there[:, 0].all()
    for i in range(n):
        first, keys = by_hand(tokens[i], mask[i], query)
        np.testing.assert_allclose(found[i, 0], first, rtol=1e-12, atol=1e-14)
        np.testing.assert_array_equal(found[i, 1:][there[i, 1:]], keys)
    assert queries.keys(query, count) == len(by_hand(tokens[0], [True] * count, query)[1])


def arranged(sets, query):
    """The same examples with their query first."""
    pairs = (by_hand(tokens, [True] * len(tokens), query) for tokens in sets)
    return [np.stack([first, *keys]) for first, keys in pairs]


@pytest.mark.parametrize("query", queries.KINDS)
@pytest.mark.parametrize("name", MAKERS)
def test_a_model_is_that_of_examples_with_their_query_first(name, query):
    sets = ragged([2, 4, 3, 5, 2] * 6, dim=3)
    y = np.array([tokens[:, 0].mean() for tokens in sets.examples])
    expected = MAKERS[name](standardize=False).fit(arranged(sets.examples, query), y)
    model = MAKERS[name](query=query, standardize=False).fit(sets.examples, y)
    padded = MAKERS[name](query=query, standardize=False).fit(sets.X, y, mask=sets.mask)
    wanted = expected.predict(arranged(X_TEST, query))
    np.testing.assert_allclose(model.predict(X_TEST), wanted, rtol=0, atol=1e-9)
    np.testing.assert_allclose(padded.predict(list(X_TEST)), wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("query", queries.KINDS)
def test_a_kernel_is_that_of_examples_with_their_query_first(query):
    expected = ol.attention_kernel(arranged(X[:6], query), arranged(X_TEST, query), bias=0.5)
    found = ol.attention_kernel(X[:6], X_TEST, bias=0.5, query=query)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("query", ["none", "mean"])
@pytest.mark.parametrize("name", MAKERS)
def test_without_a_query_of_their_own_sets_have_no_order(name, query):
    y = X[:, :, 0].mean(axis=1)
    model = MAKERS[name](query=query).fit(X, y)
    expected = model.predict(X_TEST)
    np.testing.assert_allclose(model.predict(X_TEST[:, ::-1]), expected, rtol=0, atol=1e-9)
    first = MAKERS[name]().fit(X, y)
    assert abs(first.predict(X_TEST[:, ::-1]) - first.predict(X_TEST)).max() > 1e-3


@pytest.mark.parametrize("name", ["attention", "kernel", "biased kernel"])
def test_no_element_of_a_set_is_lost(name):
    """With its first token as the query, a model of averages over keys does not know it."""
    y, truth = X[:, :, 0].mean(axis=1), X_TEST[:, :, 0].mean(axis=1)
    assert MAKERS[name](query="none").fit(X, y).score(X_TEST, truth) > 0.98


def test_a_function_of_single_elements_is_additive():
    y = (X[:, :, 0] ** 2).mean(axis=1)
    model = MAKERS["attention"](query="none").fit(X, y)
    one_by_one = np.mean([model.predict(X_TEST[:, i : i + 1]) for i in range(5)], axis=0)
    np.testing.assert_allclose(model.predict(X_TEST), one_by_one, rtol=0, atol=1e-10)


@pytest.mark.parametrize("query", ["none", "mean"])
@pytest.mark.parametrize("name", MAKERS)
def test_sets_may_have_a_single_token(name, query):
    sets = ragged([1, 3, 2, 1] * 5, dim=3)
    y = np.array([tokens[:, 0].mean() for tokens in sets.examples])
    model = MAKERS[name](query=query).fit(sets.examples, y)
    masked = MAKERS[name](query=query).fit(sets.X, y, mask=sets.mask)
    np.testing.assert_allclose(
        masked.predict(sets.X, mask=sets.mask), model.predict(sets.examples), rtol=0, atol=1e-9
    )
    rows, again = X[:, 0], MAKERS[name](query=query)
    expected = again.fit(rows[:, None], rows[:, 1]).predict(rows[:, None])
    np.testing.assert_allclose(again.fit(rows, rows[:, 1]).predict(rows), expected, atol=1e-10)


def test_tokens_keep_their_positions_whichever_is_the_query():
    """An order-dependent target is learned as well with the query last as with it first."""
    y, truth = (Z[:, 1, 0] - Z[:, 2, 0] for Z in (X, X_TEST))
    for query in queries.KINDS:
        options = {"positions": "onehot", "query": query, "random_state": 0}
        model = ol.RandomFeatureAttention(400, **options).fit(X, y)
        assert model.score(X_TEST, truth) > 0.5
        turned = model.score(X_TEST[:, [0, 2, 1, 3, 4]], truth)
        assert turned < 0.0


@pytest.mark.parametrize("query", queries.KINDS)
def test_queries_are_the_same_anywhere(request, query):
    mask = np.ones((60, 5), dtype=bool)
    mask[::3, 3:] = False
    y = X[:, :, 0].mean(axis=1)
    model = ol.RandomFeatureAttention(5, query=query, random_state=0)
    expected = model.fit(X, y, mask=mask).predict(X, mask=mask)
    for kind in ("function", "dask"):
        there = places.place(kind, request)
        found = model.fit(there(X), there(y), mask=there(mask)).predict(there(X), mask=mask)
        np.testing.assert_allclose(places.brought(found), expected, rtol=0, atol=1e-9)


def test_a_mask_may_leave_out_the_first_token_where_it_is_no_query():
    mask = np.ones((60, 5), dtype=bool)
    mask[7, 0] = False
    y = X[:, 1:, 0].mean(axis=1)
    for query in ("mean", "last", "none"):
        ol.RandomFeatureAttention(3, query=query).fit(X, y, mask=mask)
        ol.AttentionFeatures(3, query=query).fit(X, mask=mask)
        ol.attention_kernel(X[:9], mask=mask[:9], query=query)
    with pytest.raises(ValueError, match="mask leaves example 7 without its query"):
        ol.RandomFeatureAttention(3).fit(X, y, mask=mask)


@pytest.mark.parametrize("form", [np.asarray, places.by_function])
def test_the_last_token_needs_a_key_before_it(form):
    mask = np.ones((60, 5), dtype=bool)
    mask[7, 1:] = False
    message = "mask leaves example 7 with one token, expected at least a key and a query after it"
    with pytest.raises(ValueError, match=message):
        ol.RandomFeatureAttention(3, query="last").fit(form(X), form(X[:, 0, 0]), mask=mask)
    with pytest.raises(ValueError, match="expected a query and at least one key"):
        ol.RandomFeatureAttention(3, query="last").fit(X[:, :1], X[:, 0, 0])


@pytest.mark.parametrize("query", ["First", None, 0])
def test_an_unknown_query_is_refused(query):
    message = f"query is {query!r}, expected one of 'first', 'mean', 'last', 'none'"
    for model in (ol.RandomFeatureAttention(3), ol.AttentionKernelRidge(), ol.AttentionFeatures(3)):
        with pytest.raises(ValueError, match=message):
            model.set_params(query=query).fit(X, X[:, 0, 0])
    with pytest.raises(ValueError, match=message):
        ol.attention_kernel(X, query=query)
