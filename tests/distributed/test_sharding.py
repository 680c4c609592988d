"""DTensors sharded over batch, heads and length, on two gloo processes, against one process."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.device_mesh import DeviceMesh, init_device_mesh

import fa_ops
from fa_ops.distributed import context_parallel_attention
from fa_ops.ops import dense
from fa_ops.testing import make_case

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
    call = CASE.fresh(requires_grad=requires_grad)
    q, k, v = call[:3]
    t = call.operands
    return [q, k, v, t.attn_mask, t.sinks], [t.alibi_slopes, t.kv_lens]


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
    assert outputs[0].placements == outputs[1].placements == (placement,)
    if not compiled:  # torch 2.15 compiles DTensors with the strides of contiguous ones
        assert outputs[0].stride() == expected[0].stride()
    for actual, single in zip(outputs, expected):
        assert_same(actual, single.detach())
    loss(*outputs).backward()
    for actual, single in zip(sharded, floats):
        assert_same(actual.grad, single.grad)
    assert sharded[0].grad.placements == sharded[2].grad.placements == (placement,)


def check_derivatives(mesh, placement) -> None:
    """Tangents, and gradients of gradients."""

    def penalty(x, others):
        grads = torch.autograd.grad(loss(*function(*x, *others)), x, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), x)

    floats, others = arguments()
    placements = [placement, Replicate(), placement, Replicate(), Replicate()]
    sharded = [
        distribute_tensor(x.detach(), mesh, [p]).requires_grad_()
        for x, p in zip(floats, placements)
    ]
    plain = [distribute_tensor(others[0], mesh, [Replicate()]), others[1]]
    for actual, single in zip(penalty(sharded, plain), penalty(floats, others)):
        assert_same(actual, single)
    tangents = [torch.randn_like(x) for x in floats]
    found = []
    for x, t, (slopes, lens) in (
        (floats, tangents, others),
        (sharded, [distribute_tensor(t, mesh, [Replicate()]) for t in tangents], plain),
    ):
        q, k, v, mask, sinks = (s.detach() for s in x)
        options = {"sinks": sinks, "alibi_slopes": slopes, "kv_lens": lens}
        out, lse = dense.WITH_LSE(q, k, v, mask, 0.0, True, **options)
        found.append(dense.JVP(q, k, v, out, lse, *t, out, mask, 0.0, True, **options))
    for single, actual in zip(*found):
        assert_same(actual, single)
        assert actual.placements == (placement,)


def check_rows(mesh, compiled: bool) -> None:
    """Heads that the processes do not divide: keys are gathered, and uneven rows attend them."""
    Sq, Sk = (8, 10) if compiled else (7, 9)
    q, k, v = (torch.randn(2, 3, S, 8, requires_grad=True) for S in (Sq, Sk, Sk))
    sinks, lens = torch.randn(3).requires_grad_(), torch.tensor([9, 4], dtype=torch.int32)
    ranges = torch.randint(0, 10, (2, 3, Sq, 2)).sort(-1).values.int()

    def attend(q, k, v, sinks, lens, ranges):
        out, lse = fa_ops.attention(
            q, k, v, is_causal=True, window=(5, None), sinks=sinks, kv_lens=lens,
            key_ranges=ranges, return_lse=True,
        )  # fmt: skip
        return out, lse.masked_fill(lse == float("-inf"), 0.0)

    expected = attend(q, k, v, sinks, lens, ranges)
    loss(*expected).backward()
    sharded = [
        distribute_tensor(x.detach(), mesh, [p]).requires_grad_()
        for x, p in ((q, Shard(2)), (k, Shard(2)), (v, Shard(2)), (sinks, Replicate()))
    ]
    run = torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*inputs are gathered")
        found = run(*sharded, lens, ranges)
        assert [x.placements for x in found] == [(Shard(2),), (Shard(2),)]
        loss(*found).backward()
    for actual, single in zip(found, expected):
        assert_same(actual, single.detach())
    for actual, single in zip(sharded, (q, k, v, sinks)):
        assert_same(actual.grad, single.grad)


def check_batch_of_one(mesh) -> None:
    """One process has the row, with its slopes, and the others nothing."""
    tensors = [torch.randn(1, H, 5, 8, requires_grad=True) for H in (4, 2, 2)]
    options = {
        "alibi_slopes": torch.rand(1, 4), "kv_lens": torch.tensor([4], dtype=torch.int32),
        "attn_mask": torch.rand(1, 4, 5, 5) > 0.2,
    }  # fmt: skip
    expected = fa_ops.attention(*tensors, **options)
    expected.sin().sum().backward()
    placements = (Shard(0), Shard(2), Shard(0))
    sharded = [
        distribute_tensor(x.detach(), mesh, [p]).requires_grad_()
        for x, p in zip(tensors, placements)
    ]
    out = fa_ops.attention(*sharded, **options)
    assert out.placements == (Shard(0),)
    out.sin().sum().backward()
    for actual, single in zip((out, *sharded), (expected, *tensors)):
        assert_same(actual, single.detach())
    for actual, single in zip(sharded, tensors):
        assert_same(actual.grad, single.grad)


def check_length_compiled(mesh) -> None:
    tensors = [torch.randn(2, 4, S, 8, requires_grad=True) for S in (6, 8, 8)]
    attend = lambda q, k, v: fa_ops.attention(q, k, v, is_causal=True)  # noqa: E731
    expected = attend(*tensors)
    expected.sin().sum().backward()
    sharded = [distribute_tensor(x.detach(), mesh, [Shard(2)]).requires_grad_() for x in tensors]
    out = torch.compile(attend, backend="aot_eager", fullgraph=True)(*sharded)
    assert out.placements == (Shard(2),)
    out.sin().sum().backward()
    for actual, single in zip((out, *sharded), (expected, *tensors)):
        assert_same(actual, single.detach())
    for actual, single in zip(sharded, tensors):
        assert_same(actual.grad, single.grad)


def check_packed_length(mesh) -> None:
    ends = torch.tensor([0, 4, 6], dtype=torch.int32)
    tensors = [torch.randn(6, H, 8, requires_grad=True) for H in (4, 2, 2)]
    whole = fa_ops.attention_varlen(*tensors, ends, ends, is_causal=True, return_lse=True)
    loss(*whole).backward()
    sharded = [distribute_tensor(x.detach(), mesh, [Shard(0)]).requires_grad_() for x in tensors]
    found = fa_ops.attention_varlen(*sharded, ends, ends, is_causal=True, return_lse=True)
    assert (found[0].placements, found[1].placements) == ((Shard(0),), (Shard(1),))
    loss(*found).backward()
    for actual, single in zip(
        (*found, *(x.grad for x in sharded)), (*whole, *(x.grad for x in tensors))
    ):
        assert_same(actual, single.detach())


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


def check_mask_blocks(mesh) -> None:
    q, mask = torch.randn(2, 4, 5, 8), torch.rand(1, 4, 5, 5) < 0.5
    on_heads = distribute_tensor(mask, mesh, [Shard(1)])
    blocks = fa_ops.mask_blocks(on_heads)
    assert blocks.placements == (Shard(1),)
    assert torch.equal(blocks.full_tensor(), fa_ops.mask_blocks(mask))
    q_on_heads = distribute_tensor(q, mesh, [Shard(1)])
    out = fa_ops.attention(*[q_on_heads] * 3, on_heads, mask_blocks=blocks)
    assert_same(out, fa_ops.attention(q, q, q, mask))
    rows = distribute_tensor(mask[0, 0], mesh, [Shard(0)])
    assert fa_ops.mask_blocks(rows).placements == (Replicate(),)


def check_eight_bit_scales(mesh) -> None:
    """Scales of e4m3 tensors are sharded as these are."""
    shapes = (2, 4, 6, 8), (2, 2, 70, 8), (2, 2, 70, 8)
    eight = [torch.randn(shape).to(torch.float8_e4m3fn) for shape in shapes]
    names = "q_scale", "k_scale", "v_scale"
    for sizes in (((), (1,), ()), [s[:2] for s in shapes], ((2, 4, 6), (2, 2, 2), (2, 2, 8))):
        scales = dict(zip(names, (torch.rand(size) + 0.5 for size in sizes)))
        expected = fa_ops.attention(*eight, **scales)
        for dim in (0, 1):
            place = [Shard(dim)]
            local = [x.chunk(WORLD, dim)[mesh.get_local_rank()].contiguous() for x in eight]
            sharded = [DTensor.from_local(x, mesh, place) for x in local]
            assert_same(fa_ops.attention(*sharded, **scales), expected)


def check_eight_bit_rows(mesh) -> None:
    """Keys behind kv_lens have no part in the mean and the scales of the keys."""
    q, k, v = (torch.randn(2, 3, S, 8) for S in (6, 8, 8))
    k[1, :, 3:], v[1, :, 3:] = torch.nan, 1e4
    options = {"kv_lens": torch.tensor([8, 3], dtype=torch.int32), "is_causal": True}
    expected = fa_ops.quantized_attention(q, k, v, **options)
    sharded = [distribute_tensor(x, mesh, [Shard(2)]) for x in (q, k, v)]
    assert_same(fa_ops.quantized_attention(*sharded, **options), expected)


def check_lists(mesh) -> None:
    """Lists of blocks over batch, heads and length, lists of tokens, and an indexer's."""
    tensors = [torch.randn(2, H, 6, 8, requires_grad=True) for H in (4, 2, 2)]
    lists, counts = torch.randint(-1, 3, (2, 2, 6, 2)).int(), torch.full((2, 2, 6), 2).int()
    for given in (lists, lists[:1, :1]):
        options = {"block_size": 2, "counts": counts[: given.shape[0], : given.shape[1]]}
        whole = fa_ops.attention_selected(*tensors, given, return_lse=True, **options)
        whole = whole[0], whole[1].masked_fill(whole[1] == float("-inf"), 0.0)
        grads = torch.autograd.grad(loss(*whole), tensors)
        for dim in range(3):
            place = Shard(dim)
            sharded = [distribute_tensor(x.detach(), mesh, [place]) for x in tensors]
            sharded = [x.requires_grad_() for x in sharded]
            out, lse = fa_ops.attention_selected(*sharded, given, return_lse=True, **options)
            assert out.placements == lse.placements == (place,)
            lse = lse.masked_fill(lse == float("-inf"), 0.0)
            found = torch.autograd.grad(loss(out, lse), sharded)
            for actual, single in zip((out, lse, *found), (*whole, *grads)):
                assert_same(actual, single.detach())
    q, k, v = (x.detach()[0].transpose(0, 1) for x in tensors)
    tokens = torch.stack([torch.randperm(6)[:3] for _ in range(6)]).int()
    expected = fa_ops.attention_selected_tokens(q, k, v, tokens, return_lse=True)
    for dim in (0, 1):
        sharded = [distribute_tensor(x, mesh, [Shard(dim)]) for x in (q, k, v)]
        found = fa_ops.attention_selected_tokens(*sharded, tokens, return_lse=True)
        assert [x.placements for x in found] == [(Shard(dim),), (Shard(1 - dim),)]
        for actual, single in zip(found, expected):
            assert_same(actual, single)
    query, key, weights = torch.randn(3, 4, 6, 8), torch.randn(3, 1, 6, 8), torch.rand(3, 4, 6)
    lens, ranges = torch.tensor([6, 3, 0]).int(), torch.tensor([1, 5]).int().view(1, 1, 1, 2)
    options = {"kv_lens": lens, "key_ranges": ranges}
    expected = fa_ops.select_tokens(query, key, weights, 3, **options)
    for place in (Shard(0), Replicate()):
        sharded = [distribute_tensor(x, mesh, [place]) for x in (query, key, weights)]
        found = fa_ops.select_tokens(*sharded, 3, **options)
        assert found.placements == (place,) and torch.equal(found.full_tensor(), expected)
    heads = [distribute_tensor(x, mesh, [Shard(1)]) for x in (query, weights)]
    with pytest.warns(UserWarning, match="all inputs are gathered"):
        found = fa_ops.select_tokens(heads[0], key, heads[1], 3, **options)
    assert torch.equal(found.full_tensor(), expected)


def check_errors(mesh) -> None:
    q = distribute_tensor(torch.randn(2, 2, 4, 8), mesh, [Shard(2)])
    with pytest.raises(NotImplementedError, match="dropout_p > 0 does not support DTensors"):
        fa_ops.attention(q, q, q, dropout_p=0.5)
    with pytest.raises(ValueError, match=r"sinks must have shape \(2,\), got \(3,\)"):
        fa_ops.attention(q, q, q, sinks=distribute_tensor(torch.randn(3), mesh, [Replicate()]))
    wide = q.redistribute(mesh, [Shard(3)])
    with pytest.warns(UserWarning, match="all inputs are gathered"):
        out = fa_ops.attention(wide, wide, wide)
    assert out.placements == (Replicate(),)
    odd = distribute_tensor(torch.randn(2, 3, 4, 8), mesh, [Shard(1)])
    with pytest.warns(UserWarning, match="all inputs are gathered"):
        assert_same(fa_ops.attention(odd, odd, odd), dense.ATTENTION(*[odd.full_tensor()] * 3))
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("error")
        q = distribute_tensor(torch.randn(2, 2, 4, 8), mesh, [Shard(1)], src_data_rank=None)
        assert fa_ops.attention(q, q, q).placements == (Shard(1),)


def check_graph_break() -> None:
    """torch.compile breaks its graph at the call, whose gradients flow through."""
    tensors = [torch.randn(1, H, 8, 8, requires_grad=True) for H in (4, 2, 2)]
    block = lambda q, k, v: context_parallel_attention(2 * q, k, v, is_causal=True).sin()  # noqa: E731
    expected = torch.autograd.grad(block(*tensors).sum(), tensors)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="exchanges messages"):
        torch.compile(block, backend="eager", fullgraph=True)(*tensors)
    graphs = []
    compiled = torch.compile(block, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    found = torch.autograd.grad(compiled(*tensors).sum(), tensors)
    assert len(graphs) == 2 and all(map(torch.equal, found, expected))


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
    "length, compiled": lambda: check_length_compiled(mesh()),
    "derivatives, batch": lambda: check_derivatives(mesh(), Shard(0)),
    "derivatives, heads": lambda: check_derivatives(mesh(), Shard(1)),
    "derivatives, length": lambda: check_derivatives(mesh(), Shard(2)),
    "batch of one": lambda: check_batch_of_one(mesh()),
    "rows": lambda: check_rows(mesh(), False),
    "rows, compiled": lambda: check_rows(mesh(), True),
    "packed length": lambda: check_packed_length(mesh()),
    "graph break": check_graph_break,
    "varlen and merge": lambda: check_varlen_and_merge(mesh()),
    "mask blocks": lambda: check_mask_blocks(mesh()),
    "lists": lambda: check_lists(mesh()),
    "8-bit scales": lambda: check_eight_bit_scales(mesh()),
    "8-bit rows": lambda: check_eight_bit_rows(mesh()),
    "errors": lambda: check_errors(mesh()),
}


@pytest.mark.parametrize("name", CHECKS)
def test_checks_pass_in_every_process(name, verdicts):
    verdicts.assert_passed(name)
