"""Evaluations, which are not installed: `python -m tests.evaluation.<name>`."""
