"""What tests of attention need: input factories, a naive baseline, error budgets and oracle comparison. Public: test your models with it."""

from fa_ops.testing.budget import assert_close_to_oracle, assert_within_budget, naive
from fa_ops.testing.inputs import Case, make_case, random_case

__all__ = ["Case", "assert_close_to_oracle", "assert_within_budget", "make_case", "naive", "random_case"]
