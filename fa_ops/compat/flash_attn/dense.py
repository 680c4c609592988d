"""flash_attn_func and its packed forms: attention of batches of equal lengths."""

from __future__ import annotations

from torch import Tensor

from fa_ops.api import attention, dropout_seed
from fa_ops.argument_types import need_tensor
from fa_ops.compat.flash.arguments import (
    DENSE,
    Window,
    flag,
    heads_first,
    infinite_where_empty,
    number,
    parts,
    score_options,
    shape,
)
from fa_ops.compat.flash.weights import signed_weights
from fa_ops.ops import dense

Result = Tensor | tuple[Tensor, Tensor, Tensor]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Attention of q ``(B, Sq, Hq, D)`` over k ``(B, Sk, Hkv, D)`` and v ``(B, Sk, Hkv, Dv)``.

    Args:
        dropout_p: probability in [0, 1) of dropping a softmax weight.
        softmax_scale: factor of the scores; ``None``: ``1 / sqrt(D)``.
        causal: causal mask, aligned at the bottom right as in flash-attn since 2.1.
        window_size: number of visible keys on either side of a query's own position; negative:
            unbounded.
        softcap: scores become ``softcap * tanh(scores / softcap)``; 0: off.
        alibi_slopes: float32 ``(Hq,)`` or ``(B, Hq)``.
        deterministic: whether the backward pass is bitwise repeatable.
        return_attn_probs: also return the lse, float32 ``(B, Hq, Sq)``, +inf in rows that attend
            no key, and the weights.

    Returns:
        out ``(B, Sq, Hq, Dv)``, or ``(out, lse, weights)``. With dropout, the weights are
        ``exp(score - m)`` ``(B, Hq, Sq, Sk)``, both lengths rounded up to multiples of 128, where
        ``m`` is the largest score of a row; dropped ones are negative. They take that much memory,
        and are for tests. Without dropout they have no elements.

    Raises:
        ValueError, TypeError, NotImplementedError: as :func:`fa_ops.attention`.

    Source: Dao, FlashAttention-2, https://arxiv.org/abs/2307.08691.
    """
    shape(DENSE, q=q, k=k, v=v)
    options = options_of(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                         deterministic)  # fmt: skip
    if not flag("return_attn_probs", return_attn_probs):
        return attention(*map(heads_first, (q, k, v)), **options).transpose(1, 2)
    if not options["dropout_p"]:
        out, lse = attention(*map(heads_first, (q, k, v)), **options, return_lse=True)
        return out.transpose(1, 2), infinite_where_empty(lse), q.new_empty(0)
    seed = dropout_seed(q, options["dropout_p"])
    out, lse = seeded(q, k, v, seed, options)
    return out, lse, signed_weights(q, k, seed, (q.shape[1], k.shape[1]), options)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args, **options) -> Result:
    """:func:`flash_attn_func` with keys and values in one tensor ``(B, Sk, 2, Hkv, D)``."""
    k, v = parts("kv", kv, 2, "(B, S, 2, H, D)")
    return flash_attn_func(q, k, v, *args, **options)


def flash_attn_qkvpacked_func(qkv: Tensor, *args, **options) -> Result:
    """:func:`flash_attn_func` of queries, keys and values in one tensor ``(B, S, 3, H, D)``."""
    q, k, v = parts("qkv", qkv, 3, "(B, S, 3, H, D)")
    return flash_attn_func(q, k, v, *args, **options)


def options_of(
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
) -> dict:
    """The options of fa_ops.attention for the arguments of flash-attn."""
    options = score_options(softmax_scale, causal, window_size, softcap)
    if alibi_slopes is not None:
        need_tensor("alibi_slopes", alibi_slopes)
    options |= {"dropout_p": number("dropout_p", dropout_p), "alibi_slopes": alibi_slopes}
    return options | {"deterministic": flag("deterministic", deterministic)}


def keywords_of(options: dict, seed: Tensor | None) -> dict:
    """The keyword arguments of an operator for options of fa_ops.attention."""
    names = "scale", "softcap", "alibi_slopes", "deterministic"
    left, right = options["window"] or (-1, -1)
    return {
        **{name: options[name] for name in names},
        "window_left": left, "window_right": right, "dropout_seed": seed,
    }  # fmt: skip


def seeded(
    q: Tensor, k: Tensor, v: Tensor, seed: Tensor | None, options: dict
) -> tuple[Tensor, Tensor]:
    """out ``(B, Sq, Hq, Dv)`` and the lse of FlashAttention 2, with this seed of dropout."""
    p, causal = options["dropout_p"], options["is_causal"]
    tensors = map(heads_first, (q, k, v))
    out, lse = dense.WITH_LSE(*tensors, None, p, causal, **keywords_of(options, seed))
    return out.transpose(1, 2), infinite_where_empty(lse)
