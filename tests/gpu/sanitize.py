"""Every GPU kernel once or more on small inputs, for compute-sanitizer:

    compute-sanitizer --tool memcheck  python -m tests.gpu.sanitize hopper
    compute-sanitizer --tool racecheck python -m tests.gpu.sanitize triton

Prints how many calls ran; results are the other tests' business.
"""

import contextlib
import importlib
import itertools
import sys

import torch

from fa_ops.testing import random_case
from fa_ops.testing.caches import CacheCase, random_cache_case
from fa_ops.types import Packing, Spec
from tests.gpu.cases import few_processors

CASES = 24


def run(backend: str) -> int:
    module, calls = importlib.import_module(f"fa_ops.backends.{backend}"), 0
    for seed in range(1000):
        if calls >= CASES:
            break
        D = (64, 128, 32, 256)[seed % 4]
        case = random_case(seed, D=D, Dv=D, dtype=torch.bfloat16, device="cuda")
        q, k, v, spec = case.fresh()
        if module.support_error(q, k, v, spec):
            continue
        # with few processors persistent CTAs meet their second tile in a small problem
        with few_processors(2) if seed // 4 % 2 else contextlib.nullcontext():
            out, lse = module.forward(q, k, v, spec)
            grads = torch.randn_like(out), torch.randn_like(lse)
            module.backward(*grads, q, k, v, out, lse, spec, case.mask == "float")
        calls += 1
    calls += run_jumps(module)
    if hasattr(module, "varlen_forward"):
        calls += run_packed(module)
    torch.cuda.synchronize()
    return calls


def run_jumps(module) -> int:
    """Scores so far above those before that weights overflow, or nearly."""
    for D in (64, 128):
        q, k, v = (torch.randn(1, 2, 500, D, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        for factor in (30, 200):
            k[:, :, ::97] *= factor
            module.forward(q, k, v, Spec(is_causal=factor == 200))
    return 4


def run_packed(module) -> int:
    lengths = torch.tensor([0, 40, 40, 170, 200], device="cuda", dtype=torch.int32)
    packing = Packing(lengths, lengths)
    for causal in (False, True):
        case = random_case(1, B=1, Hq=4, Hkv=2, Sq=200, Sk=200, D=64, Dv=64, dtype=torch.bfloat16)
        q, k, v, spec = case.fresh()
        q, k, v = (t[0].transpose(0, 1).contiguous().cuda() for t in (q, k, v))
        spec = type(spec)(is_causal=causal)
        out, lse = module.varlen_forward(q, k, v, packing, spec)
        grads = torch.randn_like(out), torch.randn_like(lse)
        module.varlen_backward(*grads, q, k, v, out, lse, packing, spec)
    if hasattr(module, "cache_forward"):
        run_cached(module)
    if hasattr(module, "merge_states"):
        outs, lses = torch.randn(3, 64, 4, 64, device="cuda"), torch.randn(3, 64, 4, device="cuda")
        module.merge_states(outs, lses)
    return 2


def run_cached(module) -> None:
    mla = {"Hkv": 1, "D": 576, "Dv": 512, "shared": True, "page_size": 16}
    cases = [CacheCase(device="cuda", dtype=torch.bfloat16, **mla)]
    for seed in range(24):
        dtype = (torch.bfloat16, torch.float16)[seed % 2]
        cases.append(random_cache_case(seed, dtype=dtype, device="cuda"))
        reads = {
            "unified_max": None,
            "new": 0,
            "rotary": 0,
            "fp8": False,
            "num_splits": 0,
            "batch_invariant": False,
        }
        pages = {"page_size": (0, 8, 64)[seed % 3], "scale": None, "Sq": 1 + seed % 2}
        cases.append(random_cache_case(seed, dtype=dtype, device="cuda", **reads, **pages))
    for page_size, D in itertools.product((0, 16, 64), (64, 128)):
        shape = {"B": 1, "Hq": 96, "Hkv": 4, "Sq": 70, "S": 300, "page_size": page_size}
        cases.append(CacheCase(device="cuda", dtype=torch.bfloat16, D=D, Dv=D, **shape))
    for case in cases:
        inputs = case.fresh()
        if not module.cache_error(*inputs):
            module.cache_forward(*inputs)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("the kernels of GPU backends need a CUDA device, and torch sees none")
    print(f"{run(sys.argv[1])} calls of the {sys.argv[1]} backend")
