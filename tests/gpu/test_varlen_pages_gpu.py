"""Packed queries over pages on a GPU."""

from __future__ import annotations

import pytest
import torch

import fa_ops
from tests.ops.test_varlen_pages import OPTIONS, drawn


def on_gpu(tensors: tuple, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [x.cuda().to(dtype) if x.is_floating_point() else x.cuda() for x in tensors]


@pytest.mark.parametrize("page_size, D, Dv", [(4, 16, 8), (16, 64, 64), (64, 128, 128)])
@pytest.mark.parametrize("name", OPTIONS)
def test_results_are_those_of_the_oracle(name, page_size, D, Dv):
    given = drawn(page_size, D, Dv)
    q, k, v, ends, lens, table = on_gpu(given)
    options = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in OPTIONS[name].items()}
    options = {"kv_lens": lens, "page_table": table, "return_lse": True, **options}
    out, lse = fa_ops.attention_varlen(q, k, v, ends, None, 7, **options)
    options["backend"] = "reference"
    expected, expected_lse = fa_ops.attention_varlen(q, k, v, ends, None, 7, **options)
    torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse, expected_lse, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("tokens", [90, 700])  # few and many queries of a kv head
def test_fp8_pages_give_the_results_of_the_oracle(tokens):
    q = torch.randn(tokens, 8, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(60, 16, 2, 128, device="cuda").to(torch.float8_e4m3fn) for _ in "kv")
    ends = torch.tensor([0, tokens - 20, tokens], dtype=torch.int32, device="cuda")
    options = {
        "is_causal": True, "kv_lens": ends[1:].clone(), "return_lse": True,
        "page_table": torch.arange(60, dtype=torch.int32, device="cuda").repeat(2, 1),
    }  # fmt: skip
    found = fa_ops.attention_varlen(q, k, v, ends, None, **options)
    expected = fa_ops.attention_varlen(q, k, v, ends, None, **options, backend="reference")
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


def test_prompts_and_decoding_steps_without_synchronisation_and_in_a_graph():
    counts, keys = torch.tensor([700, 1, 1, 130]), torch.tensor([900, 3000, 64, 130])
    g = torch.Generator().manual_seed(0)
    k, v = (torch.randn(256, 16, 2, 128, generator=g) for _ in range(2))
    table = torch.randperm(256, generator=g).int().repeat(4, 1)
    q = torch.randn(int(counts.sum()), 8, 128, generator=g)
    ends = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    q, k, v, ends, lens, table = on_gpu((q, k, v, ends, keys.int(), table))

    def attend(backend: str | None = None) -> torch.Tensor:
        return fa_ops.attention_varlen(
            q, k, v, ends, None, 700, is_causal=True, kv_lens=lens, page_table=table,
            backend=backend,
        )  # fmt: skip

    attend()  # compiles kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = attend()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(out, attend("reference"), atol=2e-2, rtol=2e-2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend()
    lens -= 30
    ends[1] -= 20  # other numbers of queries
    graph.replay()
    torch.testing.assert_close(captured, attend("reference"), atol=2e-2, rtol=2e-2)


def test_borders_and_lengths_of_any_values_are_harmless():
    q, k, v, ends, lens, table = on_gpu(drawn(16, 64, 64))
    for wrong in (ends.flip(0), ends * 1000, -ends, ends - 2**31):
        out = fa_ops.attention_varlen(
            q, k, v, wrong, None, kv_lens=lens * 10**6, page_table=table * 10**5
        )
        assert out.isfinite().all()
