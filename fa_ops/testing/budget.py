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
from fa_ops.testing.allocators import Arena
from fa_ops.testing.inputs import Case, PackedCase, with_each
from fa_ops.testing.nan_isolation import Poison, Ties

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
