"""FlashInfer in the benchmarks, with a module that computes what its wrappers are asked for."""

import importlib.machinery
import sys
import types

import pytest
import torch

import fa_ops
from fa_ops.bench import decode, peers, quantized
from fa_ops.bench.problems import DECODE_PRESETS, DecodeProblem, Problem

LENGTHS = [1, 16, 17, 48]


class Wrapper:
    """Plans pages, of which calls attend those of each row."""

    def __init__(self, workspace, layout="NHD", backend="auto", use_tensor_cores=False):
        assert workspace.dtype == torch.uint8 and not workspace.any() and layout == "NHD"
        self.backend, self.use_tensor_cores = backend, use_tensor_cores

    def attend(self, q, k, v, ends, starts, pages, lens, causal, scale, out):
        for row in range(len(lens)):
            of_row = pages[starts[row] : starts[row + 1]].long()
            length = int(lens[row])
            keys, values = (x[of_row].flatten(0, 1)[:length].transpose(0, 1)[None] for x in (k, v))
            assert keys.shape[2] == length
            queries = q[ends[row] : ends[row + 1]].transpose(0, 1)[None]
            result = fa_ops.attention(queries, keys, values, is_causal=causal, scale=scale)
            out[ends[row] : ends[row + 1]] = result[0].transpose(0, 1)


class Prefill(Wrapper):
    def plan(
        self, ends, starts, pages, last, Hq, Hkv, D, page, causal, q_data_type, kv_data_type
    ):  # fmt: skip
        self.planned = ends, starts, pages, (starts.diff() - 1) * page + last, causal
        self.shape = Hq, Hkv, D, page
        assert q_data_type == kv_data_type == torch.float32

    def run(self, q, kv, out):
        Hq, Hkv, D, page = self.shape
        assert q.shape[1:] == (Hq, D) and kv[0].shape[1:] == kv[1].shape[1:] == (page, Hkv, D)
        *planned, causal = self.planned
        self.attend(q, *kv, *planned, causal, None, out)


class Decode(Prefill):
    def plan(self, starts, *arguments, **dtypes):
        assert self.use_tensor_cores
        ends = torch.arange(len(starts), dtype=torch.int32)
        super().plan(ends, starts, *arguments, causal=False, **dtypes)


class Latent(Wrapper):
    def plan(
        self, *, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv,
        head_dim_kpe, page_size, causal, sm_scale, q_data_type, kv_data_type,
    ):  # fmt: skip
        self.planned = qo_indptr, kv_indptr, kv_indices, kv_len_arr, causal, sm_scale
        self.widths = head_dim_ckv, head_dim_kpe

    def run(self, *, q_nope, q_pe, ckv_cache, kpe_cache, out):
        assert (q_nope.shape[-1], q_pe.shape[-1]) == self.widths
        assert (ckv_cache.shape[-1], kpe_cache.shape[-1]) == self.widths
        q, k = torch.cat([q_nope, q_pe], -1), torch.cat([ckv_cache, kpe_cache], -1)
        self.attend(q, k[:, :, None], ckv_cache[:, :, None], *self.planned, out)


class Ragged(Wrapper):
    def plan(
        self, ends_q, ends_k, Hq, Hkv, D, causal, q_data_type, kv_data_type, o_data_type
    ):  # fmt: skip
        assert q_data_type == kv_data_type == torch.float8_e4m3fn and self.backend == "fa3"
        self.planned = ends_q, ends_k, causal
        self.heads = Hq, Hkv, Hkv

    def run(self, q, k, v, *scales, out):
        assert tuple(len(scale) for scale in scales) == self.heads
        ends_q, ends_k, causal = self.planned
        q, k, v = (x.float() * scale[:, None] for x, scale in zip((q, k, v), scales))
        lengths = int(ends_q.diff().max()), int(ends_k.diff().max())
        out.copy_(fa_ops.attention_varlen(q, k, v, ends_q, ends_k, *lengths, is_causal=causal))


@pytest.fixture
def module(monkeypatch):
    module = types.ModuleType("flashinfer")
    module.__spec__ = importlib.machinery.ModuleSpec("flashinfer", None)
    module.BatchDecodeWithPagedKVCacheWrapper = Decode
    module.BatchPrefillWithPagedKVCacheWrapper = Prefill
    module.BatchPrefillWithRaggedKVCacheWrapper = Ragged
    module.mla = types.SimpleNamespace(BatchMLAPagedAttentionWrapper=Latent)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(peers, "_WORKSPACE", 16)
    return module


def problem(page=16, Hq=4, Hkv=2, D=32, **options) -> DecodeProblem:
    return DecodeProblem(4, 48, Hq, Hkv, D, page=page, dtype=torch.float32, **options)


def inputs(p: DecodeProblem, lengths=LENGTHS):
    """The tensors of `Data` on the CPU, and a cache."""
    pages = p.B * p.S // p.page
    table = torch.randperm(pages, dtype=torch.int32).view(p.B, -1)
    q = torch.randn(p.B, p.Hq, p.queries, p.D)
    data = types.SimpleNamespace(q=q, lens=torch.tensor(lengths, dtype=torch.int32), table=table)
    k = torch.randn(pages, p.page, p.Hkv, p.D)
    return data, k, k if p.shared else torch.randn_like(k)


@pytest.mark.parametrize("peer", peers.FLASHINFER_PEERS, ids=lambda peer: peer.name)
@pytest.mark.parametrize(
    "p, lengths",
    [
        (problem(), LENGTHS),
        (problem(page=1), LENGTHS),
        (problem(queries=5), [5, 16, 17, 48]),
        (problem(Hkv=1, D=48, Dv=32), LENGTHS),
        (problem(Hkv=1, D=48, Dv=32, queries=3), [3, 16, 17, 48]),
    ],
    ids=str,
)
def test_pages_of_each_row_are_attended(module, peer, p, lengths):
    data, k, v = inputs(p, lengths)
    found = peer.build(p, data)(data.q, k, v)
    arguments = {"is_causal": True} if p.queries > 1 else {}
    expected = fa_ops.attention_with_kv_cache(
        data.q, k, v[..., : p.Dv or p.D], data.lens, data.table, **arguments
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "options", [{"page": 0}, {"fp8": True}, {"padding": 8}, {"invariant": True}]
)
def test_other_caches_are_refused(module, options):
    with pytest.raises(NotImplementedError, match="pages of 16-bit keys alone"):
        peers.FLASHINFER_PEERS[0].build(problem(**options), None)


def test_without_the_package_there_is_a_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ModuleNotFoundError, match="flashinfer"):
        peers.FLASHINFER_PEERS[0].build(problem(), None)


@pytest.mark.parametrize("causal", [False, True])
def test_calls_of_e4m3_tensors_have_scales_for_all_heads(module, causal):
    shape = Problem(2, 4, 2, 40, 32, causal, torch.float32)
    q, k, v = shape.inputs("cpu", "bshd")
    found = quantized.CALLS["flashinfer, e4m3 tensors"](shape, q, k, v)().transpose(1, 2).float()
    expected = fa_ops.attention(q, k, v, is_causal=causal)
    assert 0 < ((found - expected).norm() / expected.norm()).item() < 0.1


def test_presets_of_pages_name_the_shapes_of_servers():
    cells = {name: [str(p) for p in DECODE_PRESETS[name]()] for name in ("paged", "mla", "prefill")}
    for page in (16, 64):
        assert {f"B{b} 32/8 D128 page {page}" for b in ("64 4096", "8 8192")} <= set(cells["paged"])
        for rows in ("B64 4096 32/8 D128 64", "B8 8192 32/8 D128 512", "B1 32768 32/8 D128 2048"):
            assert f"{rows} queries page {page}" in cells["prefill"]
    for rows in ("B32 8192 16/1", "B128 2048 128/1", "B1 128 16/1"):
        assert f"{rows} D576 page 64" in cells["mla"]


def test_the_decoding_benchmark_compares_flashinfer():
    assert {"flashinfer fa2", "flashinfer fa3"} <= {peer.name for peer in decode.DECODE_PEERS}
