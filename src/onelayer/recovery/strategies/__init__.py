"""Search strategies of a recovery."""
