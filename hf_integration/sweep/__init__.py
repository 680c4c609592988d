"""`python -m hf_integration.sweep`: every architecture against eager attention, by scenario."""
