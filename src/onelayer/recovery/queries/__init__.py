"""Chosen queries: an oracle, and a layer found in closed form from inputs of our choice."""
