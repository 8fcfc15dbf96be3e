"""Learning curves of three models
================================

Attention with random heads (RFA), the same with a bias towards keys that are similar to the query
(BRFA), and a network of random neurons on all tokens side by side (RFMLP) learn the target
f_{1,1}: the average of <β, x_i> over the keys. The bound on attention does not depend on the
number of keys, and the bound on the network grows with it.

::

    python examples/learning_curves.py
"""

import matplotlib.pyplot as plt

import onelayer as ol

# %%
# Each example is a query and 14 keys, uniform on the unit sphere in 16 dimensions. The three models
# have the same number of parameters and the penalty of the paper, without an intercept and without
# standardization of tokens.

HEADS, DIM, KEYS, TRAIN = 200, 16, 14, 1024
target = ol.targets.average_power(1, dim=DIM)
X = ol.inputs.sphere(TRAIN + 1000, tokens=KEYS + 1, dim=DIM, seed=0)
y = target(X)
paper = {"alpha": 1e-3, "fit_intercept": False, "standardize": False, "random_state": 0}
models = {
    "RFA": ol.RandomFeatureAttention(HEADS, **paper),
    "BRFA": ol.RandomFeatureAttention(HEADS, bias=1.0, **paper),
    "RFMLP": ol.RandomFeatureMLP(HEADS * (DIM + 1), **paper),
}

# %%
# `learning_curve` needs one factorization for all sizes, because the penalty is given.

sizes = [16, 32, 64, 128, 256, 512, 1024]
curves = {
    name: ol.learning_curve(model, X[:TRAIN], y[:TRAIN], X[TRAIN:], y[TRAIN:], sizes)
    for name, model in models.items()
}
for name, curve in curves.items():
    print(f"{name} reaches an error of 0.1 with {curve.samples_needed(0.1)[0]:.0f} examples")

# %%
# The bounds have no constants, so only their ratio can be compared with the measurement.

ratio = ol.theory.sample_size_ratio(degree=1, keys=KEYS)
print(f"the bounds predict {ratio:.2g} times as many examples for RFMLP as for RFA")

# %%
# An error of 1 is that of the best constant.

figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
for (name, curve), marker in zip(curves.items(), "os^", strict=True):
    axes.plot(curve.sizes, curve.test_error[:, 0], marker=marker, label=name)
axes.axhline(1.0, color="black", linestyle=":", linewidth=1, label="the best constant")
axes.set(xscale="log", yscale="log", xlabel="examples", ylabel="test error / variance")
axes.set_xticks(sizes, sizes, minor=False)
axes.set_xticks([], minor=True)
axes.grid(alpha=0.25)
axes.legend()
plt.show()
