"""Programs as C++ compute what they compute by torch, with the same derivatives."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fa_ops.backends import hopper
from fa_ops.backends.hopper import forward, programs
from fa_ops.backends.hopper.configs import forward_config
from fa_ops.backends.hopper.kernel_plan import LOG2E, macros
from fa_ops.backends.hopper.runtime import nvrtc
from fa_ops.backends.hopper.runtime.structs import struct_layout
from fa_ops.call.call import Call, Saved
from fa_ops.call.options import Operands, Options
from fa_ops.programs import tiles
from fa_ops.programs.evaluation import Elements
from fa_ops.programs.expressions import Expressions
from fa_ops.programs.program import ScoreProgram, parse
from fa_ops.programs.reader import read
from fa_ops.programs.splitting import Prologue, split
from tests.backends.hopper.cuda_as_cpp import PROGRAM_PTX, WARP, built, needs_compiler
from tests.backends.hopper.cuda_forward import ProgramInputs, emulated_forward, run_forward
from tests.programs import functions as f

Sizes = tuple[int, int, int, int]
SIZES = 2, 3, 25, 43
SCALE = 0.37
CPU = torch.device("cpu")
RANDOM = int(os.environ.get("FA_OPS_PROGRAMS", "60"))
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


class Case(NamedTuple):
    """A program, the tensors of its terms, and (B, H, Sq, Sk)."""

    program: ScoreProgram
    values: Tensor | None
    indices: Tensor | None
    sizes: Sizes

    def inputs(self, scale: float) -> ProgramInputs:
        """What kernels are given."""
        at = (0 if t is None else t.data_ptr() for t in (self.values, self.indices))
        return ProgramInputs(*at, scale, *self.sizes)


def case_of(score: Callable | None, mask: Callable | None, sizes: Sizes) -> Case | None:
    """Of functions, all of which is left to the program; None if it has none."""
    e, tensors, roots = Expressions(), [], {}
    for what, function in (("score_mod", score), ("mask_mod", mask)):
        if function is not None:
            roots[what] = read(function, what, e, CPU, torch.float32, tensors).root
    grads = [t.requires_grad for t in tensors]
    masks = [roots["mask_mod"]] if mask else []
    parts = split(e, roots.get("score_mod"), masks, grads, "functions", whole=True)
    if parts.program is None or parts.bias is not None or parts.dense_mask is not None:
        return None
    terms = Prologue(parts, tensors, sizes, torch.float32, CPU).packed_terms()
    return Case(parse(str(parts.program)), *terms, sizes)


def of(function: Callable, is_score: bool) -> tuple[Callable | None, Callable | None]:
    """A function as `case_of` takes it."""
    return (function, None) if is_score else (None, function)


def cases(count: int) -> Iterator[Case | None]:
    for score, functions in ((True, f.SCORES), (False, f.MASKS)):
        for function in functions.values():
            yield case_of(*of(function, score), (f.B, f.H, f.S, f.S))
    for seed in range(count):
        for score in (True, False):
            torch.manual_seed(seed)
            yield case_of(*of(f.random_function(seed, score, SIZES, []), score), SIZES)


def library_of(folder, texts: list[str]) -> ctypes.CDLL:
    parts = ['#include "programs.cuh"', RUN]
    for i, text in enumerate(texts):
        own = programs.header(text).split('#include "programs.cuh"\n')[1]
        parts.append(f"namespace n{i} {{\n{own}}}\nRUN({i})")
    return built(
        folder, "programs", "\n".join(parts), WARP + "struct int2 { int x, y; };" + PROGRAM_PTX
    )


def expected(case: Case, s: Tensor, scale: float = SCALE) -> list[Tensor]:
    """What the functions of the header give, by torch in float64."""
    program, (B, H, Sq, Sk) = case.program, case.sizes
    q, k = torch.arange(Sq).view(-1, 1), torch.arange(Sk)
    b, h = torch.arange(B).view(-1, 1, 1, 1), torch.arange(H).view(-1, 1, 1)
    arguments = {"score": s.double() * scale, "b": b, "h": h, "q": q, "k": k}
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
        params = case.inputs(SCALE)
        run = getattr(library, f"run{texts.index(str(case.program))}")
        pointers = (ctypes.c_void_p(x.data_ptr()) for x in (s, out))
        run(ctypes.byref(params), *pointers, ctypes.c_bool(is_transposed))
        assert torch.equal(out[0], wanted[0].float()), case.program
        for x, y in zip(out[1:], wanted[1:], strict=True):
            close = torch.isclose(x.double(), y, atol=2e-5, rtol=2e-5, equal_nan=True)
            assert close.all(), f"{case.program}\n{x[~close][:5]} {y[~close][:5]}"
            compared += 1
    assert compared > 2 * RANDOM + 50


# The forward kernel, run on the CPU.

QUERIES, KEYS, LOWEST = 140, 300, torch.finfo(torch.float32).min
NUMBERS = torch.arange(KEYS) // 70
GATE = torch.cumsum(-torch.rand(2, 2, KEYS, generator=torch.Generator().manual_seed(0)), -1)
TABLE = torch.randn(2, QUERIES + KEYS, generator=torch.Generator().manual_seed(1))
FILLS = torch.where(torch.arange(KEYS) < 70, LOWEST, 0.5)


def near(b, h, i, j):
    """Documents of a prompt of which queries are the last."""
    return (NUMBERS[i + KEYS - QUERIES] == NUMBERS[j]) & ((j - h) % 7 != 3)


KERNELS: dict[str, tuple] = {  # score_mod, mask_mod, options of the kernel and of the call
    "gates, documents": (
        lambda s, b, h, i, j: s + GATE[b, h, i] - GATE[b, h, j], near, {}, {}
    ),
    "table, causal": (
        lambda s, b, h, i, j: 2.0 * torch.tanh(s) + TABLE[h, i - j + KEYS], None,
        {"skips_tiles": False, "window": True}, {"is_causal": True},
    ),
    "mask alone, lengths": (None, near, {"kv_lens": True, "window": True}, {"lens": [290, 170]}),
    "no runs, empty rows": (
        None, lambda b, h, i, j: (i % 3 != 0) & (i + 100 > j),
        {"skips_tiles": False, "block_n": 80}, {},
    ),
    "fills": (
        lambda s, b, h, i, j: s + FILLS[j], lambda b, h, i, j: i + 40 >= j,
        {"block_n": 80}, {},
    ),
    "huge": (lambda s, b, h, i, j: s * 2.0e5 * (h + 1) - i * 0.1, None, {"skips_tiles": False}, {}),
}  # fmt: skip


def attended(scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    lse = scores.logsumexp(-1)
    dead = (lse == -torch.inf).unsqueeze(-1)
    weights = scores.masked_fill(dead, 0.0).softmax(-1).masked_fill(dead, 0.0)
    return weights @ v.double(), lse


@needs_compiler
@pytest.mark.parametrize("name", KERNELS)
def test_forward_kernel(name, tmp_path):
    score, mask, options, call = KERNELS[name]
    seed, sizes = list(KERNELS).index(name), (2, 2, QUERIES, KEYS)
    case = case_of(score, mask, sizes)
    g = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(2, H, S, 16, generator=g).bfloat16()
        for H, S in ((2, QUERIES), (1, KEYS), (1, KEYS))
    )
    products = q.double() @ k.double().transpose(2, 3)
    keeps, scores, *_ = expected(case, products, 0.25)
    scores = scores.masked_fill(keeps == 0, -torch.inf)
    runs = torch.zeros(1, 1, 1, dtype=torch.int32)
    if options.get("skips_tiles", True):
        terms = case.program.views(case.values, case.indices, *sizes)
        runs = tiles.tile_runs(case.program, terms, sizes).flatten(2)
    if call.get("is_causal"):
        i, j = torch.arange(QUERIES).unsqueeze(-1), torch.arange(KEYS)
        scores = scores.masked_fill(j > i + KEYS - QUERIES, -torch.inf)
    for b, length in enumerate(call.get("lens", ())):
        scores[b, ..., length:] = -torch.inf
    out, lse = run_forward(
        emulated_forward(tmp_path, program=str(case.program), **options), q, k, v,
        torch.ones(1, 1, QUERIES, KEYS, dtype=torch.bool), runs, seed=seed,
        inputs=case.inputs(0.25), **call,
    )  # fmt: skip
    wanted, wanted_lse = attended(scores, v)
    rows = wanted_lse > -torch.inf
    assert torch.equal(lse == -torch.inf, ~rows) and (out[~rows] == 0).all()
    torch.testing.assert_close(lse[rows].double(), wanted_lse[rows], atol=1e-2, rtol=1e-5)
    torch.testing.assert_close(out[rows].double(), wanted[rows], atol=2e-2, rtol=2e-2)


# On the host: what the forward kernel is given, and which calls it takes.


def call_of(case: Case, D: int = 64, **operands: Tensor) -> Call:
    B, H, Sq, Sk = case.sizes
    q, k = torch.randn(B, H, Sq, D).bfloat16(), torch.randn(B, 1, Sk, D).bfloat16()
    operands |= {"term_values": case.values, "term_indices": case.indices}
    return Call(q, k, k, Operands(**operands), Options(is_causal=True, program=str(case.program)))


class Cuda:
    """What a tensor tells `supports`, on a GPU."""

    device = torch.device("cuda", 0)

    def __init__(self, t: Tensor) -> None:
        self.shape, self.dtype, self.dim = t.shape, t.dtype, t.dim


def test_what_the_kernel_is_given(driver):
    sizes = 2, 3, 300, 500
    case = case_of(lambda s, b, h, i, j: s + GATE[b, 0, j % KEYS], None, sizes)
    masked = case_of(
        None, lambda b, h, i, j: (h > 0) & (NUMBERS[i % KEYS] == NUMBERS[j % KEYS]), sizes
    )
    layout = struct_layout("forward_rows.cuh", "ForwardParams")
    driver.struct_bytes = layout.size
    for one, log2 in ((case, LOG2E), (masked, 0.125 * LOG2E)):
        terms = one.program.views(one.values, one.indices, *sizes)
        runs = tiles.tile_runs(one.program, terms, sizes) if one is masked else None
        call = call_of(one, tile_runs=runs)
        forward.prepare_attention(call)(*call[:4])
        found = driver.launched[-1].params
        given, at = layout.unpack(found), layout.fields["program"].offset
        program = struct.unpack_from("<QQf4i", found, at)
        assert program == (*addresses(one.values, one.indices), 0.125, *sizes)
        assert given["scale_log2"] == pytest.approx((log2,))
        if runs is not None:
            lines = 3 + 4  # of tiles
            found = struct.unpack_from("<Q2q2i", found, at + 40)
            assert found == (runs.data_ptr(), 0, lines, 3, 4)


def addresses(*tensors: Tensor | None) -> tuple[int, ...]:
    return tuple(0 if t is None else t.data_ptr() for t in tensors)


def test_terms_are_aligned(driver):
    """Pairs of them are read at once."""
    case = case_of(lambda s, b, h, i, j: s + GATE[b, h % 2, j % KEYS], None, (2, 3, 300, 500))
    layout = struct_layout("forward_rows.cuh", "ForwardParams")
    driver.struct_bytes = layout.size
    call = call_of(case)
    run = forward.prepare_attention(call)
    moved = torch.cat((torch.zeros(1), case.values.detach()))[1:]
    assert moved.data_ptr() % 8
    run(*call[:3], call.operands._replace(term_values=moved))
    (at,) = struct.unpack_from("<Q", driver.launched[-1].params, layout.fields["program"].offset)
    assert at % 8 == 0


def test_the_text_is_part_of_the_kernel():
    """So that kernels of other programs have other names."""
    texts = "fa1\nmask true\n", "fa1\nx0 lt(k, q)\nmask x0\n"
    config = forward_config(128, 128)
    names = set()
    for text in texts:
        program = nvrtc.program("forward", "forward", macros(config, torch.bfloat16, program=text))
        assert dict(program.headers)["score_program.cuh"] == programs.header(text)
        assert "#define HAS_PROGRAM 1\n" in program.source
        names.add(nvrtc.file_name(program))
    assert len(names) == len(texts)
    plain = nvrtc.program("forward", "forward", macros(config, torch.bfloat16))
    assert "#define HAS_PROGRAM 0\n" in plain.source


def test_which_calls_are_refused(monkeypatch):
    case = case_of(None, lambda b, h, i, j: NUMBERS[i] == NUMBERS[j], (2, 2, 300, KEYS))
    call = call_of(case)
    cuda = call._replace(**{n: Cuda(t) for n, t in zip(("query", "key", "value"), call[:3])})
    assert hopper.supports(cuda) is None
    masked = cuda._replace(operands=cuda.operands._replace(attn_mask=torch.zeros(300, 400)))
    assert "no attn_mask beside a program" in hopper.supports(masked)
    backward = cuda._replace(saved=Saved(None, None, None, None))
    assert "gradient" in (hopper.supports(backward) or "gradient")
    large = cuda.options._replace(program="fa1\nx0 add(k, 4294967296)\nx1 lt(x0, q)\nmask x1\n")
    assert "integers of 32 bits" in hopper.supports(cuda._replace(options=large))
