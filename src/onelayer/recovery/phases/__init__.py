"""The six phases of the provable algorithm (arXiv 2402.04084)."""
