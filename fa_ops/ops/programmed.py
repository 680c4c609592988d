"""Operators with programs: attention whose scores they change and keys they mask out, and tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops.call import checks
from fa_ops.call.call import PROGRAMMED, PROGRAMMED_MAX
from fa_ops.ops import autograd, library
from fa_ops.ops.schemas import Schema
from fa_ops.plans import dispatch
from fa_ops.programs import tiles
from fa_ops.programs.program import MAX_RUNS, TILE_SIZE

PROGRAMMED_ATTENTION = torch.ops.fa.attention_programmed.default
BACKWARD = torch.ops.fa.attention_programmed_backward.default
OPERATORS = autograd.Operators(
    Schema(PROGRAMMED_ATTENTION, PROGRAMMED), Schema(BACKWARD, PROGRAMMED, 7)
)

WITH_MAX = torch.ops.fa.attention_programmed_max.default
MAX_OPERATORS = autograd.Operators(
    Schema(WITH_MAX, PROGRAMMED_MAX), Schema(BACKWARD, PROGRAMMED_MAX, 7)
)

library.register(
    "attention_programmed", *autograd.forward_functions(OPERATORS.forward),
    autograd.forward_kernel(OPERATORS, PROGRAMMED_ATTENTION),
)  # fmt: skip
library.register(
    "attention_programmed_max", *autograd.forward_functions(MAX_OPERATORS.forward),
    autograd.forward_kernel(MAX_OPERATORS, WITH_MAX),
)  # fmt: skip
library.register(
    "attention_programmed_backward", *autograd.backward_functions(OPERATORS.backward),
    autograd.backward_kernel(BACKWARD),
)  # fmt: skip


# fa::program_tiles: the runs of tiles that the mask of a program may keep. Equal calls in a graph,
# of the layers of a model, are merged by compilers.

PROGRAM_TILES = torch.ops.fa.program_tiles.default


def _program_tiles(
    like: Tensor, program: str, B: int, Hq: int, Sq: int, Sk: int,
    term_values: Tensor | None = None, term_indices: Tensor | None = None,
) -> Tensor:  # fmt: skip
    sizes = B, Hq, Sq, Sk
    parsed = checks.tiles_of_program(like, program, sizes, term_values, term_indices)
    finder = dispatch.tile_finder(like.device, sizes)
    if finder is not None:
        return finder.program_tiles(program, term_values, term_indices, sizes, like.device)
    terms = parsed.views(term_values, term_indices, *sizes)
    if like.is_cpu:
        return tiles.tile_runs(parsed, terms, sizes)
    return tiles.tile_runs_on(like.device, parsed, terms, sizes)


def _fake(
    like: Tensor, program: str, B: int, Hq: int, Sq: int, Sk: int,
    term_values: Tensor | None = None, term_indices: Tensor | None = None,
) -> Tensor:  # fmt: skip
    parsed = checks.tiles_of_program(like, program, (B, Hq, Sq, Sk), term_values, term_indices)
    leading = (n if one else 1 for n, one in zip((B, Hq), tiles.differs(parsed), strict=True))
    lines = sum(-(-size // TILE_SIZE) for size in (Sq, Sk))
    return like.new_empty((*leading, lines, 1 + 2 * MAX_RUNS), dtype=torch.int32)


library.register("program_tiles", _program_tiles, _fake)
