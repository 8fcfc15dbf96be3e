"""The claims of both papers as experiments: measured, judged by a stated rule, drawn, reported."""
