"""Heads as factors of query, key, value and output: descent to a basin, Gauss-Newton from there."""
