"""What a head computes: attention and its derivatives, and the layout of its parameters."""
