"""`python -m tests.evaluation.hf_sweep`: every architecture against eager attention."""
