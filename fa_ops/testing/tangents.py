"""Tangents of results and of gradients: the error budget against the oracle, and two identities."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fa_ops.backends import reference
from fa_ops.call.call import Call, Saved, Tangents
from fa_ops.call.options import Gradients
from fa_ops.testing.budget import by_operator, naive
from fa_ops.testing.inputs import Case, PackedCase

FLOORS = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def by_derivative(call: Call) -> tuple[Tensor, ...]:
    """The results of the operator of a call with tangents."""
    from fa_ops.ops import dense, varlen
    from fa_ops.ops.schemas import call_by_name

    operators = (varlen if call.is_packed else dense).OPERATORS
    given = dict(zip(("query", "key", "value"), call[:3])) | call.saved._asdict()
    given |= {n if n == "grad_dot" else f"{n}_t": t for n, t in call.tangents._asdict().items()}
    given |= call.operands._asdict() | call.options._asdict()
    schema = operators.backward_jvp if call.is_backward else operators.jvp
    return call_by_name(schema.operator, given)


def drawn_tangents(call: Call, seed: int = 0) -> Tangents:
    """Normal numbers for the tangents of query, key, value, a float mask and sinks."""
    random = torch.Generator().manual_seed(seed)

    def draw(x: Tensor | None) -> Tensor | None:
        if x is None or not x.dtype.is_floating_point:
            return None
        return torch.randn(x.shape, generator=random, dtype=torch.float64).to(x)

    return Tangents(*map(draw, (*call[:3], call.operands.attn_mask, call.operands.sinks)))


def with_saved(call: Call, seed: int = 1) -> Call:
    """The call with the results of its forward pass, and drawn gradients of them."""
    out, lse = by_operator(call)
    random = torch.Generator().manual_seed(seed)
    grads = [torch.randn(x.shape, generator=random, dtype=torch.float64).to(x) for x in (out, lse)]
    mask = call.operands.attn_mask
    mask_grad = mask is not None and mask.dtype.is_floating_point
    return call._replace(saved=Saved(*grads, out, lse, mask_grad))


def tangents_refusal(call: Call, of_gradients: bool = False) -> str | None:
    """Why the call's backend cannot compute tangents of its results, or of its gradients; or None.

    The call may have saved tensors.
    """
    from fa_ops.plans import dispatch

    q, k, v = call[:3]
    t = Tangents(q, k, v, lse=q if of_gradients else None)
    saved = call.saved or Saved(q, None, q, q)
    return dispatch.refusal(call.backend, call.changed(saved=saved, tangents=t))


def derivatives(
    call: Call, t: Tangents, y_t: tuple | None, of_gradients: bool = True
) -> tuple[tuple, ...]:
    """Tangents of the results by the operator, and with these those of the gradients."""
    found = by_derivative(call._replace(tangents=t))
    if not of_gradients:
        return (found,)
    # with tangents of y as jvp of grad does, without them as a double backward
    dot = None if y_t is not None else found[2]
    t = t._replace(out=found[0], lse=found[1], grad_dot=dot)
    t = t if y_t is None else t._replace(grad_out=y_t[0], grad_lse=y_t[1])
    grads = by_derivative(call._replace(tangents=t))
    return found, Gradients(*grads[:3], None if call.is_packed else grads[3], grads[-1])


def error(actual: Tensor, expected: Tensor) -> float:
    """The relative error in the Frobenius norm, of numbers that may all be 0 but for rounding."""
    expected = expected.double()
    return (actual.double() - expected).norm().item() / max(expected.norm().item(), 1.0)


def assert_tangents_close(case: Case | PackedCase, backend: str) -> bool:
    """Compare tangents of a case, by the named backend, with the oracle, and check two identities.

    <y, jvp(x; t)> = <backward(x; y), t>, and the Hessian of <y, results> is symmetric. Returns
    whether the backend has the tangents of gradients, without which those of results are compared
    alone.

    Raises:
        AssertionError: the relative error of a result is more than twice that of dense code in the
            case's dtype, or of exact code that reads rounded results of the forward pass, or of
            its rounding, or the sides of an identity differ by more than the largest of these; the
            message begins with the case's repr.
    """
    call = with_saved(case.fresh().changed(backend=backend))
    floor = FLOORS[call.query.dtype]
    if call.query.dtype.itemsize >= 4 and call.query.numel():
        # scores are rounded in the same dtype, and weights err by what their scores do
        floor *= max(1.0, call.query.double().square().mean().sqrt().item())
    t, attend = drawn_tangents(call), naive
    if call.is_packed:
        attend = functools.partial(reference.varlen, attend=naive)
    y_t = drawn_tangents(call._replace(query=call.saved.out, key=call.saved.lse), 2)[:2]
    y_t = y_t[0], y_t[1].masked_fill(call.saved.lse == float("-inf"), 0.0)
    has_gradients = tangents_refusal(call, of_gradients=True) is None
    rounding, largest = _rounding_of_out(call), floor
    for along in (None, y_t) if has_gradients else (None,):
        results = derivatives(call, t, along, has_gradients)
        asked = t._replace(grad_out=along[0], grad_lse=along[1]) if along else t
        of_results = reference.tangents(call._replace(tangents=t))
        for actual, names, of in zip(
            results, (("out", "lse", "grad_dot"), Gradients._fields), (t, _of_backward(call, asked))
        ):
            whole = call._replace(tangents=of)
            oracle, baseline = reference.tangents(whole), reference.tangents(whole, attend)
            noises = _noise_of_rounding(whole, rounding, of_results)
            for name, x, exact, rough, noise in zip(names, actual, oracle, baseline, noises):
                if exact is None:
                    continue
                noise /= max(exact.double().norm().item(), 1.0)
                limit = 2 * max(error(rough, exact), noise) + floor
                largest = max(largest, limit)
                found = error(x, exact)
                assert found <= limit, f"{case}: tangent of {name}: {found:.2e} over {limit:.2e}"
    if has_gradients:
        _assert_identities(case, call, t, largest)
    return has_gradients


def _rounding_of_out(call: Call) -> Tensor:
    """What rounding to the call's dtype adds to out, float64."""
    x = reference.leaves(call, False)
    attend = reference.varlen if call.is_packed else reference.dense
    with torch.no_grad():
        out = reference.results(attend, call, x)[0]
    return out.to(call.query.dtype).double() - out


def _noise_of_rounding(call: Call, rounding: Tensor, of_results: tuple) -> list[float]:
    """The Frobenius norms of what `_of_rounded_out` differs by from exact tangents.

    Of a mask that rows share it is what the rows' differences typically add up to.
    """
    mask, t = call.operands.attn_mask, call.tangents
    if call.is_backward and t.attn_mask is not None:
        shape = *call.query.shape[:3], mask.shape[3]
        t = t._replace(attn_mask=t.attn_mask.expand(shape))
        call = call.changed(attn_mask=mask.expand(shape), tangents=t)
    exact = reference.tangents(call)
    rough = _of_rounded_out(call, rounding, of_results)
    return [0.0 if x is None else (x.double() - y).norm().item() for x, y in zip(exact, rough)]


def _of_rounded_out(call: Call, rounding: Tensor, of_results: tuple) -> tuple:
    """Tangents, exact but for the rounding of out and of its tangent, which all passes read.

    The tangent of out is a sum less that of lse times out, and gradients are sums less the sum over
    features of grad_out * out: an error of the latter is one of the gradient of lse. `of_results`
    are the exact tangents of out and lse.
    """
    saved, t = call.saved, call.tangents

    def by_rows(x: Tensor) -> Tensor:
        return x.transpose(0, 1) if call.is_packed else x

    of_out, of_lse = rounding, by_rows(of_results[1].double()).unsqueeze(-1)
    out_t = of_results[0].double() + of_lse * of_out
    if not call.is_backward:
        dot = by_rows((saved.grad_out.double() * out_t).sum(-1))
        return out_t.to(call.query.dtype), of_results[1], dot
    less = by_rows((saved.grad_out.double() * of_out).sum(-1))
    of_out_t = of_lse * of_out
    if t.grad_out is None:
        less_t = saved.grad_out.double() * of_out_t
    else:
        of_out_t = of_out_t + out_t.to(call.query.dtype).double() - out_t
        less_t = saved.grad_out.double() * of_out_t + t.grad_out.double() * of_out
    less_t = by_rows(less_t.sum(-1))
    grad_lse_t = -less_t if t.grad_lse is None else t.grad_lse.double() - less_t
    saved = saved._replace(grad_lse=saved.grad_lse.double() - less)
    return reference.tangents(call._replace(saved=saved, tangents=t._replace(grad_lse=grad_lse_t)))


def _of_backward(call: Call, t: Tangents) -> Tangents:
    return t._replace(out=call.saved.out, lse=call.saved.lse)  # which the oracle does not read


def _assert_identities(case: object, call: Call, t: Tangents, limit: float) -> None:
    """<y, jvp(x; t)> = <backward(x; y), t>; <w, H t> = <t, H w>, H the Hessian of <y, results>."""
    w = drawn_tangents(call, 3)
    (out_t, lse_t, _), of_t = derivatives(call, t, None)
    _, of_w = derivatives(call, w, None)
    still = torch.zeros_like
    y = call.saved[:2]
    zero = Tangents(*(None if x is None else still(x) for x in t))
    _, grads = derivatives(call, zero, y)  # linear in y: those of y itself
    _assert_equal(f"{case}: jvp and backward", _inner(y, (out_t, lse_t)), _inner(grads, t), limit)
    _assert_equal(f"{case}: symmetry", _inner(of_t, w), _inner(of_w, t), limit)


def _inner(a: tuple, b: tuple) -> tuple[float, float]:
    """The sum of products of tensors, and of their absolute values."""
    pairs = [x.double() * y.double() for x, y in zip(a, b) if x is not None and y is not None]
    return sum(p.sum().item() for p in pairs), sum(p.abs().sum().item() for p in pairs)


def _assert_equal(name: str, a: tuple[float, float], b: tuple[float, float], limit: float) -> None:
    """The numbers differ by no more than `limit` of the sum of absolute values."""
    size = max(a[1], b[1], 1.0)  # sums that are 0 but for rounding
    assert abs(a[0] - b[0]) <= limit * size, f"{name}: {a[0]!r} and {b[0]!r} of {size!r}"
