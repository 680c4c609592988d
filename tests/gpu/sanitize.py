"""Run every GPU kernel on small inputs, for compute-sanitizer:

    compute-sanitizer --tool memcheck  python -m tests.gpu.sanitize hopper
    compute-sanitizer --tool racecheck python -m tests.gpu.sanitize triton
    compute-sanitizer --tool memcheck  python -m tests.gpu.sanitize hopper broken
    compute-sanitizer --tool initcheck python -m tests.gpu.sanitize hopper forward
    compute-sanitizer --tool racecheck python -m tests.gpu.sanitize hopper quantized
    compute-sanitizer --tool memcheck  python -m tests.gpu.sanitize triton broken 3/8

The last runs every eighth call from number 3 on: eight processes compile Triton's kernels faster.
`broken` makes calls whose lengths, borders, pages and ranges lie outside the tensors. `forward`
runs forward and decoding kernels only, on inputs without uninitialised memory, such as unused parts
of a cache. `quantized` makes calls with 8-bit products, `quantized_packed` of packed sequences, and
`tiles` calls with masks whose `mask_blocks` hold their tiles, or any numbers. `whole_heads` runs
backward passes in which a CTA has all keys of a head, `append` calls that write new keys to a
cache, every second one with lengths and pages outside it, and `float32` dense and packed calls of
that dtype, which are multiplied as large ones are. `programs` makes backward passes with functions
of scores and masks, some with lists of tiles that hold any numbers. Prints the number of calls;
results are checked by other tests.
"""

import contextlib
import importlib
import itertools
import random
import sys
from types import ModuleType
from unittest import mock

import torch

import fa_ops
from fa_ops.backends.hopper import backward as dense_backward
from fa_ops.backends.triton import configs
from fa_ops.call.call import Saved, attention_call
from fa_ops.cli.fuzz import refusal
from fa_ops.testing import make_case, random_calls, random_case
from fa_ops.testing.budget import by_operator
from fa_ops.testing.caches import CacheCase, random_cache_case
from fa_ops.testing.quantized import random_quantized_case
from tests.gpu import hopper_calls, test_programs
from tests.gpu.cases import few_processors, pairs_of_ctas

CASES = 24
HALF = (torch.bfloat16, torch.float16)


def functions_of(backend: str) -> ModuleType:
    """The module with a function for each kind of call."""
    if backend == "hopper":
        return hopper_calls
    return importlib.import_module(f"fa_ops.backends.{backend}")


def run(backend: str, first: int, step: int) -> int:
    """Random dense calls, calls with large scores, packed calls and calls over caches."""
    module, calls = functions_of(backend), 0
    for seed in range(first, 1000, step):
        if calls * step >= CASES:
            break
        D = (64, 128, 32, 256)[seed % 4]
        case = random_case(seed, D=D, Dv=D, dtype=torch.bfloat16, device="cuda")
        call = case.fresh()
        if module.support_error(call):
            continue
        # with few processors, persistent CTAs process a second tile even of small problems
        with few_processors(2) if seed // 4 % 2 else contextlib.nullcontext():
            out, lse = module.forward(call)
            grads = torch.randn_like(out), torch.randn_like(lse)
            module.backward(call._replace(saved=Saved(*grads, out, lse, case.mask == "float")))
        calls += 1
    if not first:
        calls += run_jumps(module) + run_packed(module) + run_short(module) + run_paged(backend)
        calls += run_pairs() + run_whole_heads(backend, 0, 1) if backend == "hopper" else 0
    return calls + run_cached(module, first, step)


def run_pairs() -> int:
    """Backward passes by pairs of CTAs."""
    shapes = ((2, 1, 200, 300), (1, 1, 330, 130), (4, 1, 64, 64))
    for Hq, Hkv, Sq, Sk in shapes:
        q, k = (
            torch.randn(2, H, S, 256, device="cuda", dtype=torch.bfloat16)
            for H, S in ((Hq, Sq), (Hkv, Sk))
        )
        call = attention_call(q, k, k, is_causal=True)
        out, lse = hopper_calls.forward(call)
        with pairs_of_ctas():
            saved = Saved(torch.randn_like(out), None, out, lse)
            hopper_calls.backward(call._replace(saved=saved))
    return len(shapes)


def run_whole_heads(backend: str, first: int, step: int) -> int:
    """Backward passes in which a CTA has all keys of a head, in one kernel and with row sums by
    another. The second shape has one block of keys; every second call has rows that are NaN."""
    shapes = ((4, 2, 200, 300), (3, 3, 90, 100), (2, 2, 300, 330))
    every = [*itertools.product((True, False), (64, 128), shapes)]
    for number in range(first, len(every), step):
        alone, D, (Hq, Hkv, Sq, Sk) = every[number]
        q, k = (
            torch.randn(2, H, S, D, device="cuda", dtype=torch.bfloat16)
            for H, S in ((Hq, Sq), (Hkv, Sk))
        )
        call = attention_call(q, k, k, is_causal=True)
        out, lse = hopper_calls.forward(call)
        grads = torch.randn_like(out), torch.randn_like(lse)
        if number % 2:
            grads[0][0, 0, 70:73] = float("nan")
        rule = mock.Mock(return_value=alone)
        with mock.patch.object(dense_backward, "prefers_own_row_sums", rule), few_processors(2):
            hopper_calls.backward(call._replace(saved=Saved(*grads, out, lse)))
    return len(range(first, len(every), step))


def run_jumps(module) -> int:
    """Scores so far above those of earlier tiles that weights overflow, or nearly do."""
    for D in (64, 128):
        q, k, v = (torch.randn(1, 2, 500, D, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        for factor in (30, 200):
            k[:, :, ::97] *= factor
            module.forward(attention_call(q, k, v, is_causal=factor == 200))
    return 4


def run_packed(module) -> int:
    lengths = torch.tensor([0, 40, 40, 170, 200], device="cuda", dtype=torch.int32)
    alibi = {"is_causal": True, "alibi_slopes": torch.rand(4, 4, device="cuda")}
    for options in ({}, {"is_causal": True}, alibi, alibi | {"deterministic": True}):
        case = random_case(1, B=1, Hq=4, Hkv=2, Sq=200, Sk=200, D=64, Dv=64, dtype=torch.bfloat16)
        q, k, v = (t[0].transpose(0, 1).contiguous().cuda() for t in case.fresh()[:3])
        call = attention_call(q, k, v, cu_seqlens_q=lengths, cu_seqlens_k=lengths, **options)
        out, lse = module.varlen_forward(call)
        grads = torch.randn_like(out), torch.randn_like(lse)
        module.varlen_backward(call._replace(saved=Saved(*grads, out, lse)))
    if hasattr(module, "merge_states"):
        outs, lses = torch.randn(3, 64, 4, 64, device="cuda"), torch.randn(3, 64, 4, device="cuda")
        module.merge_states(outs, lses)
    return 4


def run_short(module) -> int:
    """Sequences of narrow heads, more than there are multiprocessors."""
    for S in (50, 77):
        q = torch.randn(10, 16, S, 64, device="cuda", dtype=torch.bfloat16)
        module.forward(attention_call(q, q, q, is_causal=S == 77))
    return 2


def run_paged(backend: str) -> int:
    """Prompts and decoding steps over pages."""
    ends = torch.tensor([2, 2, 3, 4, 140, 141], device="cuda", dtype=torch.int32)
    lens = torch.tensor([9, 700, 300, 200, 1], device="cuda", dtype=torch.int32)
    for page, D in itertools.product((16, 64), (64, 128)):
        q = torch.randn(150, 8, D, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(90, page, 2, D, device="cuda", dtype=torch.bfloat16) for _ in "kv")
        table = torch.randint(90, (5, 50), device="cuda", dtype=torch.int32)
        fa_ops.attention_varlen(
            q, k, v, ends, None, is_causal=True, kv_lens=lens, page_table=table, backend=backend
        )
    return 4


def run_cached(module, first: int, step: int) -> int:
    calls = 0
    mla = {"Hkv": 1, "D": 576, "Dv": 512, "shared": True, "page_size": 16}
    cases = [CacheCase(device="cuda", dtype=torch.bfloat16, **mla)]
    for heads, page_size in ((64, 64), (128, 0)):  # split rows that fill all 64 rows of a CTA
        parts = mla | {"Hq": heads, "S": 900, "page_size": page_size}
        cases.append(CacheCase(device="cuda", dtype=torch.bfloat16, **parts))
    for seed in range(24):
        dtype = (torch.bfloat16, torch.float16)[seed % 2]
        cases.append(random_cache_case(seed, dtype=dtype, device="cuda"))
        reads = {
            "unified_max": None,
            "new": 0,
            "rotary": 0,
            "fp8": seed % 4 > 1,
            "num_splits": 0,
            "batch_invariant": False,
        }
        pages = {"page_size": (0, 8, 64)[seed % 3], "scale": None, "Sq": 1 + seed % 2}
        cases.append(random_cache_case(seed, dtype=dtype, device="cuda", **reads, **pages))
    for page_size, D in itertools.product((0, 16, 64), (64, 128)):
        # more blocks of keys than stages, so that each stage is used again
        shape = {"B": 1, "Hq": 96, "Hkv": 4, "Sq": 70, "S": 900, "page_size": page_size}
        cases.append(CacheCase(device="cuda", dtype=torch.bfloat16, D=D, Dv=D, **shape))
        few = shape | {"Hq": 8, "Hkv": 2, "Sq": 20, "S": 1500}  # tiles attend parts of the keys
        cases.append(CacheCase(device="cuda", dtype=torch.bfloat16, D=D, Dv=D, sinks=True, **few))
    for case in cases[first::step]:
        call = case.fresh()
        if not module.cache_error(call):
            module.cache_forward(call)
            calls += 1
    return calls


def run_float32(backend: str, first: int, step: int) -> int:
    """Dense and packed calls, every third with keys whose rows are recomputed."""
    module, calls = functions_of(backend), 0
    ends = torch.tensor([5, 5, 122, 155], device="cuda", dtype=torch.int32)
    plain = {"mask": None, "mask_grad": False, "key_ranges": None}
    for number in range(first, CASES, step):
        mode = "loaded" if number // 2 % 2 else "split"
        configs.float32_products = lambda *call, mode=mode: mode
        D, is_packed = (64, 32, 128, 40, 16)[number % 5], number % 2 > 0
        options = {"D": D, "Dv": D, "dtype": torch.float32, "device": "cuda"}
        options |= plain | {"B": 1, "Sq": 160, "Sk": 160} if is_packed else {"kv_lens": False}
        case = random_case(number, **options)
        call = case.fresh()
        if number % 3 == 2:
            call.key[:, :, 1] = float("nan")
        if is_packed:
            q, k, v = (x[0].transpose(0, 1) for x in call[:3])
            call = call.changed(
                query=q, key=k, value=v, kv_lens=None, cu_seqlens_q=ends, cu_seqlens_k=ends,
                packed=True,
            )  # fmt: skip
            out, lse = module.varlen_forward(call)
            saved = Saved(torch.randn_like(out), None, out, lse)
            module.varlen_backward(call._replace(saved=saved))
        else:
            out, lse = module.forward(call)
            grads = torch.randn_like(out), torch.randn_like(lse)
            module.backward(call._replace(saved=Saved(*grads, out, lse, case.mask == "float")))
        calls += 1
    return calls


def run_appends(backend: str, first: int, step: int) -> int:
    """New keys and values for caches of all forms, and for latent ones."""
    calls = 0
    for seed in range(first, 48, step):
        options = {"num_splits": 0, "batch_invariant": False, "unified_max": None, "scale": None}
        if seed % 8 == 7:
            options |= {"Hq": 16, "Hkv": 1, "D": 576, "Dv": 512, "shared": True, "fp8": False}
        else:
            D = (64, 128, 40, 256)[seed % 4]
            options |= {"D": D, "Dv": D, "fp8": seed % 3 == 0, "rotary": (0, 16, 12)[seed // 2 % 3]}
        case = random_cache_case(
            seed, dtype=HALF[seed % 2], device="cuda", S=500 + seed % 16, new=1 + seed % 5,
            page_size=(0, 16, 64)[seed // 3 % 3], broken=seed % 2 == 1,
            **({"rotary": 0} | options),
        )  # fmt: skip
        if refusal(backend, case) is None:
            call(case, backend, backward=False)
            calls += 1
    return calls


def run_broken(backend: str, first: int, step: int) -> int:
    """Borders, lengths, pages and ranges outside the tensors, forward and backward."""
    calls = 0
    for number in range(first, 400, step):
        pick = random.Random(number).choice
        kind = ("packed", "cached", "dense")[number % 3]
        family = random_calls.family(pick, kind, HALF, edges=True)
        case = family.case(pick, "cuda") if family.fields.get("broken") else None
        if case is not None and refusal(backend, case) is None:
            call(case, backend, backward=True)
            calls += 1
    return calls


def run_forward(backend: str, first: int, step: int) -> int:
    """Forward and decoding kernels on initialised memory."""
    calls = 0
    for number in range(first, 150, step):
        pick = random.Random(number).choice
        family = random_calls.family(pick, ("dense", "cached", "packed")[number % 3], HALF, False)
        case = family.case(pick, "cuda")
        if refusal(backend, case) is None:
            call(case, backend, backward=False)
            calls += 1
    return calls


def run_quantized(backend: str, first: int, step: int) -> int:
    """Calls with 8-bit products, every second one on few processors, and with NaN beyond keys."""
    calls = 0
    for seed in range(first, 100, step):
        case = random_quantized_case(seed, "cuda", HALF[seed % 2])
        if calls * step >= CASES or refusal(backend, case) is not None:
            continue
        with few_processors(2) if seed // 2 % 2 else contextlib.nullcontext():
            by_operator(case.fresh().changed(backend=backend))
        calls += 1
    return calls


def run_packed_quantized(backend: str, first: int, step: int) -> int:
    """Packed sequences with 8-bit products, also with pages that do not exist."""
    ends = torch.tensor([2, 2, 3, 4, 240, 241], device="cuda", dtype=torch.int32)
    lens = torch.tensor([9, 700, 300, 200, 1], device="cuda", dtype=torch.int32)
    one, calls = torch.ones(1, device="cuda"), 0
    scales = {"q_scale": one, "k_scale": one, "v_scale": one}
    every = itertools.product(((0, 64), (16, 128), (64, 256)), (False, True))
    for (page, D), few in itertools.islice(every, first, None, step):
        q = torch.randn(250, 4, D, device="cuda").to(torch.float8_e4m3fn)
        shape = (90, page, 2, D) if page else (1500, 2, D)
        k, v = (torch.randn(shape, device="cuda").to(q.dtype) for _ in "kv")
        table = torch.randint(-3, 95, (5, 50), device="cuda", dtype=torch.int32)
        keys = {"kv_lens": lens, "page_table": table} if page else {}
        ends_k = None if page else lens.new_tensor([0, 9, 709, 1009, 1209, 1210])
        with few_processors(2) if few else contextlib.nullcontext():
            fa_ops.attention_varlen(
                q, k, v, ends, ends_k, is_causal=few, backend=backend, **scales, **keys
            )
        calls += 1
    return calls


def run_tiles(backend: str, first: int, step: int) -> int:
    """Calls that skip tiles of a mask, every second one on two multiprocessors."""
    calls = 0
    for seed in range(first, 32, step):
        D, is_float, is_broken = (64, 128, 256, 72)[seed % 4], seed // 4 % 2 > 0, seed // 8 % 2 > 0
        case = make_case(
            B=2, Hq=2, Hkv=1, Sq=300, Sk=700, D=D, Dv=D, mask="float" if is_float else "bool",
            mask_blocks=True, kv_lens=seed % 3 == 0, is_causal=seed % 5 == 0, seed=seed,
            dtype=torch.bfloat16, device="cuda",
        )  # fmt: skip
        call = case.fresh()
        if is_broken:
            call.operands.mask_blocks.random_(-100, 100)
        with few_processors(2) if seed % 2 else contextlib.nullcontext():
            module = functions_of(backend)
            out, lse = module.forward(call)
            module.backward(
                call._replace(saved=Saved(torch.randn_like(out), None, out, lse, is_float))
            )
        calls += 1
    return calls


def run_programs(backend: str, first: int, step: int) -> int:
    """Functions of scores and masks, forward by any backend, on two multiprocessors."""
    B, H, S = test_programs.B, test_programs.H, test_programs.S
    every = [
        *itertools.product((64, 128), test_programs.SCORES, test_programs.MASKS, (False, True))
    ]
    for number in range(first, len(every), step):
        D, score, mask, is_broken = every[number]
        torch.manual_seed(number)
        given = [torch.randn(B, heads, S, D) for heads in (H, 2, 2, H)]
        tiles = None
        if is_broken:
            lines = 2 * -(-S // 128)
            tiles = torch.randint(-100, 100, (1, 1, lines, 33), device="cuda", dtype=torch.int32)
        with few_processors(2), fa_ops.use_backend("auto" if backend == "hopper" else backend):
            options = {"deterministic": number % 4 > 1, "block_mask": tiles}
            test_programs.attend(score, mask, "cuda", HALF[number % 2], given, **options)
    return len(range(first, len(every), step))


def call(case: random_calls.AnyCase, backend: str, backward: bool) -> None:
    """Call the operator, so that the host code of the backend runs too."""
    call = case.fresh(requires_grad=True) if backward else case.fresh()
    out, lse = by_operator(call.changed(backend=backend))
    if backward:
        torch.autograd.grad(out, call[:3], case.grad_outputs(out, lse)[0])


MODES = {"": run, "broken": run_broken, "forward": run_forward, "quantized": run_quantized}
MODES |= {"quantized_packed": run_packed_quantized, "tiles": run_tiles, "append": run_appends}
MODES |= {"whole_heads": run_whole_heads, "float32": run_float32, "programs": run_programs}

if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("the kernels of GPU backends need a CUDA device, but torch finds none")
    _, backend, *words = sys.argv
    mode = next((word for word in words if "/" not in word), "")
    part = next((word for word in words if "/" in word), "0/1")
    calls = MODES[mode](backend, *map(int, part.split("/")))
    torch.cuda.synchronize()
    print(f"{calls} calls of the {backend} backend")
