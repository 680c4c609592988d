"""cu_seqlens, max_seqlen_q and max_seqlen_k of packed sequences, checked on the CPU."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fa_ops
from fa_ops.call import checks
from fa_ops.call.call import attention_call
from fa_ops.plans import planning

ENDS = torch.tensor([0, 3, 8], dtype=torch.int32)
E4M3 = torch.float8_e4m3fn


def attend(dtype=torch.float32, **options):
    x = torch.randn(8, 2, 16).to(dtype)
    scales = {f"{name}_scale": torch.ones(1) for name in "qkv"} if dtype == E4M3 else {}
    return fa_ops.attention_varlen(x, x, x, ENDS, ENDS, **scales, **options)


@pytest.mark.parametrize("dtype", [torch.float32, E4M3], ids=str)
@pytest.mark.parametrize("name, what", [("max_seqlen_q", "queries"), ("max_seqlen_k", "keys")])
def test_every_call_is_checked(name, what, dtype):
    for _ in range(2):
        assert attend(dtype, **{name: 5}).shape == (8, 2, 16)
        with pytest.raises(ValueError, match=f"^{name} is 4, but a sequence has 5 {what}: pass"):
            attend(dtype, **{name: 4})


@pytest.mark.parametrize("dtype", [torch.float32, E4M3], ids=str)
def test_keys_beyond_kv_lens_do_not_count(dtype):
    kv_lens = torch.tensor([3, 2], dtype=torch.int32)
    exact = attend(dtype, kv_lens=kv_lens, max_seqlen_k=3)
    assert exact.shape == (8, 2, 16)
    with pytest.raises(ValueError, match="max_seqlen_k is 2, but a sequence has 3 keys"):
        attend(dtype, kv_lens=kv_lens, max_seqlen_k=2)


def test_no_sequences():
    x, ends = torch.randn(8, 2, 16), ENDS[:1]
    out = fa_ops.attention_varlen(x, x, x, ends, ends, max_seqlen_q=0, max_seqlen_k=0)
    assert not out.any()


def test_boundaries_that_change_before_the_backward_pass():
    x, ends = torch.randn(8, 2, 16, requires_grad=True), ENDS.clone()
    out = torch.ops.fa.attention_varlen(x, x, x, ends, ends, 5, 5)[0]
    ends.data[1] = 2
    with pytest.raises(ValueError, match="max_seqlen_q is 5, but a sequence has 6 queries"):
        out.sum().backward()


def attend_pages(dtype=torch.float32, **options):
    query, pages = torch.randn(8, 2, 16).to(dtype), torch.randn(4, 4, 2, 16).to(dtype)
    table, lens = torch.arange(4).view(2, 2).int(), torch.tensor([7, 5], dtype=torch.int32)
    scales = {f"{name}_scale": torch.ones(1) for name in "qkv"} if dtype == E4M3 else {}
    options = {"kv_lens": lens, "page_table": table, **scales} | options
    return fa_ops.attention_varlen(query, pages, pages, ENDS, None, **options)


@pytest.mark.parametrize("dtype", [torch.float32, E4M3], ids=str)
def test_pages(dtype):
    assert attend_pages(dtype, max_seqlen_q=5, max_seqlen_k=7).shape == (8, 2, 16)
    with pytest.raises(ValueError, match="max_seqlen_q is 4, but a sequence has 5 queries"):
        attend_pages(dtype, max_seqlen_q=4, max_seqlen_k=7)
    with pytest.raises(ValueError, match="max_seqlen_k is 6, but a sequence has 7 keys"):
        attend_pages(dtype, max_seqlen_q=5, max_seqlen_k=6)


def test_a_symbolic_bound_with_pages():
    compiled = torch.compile(attend_pages, backend="eager", dynamic=True, fullgraph=True)
    for most in (5, 6, 9):
        assert compiled(max_seqlen_q=most, max_seqlen_k=most + 2).shape == (8, 2, 16)
    with pytest.raises(ValueError, match="max_seqlen_q must not be negative, got -1"):
        torch.compile(attend_pages, backend="eager")(max_seqlen_q=-1, max_seqlen_k=7)


def test_lengths_are_checked_before_they_are_compared():
    with pytest.raises(ValueError, match=r"kv_lens must have shape \(2,\), got \(\)"):
        attend_pages(max_seqlen_k=7, kv_lens=torch.tensor(5, dtype=torch.int32))


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_a_bound_that_is_read_from_a_tensor():
    def call(x, ends):
        longest = ends.diff().max().item()
        return fa_ops.attention_varlen(
            x, x, x, ends, ends, max_seqlen_q=longest, max_seqlen_k=longest
        )

    x = torch.randn(8, 2, 16)
    found = torch.compile(call, backend="aot_eager", fullgraph=True)(x, ENDS)
    torch.testing.assert_close(found, call(x, ENDS))


@pytest.fixture
def not_warned(monkeypatch):
    monkeypatch.setattr(checks, "_warned", [])


LENGTHS = torch.tensor([2, 3], dtype=torch.int32)
FOR_LENGTHS = "if cu_seqlens_q holds lengths, pass torch.nn.functional.pad(cu_seqlens_q.cumsum(0)"


def test_lengths_in_place_of_cu_seqlens_warn_once(not_warned, recwarn):
    x = torch.randn(5, 2, 16)
    for _ in range(2):
        fa_ops.attention_varlen(x, x, x, LENGTHS, LENGTHS)
    (warning,) = recwarn
    text = str(warning.message)
    assert text.startswith(
        "cu_seqlens_q should begin with 0 and end with the number of tokens, 5, got [2, 3]: tokens "
        f"outside give 0; {FOR_LENGTHS}"
    )
    ends = eval(text.rpartition("pass ")[2], {"torch": torch, "cu_seqlens_q": LENGTHS})
    assert ends.dtype == torch.int32 and ends.tolist() == [0, 2, 5]


@pytest.mark.parametrize("ends", [[0, 5], [0, 2, 5], [0, 0, 5], [0]])
def test_cu_seqlens_of_all_tokens_do_not_warn(ends, not_warned, recwarn):
    checks.cu_seqlens("cu_seqlens_q", torch.tensor(ends, dtype=torch.int32), 5)
    checks.cu_seqlens("cu_seqlens_k", LENGTHS, 5, all_tokens=False)
    assert not list(recwarn)


@pytest.mark.parametrize("device, debug, checked", [("cpu", 0, 1), ("cuda", 0, 0), ("cuda", 1, 1)])
def test_cu_seqlens_are_read_on_the_cpu_and_with_fa_ops_debug(device, debug, checked, monkeypatch):
    monkeypatch.setattr(planning, "DEBUG", bool(debug))
    with FakeTensorMode():
        x = torch.empty(8, 2, 16, device=device)
        ends = torch.empty(3, dtype=torch.int32, device=device)
    call = attention_call(x, x, x, cu_seqlens_q=ends, cu_seqlens_k=ends)
    assert (planning._check_of_values(call) is not None) == bool(checked)
