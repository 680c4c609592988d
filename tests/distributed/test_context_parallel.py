"""context_parallel_attention on gloo processes: schemes, masks, errors, against one process."""

from __future__ import annotations

import contextlib
import functools
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fa_ops
from fa_ops.distributed import (
    SequenceLayout,
    balance,
    balanced_layout,
    context_parallel_attention,
    explain_context_parallel,
    measure_link_rate,
    ring_steps,
    schedule,
    shard,
    transport,
    ulysses,
    unshard,
)
from fa_ops.distributed import arguments as requests
from fa_ops.distributed import layout as layouts
from tests.distributed.context_cases import ContextCase, assert_case_right
from tests.distributed.random_calls import run_cases

WORLD = 4
ENDS = torch.tensor([0, 5, 6, 6, 40, 64], dtype=torch.int32)

MASKS = {
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "window": (5, 0)},
    "window without earlier keys": {"window": (0, 5)},
    "documents": {"is_causal": True, "documents": 5, "layout": "balanced"},
    "sinks and softcap": {"is_causal": True, "sinks": True, "softcap": 1.5},
    "ALiBi": {"alibi": "heads", "is_causal": True},
    "ALiBi over both sides, with lengths": {"alibi": "batch_heads", "B": 2, "kv_lens": True},
    "ranges of heads": {"key_ranges": (1, 1, 1), "B": 2},
    "dropout": {"dropout_p": 0.4, "is_causal": True, "B": 2, "window": (20, 0), "alibi": "heads"},
    "dropout of documents": {"dropout_p": 0.4, "documents": 5, "is_causal": True, "sinks": True},
}  # fmt: skip
SCHEMES = {
    "ring": {"scheme": "ring"},
    "all_gather": {"scheme": "all_gather"},
    "ulysses": {"scheme": "ulysses"},
    "ulysses with fewer key heads": {"scheme": "ulysses", "Hkv": 1},
    "ulysses with repeated key heads": {"scheme": "ulysses", "Hq": 12, "Hkv": 6},
    "two dimensions": {"inner": 2},
}


@functools.cache
def mesh(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape)


def check_case(**fields) -> None:
    case = ContextCase(**fields)
    assert_case_right(case, mesh(2, 2) if case.inner > 1 else mesh(WORLD), WORLD)


def check_dropout() -> None:
    """A process draws the seed in "auto" too, which is chosen by time alone."""
    check_case(scheme="auto", B=2, dropout_p=0.4, is_causal=True)
    found, plain = (explain_context_parallel(*inputs(), dropout_p=p) for p in (0.4, 0.0))
    assert found.scheme == plain.scheme and found.seconds == plain.seconds


def check_random() -> None:
    errors, _ = run_cases(range(1000, 1024), mesh(2, 2))
    assert not errors, "\n".join(errors)


def inputs(S: int = 8, heads: tuple = (4, 2, 2), **options) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(dist.get_rank())
    return [torch.randn(1, H, S, 8, generator=g, **options) for H in heads]


def check_bits_of_documents() -> None:
    """All-to-all of heads gives the bits of attention_varlen on one process."""
    whole = [
        torch.randn(1, H, 64, 8, generator=torch.Generator().manual_seed(H)) for H in (4, 4, 4)
    ]
    packed = [x[0].transpose(0, 1) for x in whole]
    expected = fa_ops.attention_varlen(*packed, ENDS, ENDS, is_causal=True)
    parts = [shard(x) for x in whole]
    out = context_parallel_attention(*parts, scheme="ulysses", cu_seqlens=ENDS, is_causal=True)
    assert torch.equal(unshard(out)[0].transpose(0, 1), expected)


def check_chunks_of_one_token() -> None:
    """Steps with one key have gradients of its score, as the result is of more keys."""
    g, ends = torch.Generator().manual_seed(0), torch.tensor([0, 3, 8], dtype=torch.int32)
    sizes = ((4, 8), (4, 8), (4, 16))
    whole = [torch.randn(1, H, 8, D, generator=g).requires_grad_() for H, D in sizes]
    packed = (x[0].transpose(0, 1) for x in whole)
    out = fa_ops.attention_varlen(*packed, ends, ends, is_causal=True)
    expected = torch.autograd.grad(out.sin().sum(), whole)
    for scheme in ("ring", "all_gather"):
        parts = [shard(x.detach()).requires_grad_() for x in whole]
        out = context_parallel_attention(*parts, None, scheme, is_causal=True, cu_seqlens=ends)
        for grad, wanted in zip(torch.autograd.grad(out.sin().sum(), parts), expected, strict=True):
            torch.testing.assert_close(unshard(grad), wanted)


def check_repeatable() -> None:
    for scheme in ("ring", "ulysses", "all_gather"):
        grads = []
        for _ in range(2):
            tensors = [x.requires_grad_() for x in inputs()]
            out = context_parallel_attention(
                *tensors, None, scheme, is_causal=True, deterministic=True
            )
            grads.append(torch.autograd.grad(out.sin().sum(), tensors))
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def sent_elements(function) -> int:
    """How many elements this process sends from one process to another."""
    original, sent = transport.Exchange.start, []

    def start(self, sends, receives, what):
        sent.extend(x.numel() for _, x in sends)
        return original(self, sends, receives, what)

    with mock.patch.object(transport.Exchange, "start", start):
        function()
    return sum(sent)


class Written(TorchDispatchMode):
    """Counts the elements that copies write."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **kwargs or {})
        if operator.overloadpacket.__name__ in ("cat", "copy_", "clone", "_to_copy", "add_"):
            self.elements += result.numel()
        return result


def check_copies_of_heads() -> None:
    """Heads are copied into their messages once, and once out of them, forward and backward."""
    tensors = inputs(requires_grad=True)
    layout = layouts.zigzag_layout(8 * WORLD, WORLD).segments
    split = ulysses.HeadSplit(layouts.groups_of(None)[0], layout, layout, 4, 4)
    q, k, v = tensors[0], *(x.repeat_interleave(2, 1) for x in tensors[1:])
    size = 3 * q.numel()
    once_and_own = 2 * size + size // WORLD  # gloo has no message to the process itself
    with Written() as written:
        found = ulysses.ToHeads.apply(q, k, v, split)
    assert written.elements == once_and_own
    grads = [torch.ones_like(x) for x in found]
    with Written() as written:
        torch.autograd.grad(found, (q, k, v), grads)
    assert written.elements == once_and_own


def check_skipped_steps() -> None:
    """Keys that no query attends are not sent, and steps without keys are not computed."""
    q, k, v = inputs()
    rank, token = dist.get_rank(), 2 * 2 * 8  # key heads, keys and values, features
    contiguous = {"layout": "contiguous"}
    run = lambda **options: sent_elements(  # noqa: E731
        lambda: context_parallel_attention(q, k, v, None, "ring", **contiguous | options)
    )
    assert run() == 3 * 8 * token
    assert run(is_causal=True) == (WORLD - 1 - rank) * 8 * token
    assert run(is_causal=True, window=(3, 0)) == (rank < WORLD - 1) * 3 * token
    ends = torch.tensor([0, 8, 16, 24, 32], dtype=torch.int32)
    assert run(cu_seqlens=ends) == 0
    # in zigzag order the second chunk of a process is attended by those of higher rank only
    assert run(is_causal=True, layout="zigzag") == (rank * 8 + (WORLD - 1 - rank) * 4) * token
    steps = explain_context_parallel(q, k, v, None, "ring", cu_seqlens=ends, **contiguous).steps
    assert [step.endswith("no keys: skipped") for step in steps] == [False, True, True, True]


def check_layouts() -> None:
    ends = torch.tensor([0, 48, 50, 64], dtype=torch.int32)
    layout = balanced_layout(64, cu_seqlens=ends, is_causal=True, chunks=4)
    layout.check()
    pairs = torch.cat([torch.arange(1, n + 1) for n in ends.diff().tolist()])
    work = [sum(int(pairs[a:b].sum()) for a, b in held) for held in layout.segments]
    assert max(work) < 1.15 * sum(work) / WORLD
    x = torch.arange(64).view(1, 1, 64, 1)
    assert torch.equal(unshard(shard(x, layout=layout), layout=layout), x)
    for name, zigzag in (("zigzag", True), ("contiguous", False)):
        assert torch.equal(shard(x, zigzag=not zigzag, layout=name), shard(x, zigzag=zigzag))
        assert torch.equal(unshard(shard(x, layout=name), layout=name), x)
    on_two = mesh(2, 2)
    assert torch.equal(unshard(shard(x, on_two), on_two), x)
    assert torch.equal(shard(x, on_two), shard(x))
    with pytest.raises(
        ValueError, match="tokens must be a multiple of 12, 3 chunks .*: pad the sequence"
    ):
        balanced_layout(64, chunks=3)
    for split in (shard, unshard):
        with pytest.raises(ValueError, match="dim must be one of x's 4 dimensions, got 4"):
            split(x, dim=4)
    with pytest.raises(
        ValueError, match="layout is of 64 tokens on 4 processes, but x has 32 .*: pass the"
    ):
        shard(x[:, :, :32], layout=layout)
    with pytest.raises(
        ValueError, match="give each of 2 processes 2 of 4 tokens, got 3 .*: balanced_layout"
    ):
        SequenceLayout(4, (((0, 3),), ((3, 4),))).check()
    with pytest.raises(ValueError, match="hold each of 4 tokens once"):
        SequenceLayout(4, (((0, 2),), ((1, 3),))).check()
    for segments in ([((0, 2),), ((2, 4),)], (((0, 2),), [(2, 4)]), (((0, 2),), (2, 4))):
        with pytest.raises(TypeError, match="layout must hold a tuple for each process of tuples"):
            SequenceLayout(4, segments).check()


def check_layouts_of_documents() -> None:
    """Documents stay whole where that leaves the work equal, as long ones do not."""
    sizes = [512, 512, 256, 256, 128, 128, 128, 128] * 4
    ends = torch.tensor([0, *sizes]).cumsum(0).int()
    tokens = int(ends[-1])
    layout = balanced_layout(tokens, cu_seqlens=ends, is_causal=True)
    layout.check()
    borders = set(ends.tolist())
    assert all(set(segment) <= borders for held in layout.segments for segment in held)
    x = inputs(tokens // WORLD)
    run = lambda: context_parallel_attention(  # noqa: E731
        *x, None, "ring", cu_seqlens=ends, is_causal=True, layout=layout
    )
    assert sent_elements(run) == 0
    one = torch.tensor([0, 3, 8191, 8192], dtype=torch.int32)
    layout = balanced_layout(8192, cu_seqlens=one, is_causal=True)
    layout.check()
    work = [sum(b**2 - a**2 for a, b in held) for held in layout.segments]
    assert max(work) < 1.1 * sum(work) / WORLD


def check_explanation() -> None:
    rate = measure_link_rate()
    everywhere = [None] * WORLD
    dist.all_gather_object(everywhere, rate)
    assert rate > 0 and len(set(everywhere)) == 1
    found = explain_context_parallel(*inputs(64), is_causal=True)
    dist.all_gather_object(everywhere, found.scheme)
    assert len(set(everywhere)) == 1
    assert found.scheme == min(found.seconds, key=found.seconds.get)
    assert found.rates.link == rate and set(found.seconds) == {"ring", "ulysses", "all_gather"}
    assert f"not faster than {found.scheme}" in str(found)
    odd = explain_context_parallel(*inputs(8, (3, 3, 3)), is_causal=True)
    assert odd.reasons["ulysses"] == "needs a number of query heads that 4 processes divide, got 3"
    asked = explain_context_parallel(*inputs(), None, "ring", is_causal=True)
    assert asked.scheme == "ring" and len(asked.steps) == WORLD
    assert asked.steps[0] == "step 1: own keys: 8 queries, causal"


def chosen(rates: tuple, heads: tuple, **options) -> str:
    """The scheme that "auto" chooses on a machine with these rates."""
    known = mock.patch.dict(balance._RATES, {"cpu": balance.Rates(*rates)})
    with known, mock.patch.dict(balance._measured, clear=True):
        return explain_context_parallel(*inputs(256, heads), **options).scheme


def check_choice() -> None:
    """Rings hide transfers behind compute, all-gather merges nothing, all-to-all moves least."""
    assert chosen((1e11, 1e13, 1e9), (4, 4, 4)) == "ring"
    assert chosen((1e15, 1e9, 1e15), (32, 1, 1)) == "all_gather"
    assert chosen((1e15, 1e13, 1e9), (4, 4, 4)) == "ulysses"
    few = {"is_causal": True, "window": (1, 0), "layout": "contiguous"}  # one row has two results
    assert chosen((1e15, 1e9, 1e15), (32, 1, 1), **few) == "ring"


def check_scale() -> None:
    """The value of a tensor is read in every call; a process that cannot read it ends all."""
    q, k, v = inputs(requires_grad=True)
    for scheme in ("ring", "ulysses", "all_gather"):
        wanted = [context_parallel_attention(q, k, v, None, scheme, scale=x) for x in (0.25, 2.0)]
        scale = torch.tensor(0.25)
        for x, value in zip(wanted, (0.25, 2.0), strict=True):
            scale.fill_(value)
            found = context_parallel_attention(q, k, v, None, scheme, scale=scale)
            assert torch.equal(found, x)
            assert explain_context_parallel(q, k, v, None, scheme, scale=scale).scheme == scheme
        assert not torch.equal(*wanted)
    parameter = torch.nn.Parameter(torch.tensor(2.0))
    with torch.no_grad():
        found = context_parallel_attention(q, k, v, None, scheme, scale=parameter)
    assert torch.equal(found, wanted[1])
    held = [x for key in requests._known for x in key if isinstance(x, requests.ParallelOptions)]
    assert held and not any(isinstance(x.scale, torch.Tensor) for x in held)
    rank = dist.get_rank()
    for wrong, match in (
        (parameter, "scale must not require grad, as attention has no gradient by it: multiply"),
        (torch.ones(1), "scale must be a number, or a tensor with one and without dimensions, got"),
    ):
        kind, raised = (TypeError, f"^{match}") if rank == 1 else (RuntimeError, f"raised: {match}")
        with pytest.raises(kind, match=raised):
            context_parallel_attention(q, k, v, scale=wrong if rank == 1 else 2.0)


def check_second_derivatives() -> None:
    """They raise, also those of a loss whose own gradient is a constant."""
    for scheme in ("ring", "all_gather", "ulysses"):
        for loss in (torch.sum, lambda out: out.sin().sum()):
            q, k, v = inputs(requires_grad=True)
            out = context_parallel_attention(q, k, v, None, scheme)
            (grad,) = torch.autograd.grad(loss(out), q, create_graph=True)
            with pytest.raises(NotImplementedError, match="double backward is not implemented"):
                torch.autograd.grad(grad.square().sum() + v.sum(), v)
        q, k, v = inputs(requires_grad=True)  # a checkpoint lets each tensor be unpacked once
        out = checkpoint(context_parallel_attention, q, k, v, None, scheme, use_reentrant=False)
        (found,) = torch.autograd.grad(out.sum(), q, create_graph=True)
        out = context_parallel_attention(q, k, v, None, scheme)
        torch.testing.assert_close(found, *torch.autograd.grad(out.sum(), q))


def check_errors() -> None:
    """Errors that every process finds itself, before anything is sent."""
    q, k, v = inputs()
    attend = context_parallel_attention
    with pytest.raises(ValueError, match="scheme must be one of auto, ring, ulysses, all_gather"):
        attend(q, k, v, scheme="star")
    with pytest.raises(
        ValueError, match="layout must be 'zigzag', 'contiguous' or a SequenceLayout"
    ):
        attend(q, k, v, layout="stripes")
    with pytest.raises(TypeError, match="mesh_or_group must be a DeviceMesh or a ProcessGroup"):
        attend(q, k, v, "cp")
    with pytest.raises(ValueError, match=r"mesh must have one dimension, or two .* got 3 of sizes"):
        attend(q, k, v, mesh(2, 2, 1))
    for timeout in (0, -1.0, "3", True, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=f"timeout must be .* positive .* got {timeout!r}"):
            attend(q, k, v, timeout=timeout)
    with pytest.raises(ValueError, match="^key is on meta, but query is on cpu"):
        attend(q, k.to("meta"), v)
    with pytest.raises(ValueError, match="^query is on meta, but the group has backends for cpu"):
        attend(*(x.to("meta") for x in (q, k, v)))
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'masks'"):
        explain_context_parallel(q, k, v, masks=None)
    with pytest.raises(
        ValueError, match="number of heads that the 4 processes .* got 3: pass scheme='ring'"
    ):
        attend(*inputs(8, (3, 3, 3)), scheme="ulysses")
    with pytest.raises(ValueError, match="scheme must be 'auto', 'ring' or 'all_gather' on a mesh"):
        attend(q, k, v, mesh(2, 2), "ulysses")
    for p in (-0.1, 1.0):
        with pytest.raises(ValueError, match=rf"dropout_p must be in \[0, 1\), got {p}"):
            attend(q, k, v, scheme="ring", dropout_p=p)
    with pytest.raises(TypeError, match="dropout_p must be a number, got None"):
        attend(q, k, v, dropout_p=None)
    with pytest.raises((ValueError, RuntimeError), match="key must be contiguous in its last"):
        attend(q, k.mT.contiguous().mT if dist.get_rank() == 1 else k, v)
    with pytest.raises(ValueError, match=r"key_ranges must have shape .* \(1, 4, 32\), got"):
        attend(q, k, v, key_ranges=torch.zeros(1, 1, 8, 2, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"cu_seqlens must not decrease and be within \[0, 32\]"):
        attend(q, k, v, cu_seqlens=torch.tensor([0, 33], dtype=torch.int32))
    with pytest.raises(ValueError, match="query must have a batch of 1 with cu_seqlens, got 2"):
        attend(*[x.repeat(2, 1, 1, 1) for x in (q, k, v)], cu_seqlens=ENDS)
    with pytest.raises(NotImplementedError, match="alibi_slopes with cu_seqlens must have shape"):
        attend(q, k, v, cu_seqlens=ENDS.clamp(max=32), alibi_slopes=torch.ones(5, 4))


def check_repeated_calls() -> None:
    """Calls that are alike are checked once; others are refused or attended by their own masks."""
    q, k, v = inputs()
    attend = context_parallel_attention
    attend(q, k, v, is_causal=True, window=(1, 0))
    with pytest.raises(TypeError, match="is_causal must be a bool"):
        attend(q, k, v, is_causal=1, window=(1, 0))
    with pytest.raises(TypeError, match="key is float64"):
        attend(q, k.double(), v, is_causal=True, window=(1, 0))
    for mask in ({"cu_seqlens": [0, 8, 32]}, {"kv_lens": [32]}):
        ((name, values),) = mask.items()
        values = torch.tensor(values, dtype=torch.int32)
        first = attend(q, k, v, **{name: values})
        assert torch.equal(attend(q, k, v, **{name: values}), first)
        values[0 if name == "kv_lens" else 1] = 5
        changed = attend(q, k, v, **{name: values})
        everywhere = [None] * WORLD
        dist.all_gather_object(everywhere, torch.equal(changed, first))
        assert not all(everywhere)
    values = torch.tensor([0, 8, 32], dtype=torch.int32)
    attend(q, k, v, cu_seqlens=values)
    values[2] = 33
    with pytest.raises(ValueError, match="cu_seqlens must not decrease"):
        attend(q, k, v, cu_seqlens=values)


def check_disagreement() -> None:
    """Errors that one process causes end all of them, before anything is sent."""
    rank = dist.get_rank()
    q, k, v = inputs(8 if rank != 2 else 6)
    with pytest.raises(ValueError, match=r"same shapes and options, got query \(1, 4, "):
        context_parallel_attention(q, k, v)
    q, k, v = inputs()
    with pytest.raises(ValueError, match="got .* on process .* and .* on process"):
        context_parallel_attention(q, k, v, is_causal=rank == 1)
    lens = torch.tensor([20 + (rank == 3)], dtype=torch.int32)
    with pytest.raises(ValueError, match="same shapes and options, got .*mask"):
        context_parallel_attention(q, k, v, kv_lens=lens)
    for scheme in ("ring", "ulysses"):  # the lse would be another message
        with pytest.raises(ValueError, match="same shapes and options, got .*return_lse"):
            context_parallel_attention(q, k, v, None, scheme, return_lse=rank == 1)
    sinks = torch.zeros(4, requires_grad=rank == 0)
    with pytest.raises(ValueError, match="same shapes and options, got .*gradient of sinks"):
        context_parallel_attention(q, k, v, sinks=sinks)
    kind, match = (TypeError, "^check must be") if rank == 1 else (RuntimeError, "^process 1 of")
    with pytest.raises(kind, match=match):
        context_parallel_attention(q, k, v, check=None if rank == 1 else True)
    nested = torch.nested.nested_tensor([q[0]]) if rank == 1 else q
    with pytest.raises(RuntimeError, match="sizes" if rank == 1 else "^process 1 of the group has"):
        context_parallel_attention(nested, k, v)
    wrong = k.double() if rank == 1 else k
    kind, match = (TypeError, "^key is float64") if rank == 1 else (RuntimeError, "^process 1 of")
    for where in (None, mesh(2, 2)):
        if where is not None and rank != 1:
            match = "raised: "
        with pytest.raises(kind, match=match):
            context_parallel_attention(q, wrong, v, where)


def check_other_processes() -> None:
    """A group or a mesh without this process."""
    rank, q = dist.get_rank(), inputs()
    group = dist.new_group([0, 2])
    if rank in (0, 2):
        assert_case_right(ContextCase(is_causal=True), group, 2)
        assert_case_right(ContextCase(scheme="ulysses", documents=3), group, 2)
    else:
        with pytest.raises(ValueError, match=f"group must contain this process, rank {rank}"):
            context_parallel_attention(*q, group)
    pair = DeviceMesh("cpu", [1, 3])
    if rank in (1, 3):
        assert_case_right(ContextCase(is_causal=True), pair, 2)
    else:
        with pytest.raises(ValueError, match=f"mesh must contain this process, rank {rank}"):
            context_parallel_attention(*q, pair)


def check_failure() -> None:
    """A process that raises in the middle: the others end with an error that names the step.

    Process 2 has the keys that it needs by then, and fails in its backward pass.
    """
    rank, tensors, begin = dist.get_rank(), inputs(requires_grad=True), time.monotonic()
    group = dist.new_group(range(WORLD))
    original, calls = ring_steps.operator_call, []

    def arguments(*args):
        calls.append(args)
        if rank == 1 and len(calls) == 1:
            raise MemoryError("no memory")
        return original(*args)

    with mock.patch.object(ring_steps, "operator_call", arguments):
        kind, match = (MemoryError, "no memory") if rank == 1 else (RuntimeError, "step . of 4")
        with pytest.raises(kind, match=match):
            out = context_parallel_attention(*tensors, group, "ring", timeout=1.0)
            out.sum().backward()
    assert time.monotonic() - begin < 30


def check_failure_of_heads() -> None:
    """The same in an all-to-all of heads."""
    rank, tensors, begin = dist.get_rank(), inputs(requires_grad=True), time.monotonic()
    group = dist.new_group(range(WORLD))
    kind, match = RuntimeError, "step 2 of 2 .tokens' results. failed, another process may"
    failing = mock.patch.object(ulysses, "attend", side_effect=MemoryError("no memory"))
    with contextlib.ExitStack() as stack:
        if rank == 1:
            stack.enter_context(failing)
            kind, match = MemoryError, "no memory"
        with pytest.raises(kind, match=match):
            context_parallel_attention(*tensors, group, "ulysses", timeout=1.0)
    assert time.monotonic() - begin < 30


def check_absence() -> None:
    """A process that does not call, as it raised before: the others end with an error."""
    rank, tensors, begin = dist.get_rank(), inputs(), time.monotonic()
    group = dist.new_group(range(WORLD))
    if rank != 3:
        with pytest.raises(RuntimeError, match="before the first step, another process .* did not"):
            context_parallel_attention(*tensors, group, timeout=0.5)
    assert time.monotonic() - begin < 30


def check_autocast() -> None:
    tensors = [x.requires_grad_() for x in inputs()]
    for scheme in ("ring", "ulysses", "all_gather"):
        with torch.autocast("cpu", torch.bfloat16):
            out = context_parallel_attention(*tensors, None, scheme, is_causal=True)
        halves = [x.bfloat16() for x in tensors]
        expected = context_parallel_attention(*halves, None, scheme, is_causal=True)
        assert out.dtype == torch.bfloat16 and torch.equal(out, expected)
        grads = torch.autograd.grad(out.float().sin().sum(), tensors)
        assert all(g.dtype == torch.float32 for g in grads)


def check_default_device() -> None:
    """What is planned on the host stays there, whatever torch's default device is."""
    q, k, v = inputs(16)
    slopes, options = torch.rand(4), {"is_causal": True, "window": (9, 0)}
    for scheme in ("ring", "ulysses", "all_gather"):
        for mask in ({"cu_seqlens": ENDS}, {"alibi_slopes": slopes}):
            expected = context_parallel_attention(q, k, v, None, scheme, **mask, **options)
            schedule._plans.clear(), schedule._kept.clear(), requests._known.clear()
            with torch.device("meta"):
                found = context_parallel_attention(q, k, v, None, scheme, **mask, **options)
            assert torch.equal(found, expected)
    with torch.device("meta"):
        balanced_layout(64, cu_seqlens=ENDS)
        assert explain_context_parallel(q, k, v, cu_seqlens=ENDS).scheme


CHECKS = {
    f"{scheme}, {mask}": lambda fields=fields | chosen: check_case(**fields)
    for scheme, chosen in SCHEMES.items()
    for mask, fields in MASKS.items()
}
CHECKS |= {
    "choice with dropout": check_dropout,
    "random calls": check_random,
    "bits of documents": check_bits_of_documents,
    "chunks of one token": check_chunks_of_one_token,
    "repeatable": check_repeatable,
    "copies of heads": check_copies_of_heads,
    "skipped steps": check_skipped_steps,
    "layouts": check_layouts,
    "layouts of documents": check_layouts_of_documents,
    "autocast": check_autocast,
    "another default device": check_default_device,
    "explanation": check_explanation,
    "choice": check_choice,
    "errors": check_errors,
    "scale": check_scale,
    "second derivatives": check_second_derivatives,
    "repeated calls": check_repeated_calls,
    "disagreement": check_disagreement,
    "other processes": check_other_processes,
    "absence": check_absence,
    "failure of heads": check_failure_of_heads,
    "failure": check_failure,  # the last, as messages of its group may remain
}


@pytest.mark.parametrize("name", CHECKS)
def test_checks_pass_in_every_process(name, verdicts):
    verdicts.assert_passed(name)
