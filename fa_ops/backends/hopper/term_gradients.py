"""Programs of scores and masks in backward passes: parameters, and the gradients of terms.

The pass over keys writes the sums of which gradients of terms are made: of terms of keys, and of
all scores, one for each key, and of a term of distances one for each 64 keys and distance.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from fa_ops.backends.hopper.backward_programs import BackwardProgram, backward_program
from fa_ops.backends.hopper.configs import backward_config
from fa_ops.backends.hopper.kernel_plan import Geometry
from fa_ops.backends.hopper.masks import program_inputs
from fa_ops.backends.hopper.runtime.launch import address, empty
from fa_ops.backends.hopper.runtime.structs import struct_layout
from fa_ops.call.call import Call
from fa_ops.call.options import MASK_BLOCK, Operands
from fa_ops.programs.expressions import FLOAT, TILE
from fa_ops.programs.program import padding_of_distances, parse

_MOST_DISTANCE_SUMS = 2**29  # elements
_PARAMS = struct_layout("backward_tiles.cuh", "BackwardParams")
_PROGRAM, _PROGRAM_AT = _PARAMS.packer("program", "program"), _PARAMS.fields["program"].offset


def program_error(call: Call) -> str | None:
    """Why the kernels cannot run the backward pass of a call with a program, or None."""
    D, Dv = call.query.shape[-1], call.value.shape[-1]
    if backward_config(D, Dv).is_wide:
        return f"has backward kernels with programs for equal head dims up to 128, got {D} and {Dv}"
    if call.operands.attn_mask is not None:
        return "has no attn_mask beside a program"
    program = backward_program(call.options.program)
    sums = _distance_sums((*call.query.shape[:3], call.key.shape[2]))
    if program.distance_sum is not None and sums > _MOST_DISTANCE_SUMS:
        return f"would store {sums * 4 >> 20} MiB to sum gradients of distances"
    return program.error


def _distance_sums(sizes: tuple[int, int, int, int]) -> int:
    """Elements of the sums of gradients by distance, of each 64 keys."""
    B, Hq, Sq, Sk = sizes
    return B * Hq * -(-Sk // 128) * 2 * (-(-Sq // 64) * 64 + 64)


class ProgramCall:
    """What a program adds to passes of one geometry: parameters, and gradients of terms."""

    def __init__(self, program: BackwardProgram, g: Geometry, keys: int, parts: int) -> None:
        """`keys`: of whole blocks. `parts`: of a group of query heads, see `group_parts`."""
        (B, Hq, Sq, _), (_, Hkv, Sk, _) = g.shapes[:2]
        self.changes_scores, self._program = program.changes_scores, program
        self._text, self._sizes = parse(g.program), (B, Hq, Sq, Sk)
        self._at, self._shared = _PROGRAM_AT, (g.units.gradient, B, Hq, Sq, Sk)
        lines = g.runs or (0, 0)
        self._tiles = (*lines, -(-Sq // MASK_BLOCK), -(-Sk // MASK_BLOCK))
        self._heads = Hkv * parts
        count, most = len(program.key_sums), max(Hq, self._heads)
        self._layout = (count, B * most, keys), (B * most * keys, keys, 1), torch.float32
        self._steps, self._zero, i = (0, 0), 0, program.distance_sum
        if i is not None:  # struct ProgramOfCall says how the kernels write its gradient
            term, length = self._text.terms[i], self._text.terms[i].length(Sq, Sk)
            place = self._text.places(FLOAT, *self._sizes)[0][i]
            self._zero = 4 * (place.offset + padding_of_distances(Sk))
            self._steps = place.shape[1] * length * term.by_batch, length * term.by_head
            lines = place.shape[0] * place.shape[1]
            self.grid = lines * -(-(Sq + Sk) // 256), 1
            self._of_blocks = (_distance_sums(self._sizes),), (1,), torch.float32

    def write(self, params: ctypes.Array, tensors: Operands) -> tuple[Tensor | None, ...]:
        """Write into the parameters of a call.

        Returns the gradients of terms, where kernels write that of a term of distances, the sums
        for those of terms of keys, and what else the kernels access.
        """
        sums = empty(*self._layout) if self._program.key_sums else None
        distances, packed, at = None, None, 0
        if tensors.term_values is not None:
            packed = torch.zeros_like(tensors.term_values)
        if self._program.distance_sum is not None:
            distances, at = empty(*self._of_blocks), packed.data_ptr() + self._zero
        read = program_inputs(tensors)
        values, indices, runs = read.term_values, read.term_indices, read.tile_runs
        _PROGRAM.pack_into(
            params, self._at, address(values), address(indices), *self._shared, address(runs),
            *self._tiles, address(sums), address(distances), at, *self._steps,
        )  # fmt: skip
        return packed, sums, distances, values, indices, runs

    def gradients(
        self, packed: Tensor | None, tensors: Operands, lse: Tensor, grad_lse: Tensor | None,
        delta: Tensor, sums: Tensor | None,
    ) -> Tensor | None:  # fmt: skip
        """Complete the gradients of terms; lse, its gradient and delta are (B, Hq, Sq)."""
        if packed is None:
            return None
        (B, Hq, Sq, Sk), terms = self._sizes, self._text.terms
        views = self._text.views(packed, tensors.term_indices, *self._sizes)
        for n, i in enumerate(self._program.key_sums):
            heads = Hq if terms[i].by_head else self._heads
            found = sums[n, : B * heads].view(B, heads, -1)[..., :Sk]
            if terms[i].domain == TILE:
                _add(views[i], found.sum(-1, keepdim=True))
            else:
                _add(views[i][..., :Sk], found)
        of_rows = None
        if self._program.row_grads and (grad_lse is not None or tensors.sinks is not None):
            of_rows = _row_gradient(tensors.sinks, lse, grad_lse, delta)
        for i, factor in self._program.row_grads if of_rows is not None else ():
            if terms[i].domain == TILE:
                _add(views[i], factor * of_rows.sum(-1, keepdim=True))
            else:
                _add(views[i][..., :Sq], factor * of_rows)
        return packed


def _add(view: Tensor, found: Tensor) -> None:
    """Add (B, H, elements) to a term, which batches or heads may share."""
    shared = [dim for dim in (0, 1) if view.shape[dim] == 1 and found.shape[dim] > 1]
    view += found.sum(shared, keepdim=True) if shared else found


def _row_gradient(
    sinks: Tensor | None, lse: Tensor, grad_lse: Tensor | None, delta: Tensor
) -> Tensor:
    """The gradient of a number that is added to all scores of a query.

    A softmax does not depend on it, but the log-sum-exp does, and the weight that a sink leaves.
    """
    found = torch.zeros_like(lse) if grad_lse is None else grad_lse
    if sinks is not None:
        most = torch.finfo(torch.float32).max  # the lse of a sink of +inf is +inf
        sink = sinks.float().clamp(max=most).view(1, -1, 1)
        found = found + torch.exp(sink - lse.clamp(-most, most)) * delta
    return found.masked_fill(lse == -torch.inf, 0.0)
