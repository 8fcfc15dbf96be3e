"""Naive versions of everything fast: plain loops, nothing vectorised, slow and easy to check."""

import itertools
import math

import numpy as np
from scipy.optimize import linprog


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


def attention_weights(X, attention, key_bias=None, mask=None, causal=False):
    """The attention (n, heads, tokens, tokens) of every row to every key, one row at a time."""
    n, tokens, _ = X.shape
    found = np.zeros((n, len(attention), tokens, tokens))
    for example, head, row in np.ndindex(*found.shape[:3]):
        keys = allowed_keys(row, tokens, None if mask is None else mask[example], causal)
        bias = None if key_bias is None else key_bias[head]
        weights = attention_row(X[example], row, keys, attention[head], bias)
        for key, weight in weights.items():
            found[example, head, row, key] = weight
    return found


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
    """(permutation, attention, projection) distances under the best of all matchings.

    `mine` and `theirs` are lists of heads (attention, projection); the best matching has the
    smallest sum of squared distances.
    """
    best, best_cost = None, math.inf
    for permutation in matchings(len(mine), len(theirs)):
        errors = np.full((2, len(theirs)), math.inf)
        cost = 0.0
        for i, j in enumerate(permutation):
            for part in range(2 if j >= 0 else 0):
                errors[part, i] = relative_distance(mine[j][part], theirs[i][part])
                cost += errors[part, i] ** 2
        if cost < best_cost:
            best, best_cost = (np.array(permutation), *errors), cost
    return best


def matchings(mine, theirs):
    """All ways to give each of `theirs` one of `mine`, none twice, -1 for the fewest possible."""
    unmatched = [-1] * max(0, theirs - mine)
    return set(itertools.permutations([*range(mine), *unmatched], theirs))


def relative_distance(one, other):
    """|one - other| over the larger of their Frobenius norms, 0/0 taken as 0."""
    gap = size = other_size = 0.0
    for a, b in zip(np.ravel(one), np.ravel(other), strict=True):
        gap += (float(a) - float(b)) ** 2
        size += float(a) ** 2
        other_size += float(b) ** 2
    return 0.0 if gap == 0 else math.sqrt(gap / max(size, other_size))


def relative_error(estimate, true):
    """|estimate - true| / |true| in the Frobenius norm, 0/0 taken as 0."""
    gap = size = 0.0
    for a, b in zip(np.ravel(estimate), np.ravel(true), strict=True):
        gap += (float(a) - float(b)) ** 2
        size += float(b) ** 2
    if gap == 0:
        return 0.0
    return math.sqrt(gap / size) if size > 0 else math.inf


def bert_attention(X, weights, heads):
    """Attention of a BERT layer, which computes y = A x + b, with its biases, by their names."""

    def read(name, token):
        bias = weights.get(f"{name}.bias", np.zeros(len(weights[f"{name}.weight"])))
        return row_times(token, weights[f"{name}.weight"].T) + bias

    outputs = np.zeros(X.shape)
    for example, tokens in enumerate(X):
        parts = [[read(f"self.{n}", t) for t in tokens] for n in ("query", "key", "value")]
        for row, attended in enumerate(heads_side_by_side(*parts, heads, causal=False)):
            outputs[example, row] = read("output.dense", attended)
    return outputs


def gpt2_attention(X, weights, heads):
    """Attention of a GPT-2 layer, which computes y = x A + b and looks back only."""

    def read(name, token):
        bias = weights.get(f"{name}.bias", np.zeros(weights[f"{name}.weight"].shape[1]))
        return row_times(token, weights[f"{name}.weight"]) + bias

    dim = X.shape[2]
    outputs = np.zeros(X.shape)
    for example, tokens in enumerate(X):
        rows = [read("c_attn", token) for token in tokens]
        parts = [[row[i * dim : (i + 1) * dim] for row in rows] for i in range(3)]
        for row, attended in enumerate(heads_side_by_side(*parts, heads, causal=True)):
            outputs[example, row] = read("c_proj", attended)
    return outputs


def heads_side_by_side(queries, keys, values, heads, causal):
    """For every token the values that each head attends to, head after head."""
    size = len(queries[0]) // heads
    rows = []
    for row, query in enumerate(queries):
        attended = np.zeros(heads * size)
        for head in range(heads):
            part = slice(head * size, (head + 1) * size)
            scores = {
                key: dot(query[part], keys[key][part]) / math.sqrt(size)
                for key in allowed_keys(row, len(keys), causal=causal)
            }
            powers = {key: math.exp(value) for key, value in scores.items()}
            for key, power in powers.items():
                attended[part] += power / sum(powers.values()) * values[key][part]
        rows.append(attended)
    return rows


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


# Kernels of infinitely many heads


def relu_moment(h, k, rho):
    """E[relu(u) relu(v)] for unit variances, means h, k and correlation rho, by quadrature over u.

    Given u = h + z, v is Gaussian with mean k + ρz and variance s² = 1 - ρ². Panels of the
    integral over z end where relu(u) has its kink and around the point where the mean of v is 0.
    """
    rho = min(1.0, max(-1.0, rho))
    s = math.sqrt((1 - rho) * (1 + rho))
    low, high = max(-h, -12.0), 12.0
    kink = -k / rho if rho else 0.0
    ends = {low, high, *range(-12, 13), *(kink + i * s for i in range(-12, 13))}
    ends = sorted(end for end in ends if low <= end <= high)
    nodes, weights = np.polynomial.legendre.leggauss(16)
    total = 0.0
    for left, right in itertools.pairwise(ends):
        for node, weight in zip(nodes, weights, strict=True):
            z = (left + right) / 2 + node * (right - left) / 2
            density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
            total += weight * (right - left) / 2 * density * (h + z) * relu_mean(k + rho * z, s)
    return total


def relu_mean(mean, deviation):
    """E relu(v) for v Gaussian."""
    if deviation == 0:
        return max(mean, 0.0)
    h = mean / deviation
    density = math.exp(-h * h / 2) / math.sqrt(2 * math.pi)
    return deviation * (density + h * math.erfc(-h / math.sqrt(2)) / 2)


def attention_kernel(tokens, mask, others, others_mask, bias=None):
    """The kernel (n, n') of random-feature attention with entries N(W_0, 1/4), pair by pair."""
    kernel = np.zeros((len(tokens), len(others)))
    for row, column in np.ndindex(*kernel.shape):
        x, z = tokens[row], others[column]
        keys = allowed_keys(0, len(x), None if mask is None else mask[row])
        other_keys = allowed_keys(0, len(z), None if others_mask is None else others_mask[column])
        pairs = [(i, j) for i in keys if i > 0 for j in other_keys if j > 0]
        for i, j in pairs:
            moment = product_moment(
                0.0 if bias is None else score(x[0], x[i], bias),
                0.0 if bias is None else score(z[0], z[j], bias),
                math.sqrt(dot(x[0], x[0]) * dot(x[i], x[i])) / 2,
                math.sqrt(dot(z[0], z[0]) * dot(z[j], z[j])) / 2,
                dot(x[0], z[0]) * dot(x[i], z[j]) / 4,
            )
            kernel[row, column] += moment * dot(x[i], z[j]) / len(pairs)
    return kernel


def mlp_kernel(flat, others, std):
    """The kernel (n, n') of the features relu(<w, x>) with w ~ N(0, std² I), pair by pair."""
    kernel = np.zeros((len(flat), len(others)))
    for row, column in np.ndindex(*kernel.shape):
        x, z = flat[row], others[column]
        kernel[row, column] = product_moment(
            0.0, 0.0, std * math.sqrt(dot(x, x)), std * math.sqrt(dot(z, z)), std**2 * dot(x, z)
        )
    return kernel


def product_moment(mean, other_mean, deviation, other_deviation, covariance):
    """E[relu(u) relu(v)] for any Gaussian (u, v)."""
    scale = deviation * other_deviation
    return scale * relu_moment(mean / deviation, other_mean / other_deviation, covariance / scale)


def dot(x, z):
    """<x, z>."""
    return sum(float(a) * float(b) for a, b in zip(x, z, strict=True))


# Random features


def attention_features(tokens, mask, heads):
    """The features (n, M·D) of random heads (M, D, D) for tokens (n, T, d), token 0 the query."""
    rows = []
    for example in range(len(tokens)):
        extended = [[*token, 1.0] for token in tokens[example]]
        keys = other_keys(extended, None if mask is None else mask[example])
        rows.append(heads_read(extended[0], keys, heads))
    return np.array(rows)


def hidden_layer(tokens, mask, heads, mix):
    """The tokens (n, T, d) after a frozen layer: each moves by its own length, then all shrink."""
    moved = np.zeros(tokens.shape)
    for example in range(len(tokens)):
        extended = [[*token, 1.0] for token in tokens[example]]
        keys = other_keys(extended, None if mask is None else mask[example])
        for position, token in enumerate(tokens[example]):
            update = row_times(heads_read(extended[position], keys, heads), mix)
            length, size = math.sqrt(dot(update, update)), math.sqrt(dot(token, token))
            for i in range(len(token)):
                change = 0.0 if length == 0 else size * update[i] / length
                moved[example, position, i] = (token[i] + change) / math.sqrt(2)
    return moved


def heads_read(query, keys, heads):
    """What every head reads for one query: M^{-1/2} times the mean of relu(query W key) key."""
    features = []
    for head in heads:
        for i in range(len(query)):
            total = sum(max(0.0, score(query, key, head)) * float(key[i]) for key in keys)
            features.append(total / len(keys) / math.sqrt(len(heads)))
    return features


def other_keys(tokens, mask=None):
    """The tokens that are there, without the query."""
    return [tokens[key] for key in allowed_keys(0, len(tokens), mask) if key > 0]


def flattened(tokens, mask, count):
    """Tokens (n, T, d) in a row, zero where there is none, up to `count`, and a constant 1."""
    n, there, dim = tokens.shape
    rows = np.zeros((n, count * dim + 1))
    for example, position in present_rows(n, there, mask):
        for i in range(dim):
            rows[example, position * dim + i] = tokens[example, position, i]
    for example in range(n):
        rows[example, count * dim] = 1.0
    return rows


def mlp_features(tokens, mask, count, weights):
    """The features (n, M) of random neurons (P, M) that read `count` tokens in a row."""
    rows = flattened(tokens, mask, count)
    features = np.zeros((len(rows), weights.shape[1]))
    for example, neuron in np.ndindex(*features.shape):
        value = dot(rows[example], weights[:, neuron])
        features[example, neuron] = max(0.0, value) / math.sqrt(weights.shape[1])
    return features


def sinusoidal_position(position, dim):
    """Sines and cosines of one position, of unit norm."""
    pairs = math.ceil(dim / 2)
    code = []
    for i in range(dim):
        angle = position / 10_000 ** ((i // 2) / pairs)
        code.append(math.sin(angle) if i % 2 == 0 else math.cos(angle))
    return [value / math.sqrt(dot(code, code)) for value in code]


# Polynomials of a query and a key, given by tensors


def polynomial(query, key, tensors):
    """Σ_rs <query^{⊗r} ⊗ key^{⊗s}, f_rs>, entry by entry."""
    total = 0.0
    for (r, s), tensor in tensors.items():
        for index in itertools.product(range(len(query)), repeat=r + s):
            legs = [query[i] for i in index[:r]] + [key[i] for i in index[r:]]
            total += float(tensor[index]) * math.prod(legs)
    return total


def symmetric(tensor, legs):
    """The mean over all permutations of `legs`, a list of axes."""
    total, count = np.zeros_like(tensor), 0
    for order in itertools.permutations(legs):
        axes = list(range(tensor.ndim))
        for place, leg in zip(legs, order, strict=True):
            axes[place] = leg
        total, count = total + np.transpose(tensor, axes), count + 1
    return total / count


# Ridge regression


def ridge_weights(features, targets, alpha, weights=None):
    """The smallest v (p, t) that minimises Σ_i w_i (φ_i v - y_i)² + α |v|², as least squares.

    α is one number, or one for every feature: 0 for a constant feature is an intercept.
    """
    n, p = features.shape
    penalties = np.broadcast_to(alpha, p)
    weights = np.ones(n) if weights is None else weights
    rows, right = np.zeros((n + p, p)), np.zeros((n + p, targets.shape[1]))
    for i in range(n):
        rows[i] = math.sqrt(weights[i]) * features[i]
        right[i] = math.sqrt(weights[i]) * targets[i]
    for j in range(p):
        rows[n + j, j] = math.sqrt(penalties[j])
    best, *_ = np.linalg.lstsq(rows, right, rcond=None)
    return best


def left_out_error(features, targets, alpha, weights=None):
    """Σ_i w_i (φ_i v - y_i)² for every target (t,), where v has not seen example i."""
    weights = np.ones(len(features)) if weights is None else weights
    total = np.zeros(targets.shape[1])
    for i in range(len(features)):
        others = [j for j in range(len(features)) if j != i]
        v = ridge_weights(features[others], targets[others], alpha, weights[others])
        total += weights[i] * (row_times(features[i], v) - targets[i]) ** 2
    return total


def kernel_dual(kernel, targets, alpha):
    """The c (n, t) with (K + α) c = y, the smallest of them where there are many."""
    return np.linalg.pinv(kernel + alpha * np.eye(len(kernel))) @ targets


def curve_error(predictions, targets):
    """For every target (t,), the mean squared error over the variance of the target."""
    n, count = targets.shape
    errors = np.zeros(count)
    for target in range(count):
        mean = sum(targets[:, target]) / n
        squares = sum((predictions[i, target] - targets[i, target]) ** 2 for i in range(n))
        errors[target] = squares / sum((targets[i, target] - mean) ** 2 for i in range(n))
    return errors


# Rows on which heads agree


def agreed_row(images, output):
    """The p with sum 1 that makes p @ images the nearest to an output row, and its residual.

    The last weight is what the others leave of 1, so that plain least squares do.
    """
    others = images[:-1] - images[-1]
    free, *_ = np.linalg.lstsq(others.T, output - images[-1], rcond=None)
    p = np.array([*free, 1 - sum(free)])
    residual = output - row_times(p, images)
    return p, math.sqrt(dot(residual, residual))


def agreed_spread(images, output):
    """How far each p_b moves with an error of length 1 in the output, in its worst direction.

    p is affine in the output: what unit errors do to it says what all others do.
    """
    p, _ = agreed_row(images, output)
    squares = np.zeros(len(p))
    for direction in np.eye(len(output)):
        moved, _ = agreed_row(images, output + direction)
        squares += (moved - p) ** 2
    return np.sqrt(squares)


def certifying_distance(images, output):
    """The least t for which some p ≥ 0 with sum 1 has every coordinate of p @ images within t."""
    tokens, out_dim = images.shape
    rows, limits = [], []
    for i in range(out_dim):
        for sign in (1.0, -1.0):
            rows.append([*(sign * images[:, i]), -1.0])
            limits.append(sign * output[i])
    cost = [0.0] * tokens + [1.0]
    total = [[1.0] * tokens + [0.0]]
    return linprog(cost, A_ub=rows, b_ub=limits, A_eq=total, b_eq=[1.0]).fun


def agreement_slabs(X, Y, projection_sum, error, least_error, width):
    """All slabs of all rows, two-sided and one-sided: lists of (key, normal, value, error)."""
    two_sided, one_sided = [], []
    for example, row in present_rows(*X.shape[:2]):
        images = np.array([row_times(token, projection_sum) for token in X[example]])
        size = math.sqrt(sum(dot(image, image) for image in images) / len(images))
        p, residual = agreed_row(images, Y[example, row])
        size *= min(1.0, math.sqrt(dot(p, p))) / math.sqrt(len(Y[example, row]))
        wrong = (residual + error * size) * agreed_spread(images, Y[example, row])
        c = max(range(len(p)), key=lambda token: p[token])
        for b in range(len(p)):
            normal = np.outer(X[example, row], X[example, b] - X[example, c]).ravel()
            highest, lowest = max(p[b], 0.0) + width * wrong[b], p[c] - width * wrong[c]
            if b != c and p[b] > wrong[b] and p[c] > wrong[c]:
                value = math.log(p[b] / p[c])
                log_error = max(wrong[b] / p[b] + wrong[c] / p[c], least_error)
                key = log_error / min(abs(value), 1.0)
                two_sided.append((key, normal, value, log_error))
            elif b != c and p[b] <= wrong[b] and lowest > highest:
                one_sided.append((wrong[b], normal, math.log(highest / lowest), 0.0))
    return two_sided, one_sided


def best_slabs(slabs, count):
    """The slabs with the smallest keys, of those with equal or opposite normals only the first."""
    chosen = []
    for slab in sorted(slabs, key=lambda slab: slab[0]):
        if len(chosen) == count:
            break
        gaps = [abs(sign * slab[1] - other[1]) for other in chosen for sign in (1.0, -1.0)]
        if all(max(gap) > 1e-6 for gap in gaps):
            chosen.append(slab)
    return chosen


# Small polytopes


def vertices(normals, lower, upper):
    """All corners of a bounded body lower ≤ normals @ x ≤ upper, by trying all sets of faces."""
    dim = normals.shape[1]
    faces = [(n, limit) for n, *ends in zip(normals, lower, upper, strict=True) for limit in ends]
    corners = []
    for chosen in itertools.combinations([f for f in faces if math.isfinite(f[1])], dim):
        matrix = np.array([normal for normal, _ in chosen])
        if np.linalg.cond(matrix) < 1e9:
            corner = np.linalg.solve(matrix, [limit for _, limit in chosen])
            values = normals @ corner
            if np.all(values >= lower - 1e-9) and np.all(values <= upper + 1e-9):
                corners.append(corner)
    return np.array(corners)
