"""Check one call in full: results, NaN isolation, memory around tensors, repeated calls."""

from __future__ import annotations

import torch
from torch import Tensor

from fa_ops.testing import caches
from fa_ops.testing.allocators import Arena
from fa_ops.testing.budget import assert_close_to_oracle
from fa_ops.testing.caches import CacheCase, assert_cache_close, call
from fa_ops.testing.inputs import Case, PackedCase
from fa_ops.testing.quantized import QuantizedCase, assert_quantized_right

CALLS = 3  # of each case: the third call uses what the first and second prepared


def assert_right(
    case: Case | PackedCase | CacheCase | QuantizedCase,
    backend: str,
    arena: Arena | None = None,
    repeated: bool = True,
    gradients: bool = True,
) -> bool:
    """Compare a call with the oracle; if it is invalid, check that it is refused.

    The CPU backends must refuse invalid lengths, pages and cu_seqlens; elsewhere these have the
    meaning that docs/semantics.md defines. Returns whether gradients were compared.

    Args:
        arena: allocate inputs and results in it, and check that nothing outside them is written.
        repeated: whether to call the public functions several times as well.
        gradients: whether the backend has a backward pass for the call.

    Raises:
        AssertionError: the message begins with the case's repr.
    """
    checked = backend in ("cpu", "reference")
    if isinstance(case, CacheCase):
        q, k, v, cache, spec = case.fresh()
        argument = caches.first_invalid_value(k, cache, spec) if case.broken and checked else None
        if argument is not None:
            spec = spec._replace(backend=backend)
            _assert_refused(case, argument, lambda: call(q, k, v, cache, spec))
        else:
            assert_cache_close(case, backend, arena, CALLS if repeated else 1)
        return False
    if isinstance(case, QuantizedCase):
        assert_quantized_right(case, backend, arena, CALLS if repeated else 1)
        return False
    features = getattr(case, "features", case)
    # with scores this large weights round to 0 or 1, and gradients are rounding errors
    gradients = gradients and not features.integers
    if isinstance(case, PackedCase):
        argument = _invalid_border(case)
        if argument is not None and checked:
            _assert_refused(case, argument, _public_call(case, backend, gradients=False))
            return False
    assert_close_to_oracle(case, backend, gradients, arena)
    if repeated and not features.poison:
        _assert_repeats(case, backend, gradients, arena)
    return gradients


def _invalid_border(case: PackedCase) -> str | None:
    """The beginning of the error for the first invalid element of cu_seqlens."""
    tokens = (sum(x) + 2 * case.margin for x in (case.lengths_q, case.lengths_k))
    names = ("cu_seqlens_q", "cu_seqlens_k")
    for name, ends, count in zip(names, case.packing()[:2], tokens):
        previous = 0
        for b, end in enumerate(ends.tolist()):
            if not previous <= end <= count:
                return f"{name}[{b}] is {end}, but"
            previous = end
    return None


def _assert_refused(case: object, argument: str, run) -> None:
    for _ in range(CALLS):
        try:
            run()
        except ValueError as error:
            assert argument in str(error), f"{case}: {argument!r} is not in {error}"
        else:
            raise AssertionError(f"{case}: accepted, although {argument} is wrong")


def _public_call(case: Case | PackedCase, backend: str, gradients: bool, wrap=lambda x: x):
    """The case as a call of the public function: () -> (out, *gradients of q, k, v)."""
    import fa_ops  # not at the top: fa_ops.testing may depend on types and reference only

    q, k, v, spec = case.fresh(requires_grad=gradients)
    q, k, v = map(wrap, (q, k, v))
    spec = spec._replace(**{n: wrap(x) for n, x in spec._asdict().items() if torch.is_tensor(x)})
    options = {
        "dropout_p": spec.dropout_p, "is_causal": spec.is_causal, "scale": spec.scale,
        "window": (spec.window_left, spec.window_right), "softcap": spec.softcap,
        "alibi_slopes": spec.alibi_slopes, "sinks": spec.sinks, "kv_lens": spec.kv_lens,
        "deterministic": spec.deterministic, "backend": backend,
    }  # fmt: skip
    function, args = fa_ops.attention, ()
    if isinstance(case, PackedCase):
        function, args = fa_ops.attention_varlen, tuple(map(wrap, case.packing()[:2]))
    else:
        names = "attn_mask", "key_ranges", "mask_blocks"
        options |= {name: getattr(spec, name) for name in names}

    def run() -> tuple[Tensor, ...]:
        torch.manual_seed(0)  # for dropout
        out = function(q, k, v, *args, **options)
        if not gradients:
            return (out,)
        grad_out = case.grad_outputs(out.detach(), out.detach())[0]
        return out.detach(), *torch.autograd.grad(out, (q, k, v), grad_out)

    return run


def _assert_repeats(case: Case | PackedCase, backend: str, gradients: bool, arena: Arena | None):
    """Call the public function three times: outputs must be bitwise equal.

    Gradients may be summed in another order, so they are compared to within rounding.
    """
    arena = arena or Arena()
    for recorded in (False, True) if gradients else (False,):
        run = _public_call(case, backend, recorded, arena.placed)
        with arena.outputs(backend):
            first, *others = (run() for _ in range(CALLS))
        arena.check()
        for other in others:
            for name, x, y in zip(("out", "grad_q", "grad_k", "grad_v"), first, other):
                text = f"{case}: {name} differs when the call is repeated"
                if name == "out":
                    assert torch.equal(x, y), text
                    continue
                tolerance = 64 * torch.finfo(x.dtype).eps * max(1.0, float(x.abs().max()))
                assert float((x.double() - y.double()).abs().max()) <= tolerance, text
