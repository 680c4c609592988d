"""Tiles that calls of flex_attention find themselves: which are visited, and when they are kept."""

from __future__ import annotations

import gc
import math

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import checkpoint

import fa_ops
from fa_ops.backends.cpu import scores
from fa_ops.functions import flex, tile_cache
from fa_ops.programs import tiles

S, DOCUMENT = 1024, 256


def same_document(documents):
    return lambda b, h, i, j: documents[i] == documents[j]


def inputs(size: int = S, heads: int = 4, features: int = 64, grad: bool = False):
    shape = 1, heads, size, features
    return [torch.randn(shape, requires_grad=grad) for _ in range(3)]


def dense(q, k, v, documents):
    s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    kept = documents.view(-1, 1) == documents
    return torch.softmax(s.masked_fill(~kept, -math.inf), -1) @ v


@pytest.fixture(autouse=True)
def analyses(monkeypatch):
    """The masks analysed so far, from an empty cache on."""
    found, analyse = [], tiles.tile_runs
    monkeypatch.setattr(tiles, "tile_runs", lambda *a: found.append(a[2]) or analyse(*a))
    tile_cache._kept.clear()
    yield found
    tile_cache._kept.clear()


@pytest.fixture
def visited(monkeypatch):
    """Elements of scores computed, and of masks evaluated."""
    counts = {"scores": 0, "masks": 0}
    of, elements = scores.Scores.of, scores.Scores.elements

    def count(name, rows, cols):
        counts[name] += (rows.stop - rows.start) * (cols.stop - cols.start)

    def counted_scores(self, q, tile):
        count("scores", tile.rows, tile.cols)
        return of(self, q, tile)

    def counted_masks(self, rows, cols, s=None):
        count("masks", rows, cols)
        return elements(self, rows, cols, s)

    monkeypatch.setattr(scores.Scores, "of", counted_scores)
    monkeypatch.setattr(scores.Scores, "elements", counted_masks)
    return counts


def test_documents_are_computed_by_themselves(visited, analyses):
    """Forward and backward visit the tiles on the diagonal, and evaluate no mask in full ones."""
    documents = torch.arange(S) // DOCUMENT
    q, k, v = inputs(grad=True)
    out = fa_ops.flex_attention(q, k, v, mask_mod=same_document(documents))
    assert visited == {"scores": S * DOCUMENT, "masks": 0}
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    assert visited == {"scores": 2 * S * DOCUMENT, "masks": 0}
    expected = dense(q, k, v, documents)
    torch.testing.assert_close(out, expected)
    for a, b in zip(grads, torch.autograd.grad(expected.square().sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    shifted = (torch.arange(S) + 64) // DOCUMENT  # borders are inside tiles, where masks decide
    out = fa_ops.flex_attention(q, k, v, mask_mod=same_document(shifted))
    torch.testing.assert_close(out, dense(q, k, v, shifted))
    kept = (shifted.view(-1, 1) == shifted).unflatten(1, (-1, 256)).unflatten(0, (-1, 128))
    share = 128 * 256 * int(kept.any(3).any(1).sum())
    assert visited == {"scores": 2 * S * DOCUMENT + share, "masks": share}
    assert analyses == [(1, 4, S, S)] * 2


def test_small_calls_find_tiles_once_they_are_many(analyses):
    documents = torch.arange(256) // 64
    q, k, v = inputs(256, 1, 16)
    call = flex.described(flex.Arguments(q, k, v, mask_mod=same_document(documents)))
    masked = call.masked(flex.Arguments(q, k, v))
    needed = math.ceil(masked.seconds_of_analysis() / masked.seconds_that_tiles_save())
    assert needed > 20
    for n in range(1, needed + 3):
        out = fa_ops.flex_attention(q, k, v, mask_mod=same_document(documents))
        assert len(analyses) == (n >= needed)
    torch.testing.assert_close(out, dense(q, k, v, documents))
    for _ in range(needed + 3):  # of tensors that live for a call each, none are found
        once = documents.clone()
        fa_ops.flex_attention(q, k, v, mask_mod=same_document(once))
    assert len(analyses) == 1


WRITES = {
    "in place": lambda t, new: t.copy_(new),
    "through data": lambda t, new: t.data.copy_(new),  # of which no counter tells
    "through numpy": lambda t, new: t.numpy().__setitem__(slice(None), new.numpy()),
}


@pytest.mark.parametrize("how", WRITES)
def test_written_tensors_are_analysed_again(how, analyses):
    documents = torch.arange(S) // DOCUMENT
    q, k, v = inputs()
    for new in (documents.clone(), torch.roll(documents, 100), torch.zeros_like(documents)):
        WRITES[how](documents, new)
        for _ in range(2):
            out = fa_ops.flex_attention(q, k, v, mask_mod=same_document(documents))
            torch.testing.assert_close(out, dense(q, k, v, documents))
    assert len(analyses) == 3


def test_a_number_or_a_length_that_changes_is_another_mask(analyses):
    q, k, v = inputs()
    for n in (3, 5, 700):
        mask_mod = lambda b, h, i, j: ((i - j).abs() // 128) % n == 0  # noqa: B023, E731
        out = fa_ops.flex_attention(q, k, v, mask_mod=mask_mod)
        i, j = torch.arange(S).view(-1, 1), torch.arange(S)
        kept = mask_mod(0, 0, i, j)
        torch.testing.assert_close(out, fa_ops.attention(q, k, v, kept))
        half = fa_ops.flex_attention(q[:, :, :512], k, v, mask_mod=mask_mod)
        torch.testing.assert_close(half, out[:, :, :512])
    assert len(analyses) == 6


def test_masks_are_forgotten_with_their_tensors_and_beyond_a_number():
    q, k, v = inputs()
    documents = torch.arange(S) // DOCUMENT
    fa_ops.flex_attention(q, k, v, mask_mod=same_document(documents))
    assert len(tile_cache._kept) == 1
    del documents
    gc.collect()
    assert not tile_cache._kept
    several = [torch.arange(256) // 64 for _ in range(tile_cache._MOST_KEPT + 3)]
    for documents in several:
        fa_ops.flex_attention(*inputs(256, 1, 8), mask_mod=same_document(documents))
    assert len(tile_cache._kept) == tile_cache._MOST_KEPT


def test_checkpoints_may_find_tiles_in_between(monkeypatch, analyses):
    """The tensors that a call saves do not depend on them."""
    documents = torch.arange(256) // 64
    q, k, v = inputs(256, 1, 16, grad=True)
    share = lambda self: 2.5 * self.seconds_that_tiles_save()  # noqa: E731
    monkeypatch.setattr(tile_cache.MaskedCall, "seconds_of_analysis", share)
    run = lambda q: fa_ops.flex_attention(q, k, v, mask_mod=same_document(documents)).exp()  # noqa: E731
    outs = [checkpoint(run, q, use_reentrant=False) for _ in range(4)]
    assert len(analyses) == 1
    expected = torch.autograd.grad(dense(q, k, v, documents).exp().sum(), q)
    for out in outs:
        torch.testing.assert_close(torch.autograd.grad(out.sum(), q), expected)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.documents = torch.nn.Buffer(torch.arange(S) // DOCUMENT)

    def forward(self, q, k, v):
        documents = self.documents[: q.shape[2]]
        return fa_ops.flex_attention(q, k, v, mask_mod=same_document(documents))


def test_compiled_calls_find_tiles_on_the_cpu(visited):
    """As values may be others when the graph runs, the backend looks at them in each call."""
    model, (q, k, v) = Model(), inputs(grad=True)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for documents in (model.documents.clone(), torch.arange(S) // 128):
        model.documents.copy_(documents)
        visited.update(scores=0, masks=0)
        out = compiled(q, k, v)
        kept = int((documents.view(-1, 1) == documents).sum())
        assert visited == {"scores": max(kept, 256 * S), "masks": 256 * S * (kept < 256 * S)}
        grads = torch.autograd.grad(out.square().sum(), (q, k, v))
        assert visited["scores"] == 2 * max(kept, 256 * S)
        expected = dense(q, k, v, documents)
        torch.testing.assert_close(out, expected)
        wanted = torch.autograd.grad(expected.square().sum(), (q, k, v))
        for a, b in zip(grads, wanted, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_graphs_for_gpus_hold_the_analysis(monkeypatch, visited):
    """Here on the CPU, of which the backend would find them: for all lengths by one graph."""
    monkeypatch.setattr(tile_cache, "FIND_TILES", ())
    monkeypatch.setattr(tile_cache, "_OF_DEVICE", 1e-9)
    monkeypatch.setattr(tiles, "seconds_of_analysis", lambda *_: math.inf)
    model, (q, k, v) = Model(), inputs()
    calls = []

    def record(gm, _):
        calls.extend(n for n in gm.graph.nodes if "attention_programmed" in str(n.target))
        return make_boxed_func(gm.forward)

    backend = aot_autograd(fw_compiler=record)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    for size in (S - 24, 700):  # not that of the buffer, to which it would be bound
        visited.update(scores=0, masks=0)
        part = [x[:, :, :size] for x in (q, k, v)]
        documents = model.documents[:size]
        torch.testing.assert_close(compiled(*part), dense(*part, documents))
        assert visited["scores"] < 0.7 * size**2
    (call,) = calls
    assert call.kwargs["tile_runs"] is not None
    program = torch.export.export(
        model, (q, k, v), strict=False,
        dynamic_shapes=[{2: torch.export.Dim("S", min=256, max=S)}] * 3,
    )  # fmt: skip
    (node,) = [n for n in program.graph.nodes if "attention_programmed" in str(n.target)]
    assert node.kwargs["tile_runs"] is not None
    torch.testing.assert_close(program.module()(*part), dense(*part, documents))


def test_layers_of_a_graph_share_the_analysis(monkeypatch):
    """Of one mask, whatever the terms of their scores are."""
    monkeypatch.setattr(tile_cache, "FIND_TILES", ())
    monkeypatch.setattr(tile_cache, "_OF_DEVICE", 1e-9)
    documents, slopes = torch.arange(384) // 100, torch.randn(3, 2, requires_grad=True)
    q, k, v = inputs(384, 2, 16)
    graphs = []

    def layers(q):
        for slope in slopes.unbind(0):
            score_mod = lambda s, b, h, i, j: torch.tanh(s) + slope[h] * (i - j)  # noqa: B023, E731
            q = fa_ops.flex_attention(q, k, v, score_mod, mask_mod=same_document(documents))
        return q

    def record(gm, _):
        graphs.append(str(gm.graph))
        return make_boxed_func(gm.forward)

    backend = aot_autograd(
        fw_compiler=record, bw_compiler=record, partition_fn=min_cut_rematerialization_partition
    )
    with torch.no_grad():
        expected = layers(q)
    out = torch.compile(layers, fullgraph=True, backend=backend)(q)
    torch.testing.assert_close(out, expected)
    assert graphs[0].count("fa.program_tiles") == 1
    assert graphs[0].count("fa.attention_programmed") == 3


def test_small_calls_of_graphs_have_no_analysis(monkeypatch):
    monkeypatch.setattr(tile_cache, "FIND_TILES", ())
    model, (q, k, v) = Model(), inputs(256, 1, 16)
    program = torch.export.export(model, (q, k, v), strict=False)
    (node,) = [n for n in program.graph.nodes if "attention_programmed" in str(n.target)]
    assert "tile_runs" not in node.kwargs


def test_calls_that_are_exported_or_mapped(analyses):
    model, (q, k, v) = Model(), inputs()
    expected = model(q, k, v)
    assert len(analyses) == 1
    program = torch.export.export(model, (q, k, v), strict=False)
    (node,) = [n for n in program.graph.nodes if "attention_programmed" in str(n.target)]
    assert "tile_runs" not in node.kwargs
    torch.testing.assert_close(program.module()(q, k, v), expected)
    mapped = torch.vmap(lambda d: fa_ops.flex_attention(q, k, v, mask_mod=same_document(d)))
    several = torch.stack([model.documents, torch.zeros_like(model.documents)])
    found = mapped(several)
    torch.testing.assert_close(found[0], expected)
    torch.testing.assert_close(found[1], fa_ops.attention(q, k, v))
    with torch.inference_mode():  # where tensors have no version counter
        documents = model.documents.clone()
        for _ in range(2):
            out = fa_ops.flex_attention(q, k, v, mask_mod=same_document(documents))
            torch.testing.assert_close(out, expected)
            documents.zero_()
            expected = fa_ops.attention(q, k, v)


def test_block_masks_inside_transforms_and_with_other_tensors():
    q, k, v = inputs(384, 2, 16)
    documents, other = torch.arange(384) // 100, torch.zeros(384, dtype=torch.int64)
    captured = {"documents": documents}
    mask_mod = lambda b, h, i, j: captured["documents"][i] == captured["documents"][j]  # noqa: E731
    made = create_block_mask(mask_mod, 1, 1, 384, 384, "cpu")
    attend = lambda q: fa_ops.flex_attention(q, k, v, block_mask=made)  # noqa: E731
    grad = torch.func.grad(lambda q: attend(q).square().sum())(q)
    leaf = q.clone().requires_grad_()
    torch.testing.assert_close(
        grad, torch.autograd.grad(dense(leaf, k, v, documents).square().sum(), leaf)[0]
    )
    torch.testing.assert_close(attend(q), dense(q, k, v, documents))
    with torch.inference_mode():
        once = documents.clone()
        again = create_block_mask(same_document(once), 1, 1, 384, 384, "cpu")
        out = fa_ops.flex_attention(q, k, v, block_mask=again)
        torch.testing.assert_close(out, dense(q, k, v, documents))
    captured["documents"] = other  # the lists are still those of the documents
    listed = made.to_dense()[0, 0].bool()
    kept = listed.repeat_interleave(128, 0).repeat_interleave(128, 1)
    torch.testing.assert_close(attend(q), fa_ops.attention(q, k, v, kept))


def test_what_is_explained():
    documents = torch.arange(S) // DOCUMENT
    q, k, v = inputs()
    tell = lambda *tensors: str(fa_ops.explain(*tensors, mask_mod=same_document(documents)))  # noqa: E731
    assert "tiles of the mask: 48 empty, 16 full, 0 mixed" in tell(q, k, v)
    assert "empty tiles are skipped: they are found in the call" in tell(q, k, v)
    fa_ops.flex_attention(q, k, v, mask_mod=same_document(documents))
    assert "empty tiles are skipped: they are known from an earlier call" in tell(q, k, v)
    small = [x[:, :1, :, :2] for x in (q, k, v)]
    assert "all tiles are visited: empty ones are found when about" in tell(*small)
    runs = fa_ops.mask_tiles(same_document(documents), 1, 1, S, S)
    told = fa_ops.explain(q, k, v, mask_mod=same_document(documents), block_mask=runs)
    assert "empty tiles are skipped, as block_mask lists the others" in str(told)
