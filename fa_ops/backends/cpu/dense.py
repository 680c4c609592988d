"""Dense attention on the CPU: by torch's flash kernel where it can, else block by block.

A call is cut into pieces that torch's kernel for CPUs computes as they are; what it cannot express
is computed in blocks of scores with an online softmax.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fa_ops.backends.cpu import scores as layout
from fa_ops.backends.cpu.scores import (
    ScoreProblem,
    Scores,
    ScoreTile,
    Slab,
    attended_ranges,
    cut,
    skipping_pays,
    without_nan,
)
from fa_ops.backends.dropout import is_words
from fa_ops.call.call import Call
from fa_ops.call.options import Gradients
from fa_ops.programs.evaluation import Elements
from fa_ops.programs.expressions import COLUMN, DISTANCE, ROW, derivatives
from fa_ops.programs.program import padding_of_distances, parse

# The CPU engine that calls aten's flash kernel, on pieces of a call that the kernel supports.
#
# Differences of that kernel from this library's semantics: causal is aligned at the top left; an
# empty row's lse is 0.0; an empty input divides by zero and kills the process; scaling after
# masking turns -inf into +inf if the scale is negative; 0 * NaN spreads a NaN in k or v to rows
# that do not attend it; a row whose scores are all NaN and fewer than a vector counts as empty.
# Fp16 and bf16 run in fp32, because the kernel's half-precision code needs matrix units: the
# backward of (1, 8, 2048, 64), causal, one thread with AVX2, takes 0.23 s in fp32, 1.4 s in bf16,
# 2.3 s in fp16.

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


MIN_PIECE_SCORES = 2**16  # fewer scores per batch element do not repay a kernel call each
VECTOR = 16  # elements of the longest SIMD vector that aten is compiled for


class Piece(NamedTuple):
    """Rows that attend the same keys; if causal, each attends one key more than the row before."""

    batches: slice
    rows: slice
    keys: slice
    causal: bool

    def queries(self, x: Tensor) -> Tensor:
        """The piece's rows of (B, Hq, Sq, ...)."""
        return _cut(_cut(x, 0, self.batches), 2, self.rows)

    def memory(self, x: Tensor) -> Tensor:
        """The piece's keys of (B, Hkv, Sk, ...)."""
        return _cut(_cut(x, 0, self.batches), 2, self.keys)

    def parts(self) -> list[tuple[slice, bool]]:
        """(keys, causal) of each kernel call: a rectangle of full rows and a causal square."""
        rows, keys = self.rows.stop - self.rows.start, self.keys.stop - self.keys.start
        if not self.causal or rows == 1:
            return [(slice(0, keys), False)]
        square = (slice(keys - rows, keys), True)
        return [square] if rows == keys else [(slice(0, keys - rows), False), square]

    def has_few_keys(self) -> bool:
        """Whether a kernel call has fewer keys than a vector."""
        return any(keys.stop - keys.start < VECTOR for keys, _ in self.parts())


def _cut(x: Tensor, dim: int, part: slice) -> Tensor:
    """Narrow x, or return x itself if the part is all of it: a view costs a microsecond."""
    size = part.stop - part.start
    return x if size == x.shape[dim] else x.narrow(dim, part.start, size)


def plan(call: Call) -> list[Piece] | None:
    """Pieces with disjoint batches, or None if the kernel cannot run; other rows are empty."""
    (q, k, v), tensors, options = call[:3], call.operands, call.options
    if options.softcap > 0 or options.dropout_p > 0 or tensors.alibi_slopes is not None:
        return None
    if call.is_programmed:
        return None
    if q.shape[3] != v.shape[3] or call.scale <= 0:
        return None
    is_fixed = tensors.kv_lens is None and tensors.key_ranges is None
    pieces = _fixed_pieces(call) if is_fixed else _pieces(call)
    if pieces is None:
        return None
    masked = [piece for piece in pieces if piece.causal]
    if tensors.attn_mask is not None:
        if pieces != [_everything(q, k)] or not _mask_fits(tensors.attn_mask, q):
            return None
        masked = pieces
    clean = all(_finite(piece.memory(x)) for piece in masked for x in (k, v))
    short = [piece for piece in pieces if piece.has_few_keys()]
    clean = clean and all(_finite(x) for p in short for x in (p.queries(q), p.memory(k)))
    return pieces if clean else None


def plan_backward(call: Call) -> list[Piece] | None:
    """The same as `plan`, for the gradients.

    The kernel takes exp(s - lse) as the weight, which is wrong if scores are so large that rounding
    matters, and multiplies weights of 0 by gradients that may be NaN.
    """
    pieces, lse, is_masked = plan(call), call.saved.lse, call.operands.attn_mask is not None
    largest = 0.01 / torch.finfo(lse.dtype).eps
    for piece in pieces or ():
        rows, q, k = piece.queries(lse), piece.queries(call.query), piece.memory(call.key)
        highest = rows.masked_fill(rows == -math.inf, 0.0).abs().amax()
        scores = call.scale * (layout.longest_row(q) * layout.longest_row(k))
        if not (scores.item() <= largest and highest.item() <= largest):
            return None
        if (piece.causal or is_masked) and not _finite(piece.queries(call.saved.grad_out)):
            return None
    return pieces


def _everything(q: Tensor, k: Tensor) -> Piece:
    return Piece(slice(0, q.shape[0]), slice(0, q.shape[2]), slice(0, k.shape[2]), False)


def _fixed_pieces(call: Call) -> list[Piece] | None:
    """Pieces of a call without kv_lens and key_ranges."""
    q, k, left = call.query, call.key, call.options.window_left
    Sq, Sk = q.shape[2], k.shape[2]
    right = 0 if call.options.is_causal else call.options.window_right
    whole = _everything(q, k)
    if Sq == 1:  # at the last position: nothing is to its right
        return [whole if left < 0 else whole._replace(keys=slice(max(0, Sk - 1 - left), Sk))]
    if 0 <= left < Sk - 1 or 0 < right < Sq - 1:
        return None
    return [whole._replace(rows=slice(max(0, Sq - Sk), Sq), causal=True) if right == 0 else whole]


def _pieces(call: Call) -> list[Piece] | None:
    (B, Hq, Sq, _), Sk = call.query.shape, call.key.shape[2]
    ranges = attended_ranges(call)
    if ranges.lo.shape[1] > 1:
        return None
    alike = all(bool((x == x[:1]).all()) for x in ranges)
    if not alike and Hq * Sq * Sk < MIN_PIECE_SCORES:
        return None
    pieces = []
    for b in range(1 if alike else B):
        batches = slice(0, B) if alike else slice(b, b + 1)
        found = _pieces_of_batch(batches, ranges.lo[b].flatten(), ranges.hi[b].flatten(), Sq)
        if found is None:
            return None
        pieces += found
    return pieces


def _pieces_of_batch(batches: slice, lo: Tensor, hi: Tensor, Sq: int) -> list[Piece] | None:
    """One piece with these key ranges; [] if all rows are empty; None if they do not form one."""
    live = (lo < hi).nonzero()
    if not len(live):
        return []
    rows = slice(int(live[0]), int(live[-1]) + 1)
    keys = slice(int(lo[rows.start]), int(hi[rows.stop - 1]))
    if len(lo) == 1:
        return [Piece(batches, slice(0, Sq), keys, False)]
    if len(live) != rows.stop - rows.start or bool((lo[rows] != keys.start).any()):
        return None
    steps = hi[rows].diff()
    causal = bool(steps.any())
    return None if causal and bool((steps != 1).any()) else [Piece(batches, rows, keys, causal)]


def _mask_fits(mask: Tensor, q: Tensor) -> bool:
    """Whether the mask has the kernel's dtype, or is one row, which is cheap to convert."""
    dtype = layout.accumulator(q.dtype)
    return mask.dtype == dtype or mask.dim() < 2 or mask.shape[-2] == 1


def _finite(x: Tensor) -> bool:
    """Whether x has no NaN or Inf. A sum that overflows gives False too, which only costs time."""
    return math.isfinite(x.sum(dtype=layout.accumulator(x.dtype)).item())


def _bias(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, float("-inf"))
    return layout.four_dims(mask.detach().to(dtype))


def flash_forward(call: Call, pieces: list[Piece]) -> tuple[Tensor, Tensor]:
    """out and lse, given the pieces of `plan`."""
    q, sinks = call.query, call.operands.sinks
    if _whole(pieces, q):
        out, lse = _attend(call, pieces[0])
        return layout.bshd(out, q.dtype), lse.contiguous()
    out = layout.empty_out(q, call.value).zero_()
    lse = torch.full(q.shape[:3], float("-inf"), dtype=layout.accumulator(q.dtype))
    if sinks is not None:
        lse.copy_(sinks.view(-1, 1))
    for piece in pieces:
        o, m = _attend(call, piece)
        piece.queries(out).copy_(o)
        piece.queries(lse).copy_(m)
    return out, lse


def _whole(pieces: list[Piece], q: Tensor) -> bool:
    """Whether one piece covers all rows of all batches."""
    return len(pieces) == 1 and pieces[0].queries(q).shape == q.shape


def _attend(call: Call, piece: Piece) -> tuple[Tensor, Tensor]:
    """out and lse of one piece, in fp32 (fp64 for fp64)."""
    wide, sinks = layout.accumulator(call.query.dtype), call.operands.sinks
    tensors = piece.queries(call.query), piece.memory(call.key), piece.memory(call.value)
    q, k, v = (layout.with_rows(x, wide) for x in tensors)
    bias = _bias(call.operands.attn_mask, wide)
    options = {"attn_mask": bias, "scale": call.scale}
    (out, lse), *rest = (
        _forward(q, _cut(k, 2, keys), _cut(v, 2, keys), 0.0, causal, **options)
        for keys, causal in piece.parts()
    )
    for o, m in rest:
        out = out.lerp_(o, torch.sigmoid(m - lse).unsqueeze(-1))
        lse = torch.logaddexp(lse, m)
    if bias is not None:
        lse = lse.masked_fill((bias == float("-inf")).all(-1), float("-inf"))
    if sinks is not None:
        total = torch.logaddexp(lse, sinks.to(wide).view(-1, 1))
        dead = total == float("-inf")
        out.mul_(torch.exp(lse - total).masked_fill_(dead, 0.0).unsqueeze(-1))
        lse = total
    return out, lse


def flash_backward(call: Call, pieces: list[Piece]) -> Gradients:
    """Gradients, summed over the pieces.

    With the whole row's out and lse, the kernel's gradients of any part of its keys are exact.
    """
    (q, k, v), (grad_out, _, out, lse, _) = call[:3], call.saved
    wide = layout.accumulator(q.dtype)
    options = {"attn_mask": _bias(call.operands.attn_mask, wide), "scale": call.scale}
    lse = lse.masked_fill(lse == float("-inf"), float("inf"))  # dead: exp(s - lse) = 0
    if _whole(pieces, q) and pieces[0].parts() == [(slice(0, k.shape[2]), pieces[0].causal)]:
        tensors = (layout.with_rows(x, wide) for x in (grad_out, q, k, v, out))
        grads = list(_backward(*tensors, lse, 0.0, pieces[0].causal, **options))
        return Gradients(*(_like(grads.pop(0), x) for x in (q, k, v)))
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for piece in pieces:
        do, qs, o = (layout.with_rows(piece.queries(x), wide) for x in (grad_out, q, out))
        total = torch.zeros_like(qs)
        for keys, causal in piece.parts():
            ks, vs = (layout.with_rows(_cut(piece.memory(x), 2, keys), wide) for x in (k, v))
            grads = _backward(do, qs, ks, vs, o, piece.queries(lse), 0.0, causal, **options)
            total += grads[0]
            _cut(piece.memory(dk), 2, keys).copy_(grads[1])
            _cut(piece.memory(dv), 2, keys).copy_(grads[2])
        piece.queries(dq).copy_(total)
    return Gradients(dq, dk, dv)


def _like(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient in x's dtype and in the memory layout of `torch.empty_like(x)`."""
    target = torch.empty_like(x)
    same = grad.dtype == x.dtype and grad.stride() == target.stride()
    return grad if same else target.copy_(grad)


# The CPU engine for every feature: a loop over tiles of scores, with memory linear in length.
#
# Forward: online softmax (Milakov and Gimelshein, arXiv:1805.02867). Backward: recomputed weights
# (Dao et al., arXiv:2205.14135).


def blockwise_forward(call: Call, first_batch: int) -> tuple[Tensor, ...]:
    """out (B, Hq, Sq, Dv) in q's dtype and lse (B, Hq, Sq), and the largest scores likewise."""
    q, v = call.query, call.value
    problem = ScoreProblem(call, attended_ranges(call), first_batch)
    out = layout.empty_out(q, v)
    lse = torch.empty(q.shape[:3], dtype=problem.dtype)
    highest = torch.empty_like(lse) if call.options.max_scores else None
    for slab in problem.slabs():
        scores = Scores(problem, slab)
        values, bad = without_nan(slab.keys(v, problem.dtype))
        for rows in problem.row_blocks():
            top = None if highest is None else slab.spread(highest)[..., rows]
            o, m = _forward_rows(scores, values, bad, rows, top)
            slab.spread(out)[..., rows, :] = slab.unfold(o)
            slab.spread(lse)[..., rows] = slab.unfold(m).squeeze(-1)
    return (out, lse) if highest is None else (out, lse, highest)


def _forward_rows(
    scores: Scores, v: Tensor, bad: Tensor | None, rows: slice, highest: Tensor | None
) -> tuple[Tensor, Tensor]:
    """out (n, group * rows, Dv) and lse (n, group * rows, 1); largest scores into `highest`."""
    sinks, slab = scores.operands.sinks, scores.slab
    q = scores.queries(rows)
    lowest = torch.finfo(q.dtype).min  # not infinite: then no difference of maxima is NaN
    m, total = q.new_full((*q.shape[:2], 1), lowest), q.new_zeros(*q.shape[:2], 1)
    if sinks is not None:
        sinks = slab.spread(sinks.detach().to(q.dtype).view(1, -1, 1, 1))
        slab.unfold(m).copy_(sinks.clamp(lowest, -lowest))
        slab.unfold(total).copy_(sinks > float("-inf"))
    acc = q.new_zeros(*q.shape[:2], v.shape[2])
    of_tiles = highest if sinks is not None else None  # else the running maximum has no others
    if of_tiles is not None:
        of_tiles.fill_(float("-inf"))
    touched = None if bad is None else torch.zeros_like(acc)
    for tile in scores.tiles(rows):
        s, _ = scores.of(q, tile)
        if touched is not None:
            touched += (s > float("-inf")).to(s.dtype) @ bad[:, tile.cols]
        of_tile = s.amax(-1, keepdim=True)
        if of_tiles is not None:
            torch.maximum(of_tiles, slab.unfold(of_tile).squeeze(-1), out=of_tiles)
        top = torch.maximum(m, of_tile)
        p = exp_(s.sub_(top))
        shrink = exp_(m.sub_(top))
        m = top
        total.mul_(shrink).add_(p.sum(-1, keepdim=True))
        if scores.options.dropout_p > 0:
            p.mul_(scores.survivors(tile))
        acc.mul_(shrink).baddbmm_(p, v[:, tile.cols])
    if highest is not None and of_tiles is None:  # a row with a key has a weight
        highest.copy_(slab.unfold(m.masked_fill(total == 0, float("-inf"))).squeeze(-1))
    lse = m + total.log()
    if sinks is not None:  # which may be +inf
        heads = slab.unfold(lse)
        torch.maximum(heads, sinks, out=heads)
    # a live row's top weight is exp(0)
    acc.div_(total.clamp_(min=1.0).mul_(kept_share(scores.options.dropout_p)))
    if touched is not None:
        acc.masked_fill_(touched > 0, float("nan"))
    return acc, lse


def blockwise_backward(call: Call, first_batch: int) -> Gradients:
    """Gradients of q, k and v, and of a float mask if wanted, by recomputing the weights."""
    (q, k, v), mask = call[:3], call.operands.attn_mask
    grad_out, grad_lse, out, lse, mask_grad = call.saved
    problem = ScoreProblem(call, attended_ranges(call), first_batch)
    dtype = problem.dtype
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    dmask = torch.zeros(mask.shape, dtype=dtype) if mask_grad else None
    values = call.operands.term_values
    of_terms = TermGradients(call) if values is not None and problem.program.has_gradient else None
    # exp(s - lse) is the weight, and 0 in a dead row
    lse = lse.masked_fill(lse == float("-inf"), float("inf")).unsqueeze(-1)
    for slab in problem.slabs():
        walk = _Backward(Scores(problem, slab), v, dmask, of_terms)
        for rows in problem.row_blocks():
            do = slab.fold(grad_out, rows, dtype)
            delta = (do * slab.fold(out, rows, dtype)).sum(-1, keepdim=True)
            if grad_lse is not None:
                delta -= slab.fold(grad_lse.unsqueeze(-1), rows, dtype)
            rows_dq = walk.rows(rows, do, slab.fold(lse, rows, dtype), delta)
            slab.spread(dq)[..., rows, :] = slab.unfold(rows_dq)
        dk[slab.batches, slab.heads] = slab.unfold_keys(walk.scores.unscaled(walk.dk))
        dv[slab.batches, slab.heads] = slab.unfold_keys(walk.dv)
    if dmask is not None:
        dmask = torch.empty_like(mask).copy_(dmask)
    dvalues = None
    if values is not None:
        dvalues = torch.zeros_like(values) if of_terms is None else of_terms.packed
    return Gradients(dq, dk, dv, dmask, None, dvalues)


class TermGradients:
    """The gradients of a program's terms, summed over tiles in their order."""

    def __init__(self, call: Call) -> None:
        (q, k), t = call[:2], call.operands
        self.program = parse(call.options.program)
        self.packed = torch.zeros_like(t.term_values)
        views = self.program.views(self.packed, t.term_indices, *q.shape[:3], k.shape[2])
        self.views = {i: views[i] for i, term in enumerate(self.program.terms) if term.grad}

    def add(self, elements: Elements, slab: Slab, of_each: dict[int, Tensor]) -> None:
        """Add the gradients of a tile, of each term (batches, heads, group, rows, columns)."""
        rows, columns = elements.rows, elements.columns
        for i, grads in of_each.items():
            domain, total = self.program.terms[i].domain, slab.spread(self.views[i])
            if domain == DISTANCE:
                first = padding_of_distances(elements.Sk) + rows.start - columns.stop + 1
                part = slice(first, first + sum(grads.shape[-2:]) - 1)
            else:
                part = {ROW: rows, COLUMN: columns}.get(domain, slice(None))
            total[..., part] += elements.summed(grads, i).sum_to_size(total[..., part].shape)


class _Backward:
    """The gradients of one slab; dk, dv and dmask accumulate over its blocks of rows.

    A row that holds or attends a NaN has NaN weights for the keys that it attends. Its inputs are
    set to 0, because products of the NaN with weights of 0 would spread it to masked keys.
    """

    def __init__(
        self, scores: Scores, v: Tensor, dmask: Tensor | None, of_terms: TermGradients | None
    ) -> None:
        self.scores, self.of_terms, program = scores, of_terms, scores.program
        self.leaves: list[int] = []  # terms whose gradients are wanted
        self.slopes = None
        if program is not None and program.score is not None:
            e = program.expressions
            self.leaves = [] if of_terms is None else [*of_terms.views]
            leaves = [e.argument("score"), *(e.term(i, "float") for i in self.leaves)]
            self.slopes = derivatives(e, program.score, leaves)
        self.k = scores.clean_k
        self.v, _ = without_nan(scores.slab.keys(v, self.k.dtype))
        self.dk, self.dv = torch.zeros_like(self.k), torch.zeros_like(self.v)
        self.dmask = None if dmask is None else scores.slab.spread(layout.four_dims(dmask))

    def rows(self, rows: slice, do: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
        """Return dq of these rows, and add their share to dk, dv and dmask."""
        scores, dropout_p = self.scores, self.scores.options.dropout_p
        q = scores.queries(rows)
        bad = _bad_rows(q, do, lse, delta)
        if bad is not None:
            q, do, delta = (x.masked_fill(bad, 0.0) for x in (q, do, delta))
            lse = lse.masked_fill(bad, math.inf)
        dq = torch.zeros_like(q)
        for tile in scores.tiles(rows):
            s, capped = scores.of(q, tile)
            attended = None if bad is None else s != -math.inf
            p = exp_(s.sub_(lse).clamp_(max=0.0))  # rounding of huge scores exceeds 0
            if bad is not None:
                p.masked_fill_(attended & bad, math.nan)
            dp = scores.problem.products("gradients", do, self.v[:, tile.cols])
            dropped = p
            if dropout_p > 0:
                factor = scores.survivors(tile).div_(kept_share(dropout_p))
                dropped = p * factor
                dp.mul_(factor)
            self.dv[:, tile.cols].baddbmm_(dropped.transpose(1, 2), do)
            ds = dp.sub_(delta).mul_(p)
            if self.dmask is not None:
                part = cut(self.dmask, rows, tile.cols)
                part += scores.slab.unfold(ds).sum_to_size(part.shape)
            if self.slopes is not None:
                self._through_program(tile, capped, ds, p)
            elif capped is not None:
                slope = capped.square_().neg_().add_(1.0)
                ds.mul_(slope if scores.bad_keys is None else slope.nan_to_num_())
            dq.baddbmm_(ds, self.k[:, tile.cols])
            self.dk[:, tile.cols].baddbmm_(ds.transpose(1, 2), q)
        return dq.mul_(scores.scale)

    def _through_program(self, tile: ScoreTile, before: Tensor, ds: Tensor, p: Tensor) -> None:
        """The gradients of scores `before` the program in place of `ds`, and those of terms.

        A score without weight has none, whatever the derivative of the program is there.
        """
        slab, unweighted = self.scores.slab, p == 0.0
        elements = self.scores.elements(tile.rows, tile.cols, before)
        of_score, *of_terms = elements.evaluate(*self.slopes)
        heads, without = slab.unfold(ds), slab.unfold(unweighted)
        products = (heads * x for x in of_terms)
        of_each = {i: x.masked_fill_(without, 0.0) for i, x in zip(self.leaves, products)}
        if of_each:
            self.of_terms.add(elements, slab, of_each)
        heads.mul_(of_score).masked_fill_(without, 0.0)


def _bad_rows(q: Tensor, do: Tensor, lse: Tensor, delta: Tensor) -> Tensor | None:
    """Rows with a non-finite input, bool (n, rows, 1), or None if there are none.

    An lse of Inf marks a row without keys.
    """
    sums = q.sum() + do.sum() + delta.sum()
    if math.isfinite(sums) and not lse.isnan().any():
        return None
    finite = torch.isfinite(q).all(-1, keepdim=True) & torch.isfinite(do).all(-1, keepdim=True)
    bad = ~(finite & torch.isfinite(delta)) | lse.isnan()
    return bad if bool(bad.any()) else None


def exp_(x: Tensor) -> Tensor:
    """exp in place, by exp2: 0.5 ns per element; torch.exp takes 1, or 14 on underflow."""
    return x.mul_(1.0 / math.log(2.0)).exp2_()


def kept_share(dropout_p: float) -> float:
    """The divisor of the weights that dropout keeps."""
    return max(1.0 - dropout_p, 2.0**-32)


# Dense attention on CPU: the choice between aten's flash kernel and the blockwise engine.


def forward(call: Call, first_batch: int = 0) -> tuple[Tensor, Tensor]:
    """out and lse; `first_batch` is the batch index of the first element in the dropout stream."""
    pieces = None if skipping_pays(call.operands) else plan(call)
    return blockwise_forward(call, first_batch) if pieces is None else flash_forward(call, pieces)


def backward(call: Call, first_batch: int = 0) -> Gradients:
    """Gradients by the engine that runs the call."""
    grad_out, grad_lse, out, lse, mask_grad = call.saved
    plain = grad_lse is None and not mask_grad and not skipping_pays(call.operands)
    pieces, sinks = plan_backward(call) if plain else None, call.operands.sinks
    if pieces is None:
        grads = blockwise_backward(call, first_batch)
    else:
        grads = flash_backward(call, pieces)
    if sinks is not None:
        return grads._replace(sinks=_sinks_gradient(grad_out, grad_lse, out, lse, sinks))
    if grad_lse is None and _attends_one_key(call):
        # The weight is 1 whatever the score. Multiplied, because gradients that are NaN stay NaN.
        grads.query.mul_(0.0), grads.key.mul_(0.0)
    return grads


def _attends_one_key(call: Call) -> bool:
    """Whether no row attends more than one key.

    A call with one key may be a part of attention over more keys, which its saved `out` and `lse`
    belong to. With dropout it is none if it has a seed.
    """
    k, v, out, lse = call.key, call.value, call.saved.out, call.saved.lse
    if k.shape[2] != 1 or not k.numel():
        return k.shape[2] == 1
    if call.options.dropout_p:
        return not is_words(call.operands.dropout_seed)
    is_value = out.unflatten(1, (k.shape[1], -1)) == v.unsqueeze(2)
    return bool((is_value.all(-1).flatten(1, 2) | (lse == float("-inf"))).all())


def _sinks_gradient(
    grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, sinks: Tensor
) -> Tensor:
    """A sink of weight w scales out by (1 - w), and d lse / d sink = w."""
    largest = torch.finfo(lse.dtype).max  # the lse of a sink of +inf is +inf
    weight = torch.exp(sinks.to(lse.dtype).clamp(max=largest).view(-1, 1) - lse.clamp(max=largest))
    slope = -torch.einsum("bhsd,bhsd->bhs", grad_out.to(lse.dtype), out.to(lse.dtype))
    if grad_lse is not None:
        slope += grad_lse
    weight.masked_fill_(lse == float("-inf"), 0.0)  # a sink of -inf in a row without keys
    return weight.mul_(slope).sum((0, 2)).to(sinks.dtype)
