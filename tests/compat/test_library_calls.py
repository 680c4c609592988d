"""Private functions of flash-attn in the words in which TransformerEngine calls them.

Its context parallelism (context_parallel.py) gives some arguments by position and some by name,
which differ between FlashAttention 2 and 3, and between batches and packed sequences.
"""

import pytest
import torch

from fa_ops.compat import flash_attn_interface as three
from fa_ops.compat.flash_attn import flash_attn_interface as two
from tests.compat.test_flash_attn import draw

ENDS = torch.tensor([0, 4, 11], dtype=torch.int32)
SCALE = 0.3


def arguments_of_2(packed, causal, rng_state=None):
    """The functions, what is between the tensors and the keywords, and the keywords."""
    functions = two._flash_attn_forward, two._flash_attn_backward
    between = []
    if packed:
        functions = two._flash_attn_varlen_forward, two._flash_attn_varlen_backward
        between = [ENDS, ENDS, 7, 7]
    both = {
        "softmax_scale": SCALE, "dropout_p": 0.0, "window_size_left": -1,
        "window_size_right": 0 if causal else -1, "alibi_slopes": None, "softcap": 0.0,
        "causal": causal,
    }  # fmt: skip
    forward = both | {"return_softmax": False} | ({"block_table": None} if packed else {})
    return functions, between, forward, both | {"deterministic": True, "rng_state": rng_state}


def arguments_of_3(packed, causal):
    """The same of FlashAttention 3."""
    functions = three._flash_attn_forward, three._flash_attn_backward
    ends = [ENDS, ENDS] if packed else [None, None]
    first = [None] * 4 + ends + [None] * 3 + [7, 7] + [None] * 9
    both = {
        "softmax_scale": SCALE, "window_size_left": -1, "window_size_right": 0 if causal else -1
    }  # fmt: skip
    backward = both | {"is_causal": causal, "deterministic": True}
    between = [*ends, None, None, 7, 7]
    return functions, first, between, both | {"causal": causal}, backward


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_a_step_of_context_parallelism(version, packed, causal):
    shape = (11,) if packed else (2, 7)
    q, k, v = draw(*shape, 4, 8), draw(*shape, 2, 8), draw(*shape, 2, 8)
    options = {"softmax_scale": SCALE, "causal": causal}
    if packed:
        expected, lse, _ = two.flash_attn_varlen_func(
            q, k, v, ENDS, ENDS, 7, 7, **options, return_attn_probs=True
        )
    else:
        expected, lse, _ = two.flash_attn_func(q, k, v, **options, return_attn_probs=True)
    grad, buffers = torch.randn_like(expected), [torch.empty_like(x) for x in (q, k, v)]
    if version == 2:
        (forward, backward), between, words, _ = arguments_of_2(packed, causal)
        out, found_lse, _, state = forward(q, k, v, *between, **words)
        words = arguments_of_2(packed, causal, state)[3]
        backward(grad, q, k, v, out, found_lse, *buffers, *between, **words)
    else:
        (forward, backward), first, between, words, others = arguments_of_3(packed, causal)
        out, found_lse, *_ = forward(q, k, v, *first, **words)
        backward(grad, q, k, v, out, found_lse, *between, *buffers, **others)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(found_lse, lse)
    for found, wanted in zip(buffers, torch.autograd.grad(expected, (q, k, v), grad), strict=True):
        torch.testing.assert_close(found, wanted)
