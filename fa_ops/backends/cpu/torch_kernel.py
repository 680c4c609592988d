"""What runs the calls of a plan on the CPU: torch's kernel, with everything else prepared once.

`dense` divides each call into pieces, and reads its inputs before the kernel runs, because a NaN or
Inf that a row does not attend spreads as a product with a weight of 0. Here both follow from the
geometry. Such products are NaN, so results without a NaN are right. A call whose results have one,
and a call that is not known here, are run by `dense`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from fa_ops.backends.cpu import scores as layout
from fa_ops.backends.cpu import sequences
from fa_ops.backends.cpu.dense import VECTOR, _like
from fa_ops.call.call import Call, Run
from fa_ops.call.options import Operands

try:  # empty(size, stride, dtype): half of torch.empty_strided's time
    from torch._C._dynamo.guards import _empty_strided_cpu as empty
except ImportError:

    def empty(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate a tensor."""
        return torch.empty_strided(size, stride, dtype=dtype, device="cpu")


# torch's function takes a microsecond less than the object of its operator
_kernel = torch._scaled_dot_product_flash_attention_for_cpu
_kernel_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default._op
below_autograd = torch._C._AutoDispatchBelowADInplaceOrView
equal, norm = torch.equal, torch.linalg.vector_norm

MAX_MASK = 2**18  # elements of a mask that is converted; in a larger one `dense` skips tiles
MAX_WINDOW = 2**16  # scores that are masked where keys could be left out
# Scores of a row of the batch that repay a call of the kernel; of caches fewer, because the memory
# behind their keys may hold a NaN.
MIN_PIECE_SCORES, MIN_CACHE_PIECE_SCORES = 2**13, 2**12
FEW = 4096  # elements that `torch.equal` reads in less time than a sum takes

Attend = Callable[..., tuple[Tensor, Tensor] | None]
MakeBias = Callable[[Tensor, Tensor, Operands], Tensor]  # of query and key


def prepare(call: Call, otherwise: Run) -> Run:
    """What runs calls of this geometry; `otherwise` runs any."""
    t, o, (q, k, v) = call.operands, call.options, call[:3]
    is_unknown = (
        call.tangents is not None
        or o.softcap != 0.0
        or o.dropout_p != 0.0
        or call.scale <= 0
        or t.alibi_slopes is not None
        or t.sinks is not None
        or t.mask_blocks is not None
        or call.is_programmed
        or call.is_paged
        or not q.dtype == k.dtype == v.dtype  # of a cache in 8 bits
        or q.shape[-1] != v.shape[-1]
        or 0 in q.shape
    )
    if is_unknown:
        return otherwise
    if call.is_packed and (t.kv_lens is not None or max(o.window_left, o.window_right) >= 0):
        return otherwise
    if call.is_backward:
        if call.saved.grad_lse is not None:
            return otherwise
        return packed_backward(call, otherwise) if call.is_packed else backward(call, otherwise)
    if call.is_packed:
        return packed(call, otherwise)
    if t.kv_lens is not None and t.attn_mask is None and t.key_ranges is None:
        return of_lengths(call, otherwise)
    return forward(call, otherwise)


def may_have_nan(x: Tensor) -> bool:
    """Whether x has a NaN; True also if it has an Inf, or a sum overflows, and is not small."""
    return not (torch.equal(x, x) if x.numel() <= FEW else math.isfinite(x.sum()))


def _is_finite(x: Tensor) -> bool:
    return math.isfinite(x.sum(dtype=layout.accumulator(x.dtype)))


def _as_kernel_reads(x: Tensor) -> Callable[[Tensor], Tensor] | None:
    """What makes tensors like x such as the kernel reads them; None where they are."""
    wide = layout.accumulator(x.dtype)
    widened = x if x.dtype == wide else torch.empty_like(x, dtype=wide, device="meta")
    if layout.with_rows(widened, wide) is not widened:
        return functools.partial(layout.with_rows, dtype=wide)
    return None if widened is x else Tensor.float


def attend_of(call: Call) -> Attend:
    """attend(q, k, v, is_causal, bias, with_lse) of tensors with any numbers of keys and rows.

    It returns out and lse as backends do, or None where they may be wrong. `bias` is added to the
    scores. With a single query, the query heads of a key head are rows of one product.
    """
    q, dtype, scale = call.query, call.query.dtype, call.scale
    Hq, Hkv, D = q.shape[1], call.key.shape[1], q.shape[-1]
    converts = [_as_kernel_reads(x) for x in call[:3]]
    convert = None if converts == [None] * 3 else [f or _unchanged for f in converts]
    folded = (Hkv, Hq // Hkv) if _folds(call) else None
    lowest, width = -math.inf, Hq * D

    def attend(q, k, v, is_causal, bias, with_lse):
        if convert is not None:
            q, k, v = convert[0](q), convert[1](k), convert[2](v)
        if k.shape[2] < VECTOR and not (_is_finite(q) and _is_finite(k)):
            return None  # the kernel takes rows with nothing but NaN for empty ones
        if folded is not None:
            q = q.view(-1, *folded, D)
        out, lse = _kernel(q, k, v, 0.0, is_causal, attn_mask=bias, scale=scale)
        if (is_causal or bias is not None) and may_have_nan(out):
            return None
        if with_lse:
            if bias is not None and not lse.all():  # the kernel's is 0 in empty rows
                if not _is_finite(k):
                    return None  # a score of -Inf makes a row empty, too
                lse = lse.masked_fill(bias.amax(-1) == lowest, lowest)
            lse = lse.contiguous()
        if folded is not None:
            out, lse = out.reshape(-1, Hq, 1, D), lse.view(-1, Hq, 1) if with_lse else lse
        strides, S = out.stride(), out.shape[2]
        if (
            out.dtype is not dtype
            or strides[:2] != (S * width, D)
            or (strides[2] != width and S > 1)
        ):
            out = empty((len(out), Hq, S, D), (S * width, D, width, 1), dtype).copy_(out)
        return out, lse

    return attend


def _folds(call: Call) -> bool:
    """Whether the query heads of a key head are rows of one product: those of a single query.

    A head with more rows takes less time than as many heads, but is the work of a single thread.
    """
    q, Hkv = call.query, call.key.shape[1]
    if call.is_packed or q.shape[2] > 1 or q.shape[1] == Hkv:
        return False
    return torch.get_num_threads() <= 2 * len(q) * Hkv


def _unchanged(x: Tensor) -> Tensor:
    return x


# What is added to the scores: -inf where a key is masked.


@functools.cache
def _fillings(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """0 and -inf, in place of which Python's numbers take another 2 us."""
    zero = torch.zeros((), dtype=dtype, device="cpu")
    return zero, zero - math.inf


def bias_of(call: Call) -> MakeBias | None:
    """What makes the bias of calls with masks of any kind; None where it would be too large."""
    q, k, t = call.query, call.key, call.operands
    (Hq, Sq), (Hkv, Sk) = q.shape[1:3], k.shape[1:3]
    left, right = _sides(call)
    has_ranges = t.kv_lens is not None or t.key_ranges is not None
    has_window = (left >= 0 or right >= 0) and not has_ranges
    if (has_window or has_ranges) and Hq * Sq * Sk >= MAX_WINDOW:
        return None
    folds = _folds(call)
    if folds and t.key_ranges is not None and t.key_ranges.shape[1] > 1:
        return None
    dtype, parts = layout.accumulator(q.dtype), []
    if t.attn_mask is not None:
        parts.append(_of_mask(t.attn_mask, dtype, (Hkv, Hq // Hkv) if folds else None))
    if has_window:
        parts.append(lambda q, k, operands: _window(Sq, Sk, left, right, dtype))
    if has_ranges:
        parts.append(_of_ranges(call, left, right))
    if None in parts or not parts:
        return None
    first, *others = parts
    if not others:
        return first
    return lambda q, k, operands: sum((f(q, k, operands) for f in others), first(q, k, operands))


def _of_mask(mask: Tensor, dtype: torch.dtype, heads: tuple[int, int] | None) -> MakeBias | None:
    """The bias of masks like this one; by key heads and the query heads of each if `heads`."""
    is_bool, dims = mask.dtype == torch.bool, mask.dim()
    shared = [i - dims for i in range(dims) if mask.stride(i) == 0 and mask.shape[i] > 1]
    numel = math.prod(n for n, stride in zip(mask.shape, mask.stride()) if stride)
    if (is_bool or mask.dtype != dtype) and numel > MAX_MASK:
        return None
    by_heads = heads is not None and dims > 2 and mask.shape[-3] > 1 and -3 not in shared
    if mask.dtype == dtype and dims in (2, 4) and not shared and not by_heads:
        return lambda q, k, operands: operands.attn_mask

    def make(q, k, operands):
        bias = operands.attn_mask
        for dim in shared:
            bias = bias.narrow(dim, 0, 1)
        bias = torch.where(bias, *_fillings(dtype)) if is_bool else bias.to(dtype)
        bias = bias if dims in (2, 4) else layout.four_dims(bias)
        return bias.reshape(len(bias), *heads, bias.shape[-1]) if by_heads else bias

    return make


def _of_ranges(call: Call, left: int, right: int) -> MakeBias:
    """The bias of `kv_lens` and `key_ranges`, and of a window that they move."""
    t, dtype = call.operands, layout.accumulator(call.query.dtype)
    Sq, Sk = call.query.shape[2], call.key.shape[2]
    has_lens, has_ranges = t.kv_lens is not None, t.key_ranges is not None

    def make(q, k, operands):
        at, keep = torch.arange(Sk, dtype=torch.int32), None
        if has_ranges:
            ranges = operands.key_ranges
            keep = (at >= ranges[..., :1]).logical_and_(at < ranges[..., 1:])
        lens = operands.kv_lens.view(-1, 1, 1, 1) if has_lens else None
        if has_lens:
            keep = at < lens if keep is None else keep & (at < lens)
        if left >= 0 or right >= 0:
            first = lens.clamp(0, Sk) - Sq if has_lens else Sk - Sq
            row = torch.arange(Sq, dtype=torch.int32).view(Sq, 1) + first
            if right >= 0:
                keep = keep & (at <= row + right)
            if left >= 0:
                keep = keep & (at >= row - left)
        return torch.where(keep, *_fillings(dtype))

    return make


def _window(Sq: int, Sk: int, left: int, right: int, dtype: torch.dtype) -> Tensor:
    """The bias (1, 1, Sq, Sk) of a window, whose sides are unbounded where negative."""
    lowest, at = -math.inf, Sk - Sq
    sides = []
    if right >= 0:
        sides.append(torch.full((1, 1, Sq, Sk), lowest, dtype=dtype).triu_(at + right + 1))
    if left >= 0:
        sides.append(torch.full((1, 1, Sq, Sk), lowest, dtype=dtype).tril_(at - left - 1))
    return sides[0] if len(sides) == 1 else sides[0] + sides[1]


# Dense calls.


def forward(call: Call, otherwise: Run) -> Run:
    """What runs dense forward calls of this geometry."""
    way = _way(call)
    if way is None:
        return otherwise
    attend, (is_causal, first, make_bias) = attend_of(call), way
    reads_all = not (first or _folds(call) or call.key.shape[2] < VECTOR)
    if make_bias is None and reads_all and all(_as_kernel_reads(x) is None for x in call[:3]):
        return _plain(call, is_causal, otherwise)

    def run(q, k, v, operands, with_lse=True):
        with below_autograd():  # views of what is allocated here are no views to a caller
            bias = None if make_bias is None else make_bias(q, k, operands)
            if first:
                k, v = k[:, :, first:], v[:, :, first:]
            found = attend(q, k, v, is_causal, bias, with_lse)
        return otherwise(q, k, v, operands, with_lse) if found is None else found

    return run


def _plain(call: Call, is_causal: bool, otherwise: Run) -> Run:
    """`attend` of whole tensors that the kernel reads as they are, without its other steps.

    Nothing here is a view to a caller, and nothing records: no guard against autograd is needed.
    """
    scale, (B, H, S, D) = call.scale, call.query.shape
    shape, strides, dtype = (B, H, S, D), (S * H * D, D, H * D, 1), call.query.dtype
    # the kernel's are those of the query
    is_copied = torch.empty_like(call.query).stride() != strides
    few = B * H * S * D <= FEW

    def run(q, k, v, operands, with_lse=True):
        out, lse = _kernel(q, k, v, 0.0, is_causal, scale=scale)
        if is_causal and not (equal(out, out) if few else math.isfinite(out.sum())):
            return otherwise(q, k, v, operands, with_lse)  # see `may_have_nan`
        if is_copied:
            out = empty(shape, strides, dtype).copy_(out)
        return out, lse.contiguous() if with_lse else lse

    # Allocators give memory of megabytes back, and to get it again takes a third of a call's time,
    # so that each row of the batch is copied where that leaves no thread without a head.
    is_large = math.prod(shape) * dtype.itemsize >= 2**20 and torch.get_num_threads() <= H
    if B == 1 or not (is_large and is_copied):
        return run

    def run_by_rows(q, k, v, operands, with_lse=True):
        if with_lse:
            return run(q, k, v, operands)
        out = empty(shape, strides, dtype)
        with below_autograd():
            for o, *tensors in zip(*(x.chunk(B) for x in (out, q, k, v))):
                o.copy_(_kernel(*tensors, 0.0, is_causal, scale=scale)[0])
        if is_causal and may_have_nan(out):
            return otherwise(q, k, v, operands, with_lse)
        return out, None

    return run_by_rows


def _way(call: Call) -> tuple[bool, int, MakeBias | None] | None:
    """Whether the kernel masks, the first attended key, and what makes a bias; None if none can."""
    t, Sq, Sk, (left, right) = call.operands, call.query.shape[2], call.key.shape[2], _sides(call)
    if t.attn_mask is t.kv_lens is t.key_ranges is None:
        if Sq == 1:
            return False, max(0, Sk - 1 - left) if left >= 0 else 0, None
        if left < 0 and (right < 0 or (right == 0 and Sq == Sk)):
            return right == 0, 0, None
    make_bias = bias_of(call)
    return None if make_bias is None else (False, 0, make_bias)


def _sides(call: Call) -> tuple[int, int]:
    """The sides of the window, -1 where no row has a key beyond them."""
    left, right = call.options.window_left, call.options.window_right
    right = 0 if call.options.is_causal else right
    left = left if left < call.key.shape[2] - 1 else -1
    return left, right if right < call.query.shape[2] - 1 else -1


def of_lengths(call: Call, otherwise: Run) -> Run:
    """What runs calls whose rows of the batch have `kv_lens` keys, of a cache or not."""
    (B, Hq, Sq, D), Sk = call.query.shape, call.key.shape[2]
    left, right = _sides(call)
    is_causal, dtype = right == 0, layout.accumulator(call.query.dtype)
    has_window = right > 0 or (left >= 0 and Sq > 1)
    enough = MIN_CACHE_PIECE_SCORES if call.is_cached else MIN_PIECE_SCORES
    is_small = has_window or Hq * Sq * Sk < enough
    make_bias, attend = bias_of(call) if is_small else None, attend_of(call)
    if has_window and make_bias is None:
        return otherwise

    def piece(q, k, v, length, with_lse):
        """out and lse of rows with as many keys."""
        length, bias = min(length, Sk), None
        if length <= 0:
            out = q.new_zeros((len(q), Sq, Hq, D)).transpose(1, 2)
            return out, torch.full(q.shape[:3], -math.inf, dtype=dtype)
        if is_causal and length != Sq:
            bias = _window(Sq, length, -1, 0, dtype)
        first = max(0, length - 1 - left) if left >= 0 else 0
        if length - first < k.shape[2]:
            k, v = k.narrow(2, first, length - first), v.narrow(2, first, length - first)
        return attend(q, k, v, is_causal and bias is None, bias, with_lse)

    def pieces(q, k, v, lens, with_lse):
        found = []
        for tensors in zip(q.chunk(B), k.chunk(B), v.chunk(B), lens):
            found.append(piece(*tensors, with_lse))
            if found[-1] is None:
                return None
        out = torch.cat([out.transpose(1, 2) for out, _ in found]).transpose(1, 2)
        return out, torch.cat([lse for _, lse in found]) if with_lse else None

    def run(q, k, v, operands, with_lse=True):
        lens = operands.kv_lens.tolist()
        if is_causal and Hq * Sq * min(max(lens), Sk) > MAX_WINDOW and lens.count(Sq) < B:
            return otherwise(q, k, v, operands, with_lse)
        with below_autograd():
            if not has_window and (B == 1 or lens.count(lens[0]) == B):
                found = piece(q, k, v, lens[0], with_lse)
            elif make_bias is not None:
                found = attend(q, k, v, False, make_bias(q, k, operands), with_lse)
            else:
                found = pieces(q, k, v, lens, with_lse)
        return otherwise(q, k, v, operands, with_lse) if found is None else found

    return run


# Backward passes.


def backward(call: Call, otherwise: Run) -> Run:
    """What runs backward passes of dense calls of this geometry."""
    way = _way(call)
    if way is None or way[1] or call.key.shape[2] == 1 or call.saved.mask_grad:
        return otherwise
    differentiate, (is_causal, _, make_bias) = gradients_of(call), way
    finish_q, finish_k, finish_v = map(_as_gradient_of, call[:3])

    def run(grad_out, grad_lse, q, k, v, out, lse, operands):
        bias = None if make_bias is None else make_bias(q, k, operands)
        found = differentiate(grad_out, q, k, v, out, lse, is_causal, bias)
        if found is None:
            return otherwise(grad_out, grad_lse, q, k, v, out, lse, operands)
        dq, dk, dv = found
        return finish_q(dq, q), finish_k(dk, k), finish_v(dv, v)

    return run


def gradients_of(call: Call) -> Callable[..., tuple[Tensor, Tensor, Tensor] | None]:
    """differentiate(grad_out, q, k, v, out, lse, is_causal, bias) of any numbers of keys and rows.

    It returns the kernel's gradients, or None where they may be wrong. The kernel takes
    exp(s - lse) as the weight, which is wrong if lse is so large that rounding matters. A NaN or
    Inf that a row does not attend, or in a row's gradient, is multiplied by weights of 0: this
    makes gradients of queries NaN if it is in a key, and gradients of keys otherwise.
    """
    saved, scale = call.saved, call.scale
    largest = 0.01 / torch.finfo(saved.lse.dtype).eps
    converts = [_as_kernel_reads(x) for x in (saved.grad_out, *call[:3], saved.out)]
    convert = None if converts == [None] * 5 else [f or _unchanged for f in converts]

    def differentiate(grad_out, q, k, v, out, lse, is_causal, bias):
        if not norm(lse).item() <= largest:  # in most calls, and then no element is larger
            if bias is not None:
                lse = lse.masked_fill(lse == -math.inf, 0.0)  # empty rows: weights are exp(-inf)
            if not equal(lse, lse.clamp(-largest, largest)):
                return None
        tensors = grad_out, q, k, v, out
        if convert is not None:
            tensors = [f(x) for f, x in zip(convert, tensors)]
        grads = _kernel_backward(*tensors, lse, 0.0, is_causal, attn_mask=bias, scale=scale)
        if is_causal or bias is not None:
            dq, dk, _ = grads
            if may_have_nan(dq) or may_have_nan(dk):
                return None
        return grads

    return differentiate


def _as_gradient_of(x: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """What gives the gradient of tensors like x their dtype and layout, given both."""
    dtype, strides = x.dtype, torch.empty_like(x).stride()
    is_copied = x.dtype == layout.accumulator(x.dtype) and x.is_contiguous()

    def finish(grad: Tensor, x: Tensor) -> Tensor:
        if grad.stride() == strides and grad.dtype is dtype:
            return grad
        return grad.contiguous() if is_copied else _like(grad, x)

    return finish


# Packed sequences: adjacent ones of equal lengths are a batch of a dense call.


def packed(call: Call, otherwise: Run) -> Run:
    """What runs calls of packed sequences."""
    batches_of, attend, Hq = _batches_of(call), attend_of(call), call.query.shape[1]

    def attend_all(q, k, v, operands, with_lse):
        outs, lses, batches = [], [], batches_of(len(q), len(k), operands)
        if batches is None:
            return None
        for batch, is_causal, bias in batches:
            keys = batch.dense(k, batch.keys), batch.dense(v, batch.keys)
            found = attend(batch.dense(q, batch.queries), *keys, is_causal, bias, with_lse)
            if found is None:
                return None
            out, lse = found
            outs.append(_packed_again(out))
            lses.append(lse.transpose(0, 1).reshape(Hq, -1) if with_lse else lse)
        return _joined(outs), _joined(lses, 1) if with_lse else None

    def run(q, k, v, operands, with_lse=True):
        with below_autograd():
            found = attend_all(q, k, v, operands, with_lse)
        return otherwise(q, k, v, operands, with_lse) if found is None else found

    return run


def packed_backward(call: Call, otherwise: Run) -> Run:
    """What runs backward passes of calls of packed sequences."""
    batches_of, differentiate = _batches_of(call), gradients_of(call)
    finish_q, finish_k, finish_v = map(_as_gradient_of, call[:3])

    def differentiate_all(grad_out, q, k, v, out, lse, operands):
        found, batches = [], batches_of(len(q), len(k), operands)
        # with one key, gradients of scores are exactly 0
        if batches is None or any(b.keys.stop - b.keys.start == b.size for b, *_ in batches):
            return None
        for batch, is_causal, bias in batches:
            do, qs, o = (batch.dense(x, batch.queries) for x in (grad_out, q, out))
            ks, vs, m = batch.dense(k, batch.keys), batch.dense(v, batch.keys), batch.dense_lse(lse)
            grads = differentiate(do, qs, ks, vs, o, m, is_causal, bias)
            if grads is None:
                return None
            found.append([_packed_again(x) for x in grads])
        return [_joined(grads) for grads in zip(*found)]

    def run(grad_out, grad_lse, q, k, v, out, lse, operands):
        found = differentiate_all(grad_out, q, k, v, out, lse, operands)
        if found is None:
            return otherwise(grad_out, grad_lse, q, k, v, out, lse, operands)
        dq, dk, dv = found
        return finish_q(dq, q), finish_k(dk, k), finish_v(dv, v)

    return run


def _batches_of(call: Call) -> Callable[[int, int, Operands], list[tuple] | None]:
    """What divides packed calls into (batch, whether the kernel masks, bias).

    None where a token is in no sequence, a query has no key, or too many scores are masked.
    """
    is_causal, Hq, dtype = call.options.is_causal, call.query.shape[1], call.query.dtype
    dtype = layout.accumulator(dtype)

    def batches_of(queries, keys, operands):
        ends = operands.cu_seqlens_q.tolist(), operands.cu_seqlens_k.tolist()
        found = []
        for batch in sequences.batches(*ends):
            Sq = (batch.queries.stop - batch.queries.start) // batch.size
            Sk = (batch.keys.stop - batch.keys.start) // batch.size
            queries, keys, bias = queries - Sq * batch.size, keys - Sk * batch.size, None
            if is_causal and Sq > 1 and Sq != Sk:
                if Hq * Sq * Sk >= MAX_WINDOW:
                    return None
                bias = _window(Sq, Sk, -1, 0, dtype)
            if not Sk:
                return None
            found.append((batch, is_causal and Sq > 1 and bias is None, bias))
        return None if queries or keys else found

    return batches_of


def _packed_again(x: Tensor) -> Tensor:
    """(B, H, S, D) as tokens (B * S, H, D), a view if it is laid out (B, S, H, D)."""
    return x.transpose(1, 2).flatten(0, 1)


def _joined(parts: list[Tensor], dim: int = 0) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
