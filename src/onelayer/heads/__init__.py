"""What attention heads compute, one file per family of heads.

A family decides how the parameters theta of all heads are stored in one array. Everybody else adds
such arrays, scales them and takes inner products, and asks the family for the rest:

- `pack` and `unpack` convert between theta and attention matrices with key biases; `count`,
  `concat`, `drop` and `random` work on whole heads;
- `scores` computes the scores of a block of examples, `scores_vjp` the transposed derivative;
- a `TangentSpace` (see `base.py`) says in which directions theta may move.

`dense.py` has heads with any attention matrix, `low_rank.py` those whose matrices have a known
rank. `softmax.py` turns scores into attention for every family.
"""
