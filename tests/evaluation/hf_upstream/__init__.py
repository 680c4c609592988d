"""transformers' own model tests, with fa_ops in place of sdpa or flash_attention_2.

Its source distribution carries `tests/test_modeling_common.py`, the tests that every architecture
has to pass, and no models to run them on; those are in `families`.
"""
