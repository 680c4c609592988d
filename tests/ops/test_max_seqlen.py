"""max_seqlen_q and max_seqlen_k of packed sequences, which are checked on the CPU."""

import pytest
import torch

import fa_ops

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
        with pytest.raises(ValueError, match=f"^{name} is 4, but a sequence has 5 {what}$"):
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
