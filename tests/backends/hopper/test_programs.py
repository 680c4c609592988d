"""Programs as C++ compute what they compute by torch, with the same derivatives."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fa_ops.backends.hopper import programs
from fa_ops.programs.evaluation import Elements
from fa_ops.programs.expressions import Expressions
from fa_ops.programs.program import ScoreProgram, parse
from fa_ops.programs.reader import read
from fa_ops.programs.splitting import Prologue, split
from tests.backends.hopper.cuda_as_cpp import WARP, built, needs_compiler
from tests.programs import functions as f

SIZES = 2, 3, 25, 43
SCALE = 0.37
CPU = torch.device("cpu")
RANDOM = int(os.environ.get("FA_OPS_PROGRAMS", "60"))
PROGRAM_PTX = """
struct int2 { int x, y; };
template <class T> static T __ldg(const T* x) { return *x; }
static float tanh_precise(float x) { return tanhf(x); }
static float rsqrtf(float x) { return 1.f / sqrtf(x); }
static float sin_fast(float x) { return sinf(x); }
static float cos_fast(float x) { return cosf(x); }
static float nan_min(float a, float b) { return a != a ? a : b != b ? b : a < b ? a : b; }
static float nan_max(float a, float b) { return a != a ? a : b != b ? b : a < b ? b : a; }
"""
# Scores in the order of a thread of a forward kernel (rows 8 apart, pairs of columns) and, with
# `transposed`, of a backward kernel.
RUN = """
#define RUN(N)                                                                                    \\
  extern "C" void run##N(const ProgramInputs& p, const float* s, float* out, bool transposed) {   \\
    using namespace n##N;                                                                         \\
    const int SQ = p.Sq, SK = p.Sk, count = p.B * p.H * SQ * SK;                                  \\
    for (int b = 0; b < p.B; b++)                                                                 \\
      for (int h = 0; h < p.H; h++) {                                                               \\
        const ProgramTile t = program_tile(p, b, h);                                              \\
        for (int q0 = 0; q0 < SQ; q0 += 2)                                                        \\
          for (int k0 = 0; k0 < SK; k0 += 2) {                                                    \\
            const int row = transposed ? q0 & ~15 : q0, column = transposed ? k0 : k0 & ~31;      \\
            const ProgramBlock x = program_block(t, row, column);                                 \\
            ProgramRow r[2] = {program_row(t, q0), program_row(t, q0 + 1)};                       \\
            ProgramColumn c[2] = {program_column(t, k0), program_column(t, k0 + 1)};              \\
            if (transposed) program_rows(x, q0 - row, r[0], r[1]);                                \\
            else program_columns(x, k0 - column, c[0], c[1]);                                     \\
            for (int i = 0; i < 4; i++) {                                                         \\
              const int q = q0 + i / 2, k = k0 + i % 2, R = q - row, C = k - column;              \\
              if (q >= SQ || k >= SK) continue;                                                   \\
              const int at = ((b * p.H + h) * SQ + q) * SK + k;                                    \\
              out[at] = program_keeps(t, r[i / 2], c[i % 2], x, R, C);                            \\
              out[count + at] = program_score(t, r[i / 2], c[i % 2], x, R, C, s[at]);             \\
              out[2 * count + at] = program_slope(t, r[i / 2], c[i % 2], x, R, C, s[at]);         \\
              for (int g = 0; g < PROGRAM_GRADS; g++)                                             \\
                out[(3 + g) * count + at] = program_factor(g, t, r[i / 2], c[i % 2], x, R, C, s[at]); \\
            }                                                                                     \\
          }                                                                                       \\
      }                                                                                           \\
  }
"""  # noqa: E501


class Params(ctypes.Structure):
    """`ProgramInputs`."""

    _fields_ = [
        ("values", ctypes.c_void_p), ("indices", ctypes.c_void_p), ("scale", ctypes.c_float),
        ("B", ctypes.c_int), ("H", ctypes.c_int), ("Sq", ctypes.c_int), ("Sk", ctypes.c_int),
    ]  # fmt: skip


class Case(NamedTuple):
    """A program, the tensors of its terms, and (B, H, Sq, Sk)."""

    program: ScoreProgram
    values: Tensor | None
    indices: Tensor | None
    sizes: tuple[int, int, int, int]


def case_of(function: Callable, score: bool, sizes: tuple[int, int, int, int]) -> Case | None:
    """Of a score_mod or mask_mod, all of which is left to the program; None if it has none."""
    e, tensors = Expressions(), []
    what = "score_mod" if score else "mask_mod"
    root = read(function, what, e, CPU, torch.float32, tensors).root
    grads = [t.requires_grad for t in tensors]
    parts = split(e, *((root, []) if score else (None, [root])), grads, what, whole=True)
    if parts.program is None or parts.bias is not None or parts.dense_mask is not None:
        return None
    terms = Prologue(parts, tensors, sizes, torch.float32, CPU).packed_terms()
    return Case(parse(str(parts.program)), *terms, sizes)


def cases(count: int) -> Iterator[Case | None]:
    for score, functions in ((True, f.SCORES), (False, f.MASKS)):
        for function in functions.values():
            yield case_of(function, score, (f.B, f.H, f.S, f.S))
    for seed in range(count):
        for score in (True, False):
            torch.manual_seed(seed)
            yield case_of(f.random_function(seed, score, SIZES, []), score, SIZES)


def library_of(folder, texts: list[str]) -> ctypes.CDLL:
    parts = ['#include "programs.cuh"', RUN]
    for i, text in enumerate(texts):
        own = programs.header(text).split('#include "programs.cuh"\n')[1]
        parts.append(f"namespace n{i} {{\n{own}}}\nRUN({i})")
    return built(folder, "programs", "\n".join(parts), WARP + PROGRAM_PTX)


def expected(case: Case, s: Tensor) -> list[Tensor]:
    """What the functions of the header give, by torch in float64."""
    program, (B, H, Sq, Sk) = case.program, case.sizes
    q, k = torch.arange(Sq).view(-1, 1), torch.arange(Sk)
    b, h = torch.arange(B).view(-1, 1, 1, 1), torch.arange(H).view(-1, 1, 1)
    arguments = {"score": s.double() * SCALE, "b": b, "h": h, "q": q, "k": k}
    values = None if case.values is None else case.values.detach().double()
    terms = program.views(values, case.indices, *case.sizes)
    rows, columns = slice(0, Sq), slice(0, Sk)
    elements = Elements(program, arguments, terms, rows, columns, Sk, torch.float64)
    e = program.expressions
    slope, factors = program.gradients()
    keeps = e.constant(True, "bool") if program.mask is None else program.mask
    score = e.argument("score") if program.score is None else program.score
    found = elements.evaluate(keeps, score, slope, *factors.values())
    return [x.double().expand(case.sizes) for x in found]


def address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


@needs_compiler
def test_functions_of_programs(tmp_path):
    found = [case for case in cases(RANDOM) if case is not None]
    texts = list(dict.fromkeys(str(case.program) for case in found))
    assert len(texts) > RANDOM
    library, compared = library_of(tmp_path, texts), 0
    for number, case in enumerate(found):
        s, is_transposed = torch.randn(case.sizes) * 4.0, number % 2 == 1
        wanted = expected(case, s)
        out = torch.full((len(wanted), *case.sizes), torch.nan)
        params = Params(address(case.values), address(case.indices), SCALE, *case.sizes)
        run = getattr(library, f"run{texts.index(str(case.program))}")
        pointers = (ctypes.c_void_p(x.data_ptr()) for x in (s, out))
        run(ctypes.byref(params), *pointers, ctypes.c_bool(is_transposed))
        assert torch.equal(out[0], wanted[0].float()), case.program
        for x, y in zip(out[1:], wanted[1:], strict=True):
            close = torch.isclose(x.double(), y, atol=2e-5, rtol=2e-5, equal_nan=True)
            assert close.all(), f"{case.program}\n{x[~close][:5]} {y[~close][:5]}"
            compared += 1
    assert compared > 2 * RANDOM + 50
