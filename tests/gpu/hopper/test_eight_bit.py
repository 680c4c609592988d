"""Packed e4m3 sequences on the Hopper kernels with 8-bit products: against the oracle, sizes, CUDA
graphs, and borders and pages that do not exist."""

import contextlib
import dataclasses

import pytest
import torch

import fa_ops
from fa_ops.backends.hopper import eight_bit
from fa_ops.plans import planning
from fa_ops.testing import make_case
from fa_ops.testing.quantized import QuantizedCase, assert_quantized_right, random_quantized_case
from tests.gpu.cases import few_processors

E4M3 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def ran(monkeypatch):
    """The plan of each call that the kernels ran."""
    plans, run = [], eight_bit.PackedPlan.run
    monkeypatch.setattr(
        eight_bit.PackedPlan,
        "run",
        lambda self, *args: plans.append(self) or run(self, *args),
    )
    planning.forget()
    yield plans
    planning.forget()


PARTS = 24  # of the random cases, for processes that run side by side


def cases(part):
    for seed in range(3000 + part, 6000, PARTS):
        case = random_quantized_case(seed, device="cuda")
        inner = case.case
        if case.page is None or inner.D % 16 or (inner.scale or 1) < 0 or case.page == 48:
            continue
        inner = dataclasses.replace(inner, Sq=inner.Sq * (1 + seed % 5))
        case = dataclasses.replace(case, case=inner)
        lens = case.fresh().operands.kv_lens  # which depend on the number of queries
        if lens is None or lens.any():  # without a key at all no kernel runs
            yield case


@pytest.mark.parametrize("part", range(PARTS))
def test_random(part, ran):
    count = 0
    for case in cases(part):
        with few_processors(2) if case.case.seed % 2 else contextlib.nullcontext():
            assert_quantized_right(case, "hopper", calls=2)
        count += 1
    assert count > 8 and len(ran) == 2 * count


@pytest.mark.parametrize("D, Dv", [(64, 64), (128, 128), (256, 256), (128, 64), (192, 128)])
@pytest.mark.parametrize("page", [0, 16, 64, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_long_sequences(D, Dv, page, causal, ran):
    inner = make_case(
        B=3, Hq=4, Hkv=2, Sq=700, Sk=3000, D=D, Dv=Dv, device="cuda", is_causal=causal,
        kv_lens=True, sinks=causal,
    )  # fmt: skip
    assert_quantized_right(
        QuantizedCase(inner, scales=("heads",) * 3, page=page), "hopper", calls=3
    )
    assert len(ran) == 3


def batch(lengths, keys, H=2, D=64, seed=0):
    g = torch.Generator("cuda").manual_seed(seed)
    ends = [torch.tensor([0, *x], device="cuda").cumsum(0).int() for x in (lengths, keys)]
    tensors = [
        torch.randn(sum(x), H, D, device="cuda", generator=g).to(E4M3)
        for x in (lengths, keys, keys)
    ]
    return tensors, ends, torch.ones(1, device="cuda")


def attend(tensors, ends, one, **options):
    return fa_ops.attention_varlen(
        *tensors, *ends, q_scale=one, k_scale=one, v_scale=one, return_lse=True, backend="hopper",
        **options,
    )  # fmt: skip


def test_many_short_sequences(ran, monkeypatch):
    """More than one warp looks at in one step, with none, one and many queries."""
    g = torch.Generator().manual_seed(0)
    lengths = (torch.randint(0, 4, (300,), generator=g) ** 4).tolist()
    keys = [n + 7 * (i % 3) for i, n in enumerate(lengths)]
    tensors, ends, one = batch(lengths, keys)
    out, lse = attend(tensors, ends, one, is_causal=True)
    assert len(ran) == 1
    monkeypatch.setattr(eight_bit, "packed_error", lambda call: "not in this test")
    planning.forget()
    wanted, wanted_lse = attend(
        tensors, ends, one, is_causal=True, max_seqlen_q=81, max_seqlen_k=95
    )
    torch.testing.assert_close(lse, wanted_lse, atol=2e-3, rtol=0)
    assert (out - wanted).float().norm() < 0.01 * wanted.float().norm()


def test_a_sequence_does_not_depend_on_the_others():
    tensors, ends, one = batch((130, 70, 300), (500, 70, 900))
    out, lse = attend(tensors, ends, one, is_causal=True)
    q, k, v = tensors
    alone = [q[130:200], k[500:570].clone(), v[500:570].clone()]
    borders = [torch.tensor([0, 70], device="cuda", dtype=torch.int32)] * 2
    found, found_lse = attend(alone, borders, one, is_causal=True)
    assert torch.equal(out[130:200], found) and torch.equal(lse[:, 130:200], found_lse)


def test_calls_can_be_captured():
    tensors, ends, one = batch((130, 70, 300), (500, 70, 900))
    wanted = attend(tensors, ends, one)[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(tensors, ends, one)[0]
    out.zero_()
    graph.replay()
    assert torch.equal(out, wanted)


def test_broken_borders_and_pages_are_harmless():
    (q, k, v), ends, one = batch((130, 70, 300), (500, 70, 900))
    for wrong in ([0, 2**31 - 1, -5, 400], [-(2**31), 90, 20, 10**6], [600, 5, 5, 0]):
        broken = torch.tensor(wrong, device="cuda", dtype=torch.int32)
        for borders in ((broken, ends[1]), (ends[0], broken), (broken, broken)):
            assert attend((q, k, v), borders, one, is_causal=True)[0].shape == q.shape
    pages = [x[:1408].view(88, 16, *x.shape[1:]) for x in (k, v)]
    table = torch.randint(0, 88, (3, 40), device="cuda", dtype=torch.int32)
    lens = torch.tensor([500, 640, 33], device="cuda", dtype=torch.int32)
    missing = table.clone()
    missing[0, 5:9], missing[1, 39] = -1, 10**9
    options = {"kv_lens": lens, "page_table": missing}
    out, lse = attend((q, *pages), (ends[0], None), one, **options)
    assert out.isfinite().all() and lse.isfinite().all()
    # what does not exist is left out: the same keys without those pages
    kept = torch.cat((table[0, :5], table[0, 9:], table[0, :4]))
    other = torch.stack((kept, table[1], table[2]))
    fewer = {"kv_lens": lens - torch.tensor([64, 16, 0], device="cuda"), "page_table": other}
    wanted, _ = attend(
        (q, *pages), (ends[0], None), one, **fewer | {"kv_lens": fewer["kv_lens"].int()}
    )
    assert (out - wanted).float().norm() < 0.02 * wanted.float().norm()
    lens.fill_(2**31 - 1)
    assert attend((q, *pages), (ends[0], None), one, **options)[0].shape == q.shape
