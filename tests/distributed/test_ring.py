"""The scheme "ring", on gloo processes or two GPUs, against one call over the whole sequence."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist

import fa_ops
from fa_ops.distributed import context_parallel_attention, shard, unshard
from tests.distributed.processes import Verdicts, run_checks

CASES = {
    "full": {},
    "causal, zigzag": {"is_causal": True},
    "causal, contiguous": {"is_causal": True, "zigzag": False},
    "grouped heads": {"is_causal": True, "Hkv": 2},
    "scale and softcap": {"is_causal": True, "scale": 0.4, "softcap": 2.0},
    "values of another width": {"is_causal": True, "Dv": 4},
    "repeatable": {"is_causal": True, "deterministic": True},
    "keys of another length": {"Sk": 36},
    "bfloat16": {"is_causal": True, "dtype": torch.bfloat16},
    "(B, S, H, D) in memory": {"is_causal": True, "bshd": True},
    "lse alone": {"is_causal": True, "loss": lambda out, lse: lse.cos().sum()},
    "out alone": {"is_causal": True, "loss": lambda out, lse: out.sin().sum()},
}  # fmt: skip


ring_attention = functools.partial(context_parallel_attention, scheme="ring")


def loss_of_both(out, lse):
    return out.double().sin().sum() + lse.cos().sum()


def check(
    group=None, Hkv=4, D=8, Dv=8, S=24, Sk=24, dtype=torch.float32, zigzag=True, bshd=False,
    loss=loss_of_both, **options,
):  # fmt: skip
    g = torch.Generator(torch.get_default_device()).manual_seed(0)
    whole = [
        torch.randn(shape, generator=g).to(dtype).requires_grad_()
        for shape in ((2, 4, S, D), (2, Hkv, Sk, D), (2, Hkv, Sk, Dv))
    ]
    parts = [shard(x.detach(), group, zigzag=zigzag) for x in whole]
    if bshd:
        parts = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in parts]
    parts = [x.requires_grad_() for x in parts]
    layout = "zigzag" if zigzag else "contiguous"
    found = ring_attention(*parts, group, layout=layout, return_lse=True, **options)
    assert found[0].dtype == dtype and found[1].dtype == torch.float32
    expected = fa_ops.attention(*whole, return_lse=True, **options)
    tolerance = {"atol": 3e-2, "rtol": 2e-2}
    if dtype == torch.float32:
        tolerance = dict.fromkeys(tolerance, 1e-4 if found[0].is_cuda else 1e-5)
    for one, other in zip(found, expected):
        torch.testing.assert_close(unshard(one, group, zigzag=zigzag), other.detach(), **tolerance)
    loss(*found).backward(), loss(*expected).backward()
    for part, x in zip(parts, whole):
        torch.testing.assert_close(unshard(part.grad, group, zigzag=zigzag), x.grad, **tolerance)
        assert part.grad.dtype == dtype


def check_layout():
    size, rank = dist.get_world_size(), dist.get_rank()
    x = torch.arange(2 * size * 3).view(1, 1, -1, 1)
    part = shard(x).flatten().tolist()
    last = 2 * size - 1 - rank
    assert part == [*range(3 * rank, 3 * rank + 3), *range(3 * last, 3 * last + 3)]
    assert torch.equal(unshard(shard(x)), x)
    assert shard(x, zigzag=False).flatten().tolist() == [*range(6 * rank, 6 * rank + 6)]
    assert torch.equal(unshard(shard(x.view(-1), dim=0), dim=0), x.view(-1))
    whole = torch.randn(4 * size, requires_grad=True)
    shard(whole, dim=0).sum().backward()
    assert whole.grad.sum() == 4
    with pytest.raises(
        ValueError, match=f"a multiple of {2 * size} tokens along dim 2 .*: pad it by 1$"
    ):
        shard(x[:, :, 1:])


def check_errors():
    """Every process raises, before anything is sent."""
    q, odd = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 3, 8)
    with pytest.raises(ValueError, match=r"key must have shape \(B, H, S, D\), got \(2, 4, 8\)"):
        ring_attention(q, q[0], q)
    if dist.get_world_size() > 1:
        with pytest.raises(
            ValueError, match="even number .* zigzag order, got 3: pass layout='contiguous'"
        ):
            ring_attention(odd, odd, odd, is_causal=True)
    out = ring_attention(odd, odd, odd, is_causal=True, layout="contiguous")
    assert out.shape == odd.shape
    with pytest.raises(TypeError, match="key is float64, but query is float32"):
        ring_attention(q, q.double(), q)
    with pytest.raises(ValueError, match="key has 3 heads, which does not divide query's 2"):
        ring_attention(q, *[torch.randn(1, 3, 4, 8)] * 2)
    with pytest.raises(TypeError, match="query must be float16"):
        ring_attention(q.int(), q.int(), q.int())
    with pytest.raises(ValueError, match="backend must be 'auto' or one of"):
        ring_attention(q, q, q, backend="fast")
    with pytest.raises(NotImplementedError, match="hopper"):
        ring_attention(q, q, q, backend="hopper")
    with pytest.raises(ValueError, match="softcap"):
        ring_attention(q, q, q, softcap=-1.0)
    empty = q[:, :, :0].requires_grad_()
    ring_attention(empty, empty, empty, is_causal=True).sum().backward()
    assert empty.grad.shape == empty.shape
    found = ring_attention(q, q, q, backend="reference")
    torch.testing.assert_close(found, ring_attention(q, q, q))
    with pytest.raises(NotImplementedError, match="the reference backend has no gradients of ring"):
        ring_attention(q.clone().requires_grad_(), q, q, backend="reference")
    twice = torch.autograd.grad(
        ring_attention(q.requires_grad_(), q, q).sin().sum(), q, create_graph=True
    )
    with pytest.raises(NotImplementedError, match="double backward is not implemented"):
        twice[0].sum().backward()


def check_group():
    """A group of the first and the last process; the others raise."""
    size, rank = dist.get_world_size(), dist.get_rank()
    group = dist.new_group(sorted({0, size - 1}))
    if rank in (0, size - 1):
        check(group, is_causal=True)
        return
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(ValueError, match=f"group must contain this process, rank {rank}"):
        ring_attention(q, q, q, group)


CHECKS = {name: lambda case=case: check(**case) for name, case in CASES.items()}
CHECKS |= {"layout": check_layout, "errors": check_errors, "a group": check_group}


@pytest.fixture(scope="module", params=[(2, "cpu"), (3, "cpu"), (2, "cuda")], ids=str)
def verdicts(request, tmp_path_factory) -> Verdicts:
    """The verdicts of some numbers of processes."""
    world, device = request.param
    if device == "cuda" and torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} CUDA devices")
    return run_checks(__name__, world, tmp_path_factory.mktemp("ring"), device)


@pytest.mark.parametrize("name", CHECKS)
def test_checks_pass_in_every_process(name, verdicts):
    verdicts.assert_passed(name)


def test_without_a_process_group_it_raises():
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(RuntimeError, match="call init_process_group first"):
        ring_attention(q, q, q)
