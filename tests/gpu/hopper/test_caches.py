"""Caches on a Hopper GPU: tokens that are appended, and prompts over keys that are there."""

import dataclasses
import random

import pytest
import torch

import fa_ops
from fa_ops.backends import hopper, reference, triton
from fa_ops.backends.hopper import decode, forward
from fa_ops.call.call import Call, attention_call
from fa_ops.plans import dispatch, planning
from fa_ops.testing.caches import CacheCase, assert_cache_close, random_cache_case
from fa_ops.testing.inputs import Arena
from tests.gpu import hopper_calls
from tests.gpu.cases import chosen, few_processors
from tests.kernels import relative_error

# The Hopper kernel that appends to caches on a GPU: against the oracle, and bit by bit against the
# Triton kernel, also with lengths and pages that lie outside the cache.

HALVES = (torch.bfloat16, torch.float16)
ROTATIONS = ({}, {"rotary": 16}, {"rotary": 16, "interleaved": True}, {"rotary": 12})


def check_appended(case: CacheCase) -> None:
    """Compare with the oracle; nothing outside the tensors may be written."""
    call = planning.normalised(case.fresh())
    if reason := dispatch.refusal("hopper", call):
        pytest.skip(reason)
    assert_cache_close(case, "hopper", Arena())


def random_case(seed: int, **fixed) -> CacheCase:
    r = random.Random(seed)
    D, Dv = r.choice(((64, 64), (128, 128), (96, 64), (256, 256), (16, 16), (40, 24), (192, 128)))
    return random_cache_case(
        seed, dtype=HALVES[seed % 2], device="cuda", D=D, Dv=Dv, new=r.choice((1, 1, 2, 5, 17)),
        num_splits=0, batch_invariant=False, unified_max=None, scale=(None, 0.3)[seed // 2 % 2],
        page_size=(0, 1, 16, 8, 64, 256)[seed % 6], **fixed,
    )  # fmt: skip


def with_scales(case: CacheCase, seed: int) -> CacheCase:
    """Of rows, pages or tokens in turn, for e4m3 caches."""
    page_scales = case.page_size > 0 and seed % 3 == 1
    return dataclasses.replace(
        case, page_scales=case.fp8 and page_scales, token_scales=case.fp8 and seed % 3 == 2
    )


@pytest.mark.parametrize("seed", range(60))
def test_random(seed):
    case = random_case(seed, rotary=0, fp8=False)
    check_appended(dataclasses.replace(case, S=case.S + 17 * (1 + seed % 9)))


@pytest.mark.parametrize("seed", range(100, 140))
def test_random_e4m3(seed):
    case = random_case(seed, rotary=0, fp8=True)
    check_appended(with_scales(dataclasses.replace(case, S=case.S + 17 * (1 + seed % 9)), seed))


@pytest.mark.parametrize("seed", range(200, 240))
def test_rotation(seed):
    case = random_case(seed, fp8=False, rotary=(8, 16, 12, 14)[seed % 4])
    check_appended(dataclasses.replace(case, S=case.S + 17, interleaved=seed // 4 % 2 > 0))


@pytest.mark.parametrize("seed", range(300, 360))
def test_broken_lengths_and_pages(seed):
    """A length around the capacity, negative, or the largest; pages that do not exist."""
    case = random_case(seed, rotary=0, fp8=seed % 3 == 0, broken=True, shared=False)
    check_appended(
        dataclasses.replace(case, S=500 + seed % 16, B=3, page_scales=False, token_scales=False)
    )


@pytest.mark.parametrize("page_size", [0, 1, 64])
@pytest.mark.parametrize("new, Sq", [(1, 1), (3, 3), (1, 2)])
@pytest.mark.parametrize("broken", [False, True])
def test_latent_caches(page_size, new, Sq, broken):
    check_appended(
        CacheCase(
            Hq=16, Hkv=1, D=576, Dv=512, S=500, new=new, Sq=Sq, shared=True, is_causal=True,
            page_size=page_size, dtype=torch.bfloat16, device="cuda", broken=broken,
        )
    )  # fmt: skip


@pytest.mark.parametrize("changes", [{}, {"page_size": 64}, {"rotary": 32}, {"fp8": True}])
def test_chunks_of_prompts(changes):
    check_appended(
        CacheCase(
            B=2, Hq=32, Hkv=8, Sq=200, S=1024, D=64, Dv=64, dtype=torch.bfloat16, new=200,
            device="cuda", is_causal=True, lens=(824, 5), **changes,
        )
    )  # fmt: skip


def moved(t: torch.Tensor, offset: int) -> torch.Tensor:
    """The same tensor, so many elements behind an address that is a multiple of 256 bytes."""
    span = 1 + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride()))
    whole = torch.zeros(offset + span, dtype=t.dtype, device=t.device)
    flat = whole.view(torch.uint8) if t.itemsize == 1 else whole
    source = t.view(torch.uint8) if t.itemsize == 1 else t
    flat[offset:].copy_(torch.as_strided(source, (span,), (1,)))
    return torch.as_strided(whole, t.shape, t.stride(), offset)


LENGTHS = (0, 495, 500, 511, 512, 513, 515, -1, -600, 2**31 - 1, -(2**31), 2**31 - 3)


@pytest.mark.parametrize("seed", range(64))
def test_writes_what_the_triton_kernel_writes(seed):
    """Every bit, from and to any addresses, with any lengths and pages."""
    r = random.Random(seed)
    case = random_case(
        seed, B=len(LENGTHS), S=512, lens=(0,) * len(LENGTHS), fp8=seed % 3 == 0, shared=False,
        ranges=False, **({"rotary": 0} | ROTATIONS[seed // 2 % 4]),
    )  # fmt: skip
    call = with_scales(case, seed).fresh()
    q, t = call.query, call.operands
    k, v = (t.float().nan_to_num(0.5).to(t.dtype) for t in call[1:3])
    lens = torch.tensor(LENGTHS, dtype=torch.int32, device="cuda")
    changes = {"kv_lens": lens}
    if t.page_table is not None:
        table = torch.arange(t.page_table.numel(), dtype=torch.int32, device="cuda")
        wrong = torch.rand(table.shape, device="cuda") < 0.1
        table = table.where(~wrong, r.choice((-1, len(k), 2**31 - 1, -(2**31))))
        changes["page_table"] = table.view_as(t.page_table)
    # the Triton kernel needs even addresses of e4m3 caches
    offsets = (0, 0, 2, 4, 8, 16) if case.fp8 else (0, 0, 1, 2, 4, 8)
    k, v = (moved(t, r.choice(offsets)) for t in (k, v))
    new = [moved(x, r.choice((0, 1, 3, 8))) for x in (t.new_key, t.new_value)]
    if r.random() < 0.2:
        new = [x[:, :1].expand(-1, case.Hkv, -1, -1) for x in new]
    if case.rotary:
        dtype = r.choice((torch.float32, q.dtype))
        for name in ("rotary_cos", "rotary_sin"):
            changes[name] = moved(getattr(t, name).to(dtype), r.choice((0, 1, 2, 8)))
    q, found = moved(q, r.choice((0, 1, 8))), []
    call = call.changed(query=q, new_key=new[0], new_value=new[1], **changes)
    for prepare in (decode.prepare_append, triton.prepare_append):
        k2, v2 = (moved(t, t.storage_offset()) for t in (k, v))
        queries, ends = prepare(call._replace(key=k2, value=v2))(q, k2, v2, call.operands)
        memory = (t.view(torch.uint8) if case.fp8 else t for t in (k2, v2))
        found.append((queries, ends, *memory))
    for name, x, y in zip(("queries", "lengths", "keys", "values"), *found, strict=True):
        assert torch.equal(x, y), f"{case}: {name}"
    assert found[0][1].tolist() == (lens.long() + case.new).clamp(0, 512).tolist()


def step_case(page_size: int, **changes) -> CacheCase:
    return CacheCase(
        B=4, Hq=8, S=2048, D=128, Dv=128, dtype=torch.bfloat16, device="cuda", new=1,
        page_size=page_size, lens=(2000, 0, 500, 3), **changes,
    )  # fmt: skip


def with_all_pages(case: CacheCase) -> Call:
    call = case.fresh()
    if case.page_size:
        table = call.operands.page_table
        pages = torch.randperm(table.numel(), device="cuda").int()
        call = call.changed(page_table=pages.view_as(table))
    return call._replace(key=call.key.nan_to_num(0.3), value=call.value.nan_to_num(0.2))


@pytest.mark.parametrize("page_size", [0, 64])
@pytest.mark.parametrize("rotary", [0, 64])
def test_one_cuda_graph_serves_every_length(page_size, rotary):
    call = with_all_pages(step_case(page_size, rotary=rotary))
    (q, k, v), t = call[:3], call.operands
    options = {"key": t.new_key, "value": t.new_value, "backend": "hopper"}
    options |= {"rotary_cos": t.rotary_cos, "rotary_sin": t.rotary_sin}

    def attend():
        return fa_ops.attention_with_kv_cache(q, k, v, t.kv_lens, t.page_table, **options)

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend()
        t.kv_lens.add_(1)
    for lengths in ((2047, 0, 1, 7), (5, 63, 64, 65), (2000, 2000, 2000, 2000)):
        t.kv_lens.copy_(torch.tensor(lengths))
        for _ in range(min(3, 2048 - max(lengths))):
            q.normal_(), t.new_key.normal_(), t.new_value.normal_()
            expected = reference.cache_forward(call._replace(key=k.clone(), value=v.clone()))
            graph.replay()
            assert relative_error(captured, expected[0]) < 1e-2


@pytest.mark.parametrize("page_size", [0, 16])
def test_steps_that_follow_one_another(page_size):
    """By programmatic dependent launches: no step may read keys or lengths before they are there,
    nor overwrite what the one before still reads."""
    call = with_all_pages(step_case(page_size, rotary=64, interleaved=True))
    (q, k, v), t = call[:3], call.operands
    queries, news = (torch.randn(60, *x.shape, device="cuda").to(x) for x in (q, t.new_key))

    def steps(synchronise: bool):
        keys, values, lens = k.clone(), v.clone(), torch.full_like(t.kv_lens, 1900)
        results = []
        for one, new in zip(queries, news):
            results.append(
                fa_ops.attention_with_kv_cache(
                    one, keys, values, lens, t.page_table, key=new, value=new,
                    rotary_cos=t.rotary_cos, rotary_sin=t.rotary_sin,
                    rotary_interleaved=True, backend="hopper",
                )
            )  # fmt: skip
            lens += 1
            if synchronise:
                torch.cuda.synchronize()
        return torch.stack(results), keys, values

    expected = steps(True)
    for _ in range(3):
        assert all(torch.equal(x, y) for x, y in zip(steps(False), expected))


def test_concurrent_streams():
    case = step_case(16)
    problems = [with_all_pages(dataclasses.replace(case, seed=seed)) for seed in range(2)]

    def attend(call):
        t = call.operands
        new = {"key": t.new_key, "value": t.new_value, "backend": "hopper"}
        return fa_ops.attention_with_kv_cache(*call[:3], t.kv_lens, t.page_table, **new)

    expected = [attend(problem) for problem in problems]
    streams, results = [torch.cuda.Stream() for _ in problems], ([], [])
    torch.cuda.synchronize()
    for _ in range(50):
        for n, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[n].append(attend(problems[n]))
    torch.cuda.synchronize()
    assert all(torch.equal(x, expected[n]) for n in range(2) for x in results[n])


def test_public_functions_select_the_kernel():
    call = with_all_pages(step_case(64))
    given, t = call[:3], call.operands
    new = {"kv_lens": t.kv_lens, "page_table": t.page_table}
    new |= {"key": t.new_key, "value": t.new_value}
    explained = fa_ops.explain(*given, **new)
    assert (explained.backend, explained.kernel) == ("hopper", "append, then decode")
    split = fa_ops.explain(*given, **new, num_splits=3)
    assert split.backend == "triton" and "without num_splits" in split.reasons["hopper"]
    none = fa_ops.explain(call.query[:, :, :0], *call[1:3], **new)
    assert none.backend == "triton" and "that queries attend" in none.reasons["hopper"]
    assert chosen(call) is hopper


@pytest.mark.parametrize("prepare", [decode.prepare_append, triton.prepare_append])
def test_new_numbers_that_are_not_finite(prepare):
    """In an e4m3 cache NaN stays NaN, and what is too large becomes the largest number."""
    case = CacheCase(fp8=True, dtype=torch.bfloat16, page_size=64, new=2, S=512, lens=(3, 300),
                     D=64, Dv=64, device="cuda")  # fmt: skip
    call = case.fresh()
    numbers = torch.tensor([float("nan"), float("inf"), -1e30], device="cuda")
    call.operands.new_key[:, :, 0, :3] = numbers
    found, wanted = (call._replace(key=call.key.clone(), value=call.value.clone()) for _ in "ab")
    prepare(found)(*found[:3], found.operands)
    reference.cache_forward(wanted)
    for x, y in zip(found[1:3], wanted[1:3], strict=True):
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))


# Many queries against a cache on a Hopper GPU: cases against the oracle, missing pages.

READS = {"rotary": 0, "fp8": False, "new": 0, "num_splits": 0, "batch_invariant": False,
         "unified_max": None, "ranges": False}  # fmt: skip


def check(case):
    call = case.fresh()
    assert hopper.cache_error(call) is None and hopper._cache_module(call) is forward
    assert_cache_close(case, "hopper")


@pytest.mark.parametrize("seed", range(120))
def test_random_prompts(seed):
    case = random_cache_case(
        seed, dtype=HALVES[seed % 2], device="cuda", scale=(None, 0.3)[seed // 2 % 2],
        page_size=(0, 16, 32, 64, 128, 192)[seed % 6], Sq=(64, 65, 130, 300, 77)[seed % 5],
        B=(2, 5)[seed % 2], Hkv=(24, 3)[seed // 2 % 2], Hq=(48, 24)[seed // 2 % 2] * 2, **READS,
    )  # fmt: skip
    D = (64, 128, 64, 96, 256, 40, 192)[seed % 7]
    case = dataclasses.replace(case, S=case.S * (1 + seed % 7), D=D, Dv=(D, min(D, 128))[seed % 2])
    with few_processors((2, 132)[seed % 2]):  # persistent CTAs process several tiles
        check(case)


@pytest.mark.parametrize("seed", range(48))
def test_random_e4m3_prompts(seed):
    """Converted before; only bfloat16 has the range of numbers times their scales."""
    page_size, D = (0, 16, 64, 128)[seed % 4], (64, 128, 96, 256, 192)[seed % 5]
    case = random_cache_case(
        seed, dtype=torch.bfloat16, device="cuda", scale=(None, 0.3)[seed // 2 % 2], Hkv=3, Hq=48,
        page_size=page_size, Sq=(64, 130, 77)[seed % 3], B=3, **READS | {"fp8": True},
    )  # fmt: skip
    page_scales, token_scales = page_size > 0 and seed % 3 == 1, seed % 3 == 2
    shape = {"S": case.S * (1 + seed % 7), "D": D, "Dv": (D, min(D, 128))[seed % 2]}
    check(dataclasses.replace(case, **shape, page_scales=page_scales, token_scales=token_scales))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (192, 192), (256, 256)])
@pytest.mark.parametrize("page_size", [0, 16, 64, 256])
def test_head_dims(dtype, dims, page_size):
    D, Dv = dims
    shape = dict(B=3, Hq=32, Hkv=4, Sq=128, S=900, lens=(900, 130, 1))
    check(CacheCase(D=D, Dv=Dv, dtype=dtype, device="cuda", is_causal=True,
                    page_size=page_size, **shape))  # fmt: skip


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("is_causal", [False, True])
def test_keys_in_missing_pages_are_masked_out(D, page_size, is_causal):
    call = CacheCase(
        B=2, Hq=64, Hkv=2, Sq=64, S=600, D=D, Dv=D, dtype=torch.bfloat16, device="cuda",
        lens=(600, 500), page_size=page_size, is_causal=is_causal,
    ).fresh()  # fmt: skip
    q, k, v = call[:3]
    t = call.operands
    table = t.page_table.clone()
    table[0, 1], table[0, 3], table[1, 2:5] = -1, 10**6, -(10**6)
    out, lse = hopper_calls.cache_forward(call.changed(key=k, value=v, page_table=table))
    keys = torch.arange(table.shape[1] * page_size, device="cuda")
    exists = (table >= 0) & (table < len(k))
    visible = exists[:, keys // page_size] & (keys < t.kv_lens[:, None])
    pages = torch.where(exists, table, 0).long()
    k, v = (x[pages].flatten(1, 2).transpose(1, 2).nan_to_num().double() for x in (k, v))
    mask = visible[:, None, None]
    if is_causal:
        position = t.kv_lens.view(-1, 1, 1, 1) + torch.arange(64, device="cuda").view(-1, 1) - 64
        mask = mask & (keys <= position)
    expected = reference.dense(attention_call(q.double(), k, v, attn_mask=mask))
    assert relative_error(out, expected[0]) < 1e-2
    torch.testing.assert_close(lse.double(), expected[1].double(), atol=2e-3, rtol=1e-4)


def test_one_cuda_graph_serves_prompts_of_every_length():
    case = CacheCase(B=4, Hq=32, S=2000, Sq=100, D=128, Dv=128, dtype=torch.bfloat16,
                     device="cuda", lens=(2000, 0, 500, 3), page_size=16)  # fmt: skip
    call = case.fresh()
    q, k, v = call[:3]
    pages = torch.arange(call.operands.page_table.numel(), device="cuda", dtype=torch.int32)
    call = call.changed(page_table=pages.view_as(call.operands.page_table))
    k, v = k.nan_to_num(0.3), v.nan_to_num(0.2)
    hopper_calls.cache_forward(call._replace(key=k, value=v))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = hopper_calls.cache_forward(call._replace(key=k, value=v))
    for step in range(4):
        q.normal_()
        call.operands.kv_lens.random_(0, 2000)
        expected = reference.cache_forward(call._replace(key=k, value=v))[0]
        graph.replay()
        assert relative_error(captured[0], expected) < 1e-2, step


@pytest.mark.parametrize("changes", [{}, {"page_size": 64}, {"page_size": 16, "rotary": 32}])
def test_new_keys_are_written_before(changes, monkeypatch):
    attended, prepare = [], forward.prepare_cached

    def prepare_and_note(call):
        run = prepare(call)
        return lambda *args: attended.append(1) or run(*args)

    monkeypatch.setattr(forward, "prepare_cached", prepare_and_note)
    assert_cache_close(
        CacheCase(B=2, Hq=64, Hkv=8, Sq=256, S=1024, D=64, Dv=64, dtype=torch.bfloat16, new=256,
                  device="cuda", is_causal=True, lens=(768, 5), **changes), "auto",
    )  # fmt: skip
    assert attended


@pytest.mark.parametrize("page_size", [0, 64])
def test_public_functions_select_the_kernel_of_prompts(page_size):
    case = CacheCase(B=2, Hq=64, Hkv=8, Sq=256, S=1024, D=128, Dv=128, dtype=torch.bfloat16,
                     device="cuda", is_causal=True, page_size=page_size)  # fmt: skip
    call = case.fresh()
    (q, k, v), lens, table = call[:3], call.operands.kv_lens, call.operands.page_table
    assert chosen(call) is hopper
    rows = {"page_table": table[:1]} if page_size else {"key": k[:1], "value": v[:1]}
    assert chosen(call.changed(query=q[:1, :8, :17], kv_lens=lens[:1], **rows)) is hopper
    expected = reference.cache_forward(call)
    for _ in range(3):
        out, lse = fa_ops.attention_with_kv_cache(q, k, v, lens, table, True, return_lse=True)
        assert relative_error(out, expected[0]) < 1e-2
        torch.testing.assert_close(lse, expected[1].float(), atol=2e-3, rtol=1e-4)
    ranges = torch.zeros(2, 1, 1, 2, dtype=torch.int32, device="cuda")
    with pytest.raises(NotImplementedError, match="no key_ranges"):
        fa_ops.attention_with_kv_cache(q, k, v, lens, table, key_ranges=ranges, backend="hopper")
