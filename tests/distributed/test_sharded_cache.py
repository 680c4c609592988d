"""Decoding against a cache over gloo processes, against one process with the whole cache."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fa_ops
from fa_ops.distributed import attention_with_sharded_kv_cache

WORLD, B, Hq, Hkv, D = 2, 4, 6, 2, 8
LENS = torch.tensor([[5, 0, 30, 1], [9, 0, 3, 11]], dtype=torch.int32)
OTHERS = torch.tensor([[5, 8, 30, 1], [9, 13, 13, 11]], dtype=torch.int32)

CASES = {
    "plain": {},
    "rows without keys, with sinks": {"sinks": torch.linspace(-1, 1, Hq)},
    "appended": {"new": 1, "lens": OTHERS},
    "several queries": {"new": 3, "Sq": 3, "is_causal": True, "lens": OTHERS},
    "softcap and scale": {"softcap": 2.0, "scale": 0.4},
    "scale as a tensor": {"scale": torch.tensor(0.4)},
    "window": {"window": (12, 0), "lens": OTHERS, "new": 1},
    "ALiBi": {"alibi_slopes": torch.linspace(0.1, 0.6, Hq), "lens": OTHERS},
    "ALiBi of rows, window and sinks": {
        "alibi_slopes": torch.linspace(0.1, 0.6, B * Hq).view(B, Hq), "lens": OTHERS,
        "window": (9, None), "sinks": torch.linspace(-1, 1, Hq),
    },
    "pages": {"pages": True, "new": 1, "lens": OTHERS},
    "bfloat16": {"dtype": torch.bfloat16},
    "float64": {
        "dtype": torch.float64, "alibi_slopes": torch.linspace(0.1, 0.6, Hq), "lens": OTHERS,
    },
}  # fmt: skip


def whole_cache(lens: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
    """The keys of all processes (n, B, H, S, D), those in use one after the other."""
    n, rows, H, _, width = parts.shape
    whole = parts.new_zeros(rows, H, int(lens.sum(0).max()) + 8, width)
    for b in range(rows):
        used = [parts[r, b, :, : lens[r, b]] for r in range(n)]
        whole[b, :, : int(lens[:, b].sum())] = torch.cat(used, 1)
    return whole


def in_pages(cache: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache (B, H, S, D) as pages in reverse order, and their table."""
    rows, H, S, width = cache.shape
    pages = cache.view(rows, H, S // size, size, width).permute(0, 2, 3, 1, 4).flatten(0, 1)
    table = torch.arange(pages.shape[0] - 1, -1, -1).view(rows, S // size)
    return pages.flip(0).contiguous(), table.int()


def check(new=0, Sq=1, lens=LENS, dtype=torch.float32, pages=False, **options) -> None:
    g, rank, is_last = (
        torch.Generator().manual_seed(1),
        dist.get_rank(),
        dist.get_rank() == WORLD - 1,
    )
    draw = lambda *shape: torch.randn(shape, generator=g).to(dtype)  # noqa: E731
    keys, values = draw(WORLD, B, Hkv, 48, D), draw(WORLD, B, Hkv, 48, D)
    query, fresh = draw(B, Hq, Sq, D), [draw(B, Hkv, new, D), draw(B, Hkv, new, D)] if new else None
    appended = dict(zip(("key", "value"), fresh)) if new else {}
    expected = fa_ops.attention_with_kv_cache(
        query, whole_cache(lens, keys), whole_cache(lens, values), lens.sum(0).int(),
        return_lse=True, **appended, **options,
    )  # fmt: skip
    mine = [keys[rank].clone(), values[rank].clone()]
    if pages:
        (mine[0], table), (mine[1], _) = in_pages(mine[0], 8), in_pages(mine[1], 8)
        options = options | {"page_table": table}
    found = attention_with_sharded_kv_cache(
        query, *mine, lens[rank], return_lse=True, **(appended if is_last else {}), **options
    )
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 2e-2)
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)
    assert found[0].dtype == dtype and found[0].transpose(1, 2).is_contiguous()


def check_errors() -> None:
    q, cache = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 4, 8)
    lens = torch.tensor([4], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="window over a sharded cache needs a single"):
        attention_with_sharded_kv_cache(q, cache, cache, lens, window=(3, 0))
    with pytest.raises(ValueError, match="mesh must have one dimension for a sharded cache"):
        mesh = init_device_mesh("cpu", (WORLD, 1))
        attention_with_sharded_kv_cache(q, cache, cache, lens, mesh)
    uneven = q[:, :, : 1 + dist.get_rank() % 2]
    with pytest.raises(ValueError, match="same shapes and options, got query"):
        attention_with_sharded_kv_cache(uneven, cache, cache, lens, check=True)


def check_errors_of_one() -> None:
    """With `check` all processes end with an error, whether it is found before or in attention."""
    is_first = dist.get_rank() == 0
    given = {"key_cache": torch.randn(1, 2, 4, 8), "value_cache": torch.randn(1, 2, 4, 8)}
    given |= {"query": torch.randn(1, 2, 1, 8), "kv_lens": torch.tensor([4], dtype=torch.int32)}
    wrong = {
        "kv_lens must be a Tensor": {"kv_lens": [4]},
        "return_lse must be a bool": {"return_lse": 1},
        "sinks must have shape": {"sinks": torch.zeros(3)},
        "num_splits must not be negative": {"num_splits": -1},
        "scale must not require grad": {"scale": torch.ones((), requires_grad=True)},
        "backend 'hopper' cannot run this call": {"backend": "hopper"},
        "key_cache": {"key_cache": torch.randn(1, 2, 4, 16)},
    }
    for match, options in wrong.items():
        kind = (ValueError, TypeError, NotImplementedError) if is_first else RuntimeError
        with pytest.raises(kind, match=match if is_first else f"^process 0 .* raised: .*{match}"):
            attention_with_sharded_kv_cache(**given | (options if is_first else {}), check=True)
    for options in ({"window": (3, 0)}, {"sinks": torch.zeros(2)}, {"softcap": 1.0}):
        name = next(iter(options))
        with pytest.raises(ValueError, match=f"same shapes and options, got .*{name}"):
            attention_with_sharded_kv_cache(**given | (options if is_first else {}), check=True)
    with pytest.raises(ValueError, match="^timeout must be None or a positive number"):
        attention_with_sharded_kv_cache(**given, timeout=0)
    attention_with_sharded_kv_cache(**given, check=True)


def check_absence() -> None:
    """A process that raises without `check`: the other ends with an error that names the step."""
    group, begin = dist.new_group(range(WORLD)), time.monotonic()
    cache, lens = torch.randn(1, 2, 4, 8), torch.tensor([4], dtype=torch.int32)
    if dist.get_rank():
        with pytest.raises(RuntimeError, match="the exchange of results failed, another process"):
            attention_with_sharded_kv_cache(cache, cache, cache, lens, group, timeout=0.5)
    assert time.monotonic() - begin < 30


CHECKS = {name: lambda case=case: check(**case) for name, case in CASES.items()}
CHECKS |= {
    "errors": check_errors,
    "errors of one process": check_errors_of_one,
    "absence": check_absence,
}


@pytest.mark.parametrize("name", CHECKS)
def test_checks_pass_in_every_process(name, verdicts):
    verdicts.assert_passed(name)
