"""Arguments of the functions beside context_parallel_attention: errors name the argument and the
value. What several processes disagree on is in test_context_parallel.py."""

import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import fa_ops
from fa_ops.compat import ring_flash_attn
from fa_ops.distributed import (
    attention_with_sharded_kv_cache,
    balanced_layout,
    shard,
    unshard,
)


@pytest.fixture(scope="module", autouse=True)
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


X = torch.zeros(1, 2, 8, 4)
ENDS = torch.tensor([0, 3, 8], dtype=torch.int32)


@pytest.mark.parametrize("function", [shard, unshard])
@pytest.mark.parametrize(
    "arguments, message",
    [
        (([1, 2],), "x must be a Tensor, got list"),
        ((X, None, "a"), "dim must be an int, got 'a'"),
        ((X, None, 2.0), "dim must be an int, got 2.0"),
        ((X, None, 4), "dim must be one of x's 4 dimensions, got 4: pass that of the tokens"),
        ((X, None, 2, 1), "zigzag must be a bool, got 1"),
        (
            (X, None, 2, True, "stripes"),
            "layout must be 'zigzag', 'contiguous' or a SequenceLayout, got 'stripes'",
        ),
    ],
    ids=str,
)
def test_parts_of_a_sequence(function, arguments, message):
    with pytest.raises((ValueError, TypeError), match=f"^{re.escape(message)}"):
        function(*arguments)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"tokens": "8"}, "tokens must be an int, got '8'"),
        ({"tokens": 8.0}, "tokens must be an int, got 8.0"),
        ({"tokens": -8}, "tokens must be 0 or more, got -8"),
        ({"is_causal": 1}, "is_causal must be a bool, got 1"),
        ({"chunks": 2.0}, "chunks must be an int, got 2.0"),
        ({"chunks": 0}, "tokens must be a multiple of"),
        ({"cu_seqlens": [0, 8]}, "cu_seqlens must be a Tensor, got list"),
        ({"cu_seqlens": ENDS.float()}, "cu_seqlens must be int32, got float32"),
        ({"cu_seqlens": ENDS + 1}, "cu_seqlens must not decrease and be within [0, 8]"),
        (
            {"cu_seqlens": ENDS[:0]},
            "cu_seqlens must have shape (documents + 1,), got (0,): pass the first token",
        ),
        ({"kv_lens": [8]}, "kv_lens must be a Tensor, got list"),
        (
            {"kv_lens": ENDS, "cu_seqlens": ENDS},
            "kv_lens must have shape (2,), got (3,): pass a number of keys for each document",
        ),
        (
            {"key_ranges": ENDS},
            "key_ranges must have shape (B or 1, Hq or 1, 8 or 1, 2), got (3,): pass a first key",
        ),
    ],
    ids=str,
)
def test_layouts(options, message):
    with pytest.raises((ValueError, TypeError), match=f"^{re.escape(message)}"):
        balanced_layout(**{"tokens": 8} | options)


LENS = torch.tensor([5, 8], dtype=torch.int32)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"query": None}, "query must be a Tensor, got NoneType"),
        ({"query": torch.zeros(2, 4)}, "query must have shape (B, H, S, D), got (2, 4)"),
        ({"kv_lens": None, "window": (1, 0)}, "kv_lens must be a Tensor, got NoneType"),
        ({"kv_lens": LENS.float()}, "kv_lens must be int32, got float32"),
        ({"kv_lens": LENS[:1]}, "kv_lens must have shape (2,), got (1,)"),
        ({"key": 3, "value": 3}, "key must be a Tensor, got int"),
        ({"sinks": 1.0}, "sinks must be a Tensor, got float"),
        ({"sinks": torch.zeros(3)}, "sinks must have shape (4,), got (3,)"),
    ],
    ids=str,
)
def test_caches(options, message):
    cache = torch.zeros(2, 2, 8, 4)
    given = {"query": torch.zeros(2, 4, 1, 4), "kv_lens": LENS} | options
    query, kv_lens = given.pop("query"), given.pop("kv_lens")
    with pytest.raises((ValueError, TypeError), match=f"^{re.escape(message)}"):
        attention_with_sharded_kv_cache(query, cache, cache, kv_lens, **given)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (([0, 8], True, 0, 1), "cu_seqlens must be a Tensor, got list"),
        ((ENDS.long(), True, 0, 1), "cu_seqlens must be int32 of shape (B + 1,), got int64"),
        ((ENDS, True, 1, 1), "rank must be in [0, world_size), got 1 of 1"),
        ((ENDS, True, 0, 0), "rank must be in [0, world_size), got 0 of 0"),
    ],
    ids=str,
)
def test_arguments_of_ring_flash_attention(arguments, message):
    with pytest.raises((ValueError, TypeError), match=f"^{re.escape(message)}"):
        ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(*arguments)


def test_the_scale_of_ring_flash_attention_has_its_name():
    with pytest.raises(TypeError, match="^softmax_scale must be a number, got 'a'"):
        ring_flash_attn.ring_flash_attn_func(X, X, X, softmax_scale="a")


def test_plain_keys_beside_a_distributed_query():
    mesh = init_device_mesh("cpu", (1,))
    q = distribute_tensor(X, mesh, [Replicate()])
    with pytest.raises(TypeError, match="key must be a DTensor if another argument is one"):
        fa_ops.attention(q, X, X)
    assert torch.equal(fa_ops.attention(q, q, q, sinks=torch.zeros(2)).full_tensor(), X)
