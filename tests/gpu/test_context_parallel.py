"""context_parallel_attention on two GPUs, over NCCL and over peer memory, against one GPU."""

from __future__ import annotations

import functools
import random
import subprocess
import sys
from unittest import mock

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
    ring_steps,
    shard,
    unshard,
)
from fa_ops.distributed import transport as transports

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


def check(scheme: str, mask: str, key_heads: int = 2, transport: str = "auto") -> None:
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
        *parts, None, scheme, layout=layout, return_lse=True, transport=transport, **options
    )
    for one, other in zip(found, expected):
        torch.testing.assert_close(unshard(one, **where), other.detach(), atol=2e-2, rtol=2e-2)
    loss(*found).backward(), loss(*expected).backward()
    for part, x in zip(parts, whole):
        close = {"atol": 3e-2 * float(x.grad.abs().max().clamp(min=1.0)), "rtol": 2e-2}
        torch.testing.assert_close(unshard(part.grad, **where), x.grad, **close)


def check_dropout(scheme: str, mask: str, transport: str = "auto") -> None:
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
    options["transport"] = transport
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


def tensors_of_step(tokens: int, key_heads: int) -> list[torch.Tensor]:
    g = torch.Generator("cuda").manual_seed(dist.get_rank())
    return [
        torch.randn(1, H, tokens, 64, generator=g, device="cuda").bfloat16().requires_grad_()
        for H in (8, key_heads, key_heads)
    ]


def step(tensors: list[torch.Tensor], scheme: str, transport: str) -> list[torch.Tensor]:
    out = context_parallel_attention(
        *tensors, None, scheme, is_causal=True, deterministic=True, transport=transport
    )
    return [out.detach(), *torch.autograd.grad(out.float().sin().sum(), tensors)]


def check_timing() -> None:
    """The bits of NCCL, however late a process is, in memory that grows and is used again."""
    choose = random.Random(dist.get_rank())
    for scheme in ("ring", "all_gather"):
        for tokens, key_heads in ((512, 2), (2048, 8), (256, 1)):
            tensors = tensors_of_step(tokens, key_heads)
            expected = step(tensors, scheme, "nccl")
            found = []
            for _ in range(20):
                torch.cuda._sleep(choose.choice((0, 10**5, 10**6)))
                found.append(step(tensors, scheme, "peer"))
            for one in found:
                assert all(torch.equal(x, y) for x, y in zip(one, expected, strict=True))


def check_streams() -> None:
    """Calls on several streams of a process."""
    tensors = tensors_of_step(1024, 2)
    expected, found = step(tensors, "ring", "nccl"), []
    torch.cuda.synchronize()
    for stream in [torch.cuda.Stream() for _ in range(3)] * 4:
        with torch.cuda.stream(stream):
            found.append(step(tensors, "ring", "peer"))
    torch.cuda.synchronize()
    for one in found:
        assert all(torch.equal(x, y) for x, y in zip(one, expected, strict=True))


def check_failure() -> None:
    """A process that raises in a pass: the other one gets NaN, and later calls are right."""
    tensors = tensors_of_step(512, 2)
    expected = step(tensors, "ring", "nccl")
    out = context_parallel_attention(*tensors, None, "ring", is_causal=True, transport="peer")
    if dist.get_rank() == 1:
        fails = mock.patch.object(ring_steps, "_gradients", side_effect=MemoryError("no memory"))
        with fails, pytest.raises(MemoryError):
            torch.autograd.grad(out.float().sum(), tensors)
    else:
        assert torch.autograd.grad(out.float().sum(), tensors)[1].isnan().any()
    for one, other in zip(step(tensors, "ring", "peer"), expected, strict=True):
        assert torch.equal(one, other)


def check_capture() -> None:
    """Signals have numbers, which a CUDA graph would repeat."""
    x, graph = torch.zeros(8), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x += 1
        assert "CUDA graph" in transports._unsuitable(x.device)
    assert transports._unsuitable(x.device) is None


has_peers = torch.cuda.device_count() >= WORLD and torch.cuda.can_device_access_peer(0, 1)
TRANSPORTS = ("nccl", "peer") if has_peers else ("nccl",)
WAYS = [("ulysses", "auto")]
WAYS += [(scheme, name) for scheme in ("ring", "all_gather") for name in TRANSPORTS]
CHECKS = {
    f"{scheme}, {name}, {mask}": functools.partial(check, scheme, mask, transport=name)
    for scheme, name in WAYS
    for mask in MASKS
}
CHECKS |= {
    f"{scheme}, {name}, keys are exchanged again": functools.partial(
        check, scheme, "causal", 8, transport=name
    )
    for scheme, name in WAYS[1:]
}
CHECKS |= {
    f"{scheme}, {name}, {mask}, dropout": functools.partial(
        check_dropout, scheme, mask, transport=name
    )
    for scheme, name in WAYS
    for mask in ("causal", "documents")
}
if has_peers:
    CHECKS |= {
        "any timing": check_timing,
        "several streams": check_streams,
        "capture": check_capture,
        "failure": check_failure,
    }
CHECKS |= {
    "a mesh, and the link": check_mesh_and_rate,
    "disagreement": check_disagreement,
    "cache": check_cache,
}


@pytest.mark.parametrize("name", CHECKS)
def test_checks_pass_in_every_process(name, verdicts):
    verdicts.assert_passed(name)


@pytest.mark.skipif(not has_peers, reason="needs GPUs that access each other's memory")
def test_the_timeout_of_the_group_ends_a_process_that_waits_for_another():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += [str(WORLD), "-m", "tests.gpu.peer_timeout"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ended.returncode
    assert "did not answer within the 8 seconds of the group's timeout" in ended.stderr
    assert "nothing ended" not in ended.stdout
