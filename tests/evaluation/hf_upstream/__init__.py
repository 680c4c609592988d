"""Run transformers' own model tests with fa_ops instead of sdpa or flash_attention_2.

Its source distribution contains `tests/test_modeling_common.py`, the tests that every architecture
must pass, but no models to run them on; those are in `families`.
"""
