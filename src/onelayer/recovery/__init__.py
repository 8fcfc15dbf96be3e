"""Learning one layer: its weights from examples of its inputs and outputs."""
