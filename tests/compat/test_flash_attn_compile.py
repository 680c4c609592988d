"""The functions of flash-attn in graphs without breaks."""

import pytest
import torch

from fa_ops.compat import flash_attn, flash_attn_interface

CACHE, TABLE = torch.randn(8, 4, 2, 8), torch.arange(8).view(2, 4).int()
ENDS, LENS = torch.tensor([0, 2, 5]).int(), torch.tensor([9, 12]).int()
NEW = torch.randn(5, 2, 8)


def pages(q):
    ends = torch.nn.functional.pad(LENS.cumsum(0), (1, 0)).int()
    return flash_attn.flash_attn_varlen_func(
        q, CACHE, CACHE, ENDS, ends, 3, 12, causal=True, block_table=TABLE
    )


def rows_by_index(q):
    rows = q[:4].unflatten(0, (2, 2))
    return flash_attn.flash_attn_with_kvcache(
        rows, CACHE, CACHE, cache_seqlens=LENS - 8, cache_batch_idx=TABLE[:, 1], causal=True
    )


def used_parts_and_chunks(q):
    return flash_attn_interface.flash_attn_varlen_func(
        q, q[:, :2], q[:, :2], ENDS, ENDS, 3, 3, seqused_q=LENS - 8, attention_chunk=2
    )


def appended_tokens(q):
    k, v = CACHE.clone(), CACHE.clone()
    out = flash_attn_interface.flash_attn_with_kvcache(
        q, k, v, NEW, NEW, cache_seqlens=LENS - 8, page_table=TABLE, cu_seqlens_q=ENDS,
        cu_seqlens_k_new=ENDS, max_seqlen_q=3, causal=True,
    )  # fmt: skip
    return torch.cat([out.flatten(), k.flatten(), v.flatten()])


def without_autograd(q):
    interface = flash_attn.flash_attn_interface
    return interface._flash_attn_forward(
        q[None], q[None], q[None], 0.0, 0.3, True, -1, -1, 0.0, None, False
    )[0]


@pytest.mark.parametrize(
    "function", [pages, rows_by_index, used_parts_and_chunks, appended_tokens, without_autograd]
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_one_graph_gives_the_same_result(function, dynamic):
    torch._dynamo.reset()
    q = torch.randn(5, 4, 8)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    with torch.no_grad():
        torch.testing.assert_close(compiled(q), function(q))


@torch.no_grad()
def test_numbers_that_change_between_calls():
    """Dynamo makes symbols of them."""

    def attend(q, k, ends_q, ends_k, longest):
        return flash_attn_interface.flash_attn_varlen_func(
            q, k, k, ends_q, ends_k, longest, 2 * longest, window_size=(longest, 0)
        )

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for n in (3, 5, 7):
        q, k, ends = torch.randn(2 * n, 4, 8), torch.randn(4 * n, 2, 8), torch.tensor([0, n, 2 * n])
        given = q, k, ends.int(), 2 * ends.int(), n
        torch.testing.assert_close(compiled(*given), attend(*given))
