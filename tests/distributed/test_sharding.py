"""DTensors sharded over batch and heads, on two gloo processes, against one process."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.device_mesh import DeviceMesh, init_device_mesh

import fa_ops
from fa_ops.ops import dense
from fa_ops.testing import make_case
from tests.distributed.processes import assert_passed, run_checks

WORLD = 2
CASE = make_case(
    B=3, Hq=4, Hkv=2, Sq=5, Sk=7, D=8, Dv=8, sinks=True, kv_lens=True, alibi="heads",
    is_causal=True, mask="float", mask_shape=(0, 1, 0, 1), mask_grad=True,
)  # fmt: skip


def function(q, k, v, mask, sinks, slopes, lens):
    out, lse = fa_ops.attention(
        q, k, v, mask, 0.0, True, sinks=sinks, alibi_slopes=slopes, kv_lens=lens, return_lse=True
    )
    return out, lse.masked_fill(lse == float("-inf"), 0.0)


def arguments(requires_grad: bool = True) -> tuple[list, list]:
    """The arguments that are differentiated, and the others."""
    q, k, v, spec = CASE.fresh(requires_grad=requires_grad)
    return [q, k, v, spec.attn_mask, spec.sinks], [spec.alibi_slopes, spec.kv_lens]


def loss(out, lse):
    return out.sin().sum() + lse.cos().sum()


def assert_same(actual: DTensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.full_tensor(), expected, rtol=1e-5, atol=1e-5)


def check_attention(mesh, placement, compiled: bool) -> None:
    floats, others = arguments()
    expected = function(*floats, *others)
    loss(*expected).backward()
    placements = [placement, Replicate(), placement, Replicate(), Replicate()]
    sharded = [
        distribute_tensor(x.detach(), mesh, [p]).requires_grad_()
        for x, p in zip(floats, placements)
    ]
    plain = [distribute_tensor(others[0], mesh, [Replicate()]), others[1]]
    run = torch.compile(function, backend="aot_eager", fullgraph=True) if compiled else function
    outputs = run(*sharded, *plain)
    kept = placement if placement in (Shard(0), Shard(1)) else Replicate()
    assert outputs[0].placements == (kept,)
    if not compiled:  # torch 2.15 compiles DTensors with the strides of contiguous ones
        assert outputs[0].stride() == expected[0].stride()
    for actual, single in zip(outputs, expected):
        assert_same(actual, single.detach())
    loss(*outputs).backward()
    for actual, single in zip(sharded, floats):
        assert_same(actual.grad, single.grad)


def check_varlen_and_merge(mesh) -> None:
    ends = torch.tensor([0, 4, 6], dtype=torch.int32)
    q, k = torch.randn(6, 4, 8), torch.randn(6, 2, 8)
    whole = fa_ops.attention_varlen(q, k, k, ends, ends, return_lse=True)
    on_heads = [distribute_tensor(x, mesh, [Shard(1)]) for x in (q, k, k)]
    out, lse = fa_ops.attention_varlen(*on_heads, ends, ends, return_lse=True)
    assert (out.placements, lse.placements) == ((Shard(1),), (Shard(0),))
    assert_same(out, whole[0])
    assert_same(lse, whole[1])
    outs, lses = torch.randn(3, 2, 4, 8), torch.randn(3, 2, 4)
    whole = fa_ops.merge_states(outs, lses)
    merged = fa_ops.merge_states(
        distribute_tensor(outs, mesh, [Shard(2)]), distribute_tensor(lses, mesh, [Replicate()])
    )
    assert merged[0].placements == merged[1].placements == (Shard(1),)
    for actual, single in zip(merged, whole):
        assert_same(actual, single)


def check_errors(mesh) -> None:
    q = distribute_tensor(torch.randn(2, 2, 4, 8), mesh, [Shard(2)])
    with pytest.raises(NotImplementedError, match="dropout_p > 0 does not support DTensors"):
        fa_ops.attention(q, q, q, dropout_p=0.5)
    with pytest.raises(ValueError, match=r"sinks must have shape \(2,\), got \(3,\)"):
        fa_ops.attention(q, q, q, sinks=distribute_tensor(torch.randn(3), mesh, [Replicate()]))
    with pytest.warns(UserWarning, match="all inputs are gathered"):
        out = fa_ops.attention(q, q, q)
    assert out.placements == (Replicate(),)
    odd = distribute_tensor(torch.randn(2, 3, 4, 8), mesh, [Shard(1)])
    with pytest.warns(UserWarning, match="all inputs are gathered"):
        assert_same(fa_ops.attention(odd, odd, odd), dense.ATTENTION(*[odd.full_tensor()] * 3))
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("error")
        q = distribute_tensor(torch.randn(2, 2, 4, 8), mesh, [Shard(1)], src_data_rank=None)
        assert fa_ops.attention(q, q, q).placements == (Shard(1),)


@functools.cache
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (WORLD,))


CHECKS = {
    "batch": lambda: check_attention(mesh(), Shard(0), False),
    "heads": lambda: check_attention(mesh(), Shard(1), False),
    "length": lambda: check_attention(mesh(), Shard(2), False),
    "replicated": lambda: check_attention(mesh(), Replicate(), False),
    "batch, compiled": lambda: check_attention(mesh(), Shard(0), True),
    "heads, compiled": lambda: check_attention(mesh(), Shard(1), True),
    "varlen and merge": lambda: check_varlen_and_merge(mesh()),
    "errors": lambda: check_errors(mesh()),
}


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dtensor")
    run_checks(__name__, WORLD, folder)
    return folder


@pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed")
@pytest.mark.parametrize("name", CHECKS)
def test_checks_pass_in_every_process(name, verdicts):
    assert_passed(name, WORLD, verdicts)
