"""Heads of a layer, recovered from its outputs
============================================

An attention layer with four heads is seen only through 400 random inputs and the outputs at them.
Its attention matrices are recovered to rounding, up to the order of the heads.

::

    python examples/recovered_heads.py
"""

import matplotlib.pyplot as plt
import numpy as np

import onelayer as ol

# %%
# The examples: 400 sequences of four tokens with entries ±1, and what the layer makes of them.

secret = ol.AttentionLayer.random(heads=4, dim=16, scale=2.0, seed=0)
X = ol.inputs.boolean(400, tokens=4, dim=16, seed=1)
Y = secret(X)

# %%
# `recover` sees X and Y alone. Here it is told the number of heads; ``heads="auto"`` finds it.

found = ol.recover(X, Y, heads=4)
print(found.reason)

# %%
# Outputs do not depend on the order of the heads, so heads are matched before they are compared.
# The certificate bounds their errors without knowing the true layer.

match = found.layer.distance(secret)
bars = found.certificate.attention_error[match.permutation]
for head, (error, bar) in enumerate(zip(match.attention, bars, strict=True)):
    print(f"head {head}: error {error:.0e}, error bar {bar:.0e}")

# %%
# The matrices look the same, because they are.

figure, grid = plt.subplots(2, 4, figsize=(8, 4.2), layout="constrained")
recovered = found.layer.attention[match.permutation]
limit = np.abs(secret.attention).max()
for row, matrices in zip(grid, (secret.attention, recovered), strict=True):
    for axes, matrix in zip(row, matrices, strict=True):
        image = axes.imshow(matrix, "RdBu", vmin=-limit, vmax=limit)
        axes.set(xticks=[], yticks=[])
for head, axes in enumerate(grid[0]):
    axes.set_title(f"head {head}")
grid[0, 0].set_ylabel("true")
grid[1, 0].set_ylabel("recovered")
figure.colorbar(image, ax=grid, ticks=[-limit, 0, limit], format="%.1f", shrink=0.8)
plt.show()
