"""What one attention layer can learn: random-feature attention (arXiv 2307.11353)."""
