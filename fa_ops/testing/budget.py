"""The error budget: at most twice a naive computation's error against the fp64 oracle, plus 1e-5.

The naive error is that of attention written by hand, or that of the flash algorithm in exact
arithmetic with rounded weights, score gradients and results, whichever is larger.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from fa_ops.backends import reference
from fa_ops.call.call import Call
from fa_ops.testing.inputs import Arena, Case, PackedCase, with_each

# NaN and Inf are written into an operand, and must stay out of independent results.

NUMBERS = ("nan", "inf", "-inf")
OPERANDS = ("query", "key", "value", "grad_out", "attn_mask", "sinks", "alibi_slopes")
MIN_VISIBLE_WEIGHT = 0.01  # a NaN in a key or value with a larger weight must be in the output
LARGE_SCORE = 2.0**16  # beyond it a float32 lse cannot represent the logarithm of a few keys


def scores_of(call: Call) -> Tensor:
    """Scores in fp64, (B, Hq, Sq, Sk), -inf where masked; a packed batch is one sequence."""
    if not call.is_packed:
        return _dense_scores(call)
    q, k, v = call[:3]
    scores = q.new_full((1, q.shape[1], len(q), len(k)), float("-inf"), dtype=torch.float64)
    ends_q, ends_k = call.operands.cu_seqlens_q.tolist(), call.operands.cu_seqlens_k.tolist()
    for b in range(len(ends_q) - 1):
        rows, keys = slice(*ends_q[b : b + 2]), slice(*ends_k[b : b + 2])
        one = [x.transpose(0, 1)[None] for x in (q[rows], k[keys], v[keys])]
        scores[:, :, rows, keys] = _dense_scores(call.rows(slice(b, b + 1), *one))
    return scores


def _meaning(case: Case | PackedCase, call: Call) -> Call:
    """The call with valid borders of sequences."""
    if not isinstance(case, PackedCase):
        return call
    ends_q, ends_k = case.meaning()
    return call.changed(cu_seqlens_q=ends_q, cu_seqlens_k=ends_k)


def _dense_scores(call: Call) -> Tensor:
    q, k = call.query.double(), call.key.double()
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return reference.modify_scores(q @ k.transpose(-1, -2), call)


class Poison:
    """The `poison` of a case, such as "nan key" or "-inf grad_out", and the results it may change.

    A row of scores is touched by a NaN or Inf in its query, in a key that it attends or that key's
    value, in its row of a mask, or in its head's sink or slope; its gradients also by one in its
    row of grad_out. Results of touched rows, and gradients that are sums over touched rows, are
    unconstrained. All others must be equal to those of the clean inputs.
    """

    def __init__(self, case: Case | PackedCase, call: Call) -> None:
        """Read the clean inputs, then poison one of them in place."""
        self.case, features = case, getattr(case, "features", case)
        number, self.operand = features.poison.split()
        self.number = float(number)
        self.random = torch.Generator().manual_seed(features.seed + 3)
        self.call = call = _meaning(case, call)
        with torch.no_grad():
            scores = scores_of(call)
            self.attends = scores > float("-inf")
            self.unmasked = self.attends  # what the rows would attend without attn_mask
            if self.operand == "attn_mask":
                self.unmasked = scores_of(call.changed(attn_mask=None)) > float("-inf")
            self.probability = reference.weights(scores, call.operands.sinks)[0]
            if features.dropout_p > 0:  # the weight of the poisoned key may have been dropped
                self.probability = torch.zeros_like(self.probability)
            tensors = call._asdict() | call.operands._asdict()
            if self.operand == "grad_out":
                self._find_touched(None)
            else:
                x = tensors[self.operand]
                before = x.clone()
                self._write(x)
                self._find_touched(x != before)

    def _write(self, x: Tensor) -> None:
        """Poison one to three elements or rows of x."""
        rows = x.view(-1, 1) if x.dim() == 1 else x
        for _ in range(self._draw(3) + 1):
            row = rows[tuple(self._draw(n) for n in rows.shape[:-1])]
            if self._draw(2):
                row[:] = self.number
            else:
                row[self._draw(len(row))] = self.number

    def _draw(self, n: int) -> int:
        return int(torch.randint(n, (), generator=self.random))

    def _find_touched(self, changed: Tensor | None) -> None:
        """Find the rows that the operand's changed elements touch, and those that must be NaN."""
        self.rows = self.must_show = torch.zeros_like(self.attends[..., 0])
        if self.operand == "query":
            self.rows = self._rows(changed.any(-1))
            self.must_show = self.rows & self.attends.any(-1)
        elif self.operand in ("key", "value"):
            keys = self._rows(changed.any(-1))
            keys = keys.repeat_interleave(self.rows.shape[1] // keys.shape[1], 1).unsqueeze(2)
            self.rows = (keys & self.attends).any(-1)
            self.must_show = (keys & (self.probability > MIN_VISIBLE_WEIGHT)).any(-1)
        elif self.operand == "attn_mask":
            self.rows = (changed & self.unmasked).any(-1)
            self.attends = self.attends | (changed & self.unmasked)
        elif changed is not None and changed.dim() == 2 and self.call.is_packed:
            # slopes of sequences, rows of their tokens
            ends = self.call.operands.cu_seqlens_q.long()
            self.rows = self.rows.clone()
            self.rows[0, :, ends[0] : ends[-1]] = changed.T.repeat_interleave(ends.diff(), 1)
        elif changed is not None:
            self.rows = self.rows | changed.view(-1, changed.shape[-1], 1)
        self.rows_backward = self.rows

    def _rows(self, x: Tensor) -> Tensor:
        """x with shape (B, H, S), which a packed (T, H) tensor does not have."""
        return x if x.dim() == 3 else x.transpose(0, 1)[None]

    def cotangents(self, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of out and lse, the first of them poisoned if it is the operand."""
        if self.operand == "grad_out":
            grad_out = grad_out.clone() if 0 in grad_out.stride() else grad_out
            self._write(grad_out)
            self.rows_backward = self.rows | self._rows(~torch.isfinite(grad_out).all(-1))
        return grad_out, grad_lse

    def replaced(self, name: str, actual: Tensor, expected: Tensor) -> Tensor:
        """`actual` with its unconstrained elements replaced by those of `expected`."""
        self._assert_nan_shows(name, actual)
        unconstrained = self._unconstrained(name, actual)
        return torch.where(unconstrained, expected.to(actual.dtype), actual)

    def _assert_nan_shows(self, name: str, actual: Tensor) -> None:
        if name != "out" or self.number == self.number:
            return
        hidden = self.must_show & ~self._rows(actual.isnan().any(-1))
        where = hidden.nonzero()[:1].tolist()
        assert not where, f"{self.case}: out: the row at {where[0]} attends a NaN, but has none"

    def _unconstrained(self, name: str, actual: Tensor) -> Tensor:
        packed = self.call.is_packed
        if name in ("out", "grad_q"):
            rows = self.rows if name == "out" else self.rows_backward
            return (rows[0].transpose(0, 1) if packed else rows).unsqueeze(-1)
        if name == "lse":
            return self.rows[0] if packed else self.rows
        if name == "grad_sinks":
            return self.rows_backward.any(2).any(0)
        if name == "grad_attn_mask":
            touched = self.rows_backward.unsqueeze(-1).expand(self.attends.shape)
            return touched.float().sum_to_size(actual.shape) > 0
        touched = (self.attends & self.rows_backward.unsqueeze(-1)).any(2)
        heads = actual.shape[1]
        touched = touched.view(touched.shape[0], heads, -1, touched.shape[2]).any(2)
        return (touched[0].transpose(0, 1) if packed else touched).unsqueeze(-1)


class Ties:
    """Rows with several largest scores that are too large for a float32 lse to count them.

    Their results must be finite, and may be the value of any of those keys or a mean of them.
    """

    def __init__(self, case: Case | PackedCase, call: Call) -> None:
        self.case, self.is_packed = case, call.is_packed
        with torch.no_grad():
            scores = scores_of(_meaning(case, call))
            top = scores.amax(-1, keepdim=True)
            near = scores >= top - top.abs() * torch.finfo(torch.float32).eps * 4
            self.rows = (near.sum(-1) > 1) & (top.squeeze(-1).abs() > LARGE_SCORE)

    def replaced(self, name: str, actual: Tensor, expected: Tensor) -> Tensor:
        """`actual`, which must be finite, with the rows of ties replaced by `expected`."""
        finite = torch.isfinite(actual) | ~torch.isfinite(expected)
        assert bool(finite.all()), f"{self.case}: {name} is not finite"
        if name != "out":
            return actual
        rows = self.rows[0].transpose(0, 1) if self.is_packed else self.rows
        return torch.where(rows.unsqueeze(-1), expected.to(actual.dtype), actual)


class CachePoison(Poison):
    """`Poison` for a call over a cache: a NaN or Inf in a query, or in a key or value in use."""

    def __init__(self, case, call: Call) -> None:
        """Read a clean call whose new keys have been written."""
        self.case, (number, self.operand) = case, case.poison.split()
        self.number, self.random = float(number), torch.Generator().manual_seed(case.seed + 3)
        self.attends, self.visible = [], []

        def attend(call):
            scores, sinks = _dense_scores(call), call.operands.sinks
            self.attends.append(scores[0] > float("-inf"))
            self.visible.append(reference.weights(scores, sinks)[0][0] > MIN_VISIBLE_WEIGHT)
            return call.query, call.query[..., 0]

        q, t = call.query, call.operands
        appended = call.without_new().changed(rotary_cos=t.rotary_cos, rotary_sin=t.rotary_sin)
        reference.cached(appended, attend)
        self.rows = torch.zeros(q.shape[:3], dtype=torch.bool, device=q.device)
        self.must_show = torch.zeros_like(self.rows)

    def write(self, call: Call) -> None:
        """Poison one row of the operand."""
        (q, k, v), new = call[:3], call.operands.new_key
        b = self._draw(len(q))
        if self.operand == "query":
            h, i = self._draw(q.shape[1]), self._draw(q.shape[2])
            q[b, h, i, self._draw(q.shape[3])] = self.number
            self.rows[b, h, i] = True
            self.must_show[b, h, i] = self.attends[b][h, i].any()
            return
        keys = self.attends[b].shape[2] - (0 if new is None else new.shape[2])
        if keys <= 0:
            return
        j, h = self._draw(keys), self._draw(k.shape[2 if call.is_paged else 1])
        memory = k if self.operand == "key" else v
        number = torch.tensor(self.number, device=k.device).to(memory.dtype)
        view, index = reference.slots(memory, call.operands.page_table, b, j, j + 1)
        row = view[index]
        row[:, h, self._draw(min(k.shape[3], v.shape[3]))] = number.view(view.dtype)
        view[index] = row
        heads = slice(h * q.shape[1] // row.shape[1], (h + 1) * q.shape[1] // row.shape[1])
        self.rows[b, heads] = self.attends[b][heads, :, j]
        if not (self.case.fp8 and q.device.type == "cpu"):  # Triton's interpreter has no fp8 NaN
            self.must_show[b, heads] = self.visible[b][heads, :, j]

    def _unconstrained(self, name: str, actual: Tensor) -> Tensor:
        return self.rows.unsqueeze(-1) if name == "out" else self.rows


# The error budget.

FLOOR = 1e-5
FEW = 256  # numbers in a result whose errors may all be small by chance
FLOOR_FP64 = 1e-11


def naive(call: Call, first_batch: int = 0) -> tuple[Tensor, Tensor]:
    """Attention written by hand: matmuls in the input dtype, softmax in fp32. Differentiable."""
    narrow, wide = call.query.dtype, reference.lse_dtype(call.query.dtype)
    return _attend(call, first_batch, lambda s: s.to(wide), lambda p: p.to(narrow))


def _attend(call: Call, first_batch: int, products, weights) -> tuple[Tensor, Tensor]:
    """Attention with functions applied to q @ k^T (`products`) and to the weights (`weights`)."""
    (q, k, v), softcap = call[:3], call.options.softcap
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    if softcap > 0 and q.dtype != torch.float64:  # keep it within float32's range
        call = call.changed(softcap=min(max(softcap, 1e-30), 1e30))
    s = reference.modify_scores(products(q @ k.transpose(-1, -2)), call)
    p, lse = reference.weights(s, call.operands.sinks)
    if call.options.dropout_p > 0:
        p = p * reference.dropout_factor(call, first_batch).to(p.dtype)
    return reference.apply_weights(weights(p), v, s > float("-inf")), lse


class _RoundedWeights(torch.autograd.Function):
    """Round weights to `dtype`, relative to the largest of the row; pass gradients unchanged.

    A flash kernel divides by the sum of weights after the product with the values, so the weight of
    the largest score is exactly one and the others are rounded as multiples of it.
    """

    @staticmethod
    def forward(ctx, p: Tensor, dtype: torch.dtype) -> Tensor:
        if p.shape[-1] == 0:
            return p.clone()
        largest = p.amax(-1, keepdim=True)
        largest = largest.where(largest > 0, 1.0)
        return (p / largest).to(dtype).to(p.dtype) * largest

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _RoundedGradients(torch.autograd.Function):
    """Pass values through unchanged; round gradients to multiples of `unit` in `dtype`."""

    @staticmethod
    def forward(ctx, x: Tensor, dtype: torch.dtype, unit: float) -> Tensor:
        ctx.dtype, ctx.unit = dtype, unit
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return (grad / ctx.unit).to(ctx.dtype).to(grad.dtype) * ctx.unit, None, None


def flash(call: Call, first_batch: int = 0, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Attention with only the roundings that every flash kernel of `dtype` has. Differentiable."""
    scale = call.scale or 1.0  # gradients are rounded before scaling
    return _attend(
        call, first_batch,
        lambda s: _RoundedGradients.apply(s, dtype, scale),
        lambda p: _RoundedWeights.apply(p, dtype),
    )  # fmt: skip


def _squared(call: Call, first_batch: int = 0) -> tuple[Tensor, Tensor]:
    """Attention with the squares of the weights."""
    return _attend(call, first_batch, lambda s: s, torch.square)


def assert_within_budget(
    name: str, actual: Tensor, oracle: Tensor, baseline: Tensor, noise: Tensor | None = None
) -> None:
    """Compare a result with the oracle, allowing twice the error of a naive computation.

    In 16 bits the naive error counts as at least half an ulp of the largest number, because the
    error of a result with few elements may be small by chance.

    Args:
        noise: the typical error of the baseline, for results that are sums of so few numbers that
            the actual error may be small by chance.

    Raises:
        AssertionError: max|actual - oracle| > 2 max|baseline - oracle| + 1e-5 max(1, |oracle|)
            (1e-11 in fp64), or NaN or Inf are at other positions.
    """
    floor = FLOOR_FP64 if actual.dtype == torch.float64 else FLOOR
    half_ulp = torch.finfo(actual.dtype).eps / 2 if actual.dtype.itemsize == 2 else 0.0
    actual, oracle, baseline = (x.detach().double() for x in (actual, oracle, baseline))
    expected = f"expected {tuple(oracle.shape)}"
    assert actual.shape == oracle.shape, f"{name}: shape {tuple(actual.shape)}, {expected}"
    if actual.numel() == 0:
        return
    kinds = (torch.isnan, torch.isposinf, torch.isneginf)
    differs = torch.stack([kind(actual) != kind(oracle) for kind in kinds])
    finite = torch.isfinite(oracle)
    sizes = [
        _largest(actual - oracle, finite),
        _largest(oracle, finite),
        _largest(baseline - oracle, finite & torch.isfinite(baseline)),
    ]
    if noise is not None:
        sizes.append(noise.abs().max().to(oracle))
    # a single copy from the device, as each one synchronises
    wrong, error, largest, *naive_errors = torch.stack([differs.any().to(oracle), *sizes]).tolist()
    if wrong:
        kind, *index = differs.nonzero()[0].tolist()
        raise AssertionError(f"{name}: {kinds[kind].__name__} differs at {index}")
    naive_error = max(*naive_errors, half_ulp * largest)
    budget = 2 * naive_error + floor * max(1.0, largest)
    assert error <= budget, (
        f"{name}: error {error:.3e} over the budget {budget:.3e} (naive: {naive_error:.3e})"
    )


def _largest(x: Tensor, where: Tensor) -> Tensor:
    return torch.where(where, x.abs(), 0.0).max()


def assert_close_to_oracle(
    case: Case | PackedCase, backend: str, gradients: bool = True, arena: Arena | None = None
) -> None:
    """Compare the operator on a case, run by the named backend, with the oracle.

    Args:
        gradients: whether to compare gradients as well.
        arena: allocate inputs and results in it, and check that nothing outside them is written.

    Raises:
        AssertionError: out, lse or a gradient is outside the budget; the message is the case's
            repr, the result's name and the error.
    """
    call = case.fresh(requires_grad=gradients)
    narrow = call.query.dtype
    dtypes = {"oracle": torch.float64, "naive": narrow}
    if gradients:
        dtypes |= {"mirrored": narrow, "flash": torch.float64}
    others = {kind: _copies(call, dtype) for kind, dtype in dtypes.items()}
    features = getattr(case, "features", case)
    poison = Poison(case, call) if features.poison else None
    exempt = Ties(case, call) if features.integers else poison
    if arena is not None:
        call = with_each(call, lambda name, t: arena.placed(t))
    with contextlib.nullcontext() if arena is None else arena.outputs(backend):
        actual = _Solution("actual", case, call, backend)
        out, lse = actual.results.values()
        clean = case.grad_outputs(out, lse) if gradients else None
        cotangents = clean
        if gradients and poison is not None:
            cotangents = poison.cotangents(*case.grad_outputs(out, lse))
        if gradients and arena is not None:
            cotangents = tuple(map(arena.placed, cotangents))
        actual.differentiate(cotangents)
    if arena is not None:
        arena.check()
    oracle, *baselines = (_Solution(kind, case, copies) for kind, copies in others.items())
    for solution in (oracle, *baselines):
        solution.differentiate(clean, oracle.results["out"].detach())
    for name, value in actual.results.items():
        expected = oracle.results[name]
        if exempt is not None:
            value = exempt.replaced(name, value.detach(), expected.detach())
        baseline = _farthest(expected, *(b.results[name].to(value.dtype) for b in baselines))
        noise = _noise(name, value, oracle, baselines, clean)
        assert_within_budget(f"{case}: {name}", value, expected, baseline, noise)


def _noise(
    name: str, value: Tensor, oracle: _Solution, baselines: list, cotangents: tuple | None
) -> Tensor | None:
    """The typical error of a sum over all scores and of few gradients of values, otherwise None."""
    if name == "grad_v" and value.dtype.itemsize == 2 and value.numel() <= FEW:
        return oracle.noise_of_grad_v(cotangents[0])
    if name not in oracle.terms:
        return None
    errors = [(b.terms[name] - oracle.terms[name]).double() for b in baselines]
    if name == "grad_attn_mask" and value.shape[-1] == 1:
        # the terms of a row share the errors of its lse and of its sum of grad_out * out
        errors = [error.sum(-1, keepdim=True) for error in errors]
    return torch.stack([e.square().sum_to_size(value.shape).sqrt() for e in errors])


def _farthest(expected: Tensor, *candidates: Tensor) -> Tensor:
    """Elementwise, the candidate with the largest distance from `expected`."""
    first, *others = candidates
    for other in others:
        first = torch.where((other - expected).abs() > (first - expected).abs(), other, first)
    return first


def _copies(call: Call, dtype: torch.dtype) -> Call:
    """A call with copies of the tensors, equal to those of `case.fresh(dtype)`."""
    dtypes = dict.fromkeys(("query", "key", "value", "attn_mask"), dtype)
    dtypes["sinks"] = reference.lse_dtype(dtype)

    def copy(name: str, x: Tensor) -> Tensor:
        to = dtypes.get(name, x.dtype) if x.is_floating_point() else x.dtype
        return x.detach().to(to, copy=True).requires_grad_(x.requires_grad)

    return with_each(call, copy)


def by_operator(call: Call) -> tuple[Tensor, Tensor]:
    """out and lse of the call's operator."""
    from fa_ops.ops import dense, kv_cache, quantized, selected, varlen

    if call.is_selected:
        return selected.OPERATORS.forward.run(call)
    if call.is_quantized:
        return quantized.SCHEMA.run(call)
    if not call.is_cached:
        return (varlen if call.is_packed else dense).OPERATORS.forward.run(call)
    if call.operands.new_key is None:
        return kv_cache.READING.run(call)
    args, options = kv_cache.APPENDING.arguments(call)
    return kv_cache.APPEND(*call[:3], *args, **options)


class _Solution:
    """The results of one computation of a case by name, and the terms of those that are long sums.

    `kind` is "actual" for the operator, "oracle" for the reference, and "naive", "mirrored" or
    "flash" for the baselines; "mirrored" is "naive" with rounding errors of the opposite sign.
    """

    def __init__(
        self, kind: str, case: Case | PackedCase, call: Call, backend: str | None = None
    ) -> None:
        self.kind, self.case, self.backend = kind, case, backend
        self.features = getattr(case, "features", case)
        self.terms: dict[str, Tensor] = {}
        q, k, mask = call.query, call.key, call.operands.attn_mask
        self.mask = mask
        self.differentiable_mask = mask is not None and mask.requires_grad
        if self.differentiable_mask and kind != "actual":
            # expanded, so that its gradient has one term for every score
            wide = mask.to(reference.lse_dtype(q.dtype))
            shape = (*q.shape[:3], k.shape[2])
            call = call.changed(attn_mask=wide.expand(shape))
        self.call = call
        out, lse = self._attend()
        self.results = {"out": out, "lse": lse}

    def differentiate(
        self, cotangents: tuple[Tensor, Tensor] | None, exact_out: Tensor | None = None
    ) -> None:
        """Add the gradients to the results, given those of out and lse."""
        if cotangents is None:
            return
        leaves, tensors = dict(zip("qkv", self.call[:3])), self.call.operands
        if self.differentiable_mask:
            leaves["attn_mask"] = tensors.attn_mask
        if tensors.sinks is not None:
            leaves["sinks"] = tensors.sinks
        for name, grad in self._gradients(leaves, *cotangents, exact_out).items():
            self.results[f"grad_{name}"] = grad
        if self.differentiable_mask and self.kind != "actual":
            grad = self.terms["grad_attn_mask"] = self.results["grad_attn_mask"]
            grad = grad.sum_to_size(self.mask.shape).to(self.mask.dtype)
            self.results["grad_attn_mask"] = grad

    def noise_of_grad_v(self, grad_out: Tensor) -> Tensor:
        """The typical error of grad_v where every weight is rounded to the case's dtype."""
        out, _ = self._attend(_squared)
        (squares,) = torch.autograd.grad(out, self.call.value, grad_out.to(out.dtype).square())
        return squares.sqrt() * (torch.finfo(self.features.dtype).eps / 12**0.5)

    def _attend(self, attend: Callable | None = None) -> tuple[Tensor, Tensor]:
        call, is_packed = self.call, isinstance(self.case, PackedCase)
        if self.kind == "actual":
            return by_operator(call.changed(backend=self.backend))
        attend = attend or {
            "oracle": reference.dense,
            "flash": functools.partial(flash, dtype=self.features.dtype),
        }.get(self.kind, naive)
        if not is_packed:
            return attend(call)
        ends_q, ends_k = self.case.meaning()
        return reference.varlen(call.changed(cu_seqlens_q=ends_q, cu_seqlens_k=ends_k), attend)

    def _gradients(
        self, leaves: dict, grad_out: Tensor, grad_lse: Tensor, exact_out: Tensor | None
    ) -> dict[str, Tensor]:
        out, lse, sinks = self.results["out"], self.results["lse"], self.call.operands.sinks
        grad_out, grad_lse = grad_out.to(out.dtype), grad_lse.to(lse.dtype)
        if not self.features.lse_grad:
            grad_lse = torch.zeros_like(grad_lse)
        sign, summed = _SIGNS.get(self.kind), out
        if sign is not None:
            grad_out, grad_lse = _with_rounding(grad_out, grad_lse, out, lse, sign)
        if self.kind == "flash":
            # a flash backward sums grad_out * out over the rounded out; autograd's sum is exact
            error = grad_out * (out.detach().to(self.features.dtype) - exact_out)
            grad_lse = grad_lse - _per_row(error, lse).sum(-1)
            summed = exact_out
        outputs, cotangents = [out], [grad_out]
        if self.features.lse_grad or sign is not None or self.kind == "flash":
            outputs.append(lse.masked_fill(lse == float("-inf"), 0.0))
            cotangents.append(grad_lse)
        options = {"allow_unused": True, "materialize_grads": True}
        grads = torch.autograd.grad(outputs, list(leaves.values()), cotangents, **options)
        if sinks is not None:
            slope = grad_lse - _per_row(grad_out * summed, lse).sum(-1)
            most = torch.finfo(lse.dtype).max  # an infinite sink is the lse
            share = torch.exp(sinks.clamp(max=most).view(-1, 1) - lse.clamp(max=most))
            share = share.masked_fill(lse == float("-inf"), 0.0)
            self.terms["grad_sinks"] = (share * slope).transpose(-1, -2)
        return dict(zip(leaves, grads))


_SIGNS = {"naive": 1.0, "mirrored": -1.0}  # by which simulated rounding errors are multiplied


def _with_rounding(
    grad_out: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor, sign: float
) -> tuple[Tensor, Tensor]:
    """Cotangents that give the naive gradients the errors of a flash backward's saved tensors.

    Every flash backward computes exp(s - lse) and sum(grad_out * out) from rounded results of the
    forward pass, whereas autograd through the naive computation keeps unrounded weights. An error
    of lse scales the gradients of its row; an error of the sum, which has Dv terms, acts as a
    cotangent of lse. Signs are random times `sign`, as errors of one sign may cancel others. The
    error of a large lse, which weighs a sink only, counts as at most half of the gradients.
    """
    random = torch.Generator().manual_seed(0)
    signs = torch.randn((2, *lse.shape), generator=random).sign().to(lse.device) * sign
    products = _per_row((grad_out * out).detach().double(), lse)
    share = torch.finfo(out.dtype).eps / 2 + torch.finfo(lse.dtype).eps / 4 * out.shape[-1] ** 0.5
    slope = share * products.norm(dim=-1).nan_to_num()
    weight = torch.finfo(lse.dtype).eps / 2 * lse.detach().double().masked_fill(lse.isinf(), 0.0)
    weight = weight.clamp(-0.5, 0.5)
    scale = 1.0 + signs[0] * weight
    grad_lse = scale * grad_lse + signs[1] * slope
    grad_out = _per_row(scale.unsqueeze(-1) * _per_row(grad_out, lse), lse)
    return grad_out.to(out.dtype), grad_lse.to(lse.dtype)


def _per_row(x: Tensor, lse: Tensor) -> Tensor:
    """x, shaped like out, with rows in lse's order: packed, out is (T, Hq, Dv) and lse (Hq, T)."""
    return x if lse.dim() == 3 else x.transpose(0, 1)
