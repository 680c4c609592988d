"""A Hypothesis strategy for the random calls of `fa_ops.testing.random_calls`, which shrink."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from fa_ops.testing import random_calls


@st.composite
def cases(
    draw, kind: str, dtype: torch.dtype, device: str = "cpu", edges: bool | None = None
) -> random_calls.AnyCase:
    def pick(options):
        return draw(st.sampled_from(options))

    return random_calls.family(pick, kind, (dtype,), edges).case(pick, device)
