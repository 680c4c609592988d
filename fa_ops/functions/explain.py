"""Why a call runs as it does: which backend, which kernel, by which route."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fa_ops.call import backend_option, selected_checks
from fa_ops.call.call import (
    CACHED,
    DENSE,
    PACKED,
    QUANTIZED,
    QUANTIZED_PACKED,
    SELECTED,
    Call,
    Signature,
)
from fa_ops.call.options import Operands, Options
from fa_ops.call.python_types import checked_call, read_scale, refuse_unknown, sides
from fa_ops.functions import attention, flex, kv_cache, largest_scores, quantized, selected, varlen
from fa_ops.functions import varlen_quantized as packed_quantized
from fa_ops.functions.varlen import PagedCall
from fa_ops.ops import library
from fa_ops.ops.selected import tokens_call
from fa_ops.plans import dispatch, planning
from fa_ops.plans.dispatch import CallExplanation


def explain(query: Tensor, key: Tensor, value: Tensor, /, **options: Any) -> CallExplanation:
    """Explain which backend and which kernel would run a call, and why other backends would not.

    Nothing is computed or compiled.

    Args:
        query: as the call takes it, here and below.
        key: ``key_cache`` of :func:`attention_with_kv_cache`.
        value: ``value_cache`` likewise.
        **options: the other arguments, by name. Those with ``cu_seqlens_q`` are of
            :func:`attention_varlen`, those with an argument that only
            :func:`attention_with_kv_cache` has (``page_table=None`` is enough) are of that, those
            with ``qk_dtype``, ``smooth_key`` or ``rotate`` are of :func:`quantized_attention`,
            those with ``score_mod``, ``mask_mod`` or ``block_mask`` are of :func:`flex_attention`
            (the notes have its terms, program and classes of tiles), those with ``block_indices``
            of :func:`attention_selected`, with ``token_indices`` of
            :func:`attention_selected_tokens`, and all others are of :func:`attention`. Where no
            kernel takes packed queries over pages, the call of :func:`attention_with_kv_cache` is
            explained by which they are attended, and where none takes packed e4m3 sequences, the
            one of :func:`attention` for rows of equal length.

    Returns:
        ``backend`` and ``kernel``, None where no backend can run the call; ``route``: "direct"
        where the call's plan is run at once, "record" where autograd records it, "autocast"
        where one of these follows a cast to autocast's dtype (the rest of the explanation is of
        the tensors given), "dispatch" where PyTorch's dispatcher takes part; ``reasons``: for each
        backend why it refuses the call, or None; ``notes``: what the dimensions of the tensors are
        taken for, and which keys the first query of a causal call attends. Printing the result
        shows all of it.

    Raises:
        ValueError, TypeError: what the call itself would raise.

    Examples:
        >>> print(fa_ops.explain(q, k, v, is_causal=True))
        backend: cpu
        kernel: forward
        route: direct
        query: 1 row, 2 heads, 8 tokens, 16 features
        key: 1 row, 2 heads, 8 tokens, 16 features
        value: 1 row, 2 heads, 8 tokens, 16 features
        causal, bottom right: query 0 attends key 0
          hopper: needs a CUDA device
          triton: ...
          cpu: can run this
          reference: can run this
    """
    if options.keys() & {"score_mod", "mask_mod", "block_mask"}:
        return _of_functions(query, key, value, options)
    if getattr(options.get("return_aux"), "max_scores", False):
        given = _bound(attention.attention, query, key, value, options)
        arguments = largest_scores.arguments(query, key, value, given)
        largest_scores.check(arguments)
        return _of_program(arguments, True)
    if "token_indices" in options:
        call = _tokens(query, key, value, options)
        return _explained(call, None)._replace(
            notes=dispatch.notes(*call[:3], call.operands, call.options.is_causal)
        )
    found = _explain(query, key, value, options)
    operands = Operands(
        **{name: options.get(name) for name in ("cu_seqlens_q", "kv_lens", "page_table")},
        new_key=options.get("key"),
    )
    return found._replace(
        notes=dispatch.notes(query, key, value, operands, options.get("is_causal", False))
    )


def _explain(query: Tensor, key: Tensor, value: Tensor, options: dict) -> CallExplanation:
    one = None
    if "cu_seqlens_q" in options and _has_scales(options):
        return _packed_quantized(query, key, value, options)
    if "cu_seqlens_q" in options and options.get("page_table") is not None:
        given = _over_pages(query, key, value, options)
        one = varlen.call_of(*given[:6], given.options)
        tiled = varlen.tiled_call(query, key, *given[3:6], given.longest[0], given.options)
        query, tables = tiled.query, {"kv_lens": tiled.kv_lens, "page_table": tiled.page_table}
        options = tables | tiled.options
    describe = _described_quantized if options.keys() & _OF_QUANTIZED else _described
    call = describe(query, key, value, options)
    planning.check(call)
    return _explained(call, one)


def _of_functions(query: Tensor, key: Tensor, value: Tensor, options: dict) -> CallExplanation:
    """The explanation of flex_attention: what its functions become, and what runs that."""
    unknown = options.keys() - {*flex.Arguments._fields[:-1]}
    if refused := unknown - {"return_lse", "return_aux", "kernel_options"}:
        refuse_unknown(flex.flex_attention, dict.fromkeys(sorted(refused)))
    given = {name: x for name, x in options.items() if name not in unknown}
    arguments = flex.Arguments(query, key, value, **given)
    return _of_program(arguments, getattr(options.get("return_aux"), "max_scores", False))


def _of_program(arguments: flex.Arguments, with_max: bool) -> CallExplanation:
    (query, key, value), described = arguments[:3], flex.described(arguments, with_max)
    function, operands, scalars, split, _ = described
    call = checked_call(function.signature, query, key, value, operands, scalars)
    planning.check(call)
    found = _explained(call, None)
    notes = dispatch.notes(query, key, value, operands, scalars[0])
    lines = (*notes, *split.lines(), *flex.tile_lines(arguments, described))
    return found._replace(notes=lines)


def _explained(call: Call, one: Call | None) -> CallExplanation:
    """The explanation of a checked call; `one` is a single-kernel call that replaces it."""
    call = planning.normalised(call)
    reasons = {name: dispatch.refusal(name, call) for name in backend_option.BACKENDS}
    route = library.route_of(call.query, call.key, call.value, *call.operands).value
    if one is not None:
        reasons[varlen.BACKEND] = None
        return CallExplanation(varlen.BACKEND, planning.plan_for(one).kernel, route, reasons)
    try:
        backend = dispatch.choose(call).__name__.rpartition(".")[2]
    except NotImplementedError:
        return CallExplanation(None, None, route, reasons)
    return CallExplanation(backend, planning.plan_for(call).kernel, route, reasons)


_SCALES = "q_scale", "k_scale", "v_scale"


def _has_scales(options: dict) -> bool:
    return any(options.get(name) is not None for name in _SCALES)


def _packed_quantized(query: Tensor, key: Tensor, value: Tensor, options: dict) -> CallExplanation:
    """The explanation of packed e4m3 sequences: one kernel, or a batch of rows."""
    given = _bound(attention.attention_varlen, query, key, value, options)
    operands = _operands(given)._replace(alibi_slopes=None)
    defaults = {"alibi_slopes": None, "dropout_p": 0, "deterministic": False}
    packed_quantized.refuse(operands, {name: (given[name], x) for name, x in defaults.items()})
    operands = packed_quantized.with_lengths(query, operands)
    scalars = _scalars(QUANTIZED_PACKED, given | {"dropout_p": 0.0, "deterministic": False})
    call = checked_call(QUANTIZED_PACKED, query, key, value, operands, scalars)
    planning.check(call)
    one = planning.normalised(call)
    is_taken = dispatch.refusal(packed_quantized.BACKEND, one) is None
    return _explained(packed_quantized.shape_of_rows(call), one if is_taken else None)


_OF_QUANTIZED = {"q_scale", "qk_dtype", "smooth_key", "rotate"}


def _tokens(query: Tensor, key: Tensor, value: Tensor, options: dict) -> Call:
    """The call by which lists of tokens are attended, checked."""
    given = _bound(selected.attention_selected_tokens, query, key, value, options)
    lists, counts = given["token_indices"], given["counts"]
    selected_checks.tokens(query, key, value, lists, counts, real=True)
    others = (given[name] for name in ("scale", "sinks", "backend"))
    call = tokens_call(query, key, value, lists, counts, *others)
    planning.check(call)
    return call


def _over_pages(query: Tensor, key: Tensor, value: Tensor, options: dict) -> PagedCall:
    """The arguments of attention_varlen with page_table, checked."""
    given = _bound(attention.attention_varlen, query, key, value, options)
    for name in ("return_lse", *_SCALES):
        del given[name]
    call = varlen.arguments(**given)
    varlen.check(*call[:-1])
    varlen.check_options(*call[:-2], call.options)
    return call


def _described_quantized(query: Tensor, key: Tensor, value: Tensor, options: dict) -> Call:
    """The call that attention of e4m3 tensors, or quantized_attention, would plan."""
    scales = {name: options[name] for name in _SCALES if name in options}
    is_quantizing = options.keys() & {"qk_dtype", "smooth_key", "rotate"}
    function = quantized.quantized_attention if is_quantizing else attention.attention
    given = _bound(function, query, key, value, options)
    names = "sinks", "kv_lens", "key_ranges"
    operands = Operands(**{name: given[name] for name in names}, **scales)
    given = {"smooth_key": False} | given | {"dropout_p": 0.0, "deterministic": False}
    return checked_call(QUANTIZED, query, key, value, operands, _scalars(QUANTIZED, given))


def _scalars(signature: Signature, given: dict[str, Any]) -> tuple:
    """The scalars of a signature among the arguments of a public function."""
    left, right = sides(given.get("window"))
    given = Options._field_defaults | given | {"window_left": left, "window_right": right}
    return tuple(given[name] for name in signature.options)


def _operands(given: dict[str, Any]) -> Operands:
    """The operands among the arguments of a public function."""
    operands = {name: given[name] for name in Operands._fields if name in given}
    if "key_cache" in given:
        operands |= {"new_key": given["key"], "new_value": given["value"]}
    return Operands(**operands)


def _bound(function: Callable, query: Tensor, key: Tensor, value: Tensor, options: dict) -> dict:
    """The arguments of the public function by name, defaults included."""
    try:
        bound = inspect.signature(function).bind(query, key, value, **options)
    except TypeError as error:
        raise TypeError(f"{function.__name__}: {error}") from None
    if unknown := bound.arguments.pop("unknown", None):
        refuse_unknown(function, unknown)
    bound.apply_defaults()
    del bound.arguments["unknown"]
    return bound.arguments | {"scale": read_scale(bound.arguments["scale"])}


_OF_CACHE = {"key", "value", *CACHED.operands.names, *CACHED.options}
_OF_LISTS = {*SELECTED.operands.names, *SELECTED.options} - {*DENSE.operands.names, *DENSE.options}
_OF_CACHE -= {*DENSE.operands.names, *DENSE.options}


def _described(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Call:
    """The call that the public function with these options would plan."""
    function, signature = attention.attention, DENSE
    if "cu_seqlens_q" in options:
        function, signature = attention.attention_varlen, PACKED
    elif options.keys() & _OF_LISTS:
        function, signature = selected.attention_selected, SELECTED
    elif options.keys() & _OF_CACHE:
        function, signature = kv_cache.attention_with_kv_cache, CACHED
    given = _bound(function, query, key, value, options)
    given.pop("return_aux", None)
    seed, scalars = None, _scalars(signature, given)
    if given.get("dropout_p", 0.0) != 0.0 and isinstance(query, Tensor):
        seed = torch.zeros(1, dtype=torch.int64, device=query.device)  # draws no number
    operands = _operands(given)._replace(dropout_seed=seed)
    return checked_call(signature, query, key, value, operands, scalars)
