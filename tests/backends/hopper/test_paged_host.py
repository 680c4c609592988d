"""Packed queries over pages on the host: what the kernel finds, and who takes the call."""

import struct

import pytest
import torch

import fa_ops
from fa_ops.backends import hopper
from fa_ops.backends.hopper import forward
from fa_ops.backends.hopper.runtime import nvrtc
from fa_ops.call.call import attention_call
from fa_ops.functions import varlen
from fa_ops.ops import eager
from fa_ops.plans import dispatch, planning


def described(tokens=90, page=16, Hq=8, Hkv=2, D=64, **options):
    """A call of three sequences, one of which has no query."""
    q = torch.randn(tokens, Hq, D, dtype=torch.bfloat16)
    k, v = (torch.randn(40, page, Hkv, D, dtype=torch.bfloat16) for _ in "kv")
    ends = torch.tensor([0, 70, 70, 85], dtype=torch.int32)
    lens = torch.tensor([100, 30, 160], dtype=torch.int32)
    table = torch.arange(3 * 12, dtype=torch.int32).view(3, 12)
    return attention_call(
        q, k, v, is_causal=True, kv_lens=lens, cu_seqlens_q=ends, cu_seqlens_k=ends,
        page_table=table, **options,
    )  # fmt: skip


def test_the_kernel_finds_borders_and_tables(driver, monkeypatch):
    compiled = []
    monkeypatch.setattr(
        nvrtc, "program", lambda source, entry, defines: compiled.append(defines) or entry
    )
    driver.struct_bytes = 720
    call = described()
    t = call.operands
    assert call.is_paged
    out, lse = forward.prepare_paged(call)(call.query, call.key, call.value, t)
    assert out.shape == call.query.shape and lse.shape == (8, 90) and out.is_contiguous()
    assert [compiled[0][n] for n in ("PACKED_QUERIES", "PACKED_HEADS", "IS_PAGED")] == [1, 4, 1]
    (grid, _), params = driver.last("forward")
    where = struct.unpack_from("<3Q", params, 384)
    assert where == (out.data_ptr(), lse.data_ptr(), t.kv_lens.data_ptr())
    sizes = struct.unpack_from("<7i", params, 568)
    assert sizes == (3, 8, 4, 90, 12 * 16, 64, 64)  # B is the number of sequences
    per, (m_blocks, tiles, splits) = 4 * 16, struct.unpack_from("<3i", params, 604)
    assert (m_blocks, tiles, splits) == (1, (90 // per + 3 + 2) * 2, 1) and grid == 4
    table = struct.unpack_from("<Q3i", params, 680)
    assert table == (t.page_table.data_ptr(), 12, 16, 40)
    assert struct.unpack_from("<Q", params, 712) == (t.cu_seqlens_q.data_ptr(),)


@pytest.mark.parametrize(
    "change, packed_heads", [({}, 4), ({"alibi_slopes": torch.ones(3, 8)}, 1), ({"Hkv": 8}, 1)]
)
def test_heads_share_tiles_where_the_kernel_allows_it(driver, monkeypatch, change, packed_heads):
    compiled = []
    monkeypatch.setattr(
        nvrtc, "program", lambda source, entry, defines: compiled.append(defines) or entry
    )
    call = described(**change)
    forward.prepare_paged(call)(call.query, call.key, call.value, call.operands)
    assert [defines["PACKED_HEADS"] for defines in compiled] == [packed_heads]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"page": 4}, "needs pages of 16, 32 or"),
        ({"D": 24}, None),
        ({"D": 20}, "multiples of 8"),
        ({"scale": -1.0}, "needs a positive scale"),
    ],
)
def test_what_it_does_not_take(change, message):
    found = forward.paged_error(described(**change))
    assert found is None if message is None else message in found


def test_pages_of_another_dtype_are_refused_however_many_queries_there_are():
    for tokens in (90, 600):
        call = described(tokens=tokens)
        key, value = (x.to(torch.float8_e4m3fn) for x in (call.key, call.value))
        assert "own dtype" in forward.paged_error(call._replace(key=key, value=value))


@pytest.fixture
def as_on_cuda(monkeypatch):
    """The choice for CUDA tensors, of CPU tensors; the kernel's calls are noted."""
    ran = []
    monkeypatch.setattr(dispatch, "available_error", lambda name: None)
    monkeypatch.setattr(hopper, "_paged_error", forward.paged_error)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    monkeypatch.setattr(
        forward, "prepare_paged", lambda call: lambda *args: ran.append(args) or ("out", "lse")
    )
    planning.forget()
    yield ran
    planning.forget()
    eager._refused.clear()


def attend(call, **options):
    t = call.operands
    return varlen.attend_by_kernel(
        call.query, call.key, call.value, t.cu_seqlens_q, t.kv_lens, t.page_table,
        {"is_causal": True} | options,
    )  # fmt: skip


def test_a_supported_call_is_planned_once(as_on_cuda, monkeypatch):
    call = described()
    assert attend(call) == ("out", "lse")
    monkeypatch.setattr(planning, "prepare", lambda *args: pytest.fail("planned again"))
    assert attend(call) == ("out", "lse")
    assert [args[3].kv_lens is call.operands.kv_lens for args in as_on_cuda] == [True, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_left_out_where_it_has_nothing_to_cast(as_on_cuda, dtype):
    """Queries follow the cache, whatever the region's dtype."""
    call = described()
    with torch.autocast("cpu", dtype):
        assert attend(call) == ("out", "lse")
        assert attend(call._replace(query=call.query.float())) is None
        assert attend(call._replace(query=call.query.requires_grad_())) is None
    assert len(as_on_cuda) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"backend": "triton"},
        {"backend": "reference"},
        {"key_ranges": torch.zeros(3, 1, 1, 2, dtype=torch.int32)},
        {"num_splits": 1},
    ],
)
def test_other_calls_are_left_to_attention_over_a_cache(as_on_cuda, options):
    assert attend(described(), **options) is None and not as_on_cuda


def test_a_refusal_is_remembered(as_on_cuda, monkeypatch):
    call = described(page=4)
    assert attend(call) is None
    monkeypatch.setattr(eager, "checked_call", lambda *args: pytest.fail("asked again"))
    assert attend(call) is None
    assert attend(described()._replace(key=call.key[:0], value=call.value[:0])) is None


@pytest.mark.parametrize(
    "options, error",
    [
        ({"scale": float("nan")}, "scale must be finite"),
        ({"softcap": -1.0}, "softcap must be finite and >= 0"),
        ({"sinks": torch.ones(3)}, "sinks must have shape"),
        ({"alibi_slopes": torch.ones(2, 8)}, "alibi_slopes must have shape"),
        ({"is_causal": 1}, "is_causal must be a bool"),
        ({"window": (1, 2, 3)}, "window must be a pair"),
    ],
)
def test_errors(as_on_cuda, options, error):
    attend(described())
    with pytest.raises((ValueError, TypeError), match=error):
        attend(described(), **options)


def test_explain_names_the_kernel(as_on_cuda):
    call = described()
    t = call.operands
    found = fa_ops.explain(
        call.query, call.key, call.value, cu_seqlens_q=t.cu_seqlens_q, cu_seqlens_k=None,
        kv_lens=t.kv_lens, page_table=t.page_table, max_seqlen_q=70,
    )  # fmt: skip
    assert (found.backend, found.kernel, found.reasons["hopper"]) == ("hopper", "forward", None)
    assert not as_on_cuda


def test_the_cpu_attends_a_cache():
    call = described()
    t = call.operands
    out = fa_ops.attention_varlen(
        call.query, call.key, call.value, t.cu_seqlens_q, None, kv_lens=t.kv_lens,
        page_table=t.page_table, is_causal=True,
    )  # fmt: skip
    assert out.shape == call.query.shape and not out[85:].any()
