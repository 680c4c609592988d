"""The backward kernels with programs, run on the CPU: all gradients, and those of terms."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch
from torch import Tensor

from fa_ops.backends.hopper import backward_programs, configs, term_gradients
from fa_ops.backends.hopper.kernel_plan import Geometry, lines_of_runs, macros
from fa_ops.call.options import NO_OPERANDS
from fa_ops.programs import tiles
from fa_ops.programs.evaluation import Elements
from fa_ops.programs.program import parse
from tests.backends.hopper.cuda_as_cpp import PROGRAM_PTX, needs_compiler
from tests.backends.hopper.cuda_cluster import PTX, compiled
from tests.backends.hopper.cuda_forward import FORWARD_PTX

pytestmark = needs_compiler
D, SCALE = 16, 0.3
BACKWARD_PTX = (
    PROGRAM_PTX
    + r"""
template <class T> static T __ldcg(const T* x) { return *x; }
static u32 pack_bf16(float low, float high) { return pack(low, high); }
static float2 unpack_bf16(u32 x) { return {value_of(x), value_of(x >> 16)}; }
static u32 pack_f16(float low, float high) {
  const _Float16 x[2] = {(_Float16)low, (_Float16)high};
  u32 y;
  return std::memcpy(&y, x, 4), y;
}
static float2 unpack_f16(u32 x) {
  _Float16 y[2];
  return std::memcpy(y, &x, 4), float2{(float)y[0], (float)y[1]};
}
"""
)
CALL = r"""
#include KERNEL_FILE
static BackwardParams params;
static void body_of_thread() { KERNEL(params); }
extern "C" const char* run(u16** data, const int* sizes, float* lse, float* delta, float* sums,
                           u32* notes, const float* values, const int* indices, const int* runs,
                           float* term_sums, float* key_sums, float* distance_sums,
                           float* distances, const long long* steps) {
  BackwardParams& p = params;
  const int B = sizes[0], Hq = sizes[1], Hkv = sizes[2], Sq = sizes[3], Sk = sizes[4];
  static Tensor tensors[TENSORS];
  TensorMap* maps[TENSORS] = {&p.q, &p.k, &p.v, &p.grad_out, &p.dq, &p.dk, &p.dv};
  for (int i = 0; i < TENSORS; i++) {
    const bool of_keys = i == K || i == V || i == DK || i == DV;
    tensors[i] = {data[i], 16, of_keys ? Sk : Sq, of_keys ? Hkv : Hq, B};
    maps[i]->words[0] = (u64)&tensors[i];
  }
  static int counter;
  counter = 0, p.counter = &counter;
  p.lse = lse, p.delta = delta, p.sums = sums, p.nonfinite = notes, p.key_sums = key_sums;
  p.B = B, p.Hq = Hq, p.Hkv = Hkv, p.group = Hq / Hkv, p.Sq = Sq, p.Sk = Sk;
  p.window_left = UNBOUNDED, p.window_right = sizes[5];
  p.m_blocks = (Sq + BLOCK_M - 1) / BLOCK_M, p.n_blocks = (Sk + BLOCK_N - 1) / BLOCK_N;
  p.parts = sizes[6], p.part_heads = p.group / p.parts;
  p.section = B * Hkv * p.parts, p.query_section = B * Hq;
  p.D = p.Dv = 16, p.scale = SCALE, p.scale_log2 = PROGRAM_HAS_SCORE ? LOG2E : SCALE * LOG2E;
  p.program = {{values, indices, SCALE, B, Hq, Sq, Sk},
               {runs, sizes[7], sizes[8], (Sq + 127) / 128, (Sk + 127) / 128}, term_sums,
               distance_sums, distances, steps[0], steps[1]};
  gridDim.x = sizes[9];
  for (int i = 0; i < sizes[9]; i++)
    if (const char* found = run_cluster(body_of_thread, i, sizes[10] + i)) return found;
  return nullptr;
}
"""
PROGRAMS = {
    # terms of queries, keys, distances and all scores, and a mask whose tiles are listed
    "trained": "t0 float row bh grad\nt1 float column bh grad\nt2 float column - grad\n"
    "t3 float distance h grad\nt4 float tile - grad\nt5 int row b\nt6 int column b\n"
    "x0 add(score, t0)\nx1 sub(x0, t1)\nx2 mul(t2, -2.0)\nx3 add(x1, x2)\nx4 add(x3, t3)\n"
    "x5 add(x4, t4)\nx6 eq(t5, t6)\nmask x6\nscore x5",
    # derivatives that depend on the score, of it and of a term of all scores
    "products": "t0 float tile h grad\nt1 float column b grad\nx0 div(score, t0)\nx1 tanh(x0)\n"
    "x2 mul(x1, 0.5)\nx3 mul(t1, t1)\nx4 add(x2, x3)\nscore x4",
    "cubic": "t0 float distance b\nx0 mul(score, score)\nx1 mul(x0, score)\nx2 mul(x1, 0.1)\n"
    "x3 add(score, x2)\nx4 add(x3, t0)\nscore x4",
    # a mask whose tiles are not listed, NaN behind the last block, and few registers
    "blocks": "t0 float blocks:32x64 h\nt1 int column -\nx0 add(score, t0)\nx1 div(1.0, t0)\n"
    "x2 mul(x1, 0.0)\nx3 add(x0, x2)\nx4 bitand(t1, 1)\nx5 eq(x4, 0)\nx6 sub(q, k)\n"
    "x7 lt(x6, 40)\nx8 or(x5, x7)\nmask x8\nscore x3",
}  # fmt: skip


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """What computes gradients, by program, the kernel's name and features; the configuration."""
    made = {}

    def compile(name, entry, **features):
        key = name, entry, *features.items()
        if key not in made:
            program = backward_programs.backward_program(text_of(name))
            few = entry == "backward_queries" or program.keeps_registers
            skips = program.has_mask and name == "trained"
            config = configs.BackwardConfig(
                D, D, adds_dq=entry != "backward_queries", skips_tiles=skips,
                block_m=64 if few else 128, sums_distances=program.distance_sum is not None,
            )  # fmt: skip
            defines = macros(config, torch.bfloat16, window=True, **features)
            defines["HAS_PROGRAM"] = 1
            file, threads = f"{entry}.cu", 384
            if entry == "distance_gradient":
                file, threads = "backward_distances.cu", 256
            machine = PTX.replace("CTAS = 2, THREADS = 512", f"CTAS = 1, THREADS = {threads}")
            call = CALL.replace("KERNEL_FILE", f'"{file}"').replace("KERNEL(", f"{entry}(")
            library = compiled(
                tmp_path_factory.mktemp("programs"), file,
                f"#define SCALE {SCALE}f\n{call}", defines, machine + FORWARD_PTX + BACKWARD_PTX,
                {"score_program.cuh": program.header},
            )  # fmt: skip
            made[key] = library, config
        return made[key]

    return compile


def text_of(name: str) -> str:
    return f"fa1\n{PROGRAMS[name]}\n"


class Problem:
    """Tensors, terms, and the gradients that torch computes of them."""

    def __init__(self, name: str, sizes: tuple[int, ...], seed: int, is_causal: bool) -> None:
        B, Hq, Hkv, Sq, Sk = self.sizes = sizes
        g = torch.Generator().manual_seed(seed)
        self.program = parse(text_of(name))
        q, k, v, grad_out = self.tensors = [
            torch.randn(B, H, S, D, generator=g).bfloat16()
            for H, S in ((Hq, Sq), (Hkv, Sk), (Hkv, Sk), (Hq, Sq))
        ]
        of = B, Hq, Sq, Sk
        self.values, self.indices = (
            self.program.pack(kind, self._terms(kind, of, g), of, q.float())
            for kind in ("float", "int")
        )
        if self.values is not None:
            self.values.requires_grad_()
        self.grad_lse = torch.randn(B, Hq, Sq, generator=g)
        leaves = [x.float().requires_grad_() for x in (q, k, v)]
        keys, values = (x.repeat_interleave(Hq // Hkv, 1) for x in leaves[1:])
        natural = leaves[0] @ keys.mT * SCALE
        i, j = torch.arange(Sq).view(-1, 1), torch.arange(Sk)
        scores, kept = self._applied(natural, i, j)
        if is_causal:
            kept = kept & (j <= i + Sk - Sq)
        scores = torch.where(kept, scores, -torch.inf)
        self.lse = scores.logsumexp(-1)
        has_keys = self.lse > -torch.inf
        weights = (scores - torch.where(has_keys, self.lse, 0.0).unsqueeze(-1)).exp()
        weights = torch.where(kept, weights, 0.0)
        out = weights @ values
        lse = torch.where(has_keys, self.lse, 0.0)
        given = leaves if self.values is None else [*leaves, self.values]
        loss = (out * grad_out.float()).sum() + (lse * self.grad_lse).sum()
        self.expected = torch.autograd.grad(loss, given, allow_unused=True)
        self.delta = (out * grad_out).sum(-1) - torch.where(has_keys, self.grad_lse, 0.0)

    def _terms(self, kind: str, of: tuple, g: torch.Generator) -> list[Tensor | None]:
        found = []
        for term in self.program.terms:
            B, H, _ = term.shape(*of)
            length = term.length(*of[2:])
            length = {"row": of[2], "column": of[3]}.get(term.domain, length)
            if term.type != kind:
                found.append(None)
            elif kind == "int":
                found.append(torch.randint(0, 3, (B, H, length), generator=g).sort().values.int())
            else:
                found.append(torch.randn(B, H, length, generator=g))
        return found

    def _applied(self, s: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
        B, Hq, _, Sq, Sk = self.sizes
        b, h = torch.arange(B).view(-1, 1, 1, 1), torch.arange(Hq).view(-1, 1, 1)
        arguments = {"score": s, "b": b, "h": h, "q": i, "k": j}
        views = self.program.views(self.values, self.indices, B, Hq, Sq, Sk)
        whole = slice(0, Sq), slice(0, Sk)
        elements = Elements(self.program, arguments, views, *whole, Sk, torch.float32)
        found = dict(zip(self.program.roots, elements.evaluate(*self.program.roots)))
        kept = found.get(self.program.mask, torch.ones((), dtype=torch.bool))
        return found.get(self.program.score, s), kept.expand(B, Hq, Sq, Sk)

    def offset(self) -> Tensor:
        """What the program adds to all scores of a query."""
        part, _ = backward_programs._parts(self.program)
        B, Hq, _, Sq, Sk = self.sizes
        i, j = torch.arange(Sq).view(-1, 1), torch.zeros(1, dtype=torch.int64)
        b, h = torch.arange(B).view(-1, 1, 1, 1), torch.arange(Hq).view(-1, 1, 1)
        views = self.program.views(self.values, self.indices, B, Hq, Sq, Sk)
        elements = Elements(
            self.program, {"b": b, "h": h, "q": i, "k": j}, views, slice(0, Sq), slice(0, 1), Sk,
            torch.float32,
        )  # fmt: skip
        return elements.evaluate(part)[0].detach().expand(B, Hq, Sq, 1)[..., 0]


def assert_right(kernel, name, sizes, seed, entry="backward", is_causal=False, parts=1, ctas=2):
    library, config = kernel(name, entry, **({"split": True} if parts > 1 else {}))
    problem = Problem(name, sizes, seed, is_causal)
    B, Hq, Hkv, Sq, Sk = sizes
    block = config.block_m if entry == "backward" else 64
    pad, n = -Sq % block, -(-Sk // 128)
    rows = Sq + pad
    lse = torch.where(problem.lse > -math.inf, problem.lse - problem.offset(), math.inf).detach()
    lse = torch.nn.functional.pad(lse * 1.4426950408889634, [0, pad], value=math.inf).contiguous()
    delta = torch.nn.functional.pad(problem.delta.detach(), [0, pad]).contiguous()
    sums = torch.zeros(B * Hq * rows * D)
    notes = torch.zeros(B * Hkv * n * 16 + B * Hq * rows, dtype=torch.int32)
    key_sums = torch.zeros(B * Hkv * n * 128 * 2 * D)
    q, k, v, grad_out = problem.tensors
    dq, dk, dv = grads = [torch.full_like(x, math.nan) for x in (q, k, v)]
    runs = None
    if config.skips_tiles:
        views = problem.program.views(problem.values, problem.indices, B, Hq, Sq, Sk)
        runs = tiles.tile_runs(problem.program, views, (B, Hq, Sq, Sk))
    g = Geometry(
        torch.bfloat16, None, (q.shape, k.shape, v.shape), (), scale=SCALE, program=text_of(name),
        runs=lines_of_runs(runs),
    )  # fmt: skip
    program = backward_programs.backward_program(text_of(name))
    call = term_gradients.ProgramCall(program, g, n * 128, parts)
    term_sums = torch.full((math.prod(call._layout[0]),), math.nan).view(call._layout[0])
    far = 0 if is_causal else 1 << 29
    lines = lines_of_runs(runs) or (0, 0)
    if entry == "backward_queries":
        ctas = -(-rows // 128) * B * Hq
    numbers = (ctypes.c_int * 11)(*sizes, far, parts, *lines, ctas, seed)
    at = (ctypes.c_void_p * 7)(*(x.data_ptr() for x in (*problem.tensors, *grads)))
    packed = None if problem.values is None else torch.zeros_like(problem.values).detach()
    distance_sums = distances = None
    if program.distance_sum is not None:
        distance_sums = torch.full(call._of_blocks[0], math.nan)
        distances = packed[call._zero // 4 :]
    steps = torch.tensor(call._steps)
    others = (lse, delta, sums, notes, problem.values, problem.indices, runs, term_sums, key_sums,
              distance_sums, distances, steps)  # fmt: skip
    pointers = [ctypes.c_void_p(0 if x is None else x.data_ptr()) for x in others]
    error = library.run(at, numbers, *pointers)
    assert error is None, error.decode()
    if program.distance_sum is not None and entry == "backward":
        library, _ = kernel(name, "distance_gradient")
        numbers[9] = call.grid[0]
        error = library.run(at, numbers, *pointers)
        assert error is None, error.decode()
    found = {"dq": dq, "dk": dk, "dv": dv}
    if entry == "backward":
        halves = block == 128
        x = sums.view(B * Hq * rows // block, *((2,) if halves else (1,)), D // 8, 4, 8, 4, 2, 2)
        if halves:  # by block: half of the rows, four elements, warp, row, columns, second row
            x = x.permute(0, 1, 3, 6, 4, 2, 5, 7)
        else:
            x = x.view(B * Hq * rows // 64, 2, D // 16, 4, 8, 4, 2, 2)
            x = x.permute(0, 3, 6, 4, 1, 2, 5, 7)
        found["dq"] = x.reshape(B, Hq, rows, D)[:, :, :Sq] * SCALE
        if parts > 1:
            x = key_sums.view(B * Hkv, n, 2, 2, D // 8, 4, 8, 4, 2, 2)
            x = x.permute(2, 0, 1, 3, 5, 8, 6, 4, 7, 9).reshape(2, B, Hkv, n * 128, D)
            found["dk"], found["dv"] = x[0, :, :, :Sk] * SCALE, x[1, :, :, :Sk]
    else:
        del found["dk"], found["dv"]
    for name, x, y in zip(("dq", "dk", "dv"), (found.get(n) for n in ("dq", "dk", "dv")),
                          problem.expected):  # fmt: skip
        if x is not None:
            assert x.isfinite().all(), name
            assert (x.float() - y).abs().max() <= 2e-2 * max(y.abs().max(), 0.5), name
    if entry == "backward" and problem.program.has_gradient:
        operands = NO_OPERANDS._replace(
            term_values=problem.values.detach(), term_indices=problem.indices
        )
        x = call.gradients(
            packed, operands, problem.lse.detach(), problem.grad_lse, problem.delta, term_sums
        )
        y = problem.expected[3]
        for i, term in enumerate(problem.program.terms):
            if term.grad:
                a, b = (problem.program.views(t, problem.indices, B, Hq, Sq, Sk)[i] for t in (x, y))
                assert (a - b).abs().max() <= 2e-2 * max(b.abs().max(), 0.5), f"t{i}"


@pytest.mark.parametrize(
    "seed, name, sizes, is_causal",
    [
        (0, "trained", (2, 2, 1, 200, 300), True), (1, "products", (1, 4, 2, 100, 150), True),
        (2, "cubic", (2, 1, 1, 90, 150), False), (3, "blocks", (1, 2, 1, 150, 140), False),
    ],
)  # fmt: skip
def test_backward(seed, name, sizes, is_causal, kernel):
    assert_right(kernel, name, sizes, seed, is_causal=is_causal)


@pytest.mark.parametrize("seed, name", [(4, "trained"), (5, "products")])
def test_pass_over_queries(seed, name, kernel):
    assert_right(kernel, name, (1, 2, 1, 150, 200), seed, "backward_queries", True)


def test_groups_in_parts(kernel):
    assert_right(kernel, "products", (1, 4, 2, 100, 150), 7, parts=2)
