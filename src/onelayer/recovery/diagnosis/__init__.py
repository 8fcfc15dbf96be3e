"""What is wrong with examples or model when a recovery does not converge."""
