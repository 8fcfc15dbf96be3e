"""How a recovery goes about its search."""
