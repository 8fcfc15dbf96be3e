"""Naive versions of everything fast: plain loops, nothing vectorised, slow and easy to check."""

import itertools
import math

import numpy as np


def attention_layer(
    X, attention, projection, key_bias=None, output_bias=None, mask=None, causal=False
):
    """The outputs (n, tokens, out_dim) of a softmax attention layer, one number at a time."""
    n, tokens, _ = X.shape
    heads, _, out_dim = projection.shape
    outputs = np.zeros((n, tokens, out_dim))
    for example in range(n):
        for row in range(tokens):
            if output_bias is not None:
                outputs[example, row] = output_bias
            keys = allowed_keys(row, tokens, None if mask is None else mask[example], causal)
            for head in range(heads):
                bias = None if key_bias is None else key_bias[head]
                weights = attention_row(X[example], row, keys, attention[head], bias)
                for key, weight in weights.items():
                    outputs[example, row] += weight * row_times(X[example, key], projection[head])
    return outputs


def attention_row(tokens, row, keys, theta, key_bias=None):
    """The softmax weights of one row of one head, by key; empty where there is no key."""
    scores = {key: score(tokens[row], tokens[key], theta, key_bias) for key in keys}
    highest = max(scores.values(), default=0.0)
    powers = {key: math.exp(value - highest) for key, value in scores.items()}
    return {key: power / sum(powers.values()) for key, power in powers.items()}


def score(query, key, theta, key_bias=None):
    """query Θ key + c key."""
    total = 0.0
    for i in range(len(query)):
        for j in range(len(key)):
            total += float(query[i]) * float(theta[i, j]) * float(key[j])
    for j in range(len(key)):
        total += 0.0 if key_bias is None else float(key_bias[j]) * float(key[j])
    return total


def allowed_keys(row, tokens, mask=None, causal=False):
    """The keys that a row may attend to: present and, if causal, not after the row."""
    return [
        key for key in range(tokens) if (mask is None or mask[key]) and (not causal or key <= row)
    ]


def row_times(row, matrix):
    """row @ matrix."""
    product = np.zeros(matrix.shape[1])
    for i in range(matrix.shape[0]):
        for j in range(matrix.shape[1]):
            product[j] += float(row[i]) * float(matrix[i, j])
    return product


def head_distance(mine, theirs):
    """(permutation, attention errors, projection errors) of the best of all matchings.

    `mine` and `theirs` are lists of heads (attention, projection); the best matching has the
    smallest sum of squared errors, each error capped at 10.
    """
    best, best_cost = None, math.inf
    for permutation in matchings(len(mine), len(theirs)):
        errors = np.full((2, len(theirs)), math.inf)
        cost = 0.0
        for i, j in enumerate(permutation):
            for part in range(2 if j >= 0 else 0):
                errors[part, i] = relative_error(mine[j][part], theirs[i][part])
                cost += min(errors[part, i], 10.0) ** 2
        if cost < best_cost:
            best, best_cost = (np.array(permutation), *errors), cost
    return best


def matchings(mine, theirs):
    """All ways to give each of `theirs` one of `mine`, none twice, -1 for the fewest possible."""
    unmatched = [-1] * max(0, theirs - mine)
    return set(itertools.permutations([*range(mine), *unmatched], theirs))


def relative_error(estimate, true):
    """|estimate - true| / |true| in the Frobenius norm, 0/0 taken as 0."""
    gap = size = 0.0
    for a, b in zip(np.ravel(estimate), np.ravel(true), strict=True):
        gap += (float(a) - float(b)) ** 2
        size += float(b) ** 2
    if gap == 0:
        return 0.0
    return math.sqrt(gap / size) if size > 0 else math.inf


def attended_tokens(X, attention, key_bias=None, mask=None, causal=False, constant=False):
    """H: the attended tokens of every row, heads side by side, (n · tokens, heads · dim).

    With `constant` a last column of ones; rows of padding are zero throughout.
    """
    n, tokens, dim = X.shape
    heads = len(attention)
    H = np.zeros((n * tokens, heads * dim + int(constant)))
    for example, row in present_rows(n, tokens, mask):
        keys = allowed_keys(row, tokens, None if mask is None else mask[example], causal)
        for head in range(heads):
            bias = None if key_bias is None else key_bias[head]
            weights = attention_row(X[example], row, keys, attention[head], bias)
            for key, weight in weights.items():
                for j in range(dim):
                    H[example * tokens + row, head * dim + j] += weight * X[example, key, j]
        if constant:
            H[example * tokens + row, -1] = 1.0
    return H


def output_change(
    X, attention, projection, change, key_bias=None, bias_change=None, mask=None, causal=False
):
    """What small changes of attention and key bias do to the outputs, (n · tokens, out_dim).

    The derivative of a softmax weight p_b under changes t of the scores is p_b (t_b - Σ_c p_c t_c);
    rows of padding do not count and stay zero.
    """
    n, tokens, _ = X.shape
    outputs = np.zeros((n * tokens, projection.shape[2]))
    for example, row in present_rows(n, tokens, mask):
        keys = allowed_keys(row, tokens, None if mask is None else mask[example], causal)
        for head in range(len(attention)):
            bias = None if key_bias is None else key_bias[head]
            moved = None if bias_change is None else bias_change[head]
            weights = attention_row(X[example], row, keys, attention[head], bias)
            shifts = {
                key: score(X[example, row], X[example, key], change[head], moved) for key in keys
            }
            mean = sum(weights[key] * shifts[key] for key in keys)
            for key in keys:
                weight = weights[key] * (shifts[key] - mean)
                outputs[example * tokens + row] += weight * row_times(
                    X[example, key], projection[head]
                )
    return outputs


def reduced_loss(X, Y, attention, key_bias=None, mask=None, causal=False, output_bias=False):
    """The mean square that the best projections for these attention matrices leave over."""
    n, tokens, out_dim = Y.shape
    H = attended_tokens(X, attention, key_bias, mask, causal, constant=output_bias)
    rows = [example * tokens + row for example, row in present_rows(n, tokens, mask)]
    targets = np.array([Y[row // tokens, row % tokens] for row in rows])
    best, *_ = np.linalg.lstsq(H[rows], targets, rcond=1e-12)
    return float(np.sum((targets - H[rows] @ best) ** 2)) / (len(rows) * out_dim)


def present_rows(n, tokens, mask=None):
    """The (example, row) pairs that are not padding, in order."""
    return [
        (example, row)
        for example in range(n)
        for row in range(tokens)
        if mask is None or mask[example][row]
    ]


def second_moments(X, mask=None):
    """E xᵀx over the tokens that are there."""
    n, tokens, dim = X.shape
    rows = present_rows(n, tokens, mask)
    moments = np.zeros((dim, dim))
    for example, row in rows:
        for i in range(dim):
            for j in range(dim):
                moments[i, j] += X[example, row, i] * X[example, row, j] / len(rows)
    return moments


def coin_divergence(p, q):
    """kl(p, q) of two coins, 0 log 0 taken as 0."""
    total = 0.0
    for a, b in ((p, q), (1 - p, 1 - q)):
        if a > 0:
            total += a * math.log(a / b) if b > 0 else math.inf
    return total
