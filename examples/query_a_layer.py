"""A layer that can be asked
=========================

Chosen inputs tell more about an attention layer than random ones. This example counts the output
entries from which `query` finds layers of one to eight heads, beside the unknowns of these layers.

::

    python examples/query_a_layer.py
"""

import matplotlib.pyplot as plt
import numpy as np

import onelayer as ol

# %%
# The layer is a function from inputs to outputs. It need not be one of ours.

DIM = 8
secret = ol.AttentionLayer.random(heads=4, dim=DIM, scale=2.0, seed=0)
found = ol.query(lambda X: secret(X), dim=DIM)
error = found.layer.distance(secret).attention.max()
print(f"{found.layer.heads} heads, error {error:.0e}, {found.queries} inputs")

# %%
# The number of heads is found from the rank of some outputs. So are layers of other numbers of
# heads. A layer has 2 d² unknowns per head.

heads = np.array([1, 2, 4, 6, 8])
used = []
for count in heads:
    layer = ol.AttentionLayer.random(heads=count, dim=DIM, scale=2.0, seed=1)
    recovery = ol.query(layer, dim=DIM)
    print(f"{count} heads: {recovery.converged}, {recovery.scalars} output entries")
    used.append(recovery.scalars)

# %%
# Entries that are used grow as the unknowns do. The dashed line is the number of scalar queries of
# arXiv 2608.03294.

figure, axes = plt.subplots(figsize=(5, 3.4), layout="constrained")
axes.plot(heads, used, "o-", label="output entries used")
axes.plot(heads, 2 * heads * DIM**2, color="0.6", label="unknowns")
axes.plot(heads, 4 * heads * DIM**2 - 2 * heads + 1, "k--", label="4 H d² - 2 H + 1")
axes.set(xlabel="heads", ylabel="scalars", title=f"{DIM} dimensions")
axes.legend()
plt.show()
