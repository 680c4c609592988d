"""Public utilities for testing attention: input factories, error budgets, an oracle comparison."""

from fa_ops.testing.budget import assert_close_to_oracle, assert_within_budget, naive
from fa_ops.testing.caches import CacheCase, assert_cache_close, random_cache_case
from fa_ops.testing.inputs import Arena, Case, PackedCase, make_case, random_case
from fa_ops.testing.quantized import (
    QuantizedCase,
    assert_quantized_close,
    random_quantized_case,
)
from fa_ops.testing.random_calls import assert_right

__all__ = [
    "Arena",
    "CacheCase",
    "Case",
    "PackedCase",
    "QuantizedCase",
    "assert_cache_close",
    "assert_close_to_oracle",
    "assert_quantized_close",
    "assert_right",
    "assert_within_budget",
    "make_case",
    "naive",
    "random_cache_case",
    "random_case",
    "random_quantized_case",
]
