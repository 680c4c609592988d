"""context_parallel_attention over memory that processes share, against one process."""

from __future__ import annotations

import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fa_ops.distributed import (
    context_parallel_attention,
    explain_context_parallel,
    ring_steps,
    transport,
)
from tests.distributed.context_cases import ContextCase, assert_case_right
from tests.distributed.random_calls import run_cases
from tests.distributed.simulated_peers import use_files

WORLD = 4

MASKS = {
    "full": {"Sk": 12},
    "causal": {"is_causal": True},
    "contiguous": {"is_causal": True, "layout": "contiguous"},
    "window": {"is_causal": True, "window": (5, 0)},
    "documents": {"is_causal": True, "documents": 5, "layout": "balanced"},
    "bfloat16": {"is_causal": True, "dtype": torch.bfloat16},
    "keys are kept": {"is_causal": True, "Hkv": 1},
    "values of another width": {"is_causal": True, "Dv": 4},
    "dropout": {"dropout_p": 0.4, "is_causal": True, "B": 2, "alibi": "heads"},
}


@functools.cache
def mesh(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape)


def check_case(**fields) -> None:
    use_files()
    sent = mock.Mock(side_effect=AssertionError("a message was sent"))
    case = ContextCase(**fields)
    where = mesh(2, 2) if case.inner > 1 else mesh(WORLD)
    with mock.patch.object(transport.Exchange, "keys", sent):
        assert_case_right(case, where, WORLD)


def check_random() -> None:
    use_files()
    errors, _ = run_cases(range(2000, 2030), mesh(2, 2))
    assert not errors, "\n".join(errors)


def inputs(requires_grad: bool = False, S: int = 8) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(dist.get_rank())
    return [torch.randn(1, H, S, 8, generator=g).requires_grad_(requires_grad) for H in (4, 2, 2)]


def step(tensors: list[torch.Tensor], scheme: str, **options) -> list[torch.Tensor]:
    out = context_parallel_attention(*tensors, None, scheme, is_causal=True, **options)
    return [out.detach(), *torch.autograd.grad(out.sin().sum(), tensors)]


def check_same_bits() -> None:
    """Both transports give the same bits, also when memory has grown and has been used before."""
    use_files()
    for scheme in ("ring", "all_gather"):
        for S in (8, 32, 8):
            tensors = inputs(True, S)
            expected = step(tensors, scheme, transport="nccl")
            for _ in range(3):
                for one, other in zip(step(tensors, scheme), expected, strict=True):
                    assert torch.equal(one, other)
            with torch.no_grad():
                out = context_parallel_attention(*tensors, None, scheme, is_causal=True)
            assert torch.equal(out, expected[0]) and not out.requires_grad


def check_graphs_of_several_calls() -> None:
    """Backward passes in the reverse order of the forward passes."""
    use_files()
    tensors = inputs(True)
    expected, found = (
        [
            context_parallel_attention(*tensors, None, scheme, is_causal=causal, transport=name)
            for scheme in ("ring", "all_gather")
            for causal in (False, True)
        ]
        for name in ("nccl", "peer")
    )
    for one, other in zip(reversed(found), reversed(expected), strict=True):
        wanted = torch.autograd.grad(other.sin().sum(), tensors)
        for x, y in zip(torch.autograd.grad(one.sin().sum(), tensors), wanted, strict=True):
            assert torch.equal(x, y)


def check_failure() -> None:
    """Others of a process that raises get NaN where it owes them data; later calls are right."""
    use_files()
    tensors, rank = inputs(True), dist.get_rank()
    expected = step(tensors, "ring", transport="nccl")
    failing = [
        mock.patch.object(transport, "tokens_first", side_effect=MemoryError("no memory")),
        mock.patch.object(ring_steps, "backward", side_effect=MemoryError("no memory")),
    ]
    for is_backward, fails in enumerate(failing):
        out = context_parallel_attention(*tensors, None, "ring", is_causal=True)
        if rank == 1:
            with fails, pytest.raises(MemoryError):
                if is_backward:
                    torch.autograd.grad(out.sin().sum(), tensors)
                else:
                    context_parallel_attention(*tensors, None, "ring", is_causal=True)
        elif is_backward:
            dq, dk, dv = torch.autograd.grad(out.sin().sum(), tensors)
            assert dq.isfinite().all() and dk.isnan().any() and dv.isnan().any()
        else:
            out = context_parallel_attention(*tensors, None, "ring", is_causal=True)
            assert out.isnan().any()
        for one, other in zip(step(tensors, "ring"), expected, strict=True):
            assert torch.equal(one, other)


def check_choice() -> None:
    """All take the memory that they share, unless messages are asked for; "peer" raises without."""
    use_files()
    with mock.patch.object(transport.Exchange, "keys", side_effect=AssertionError("a message")):
        context_parallel_attention(*inputs(), None, "ring")
        with pytest.raises(AssertionError, match="a message"):
            context_parallel_attention(*inputs(), None, "ring", transport="nccl")
    explain = functools.partial(explain_context_parallel, *inputs(), None, "ring")
    assert explain().transport == "peer" and "transport: peer" in str(explain())
    assert explain(transport="nccl").transport == "gloo"
    with mock.patch.object(transport, "_unsuitable", lambda device: "of a reason"):
        assert explain().transport == "gloo, as of a reason"
        context_parallel_attention(*inputs(), None, "ring")
        with pytest.raises(NotImplementedError, match="'peer' cannot be used: of a reason"):
            context_parallel_attention(*inputs(), None, "ring", transport="peer")
    with pytest.raises(ValueError, match="transport must be one of auto, peer, nccl, got 'mpi'"):
        context_parallel_attention(*inputs(), transport="mpi")
    with pytest.raises(ValueError, match="'auto' or 'nccl' with scheme='ulysses', .* got 'peer'"):
        context_parallel_attention(*inputs(), None, "ulysses", transport="peer")
    chosen = explain_context_parallel(*inputs(), transport="peer")
    assert chosen.scheme != "ulysses" and "not 'peer'" in chosen.reasons["ulysses"]
    with pytest.raises(ValueError, match="same shapes and options, got .*transport"):
        name = "nccl" if dist.get_rank() == 2 else "auto"
        context_parallel_attention(*inputs(), None, "ring", transport=name)


@pytest.mark.parametrize(
    "dtype, width, offset, is_wide",
    [
        (torch.bfloat16, 128, 0, True),
        (torch.bfloat16, 12, 0, False),
        (torch.bfloat16, 16, 4, False),
        (torch.float64, 2, 2, True),
    ],
)
def test_rows_are_copied_by_16_bytes_where_possible(dtype, width, offset, is_wide):
    of = torch.randn(2, 5, 3, width + offset).to(dtype)[..., offset:].transpose(1, 2)
    to = torch.zeros(2, 3, 5, width, dtype=dtype)
    assert transport._has_wide_rows(of) == is_wide
    transport.copy_rows(to, of)
    assert torch.equal(to, of)
    transport.copy_rows(to.float(), of)


CHECKS = {
    f"{scheme}, {mask}": lambda fields=fields | {"scheme": scheme}: check_case(**fields)
    for scheme in ("ring", "all_gather")
    for mask, fields in MASKS.items()
}
CHECKS |= {
    "two dimensions": lambda: check_case(inner=2, is_causal=True),
    "random calls": check_random,
    "same bits": check_same_bits,
    "graphs of several calls": check_graphs_of_several_calls,
    "choice": check_choice,
    "failure": check_failure,
}


@pytest.mark.parametrize("name", CHECKS)
def test_checks_pass_in_every_process(name, verdicts):
    verdicts.assert_passed(name)
