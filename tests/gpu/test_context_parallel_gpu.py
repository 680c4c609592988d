"""context_parallel_attention over NCCL on two GPUs, against one GPU."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fa_ops
from fa_ops.distributed import (
    attention_with_sharded_kv_cache,
    balanced_layout,
    context_parallel_attention,
    measure_link_rate,
    shard,
    unshard,
)

WORLD, DEVICE, TOKENS = 2, "cuda", 2048
ENDS = [0, 100, 700, 701, 1500, TOKENS]

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < WORLD, reason=f"needs {WORLD} CUDA devices"
)


def options_of(mask: str) -> dict:
    """The options of a kind of mask; tensors on the GPU, which the host reads."""
    g = torch.Generator("cuda").manual_seed(1)
    ranges = torch.randint(TOKENS, (1, 8, TOKENS, 2), generator=g, device="cuda").sort(-1).values
    return {
        "full": {},
        "causal": {"is_causal": True},
        "window": {"is_causal": True, "window": (300, 0)},
        "documents": {"is_causal": True, "cu_seqlens": torch.tensor(ENDS).int().cuda()},
        "ALiBi": {"is_causal": True, "alibi_slopes": torch.linspace(0.01, 0.3, 8).cuda()},
        "sinks and softcap": {"softcap": 20.0, "sinks": torch.linspace(-1, 1, 8).cuda()},
        "ranges": {"key_ranges": ranges.int()},
        "lengths": {"kv_lens": torch.tensor([1234]).int().cuda()},
    }[mask]


MASKS = (
    "full", "causal", "window", "documents", "ALiBi", "sinks and softcap", "ranges", "lengths",
)  # fmt: skip


def one_gpu(q, k, v, cu_seqlens=None, **options):
    if cu_seqlens is None:
        return fa_ops.attention(q, k, v, return_lse=True, **options)
    packed = (x[0].transpose(0, 1) for x in (q, k, v))
    ends = (cu_seqlens, cu_seqlens)
    out, lse = fa_ops.attention_varlen(*packed, *ends, return_lse=True, **options)
    return out.transpose(0, 1).unsqueeze(0), lse.unsqueeze(0)


def loss(out, lse):
    return out.float().sin().sum() + lse.masked_fill(lse.isinf(), 0.0).cos().sum()


def check(scheme: str, mask: str, key_heads: int = 2) -> None:
    g = torch.Generator("cuda").manual_seed(0)
    whole = [
        torch.randn(1, H, TOKENS, 64, generator=g, device="cuda").bfloat16().requires_grad_()
        for H in (8, key_heads, key_heads)
    ]
    options = options_of(mask)
    expected = one_gpu(*whole, **options)
    layout, where = "zigzag", {}
    if mask == "documents":
        layout = balanced_layout(TOKENS, is_causal=True, cu_seqlens=options["cu_seqlens"])
        where = {"layout": layout}
    parts = [shard(x.detach(), **where).requires_grad_() for x in whole]
    found = context_parallel_attention(
        *parts, None, scheme, layout=layout, return_lse=True, **options
    )
    for one, other in zip(found, expected):
        torch.testing.assert_close(unshard(one, **where), other.detach(), atol=2e-2, rtol=2e-2)
    loss(*found).backward(), loss(*expected).backward()
    for part, x in zip(parts, whole):
        close = {"atol": 3e-2 * float(x.grad.abs().max().clamp(min=1.0)), "rtol": 2e-2}
        torch.testing.assert_close(unshard(part.grad, **where), x.grad, **close)


def check_dropout(scheme: str, mask: str) -> None:
    """The weights that one GPU drops."""
    g = torch.Generator("cuda").manual_seed(0)
    whole = [
        torch.randn(1, H, TOKENS, 64, generator=g, device="cuda").bfloat16().requires_grad_()
        for H in (8, 2, 2)
    ]
    options = options_of(mask) | {"dropout_p": 0.5}
    torch.manual_seed(7)
    expected = one_gpu(*whole, **options)
    parts = [shard(x.detach()).requires_grad_() for x in whole]
    torch.manual_seed(7 + dist.get_rank())  # the seed of the first process counts
    found = context_parallel_attention(*parts, None, scheme, return_lse=True, **options)
    for one, other in zip(found, expected):
        torch.testing.assert_close(unshard(one), other.detach(), atol=3e-2, rtol=3e-2)
    loss(*found).backward(), loss(*expected).backward()
    for part, x in zip(parts, whole):
        close = {"atol": 3e-2 * float(x.grad.abs().max().clamp(min=1.0)), "rtol": 3e-2}
        torch.testing.assert_close(unshard(part.grad), x.grad, **close)


def check_mesh_and_rate() -> None:
    assert measure_link_rate(device="cuda") > 1e9
    mesh = init_device_mesh("cuda", (1, 2))
    tensors = [torch.randn(1, H, 256, 64).bfloat16() for H in (8, 2, 2)]
    one = context_parallel_attention(*tensors, mesh, is_causal=True)
    other = context_parallel_attention(*tensors, None, "ring", is_causal=True)
    torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)


def check_disagreement() -> None:
    """Processes of a GPU compare their calls between hosts, before NCCL could hang."""
    tensors = [torch.randn(1, 4, 64 + 2 * dist.get_rank(), 64).bfloat16() for _ in range(3)]
    with pytest.raises(ValueError, match="same shapes and options"):
        context_parallel_attention(*tensors, is_causal=True)


def check_cache() -> None:
    g = torch.Generator("cuda").manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=g, device="cuda").bfloat16()  # noqa: E731
    q, keys, values = draw(3, 8, 1, 64), draw(2, 3, 2, 512, 64), draw(2, 3, 2, 512, 64)
    lens = torch.full((3,), 512, dtype=torch.int32)
    whole = (x.transpose(0, 1).transpose(1, 2).flatten(2, 3) for x in (keys, values))
    expected = fa_ops.attention_with_kv_cache(q, *whole, 2 * lens, window=(700, 0))
    here = (x[dist.get_rank()] for x in (keys, values))
    found = attention_with_sharded_kv_cache(q, *here, lens, window=(700, 0))
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


CHECKS = {
    f"{scheme}, {mask}": lambda scheme=scheme, mask=mask: check(scheme, mask)
    for scheme in ("ring", "ulysses", "all_gather")
    for mask in MASKS
}
CHECKS |= {
    f"{scheme}, keys are exchanged again": lambda scheme=scheme: check(scheme, "causal", 8)
    for scheme in ("ring", "all_gather")
}
CHECKS |= {
    f"{scheme}, {mask}, dropout": lambda scheme=scheme, mask=mask: check_dropout(scheme, mask)
    for scheme in ("ring", "ulysses", "all_gather")
    for mask in ("causal", "documents")
}
CHECKS |= {
    "a mesh, and the link": check_mesh_and_rate,
    "disagreement": check_disagreement,
    "cache": check_cache,
}


@pytest.mark.parametrize("name", CHECKS)
def test_checks_pass_in_every_process(name, verdicts):
    verdicts.assert_passed(name)
