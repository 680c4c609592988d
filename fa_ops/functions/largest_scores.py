"""Statistics of scores: what `return_aux` asks for, and how dense calls return it.

The largest score of each query is a result of the operator of programs. It has masks and bounds of
keys as options; a soft cap and ALiBi slopes are a program there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fa_ops import tracing
from fa_ops.call import checks
from fa_ops.call.call import DENSE, PROGRAMMED_MAX
from fa_ops.call.options import NO_OPERANDS, Operands
from fa_ops.call.python_types import (
    checked_call,
    need_bool,
    need_tensor,
    probability,
    read_scale,
    sides,
)
from fa_ops.ops import autocast, autograd, programmed
from fa_ops.ops.eager import PublicFunction, run
from fa_ops.plans import planning
from fa_ops.programs.program import ALIGNED, MARGIN, VERSION

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import AuxOutput, AuxRequest

PROGRAMMED_MAX_FUNCTION = PublicFunction(
    PROGRAMMED_MAX, lambda call, with_lse: programmed.MAX_OPERATORS.forward,
    autocast.cast_attention, programmed.MAX_OPERATORS,
)  # fmt: skip


def need_request(return_aux: object, return_lse: object) -> AuxRequest:
    """What `return_aux` asks for."""
    from torch.nn.attention.flex_attention import AuxRequest

    if not isinstance(return_aux, AuxRequest):
        raise TypeError(
            f"return_aux must be an AuxRequest, got {type(return_aux).__name__}: pass "
            "torch.nn.attention.flex_attention.AuxRequest(lse=True, max_scores=True), or what of "
            "both is wanted"
        )
    if return_lse is not False:
        need_bool("return_lse", return_lse)
        if return_lse:
            raise ValueError("return_lse and return_aux both ask for lse: pass return_aux alone")
    return return_aux


def with_aux(
    attend: Callable, tensors: tuple[Tensor, Tensor, Tensor], options: dict[str, Any],
    return_lse: object, return_aux: object,
) -> tuple[Tensor, AuxOutput]:  # fmt: skip
    """(out, AuxOutput) of the dense function `attend` with the options that it was given."""
    from torch.nn.attention.flex_attention import AuxOutput

    wanted = need_request(return_aux, return_lse)
    if wanted.max_scores:
        call = described(*tensors, options)
        out, lse, largest = run(*tensors, *call, PROGRAMMED_MAX_FUNCTION, True)
        return out, AuxOutput(lse if wanted.lse else None, largest)
    found = attend(*tensors, **options, return_lse=wanted.lse)
    out, lse = found if wanted.lse else (found, None)
    return out, AuxOutput(lse, None)


class LargestScoresCall(NamedTuple):
    """Operands and scalars of PROGRAMMED_MAX."""

    operands: Operands
    scalars: tuple


def described(
    query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
) -> LargestScoresCall:
    """The call by which a dense call, whose options are given by name, returns largest scores."""
    t = options
    if any(t[name] is not None for name in ("q_scale", "k_scale", "v_scale")):
        raise NotImplementedError(
            "max_scores of return_aux must not be asked for with q_scale, k_scale and v_scale: "
            "kernels of float8_e4m3fn return no largest scores; pass AuxRequest(lse=True)"
        )
    if probability(t["dropout_p"]) != 0.0:
        raise NotImplementedError(
            f"max_scores of return_aux must not be asked for with dropout_p={t['dropout_p']}: "
            "kernels with dropout return no largest scores, which do not depend on it; call once "
            "more with dropout_p=0.0 under torch.no_grad()"
        )
    if t["enable_gqa"] is not False:
        need_bool("enable_gqa", t["enable_gqa"])
    names = "attn_mask", "sinks", "kv_lens", "key_ranges"
    operands = Operands(**{name: t[name] for name in names})
    scalars = (
        t["is_causal"], 0.0, read_scale(t["scale"]), *sides(t["window"]), t["softcap"],
        t["deterministic"], t["backend"],
    )  # fmt: skip
    given = operands._replace(alibi_slopes=t["alibi_slopes"], mask_blocks=t["mask_blocks"])
    for name, x in zip(("query", "key", "value"), (query, key, value), strict=True):
        if need_tensor(name, x).is_nested:
            raise NotImplementedError(
                f"{name} must not be a NestedTensor where return_aux asks for max_scores: pass a "
                "padded tensor with kv_lens, or AuxRequest(lse=True)"
            )
    if not tracing.is_traced_by_dynamo():  # the operator checks what graphs hold
        planning.check(checked_call(DENSE, query, key, value, given, scalars))
    lines, slopes = [VERSION], t["alibi_slopes"]
    score = "score"
    if slopes is not None:
        autograd.refuse_gradient_of(slopes)
        lines += ["t0 float tile bh", "t1 int tile b"]
        values, indices = _terms(query, key, slopes, t["kv_lens"])
        operands = operands._replace(term_values=values, term_indices=indices)
    if t["softcap"] > 0:
        # as a float32 constant, neither 0 nor infinite
        cap = min(max(float(t["softcap"]), 1e-30), 1e30)
        lines += [f"x0 div(score, {cap!r})", "x1 tanh(x0)", f"x2 mul(x1, {cap!r})"]
        score = "x2"
    if slopes is not None:
        n = 3 if score == "x2" else 0
        lines += [
            f"x{n} add(q, t1)", f"x{n + 1} sub(x{n}, k)", f"x{n + 2} abs(x{n + 1})",
            f"x{n + 3} to_float(x{n + 2})", f"x{n + 4} mul(t0, x{n + 3})",
            f"x{n + 5} sub({score}, x{n + 4})",
        ]  # fmt: skip
        score = f"x{n + 5}"
    text = "; ".join([*lines, f"score {score}"])
    if all(x is None for x in operands):
        operands = NO_OPERANDS
    return LargestScoresCall(operands, (*scalars[:5], 0.0, *scalars[6:], text))


def _terms(q: Tensor, k: Tensor, slopes: Tensor, kv_lens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Slopes (B, Hq), and the key position (B,) at which the first query of each row stands."""
    (B, Hq, Sq), Sk = q.shape[:3], k.shape[2]
    values = slopes.to(checks.lse_dtype(q.dtype)).expand(B, Hq).reshape(-1)
    if kv_lens is None:
        first = torch.full((B,), Sk - Sq, dtype=torch.int32, device=q.device)
    else:
        first = kv_lens.clamp(0, Sk) - Sq
    return tuple(F.pad(t, (MARGIN, -t.shape[0] % ALIGNED + MARGIN)) for t in (values, first))
