"""The functions of ring-flash-attention on gloo processes, against one process."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fa_ops
from fa_ops import compat
from fa_ops.compat import flash_attn, ring_flash_attn
from fa_ops.compat.ring_flash_attn import Gathering, key_ranges
from fa_ops.distributed.schedule import Mask, visible

WORLD = 2
ENDS = [0, 8, 8, 28, 32]  # of parts of 1 / WORLD of each sequence
SLOPES = torch.linspace(0.05, 0.4, 4)
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window_size": (5, 0), "softmax_scale": 0.3},
    "ALiBi": {"causal": True, "alibi_slopes": SLOPES, "deterministic": True},
    "dropout": {"causal": True, "dropout_p": 0.4},
}


def whole_tensors(*shape: int) -> list[torch.Tensor]:
    """q, k and v that all processes share; the last dimension but one is that of heads."""
    g = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, H, 8, generator=g).requires_grad_() for H in (4, 2, 2)]


def packed_form(name: str, tensors: list) -> tuple:
    """The arguments of a function or of its packed forms, whose heads are repeated if need be."""
    q, k, v = tensors
    if "qkvpacked" in name:
        return (torch.stack([q, *(x.repeat_interleave(2, -2) for x in (k, v))], -3),)
    return (q, torch.stack([k, v], -3)) if "kvpacked" in name else (q, k, v)


def compare(name: str, one_process: str, chosen: torch.Tensor, dim: int, whole, here, options):
    """Compare a function on this process's tokens with one of flash-attn on all tokens."""
    tensors = whole_tensors(*whole)
    torch.manual_seed(7)
    out, lse, _ = getattr(flash_attn, one_process)(
        *packed_form(one_process, tensors), *here[0], return_attn_probs=True, **options
    )
    parts = [x.detach().index_select(dim, chosen).requires_grad_() for x in tensors]
    torch.manual_seed(7 + dist.get_rank())  # the seed of the first process counts
    found, found_lse, nothing = getattr(ring_flash_attn, name)(
        *packed_form(name, parts), *here[1], return_attn_probs=True, **options
    )
    assert nothing is None and found.is_contiguous()
    torch.testing.assert_close(found, out.index_select(dim, chosen), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found_lse, lse.index_select(-1, chosen), atol=1e-5, rtol=1e-5)
    out.sin().sum().backward(), found.sin().sum().backward()
    for part, x in zip(parts, tensors):
        expected = x.grad.index_select(dim, chosen)
        torch.testing.assert_close(part.grad, expected, atol=1e-5, rtol=1e-5)


def tokens_of(rank: int, zigzag: bool, ends: list[int]) -> torch.Tensor:
    """The tokens of a process, in the whole of sequences whose parts have these borders."""
    found = []
    for a, b in zip(ends, ends[1:]):
        tokens = torch.arange(a * WORLD, b * WORLD)
        chunks = tokens.chunk(2 * WORLD) if zigzag else tokens.chunk(WORLD)
        pair = (rank, 2 * WORLD - 1 - rank) if zigzag else (rank,)
        found += [chunks[c] for c in pair if len(tokens)]
    return torch.cat(found)


def check_dense(name: str, options: dict) -> None:
    chosen = tokens_of(dist.get_rank(), name.startswith("zigzag"), [0, 16])
    one = name.removeprefix("zigzag_").removeprefix("ring_")
    compare(name, one, chosen, 1, (2, 16 * WORLD), ((), ()), options)


def check_varlen(name: str, options: dict) -> None:
    chosen = tokens_of(dist.get_rank(), name.startswith("zigzag"), ENDS)
    ends = torch.tensor(ENDS, dtype=torch.int32)
    whole = (ends * WORLD, 40) if "qkv" in name else (ends * WORLD, ends * WORLD, 40, 40)
    one = name.removeprefix("zigzag_").removeprefix("ring_")
    compare(name, one, chosen, 0, (64,), (whole, (ends, 20)), options)


def check_llama3(name: str, options: dict, ends: list[int], stride: int) -> None:
    whole = torch.tensor(ends, dtype=torch.int32)
    longest = int(whole.diff().max())
    packing = (whole, longest) if "qkv" in name else (whole, whole, longest, longest)
    local, rank = ends[-1] // WORLD, dist.get_rank()
    *prepared, keys = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(
        whole, options.get("causal", False), rank, WORLD
    )
    chosen = torch.arange(rank * local, (rank + 1) * local)
    here = (packing, (*prepared, stride, keys))
    compare(name, name.replace("llama3_", ""), chosen, 0, (ends[-1],), here, options)


def check_llama3_dropout(options: dict, ends: list[int], stride: int) -> None:
    """Weights are numbered in the packed whole, as in a dense call with key ranges."""
    tensors, rank = whole_tensors(ends[-1]), dist.get_rank()
    whole, local = torch.tensor(ends, dtype=torch.int32), ends[-1] // WORLD
    documents = Mask(ends[-1], ends[-1], True, *options.get("window_size", (-1, -1)))
    documents = documents._replace(cu_seqlens=whole.long())
    ranges = torch.stack(visible(documents, torch.arange(ends[-1])), -1).int()
    dense = [x.transpose(0, 1).unsqueeze(0) for x in tensors]
    torch.manual_seed(7)
    out, lse = fa_ops.attention(
        *dense, key_ranges=ranges, dropout_p=0.4, return_lse=True,
        alibi_slopes=options.get("alibi_slopes"),
    )  # fmt: skip
    *prepared, keys = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(whole, True, rank, WORLD)
    chosen = slice(rank * local, (rank + 1) * local)
    parts = [x.detach()[chosen].requires_grad_() for x in tensors]
    torch.manual_seed(7 + rank)
    found, found_lse, _ = ring_flash_attn.llama3_flash_attn_varlen_func(
        *parts, *prepared, stride, keys, 0.4, causal=True, return_attn_probs=True, **options
    )
    out = out[0].transpose(0, 1)
    torch.testing.assert_close(found, out[chosen], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found_lse, lse[0, :, chosen], atol=1e-5, rtol=1e-5)
    for outs, lses in ((out, lse), (found, found_lse)):
        (outs.sin().sum() + lses.cos().sum()).backward()
    for part, x in zip(parts, tensors):
        torch.testing.assert_close(part.grad, x.grad[chosen], atol=1e-5, rtol=1e-5)


def check_errors() -> None:
    q, k, v = (x.detach() for x in whole_tensors(1, 8))
    with pytest.raises(ValueError, match=r"dropout_p must be in \[0, 1\), got 1.5"):
        ring_flash_attn.ring_flash_attn_func(q, k, v, 1.5)
    with pytest.raises(TypeError, match="dropout_p must be a number, got '0.1'"):
        ring_flash_attn.ring_flash_attn_func(q, k, v, "0.1")
    with pytest.raises(ValueError, match=r"q must have shape \(B, S, H, D\), got \(8, 4, 8\)"):
        ring_flash_attn.ring_flash_attn_func(q[0], k, v)
    packed, ends = (q[0], k[0], v[0]), torch.tensor([0, 5, 8], dtype=torch.int32)
    with pytest.raises(
        ValueError, match=r"parts of even lengths in zigzag order, got \[5, 3\]: pad"
    ):
        ring_flash_attn.zigzag_ring_flash_attn_varlen_func(*packed, ends, 5, causal=True)
    with pytest.raises(ValueError, match=r"cu_seqlens must rise from 0 to q's 8 tokens, got \[0"):
        ring_flash_attn.ring_flash_attn_varlen_func(*packed, ends[:2], 5)
    llama3 = ring_flash_attn.llama3_flash_attn_varlen_func
    prepare = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens
    with pytest.raises(ValueError, match=r"rise from 0 to a multiple of world_size 3, got \[0, 5"):
        prepare(ends, True, 0, 3)
    *prepared, keys = prepare(2 * ends, False, dist.get_rank(), WORLD)
    with pytest.raises(ValueError, match="heads_k_stride must divide k's 2 heads, got 3: 1 always"):
        llama3(*packed, *prepared, 3, keys)
    with pytest.raises(
        ValueError, match="local_k_slice must lie within the 16 tokens .*: pass that of"
    ):
        llama3(*packed, *prepared, 1, slice(0, 17))
    with pytest.raises(ValueError, match=r"dropout_p must be in \[0, 1\), got -0.5"):
        llama3(*packed, *prepared, 1, keys, -0.5)
    with pytest.raises(NotImplementedError, match="window_size needs causal=True"):
        llama3(*packed, *prepared, 1, keys, window_size=(3, 3))
    leaves = [x.requires_grad_() for x in packed]
    out = llama3(*leaves, *prepared, 1, keys, causal=True)
    (grad,) = torch.autograd.grad(out.sum(), leaves[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward is not implemented"):
        torch.autograd.grad(grad.square().sum() + leaves[2].sum(), leaves[2])
    kind = ValueError if dist.get_rank() else RuntimeError
    with pytest.raises(kind, match="heads_k_stride must divide"):
        llama3(*packed, *prepared, 1 if dist.get_rank() == 0 else 3, keys)


def check_failure() -> None:
    """A process that raises in its backward pass: the other ends with an error naming the step."""
    q, k, v = (x.detach().requires_grad_() for x in whole_tensors(8))
    ends = torch.tensor([0, 10, 16], dtype=torch.int32)
    rank, group = dist.get_rank(), dist.new_group(range(WORLD), timeout=timedelta(seconds=2))
    *prepared, keys = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(ends, True, rank, WORLD)
    out = ring_flash_attn.llama3_flash_attn_varlen_func(
        q, k, v, *prepared, 1, keys, causal=True, group=group
    )
    kind, match = RuntimeError, "the step of key heads 0 to 1 .gradients. failed, another process"
    with contextlib.ExitStack() as stack:
        if rank == 1:
            failing = mock.Mock(side_effect=MemoryError("no memory"))
            stack.enter_context(mock.patch.object(Gathering, "gradients", failing))
            kind, match = MemoryError, "no memory"
        with pytest.raises(kind, match=match):
            out.sum().backward()


NAMES = [name for name in ring_flash_attn.__all__ if "prepare" not in name]
CHECKS: dict = {"errors": check_errors}
for _name in NAMES:
    for _mask in OPTIONS if _name.endswith("attn_func") or "n_func" in _name else ("causal",):
        _options = OPTIONS[_mask]
        if "llama3" not in _name:
            _check = check_varlen if "varlen" in _name else check_dense
            CHECKS[f"{_name}, {_mask}"] = lambda c=_check, n=_name, o=_options: c(n, o)
            continue
        if _mask == "dropout":
            continue
        for _ends, _stride in (([0, 10, 11, 11, 40], 1), ([0, 20, 24], 2), ([0, 40], 1)):
            CHECKS[f"{_name}, {_mask}, {_ends}"] = lambda n=_name, o=_options, e=_ends, s=_stride: (
                check_llama3(n, o, e, s)
            )
for _ends, _stride in (([0, 10, 11, 11, 40], 1), ([0, 20, 24], 2)):
    for _mask, _options in (
        ("causal", {}), ("window", {"window_size": (5, 0)}), ("ALiBi", {"alibi_slopes": SLOPES})
    ):  # fmt: skip
        CHECKS[f"llama3 dropout, {_mask}, {_ends}"] = lambda o=_options, e=_ends, s=_stride: (
            check_llama3_dropout(o, e, s)
        )
CHECKS["failure"] = check_failure  # the last, as messages of its group may remain


@pytest.mark.parametrize("name", CHECKS)
def test_checks_pass_in_every_process(name, verdicts):
    verdicts.assert_passed(name)


def test_prepared_borders():
    """Three sequences of 7, 7 and 2 tokens on four processes."""
    ends = torch.tensor([0, 7, 14, 16], dtype=torch.int32)
    prepare = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens
    q, k, longest_q, longest_k, keys = prepare(ends, True, 1, 4)
    assert (q.tolist(), k.tolist(), longest_q, longest_k) == ([0, 3, 4], [0, 7, 8], 3, 7)
    assert keys == slice(0, 8) and q.dtype == torch.int32
    q, k, longest_q, longest_k, keys = prepare(ends, False, 1, 4)
    assert (q.tolist(), k.tolist(), longest_q, longest_k) == ([0, 3, 4], [0, 7, 14], 3, 7)
    assert keys == slice(0, 14)
    _, k, _, _, keys = prepare(ends, True, 2, 4)
    assert k.tolist() == [0, 5] and keys == slice(7, 12)


@pytest.mark.parametrize("window", [(-1, -1), (3, 0), (2, 4)])
@pytest.mark.parametrize("causal", [True, False])
def test_key_ranges_of_packed_sequences(causal, window):
    """Also outside of every sequence, and of an empty one."""
    ends = torch.tensor([2, 9, 9, 14], dtype=torch.int32)
    found = key_ranges(ends, ends, 16, causal, *window)
    mask = Mask(16, 16, causal, *window, cu_seqlens=ends.long())
    assert torch.equal(found, torch.stack(visible(mask, torch.arange(16)), -1).int())


def test_install_makes_the_import_find_the_functions():
    compat.install("ring_flash_attn")
    try:
        from ring_flash_attn import ring_flash_attn_func as found

        assert found is ring_flash_attn.ring_flash_attn_func
    finally:
        compat.uninstall("ring_flash_attn")
