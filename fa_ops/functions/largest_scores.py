"""Statistics of scores: what `return_aux` asks for, and how dense calls return it.

The largest score of each query is a result of the operator of programs. It has masks and bounds of
keys as options; a soft cap and ALiBi slopes become a function of scores, as flex_attention has one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fa_ops.call.call import DENSE
from fa_ops.call.options import Operands
from fa_ops.call.python_types import (
    ScoreMod,
    checked_call,
    need_bool,
    need_tensor,
    probability,
    read_scale,
    sides,
)
from fa_ops.ops import autograd
from fa_ops.plans import planning

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import AuxOutput, AuxRequest

    from fa_ops.functions import flex


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


def answer(asked: AuxRequest, attend: Callable[..., Any]) -> tuple[Tensor, AuxOutput]:
    """(out, AuxOutput) by `attend(with_lse, with_max)`: out, (out, lse), or also largest scores."""
    from torch.nn.attention.flex_attention import AuxOutput

    if asked.max_scores:
        out, lse, largest = attend(True, True)
        return out, AuxOutput(lse if asked.lse else None, largest)
    found = attend(asked.lse, False)
    out, lse = found if asked.lse else (found, None)
    return out, AuxOutput(lse, None)


def with_aux(
    attend: Callable, tensors: tuple[Tensor, Tensor, Tensor], options: dict[str, Any],
    return_lse: object, return_aux: object,
) -> tuple[Tensor, AuxOutput]:  # fmt: skip
    """(out, AuxOutput) of the dense function `attend` with the options that it was given."""
    from fa_ops.functions import flex

    asked = need_request(return_aux, return_lse)
    if asked.max_scores:
        return answer(asked, functools.partial(flex.attend, arguments(*tensors, options)))
    return answer(asked, lambda with_lse, _: attend(*tensors, **options, return_lse=with_lse))


class ScoreChanges(NamedTuple):
    """Options of `attention` that flex_attention does not have."""

    attn_mask: Tensor | None = None
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    mask_blocks: Tensor | None = None  # checked, and not read


def arguments(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> flex.Arguments:
    """Those of the call by which a dense call, with options by name, returns largest scores."""
    from fa_ops.functions import flex

    if any(options[name] is not None for name in ("q_scale", "k_scale", "v_scale")):
        raise NotImplementedError(
            "max_scores of return_aux must not be asked for with q_scale, k_scale and v_scale: "
            "kernels of float8_e4m3fn return no largest scores; pass AuxRequest(lse=True)"
        )
    if probability(options["dropout_p"]) != 0.0:
        raise NotImplementedError(
            f"max_scores of return_aux must not be asked for with dropout_p={options['dropout_p']}"
            ": kernels with dropout return no largest scores, which do not depend on it; call once "
            "more with dropout_p=0.0 under torch.no_grad()"
        )
    need_bool("enable_gqa", options["enable_gqa"])
    for name, x in zip(("query", "key", "value"), (query, key, value), strict=True):
        if need_tensor(name, x).is_nested:
            raise NotImplementedError(
                f"{name} must not be a NestedTensor where return_aux asks for max_scores: pass a "
                "padded tensor with kv_lens, or AuxRequest(lse=True)"
            )
    changes = ScoreChanges(*(options[name] for name in ScoreChanges._fields))
    names = "is_causal", "window", "key_ranges", "kv_lens", "sinks", "deterministic", "backend"
    given = {name: options[name] for name in names} | {"scale": read_scale(options["scale"])}
    return flex.Arguments(query, key, value, **given, enable_gqa=True, score_changes=changes)


def check(given: flex.Arguments) -> None:
    """Raise ValueError or TypeError as the dense call would."""
    changes = given.score_changes
    operands = Operands(
        attn_mask=changes.attn_mask, alibi_slopes=changes.alibi_slopes, sinks=given.sinks,
        kv_lens=given.kv_lens, key_ranges=given.key_ranges, mask_blocks=changes.mask_blocks,
    )  # fmt: skip
    scalars = (
        given.is_causal, 0.0, given.scale, *sides(given.window), changes.softcap,
        given.deterministic, given.backend,
    )  # fmt: skip
    if torch.is_grad_enabled() and isinstance(changes.alibi_slopes, Tensor):
        autograd.refuse_gradient_of(changes.alibi_slopes)
    planning.check(checked_call(DENSE, *given[:3], operands, scalars))


def score_mod_of(given: flex.Arguments) -> ScoreMod | None:
    """The soft cap and the slopes as a function of scores; None: there are none."""
    softcap, slopes = given.score_changes.softcap, given.score_changes.alibi_slopes
    Sq, Sk = given.sizes[2:]
    slopes = None if slopes is None else slopes.detach()
    lens = None if given.kv_lens is None else given.kv_lens.clamp(0, Sk)
    # as a float32 constant, neither 0 nor infinite
    cap = min(max(float(softcap), 1e-30), 1e30) if softcap else 0.0
    if slopes is None and not cap:
        return None

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if cap:
            score = cap * torch.tanh(score / cap)
        if slopes is None:
            return score
        place = q + (Sk if lens is None else lens[b]) - Sq
        slope = slopes[h] if slopes.dim() == 1 else slopes[b, h]
        return score - slope * (place - k).abs()

    return score_mod
