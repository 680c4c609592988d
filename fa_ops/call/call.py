"""The description of one attention call, and the plan that a backend makes for such calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa_ops.call.options import (
    ALIGNMENT,
    MAX_DECODING_QUERIES,
    MAX_SHORT_GRADIENT_ROWS,
    MAX_SHORT_HEAD_DIM,
    MAX_SHORT_ROWS,
    MIN_DECODING_KEYS,
    NO_OPERANDS,
    Operands,
    OperandSet,
    Options,
    new_operands,
)


class Signature:
    """The operands and options that the calls of one function may have, and what is true of all.

    A call repeated is described by two tuples in this order, `operands.select` of its operands and
    `scalars` of its options, from which `call` makes it.
    """

    def __init__(
        self, name: str, operands: Sequence[str], options: Sequence[str] = (),
        required: Sequence[str] = (), **fixed: bool,
    ) -> None:  # fmt: skip
        self.name, self.operands = name, OperandSet(operands)
        self.results = 2 + fixed.get("max_scores", False)  # of a forward pass: out, lse, maxima
        self.required = tuple(required)  # operands that every call has
        self.options = (*Options._fields[: Options._fields.index("backend") + 1], *options)
        self._select = itemgetter(*map(Options._fields.index, self.options))
        # of the options that it does not have, in order: behind the common ones, and at the end
        others = Options(**fixed)
        self._common = len(self.options) - len(options)
        start = Options._fields.index(options[0]) if options else self._common
        self._before, self._behind = others[self._common : start], others[start + len(options) :]

    def __repr__(self) -> str:
        return self.name

    def scalars(self, options: Options) -> tuple:
        """The options of a call in this order."""
        return self._select(options)

    def call(
        self, query: Tensor | None, key: Tensor | None, value: Tensor | None, operands: Operands,
        scalars: tuple,
    ) -> Call:  # fmt: skip
        """The call with these operands and options."""
        common, own = scalars[: self._common], scalars[self._common :]
        options = Options(*common, *self._before, *own, *self._behind)
        return Call(query, key, value, operands, options)


_LONGEST = ("max_seqlen_q", "max_seqlen_k")
_SCALES = ("q_scale", "k_scale", "v_scale")
DENSE = Signature("dense", Operands._fields[:7])  # (B, H, S, D) tensors
PACKED = Signature(  # (T, H, D) tokens of sequences that follow one another
    "packed",
    ("cu_seqlens_q", "cu_seqlens_k", "alibi_slopes", "sinks", "kv_lens", "dropout_seed"),
    _LONGEST, ("cu_seqlens_q",), packed=True,
)  # fmt: skip
CACHED = Signature(  # queries against a key-value cache, which new keys and values may extend
    "cached",
    ("kv_lens", "page_table", "key_ranges", "alibi_slopes", "sinks", "new_key", "new_value",
     "k_scale", "v_scale", "rotary_cos", "rotary_sin", "unified_max"),
    ("rotary_interleaved", "num_splits", "batch_invariant"), ("kv_lens",),
    over_cache=True,
)  # fmt: skip
PAGED = Signature(  # (T, H, D) tokens of sequences whose keys are in pages
    "paged", ("cu_seqlens_q", "kv_lens", "page_table", "alibi_slopes", "sinks"), packed=True
)
PROGRAMMED = Signature(  # (B, H, S, D) tensors whose scores a program changes
    "programmed",
    ("attn_mask", "sinks", "kv_lens", "key_ranges", "term_values", "term_indices", "tile_runs"),
    ("program",),
)  # fmt: skip
PROGRAMMED_MAX = Signature(  # the same with the largest score of each query
    "programmed with largest scores", PROGRAMMED.operands.names, ("program",), max_scores=True
)
SELECTED = Signature(  # (B, H, S, D) tensors, where queries attend blocks of keys that lists name
    "selected", ("sinks", "key_ranges", "block_indices", "counts", "cu_seqlens"),
    ("block_size", "query_block"), ("block_indices",),
)  # fmt: skip
QUANTIZED = Signature(  # (B, H, S, D) tensors whose products are of 8-bit numbers
    "quantized", ("sinks", "kv_lens", "key_ranges", *_SCALES),
    ("qk_dtype", "smooth_key", "rotate"), eight_bits=True,
)  # fmt: skip
QUANTIZED_PACKED = Signature(  # the same of packed sequences, whose keys may be in pages
    "packed quantized",
    ("cu_seqlens_q", "cu_seqlens_k", "page_table", "sinks", "kv_lens", *_SCALES),
    _LONGEST, ("cu_seqlens_q",), eight_bits=True, packed=True, smooth_key=False,
)  # fmt: skip


class Saved(NamedTuple):
    """The inputs of a backward pass in addition to the arguments of the forward pass.

    Tangents of `out` and `lse` need these two alone.
    """

    grad_out: Tensor | None
    grad_lse: Tensor | None
    out: Tensor
    lse: Tensor
    mask_grad: bool = False


class Tangents(NamedTuple):
    """The tangents of a call's tensors, None for 0; those behind `sinks` are of a backward pass.

    `grad_dot` is the sum over features of `grad_out` times the tangent of out, (B, Hq, Sq) in the
    dtype of lse, from before this tangent was rounded.
    """

    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    attn_mask: Tensor | None = None
    sinks: Tensor | None = None
    grad_out: Tensor | None = None
    grad_lse: Tensor | None = None
    out: Tensor | None = None
    lse: Tensor | None = None
    grad_dot: Tensor | None = None


class Call(NamedTuple):
    """A call of attention. Its backward pass is a call of its own, with `saved`.

    With `tangents` besides, a call asks for the tangents of the results: of out and lse, or of the
    gradients where it is a backward pass.
    """

    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    operands: Operands = NO_OPERANDS
    options: Options = Options()
    saved: Saved | None = None
    backend: str = "auto"  # the name that the caller asked for
    tangents: Tangents | None = None

    # Facets of a call: properties in Python, as TorchDynamo traces some of them.

    @property
    def is_packed(self) -> bool:
        """Whether query is (T, H, D), tokens of sequences that follow one another."""
        return self.options.packed

    @property
    def is_cached(self) -> bool:
        """Whether query is (B, H, S, D), and key and value a cache of which kv_lens are used."""
        return self.options.over_cache

    @property
    def is_quantized(self) -> bool:
        """Whether the products are of 8-bit numbers."""
        return self.options.eight_bits

    @property
    def is_paged(self) -> bool:
        """Whether key and value are pages (pages, page_size, Hkv, D)."""
        return self.operands.page_table is not None

    @property
    def is_selected(self) -> bool:
        """Whether lists of blocks name the keys of each query."""
        return self.signature is SELECTED

    @property
    def is_programmed(self) -> bool:
        """Whether a program changes the scores or masks keys."""
        return self.options.program is not None

    @property
    def is_backward(self) -> bool:
        """Whether the call is a backward pass, or asks for the tangents of one."""
        return self.saved is not None and (self.tangents is None or self.tangents.lse is not None)

    @property
    def writes_cache(self) -> bool:
        """Whether new keys are appended, or anything is rotated, before the call attends."""
        operands = self.operands
        return operands.new_key is not None or operands.rotary_cos is not None

    @property
    def signature(self) -> Signature:
        """The signature of the function whose call it is."""
        t, o = self.operands, self.options
        if o.eight_bits:
            return QUANTIZED_PACKED if o.packed else QUANTIZED
        if o.over_cache:
            return CACHED
        if o.packed:
            return PACKED if t.page_table is None else PAGED
        if o.program is not None:
            return PROGRAMMED_MAX if o.max_scores else PROGRAMMED
        return DENSE if t.block_indices is None and not o.block_size else SELECTED

    @property
    def num_keys(self) -> int:
        """Keys of a row of the batch, or all tokens of a packed call; the capacity of a cache."""
        table = self.operands.page_table
        if table is not None:
            return table.shape[1] * self.key.shape[1]
        return self.key.shape[0 if self.is_packed else 2]

    @property
    def is_empty(self) -> bool:
        """Whether there are no queries or no keys, and nothing to write."""
        q, k, lists = self.query, self.key, self.operands.block_indices
        if not self.options.over_cache:
            return not (q.numel() and k.numel() and (lists is None or lists.numel()))
        table = self.operands.page_table
        has_room = k.numel() > 0 and (table is None or table.numel() > 0)
        return not has_room or (self.operands.new_key is None and not q.numel())

    @property
    def lacks_features(self) -> bool:
        """Whether the head dimension of query and key, or of value, is 0."""
        return 0 in (self.query.shape[-1], self.value.shape[-1])

    def without_tensors(self) -> Call:
        """The call's options alone, which may be kept."""
        return Call(None, None, None, NO_OPERANDS, self.options, None, self.backend)

    def without_new(self) -> Call:
        """The call that remains once the new keys and values are in the cache."""
        rest, new = self.read_only(), self.operands.new_key
        if new is None:
            return rest
        kv_lens = rest.operands.kv_lens + new.shape[2]
        return rest._replace(operands=rest.operands._replace(kv_lens=kv_lens))

    def read_only(self) -> Call:
        """The call that attends the same cache, writes nothing and has the same lengths."""
        return self._replace(
            operands=self.operands._replace(
                new_key=None, new_value=None, rotary_cos=None, rotary_sin=None
            )
        )

    def changed(self, **arguments: Any) -> Call:
        """The call with other tensors, operands, options or `saved`, by name."""
        operands = {n: arguments.pop(n) for n in Operands._fields if n in arguments}
        options = {n: arguments[n] for n in Options._fields if n in arguments}
        fields = {n: t for n, t in arguments.items() if n not in options}
        if "backend" in options:
            fields["backend"] = options["backend"] or "auto"
        if operands:
            changed = self.operands._replace(**operands)
            given = any(t is not None for t in changed)
            fields["operands"] = changed if given else NO_OPERANDS
        if options:
            fields["options"] = self.options._replace(**options)
        return self._replace(**fields)

    def rows(
        self, some: slice, query: Tensor, key: Tensor, value: Tensor, saved: Saved | None = None,
        tangents: Tangents | None = None,
    ) -> Call:  # fmt: skip
        """The dense call of some rows of the batch, or of packed sequences, with these tensors."""
        t = self.operands
        slopes, ranges, lens = t.alibi_slopes, t.key_ranges, t.kv_lens
        operands = Operands(
            t.attn_mask, slopes[some] if slopes is not None and slopes.dim() == 2 else slopes,
            t.sinks, None if lens is None else lens[some],
            ranges[some] if ranges is not None and ranges.shape[0] > 1 else ranges,
            t.dropout_seed, t.mask_blocks,
        )  # fmt: skip
        options = self.options._replace(packed=False, over_cache=False)
        return Call(query, key, value, operands, options, saved, self.backend, tangents)

    @property
    def scale(self) -> float:
        """The factor on the products: the option, or 1 / sqrt(D); any, without features."""
        scale = self.options.scale
        return max(self.query.shape[-1], 1) ** -0.5 if scale is None else scale


def attention_call(
    query: Tensor | None, key: Tensor | None, value: Tensor | None, /, *,
    saved: Saved | None = None, **arguments: Any,
) -> Call:  # fmt: skip
    """The call with these operands and options, by name.

    Calls with `cu_seqlens_q` are packed; those of a cache or of 8-bit products have `over_cache`
    or `eight_bits`. A `backend` is that of the options and of the call.

    Raises:
        TypeError: an argument is neither an operand nor an option.
    """
    backend = arguments.get("backend") or "auto"
    operands = {n: arguments.pop(n) for n in Operands._fields if n in arguments}
    options = {n: arguments.pop(n) for n in Options._fields if n in arguments}
    if arguments:
        raise TypeError(f"calls of attention have no argument {next(iter(arguments))!r}")
    options.setdefault("packed", operands.get("cu_seqlens_q") is not None)
    given = any(t is not None for t in operands.values())
    return Call(
        query, key, value, Operands(**operands) if given else NO_OPERANDS, Options(**options),
        saved, backend,
    )  # fmt: skip


# Facts that follow from the shapes, strides and addresses of a call's tensors, and its options.


def is_prefill(q: Tensor) -> bool:
    """Whether a cached call has so many queries (B, H, S, D) that tiles of queries fill the device.

    Each tile then attends all keys of its row; a kernel that cannot split keys is slower with less.
    """
    B, H, S, _ = q.shape
    return S >= 64 and B * H * S >= 4096


def heads_of_tile(group: int) -> int:
    """The number of heads of a group that share 64 rows of a tile.

    A tile has whole queries, and this number leaves the fewest rows unused.
    """
    divisors = [n for n in range(2, min(group, 64) + 1) if group % n == 0]
    return max(divisors, key=lambda n: (64 // n * n, n), default=1)


def rows_are_aligned(*tensors: Tensor) -> bool:
    """Whether every row of the last dimension is contiguous and starts at a multiple of 16 bytes.

    False for expanded tensors too, whose strides of 0 TMA does not accept.
    """
    for t in tensors:
        *strides, last = t.stride()
        if last != 1 or t.data_ptr() % ALIGNMENT:
            return False
        bits, unit = 0, ALIGNMENT // t.element_size()
        for stride in strides:
            bits |= stride
        if bits % unit or 0 in strides:
            pairs = zip(t.shape, strides)
            if any(size > 1 and (stride % unit or not stride) for size, stride in pairs):
                return False
    return True


def values_in_keys(k: Tensor, v: Tensor) -> bool:
    """Whether the values are the first features of the keys, in the same memory."""
    return k.data_ptr() == v.data_ptr() and k.stride() == v.stride()


def is_decoding(call: Call) -> bool:
    """Whether a dense call has so few queries and so many keys that splitting the keys pays.

    With `key_ranges`, all queries of a row must share one range.
    """
    ranges = call.operands.key_ranges
    return (
        call.query.shape[2] <= MAX_DECODING_QUERIES
        and call.key.shape[2] >= MIN_DECODING_KEYS
        and call.operands.attn_mask is None
        and (ranges is None or ranges.shape[1:3] == (1, 1))
        and call.options.dropout_p == 0.0
    )


def has_short_rows(call: Call) -> bool:
    """Whether a program can hold whole rows of the scores of a dense call in 16 bits, and a bias.

    The bias is a float mask, and the call has no other option than a scale.
    """
    (q, k, v), t, o = call[:3], call.operands, call.options
    if t.attn_mask is None or not t.attn_mask.is_floating_point() or q.element_size() != 2:
        return False
    if o.is_causal or o.dropout_p > 0 or o.softcap > 0:
        return False
    others = t.alibi_slopes, t.sinks, t.kv_lens, t.key_ranges, t.mask_blocks
    if any(x is not None for x in others) or max(o.window_left, o.window_right) >= 0:
        return False
    if o.scale is not None and abs(o.scale) > 1e30:  # scores may exceed float32
        return False
    widest, longest = max(q.shape[3], v.shape[3]), max(q.shape[2], k.shape[2])
    return widest <= MAX_SHORT_HEAD_DIM and longest <= MAX_SHORT_ROWS


def has_short_gradients(call: Call) -> bool:
    """Whether a program can hold all scores of a head and their gradients, as `has_short_rows`.

    The gradient of a bias that the batch shares is a sum over the batch, of any other one it is
    that of the scores.
    """
    q, k = call.query, call.key
    if not has_short_rows(call) or q.shape[1] != k.shape[1]:
        return False
    if max(q.shape[2], k.shape[2]) > MAX_SHORT_GRADIENT_ROWS:
        return False
    shape, full = call.operands.attn_mask.shape, (*q.shape[:3], k.shape[2])
    return not call.saved.mask_grad or len(shape) < 4 or shape[0] == 1 or shape == full


def queries_of_kv_head(call: Call) -> int:
    """Queries (B, Hq, Sq, D) of a batch row that share a kv head of a cache."""
    heads = call.key.shape[2 if call.is_paged else 1]
    return call.query.shape[1] // heads * call.query.shape[2]


# Forward: run(query, key, value, operands, with_lse) -> (out, lse), where lse may be None if not
#     with_lse; with the option max_scores also the largest scores, in shape and dtype of lse.
# Backward: run(grad_out, grad_lse, query, key, value, out, lse, operands) -> Gradients, or a tuple
#     in their order that may end after the gradient of value.
# With tangents: run(query, key, value, operands, saved, tangents) -> (tangent of out, of lse,
#     `grad_dot` if grad_out is given, else None), or of a backward pass their Gradients.
# Append: run(query, key, value, operands) -> (query, kv_lens with the new keys).
Run = Callable[..., Any]


class Plan(NamedTuple):
    """The way a backend runs a family of calls that differ only in lengths and strides of keys."""

    kernel: str  # the name that `explain` shows
    # Makes what runs calls with this call's geometry; compiles what is missing, keeps no tensor.
    prepare: Callable[[Call], Run]


def decoding(plan: Plan) -> Plan:
    """The plan of dense calls with few queries, given one of cached calls."""

    def prepare(call: Call) -> Run:
        return plan.prepare(call._replace(options=call.options._replace(over_cache=True)))

    return Plan(plan.kernel, prepare)


_BEHIND_CACHES = (None,) * (len(NO_OPERANDS) - NO_OPERANDS._fields.index("unified_max") - 1)


def append_then_attend(writer: Plan, attend: Plan, name: str = "") -> Plan:
    """The plan that writes the new keys of cached calls and rotates their queries, then attends.

    `name`: of the attending backend, if it is another one than that which writes.
    """

    def prepare(call: Call) -> Run:
        write, rest, cos = writer.prepare(call), call.read_only(), call.operands.rotary_cos
        if cos is not None and cos.shape[1]:  # rotated queries are a tensor of their own
            rest = rest._replace(query=rest.query.new_empty(rest.query.shape))
        run = attend.prepare(rest)

        def write_and_attend(q, k, v, operands, with_lse=True):
            q, kv_lens = write(q, k, v, operands)
            t = operands
            left = new_operands((
                None, t.alibi_slopes, t.sinks, kv_lens, t.key_ranges, None, None, None, None,
                t.page_table, None, None, None, t.k_scale, t.v_scale, None, None, t.unified_max,
                *_BEHIND_CACHES,
            ))  # fmt: skip
            return run(q, k, v, left, with_lse)

        return write_and_attend

    kernels = f"{writer.kernel}, then {attend.kernel}"
    return Plan(f"{kernels} of {name}" if name else kernels, prepare)


_below_autograd = torch._C._AutoDispatchBelowADInplaceOrView


def general(kernel: str, function: Callable[[Call], Any]) -> Plan:
    """The plan that calls a backend's function of the call.

    Of a forward call it returns (out, lse), of a backward pass Gradients; with tangents the
    tangents of these.
    """

    def prepare(call: Call) -> Run:
        options, backend = call.options, call.backend
        if call.tangents is not None:

            def run_tangents(q, k, v, operands, saved, tangents):
                saved, tangents = map(_as_backends_read, (saved, tangents))
                return function(Call(q, k, v, operands, options, saved, backend, tangents))

            return run_tangents

        if call.saved is not None:
            mask_grad = call.saved.mask_grad

            def run_backward(grad_out, grad_lse, q, k, v, out, lse, operands):
                # a sum's gradient has strides of 0
                grad_out, out = rows_contiguous(grad_out), rows_contiguous(out)
                grad_lse = None if grad_lse is None else grad_lse.contiguous()
                saved = Saved(grad_out, grad_lse, out, lse.contiguous(), mask_grad)
                return function(Call(q, k, v, operands, options, saved, backend))

            return run_backward

        def run(q, k, v, operands, with_lse=True):
            # views of what a function allocates are no views to its caller
            with _below_autograd():
                return function(_new_call((q, k, v, operands, options, None, backend, None)))

        return run

    return Plan(kernel, prepare)


_new_call = functools.partial(tuple.__new__, Call)  # faster than the class's constructor


def general_plan(
    call: Call, forward: Callable, backward: Callable, varlen_forward: Callable,
    varlen_backward: Callable, cache_forward: Callable, tangents: Callable,
) -> Plan:  # fmt: skip
    """The plan of a backend that has one function for each kind of call."""
    if call.tangents is not None:
        return general("tangents of backward" if call.is_backward else "tangents", tangents)
    if call.is_cached:
        return general("cache", cache_forward)
    if call.is_backward:
        return general("backward", varlen_backward if call.is_packed else backward)
    return general("forward", varlen_forward if call.is_packed else forward)


_WITH_FEATURES = ("query", "key", "value", "grad_out", "out")


def _as_backends_read(tensors: Saved | Tangents) -> Saved | Tangents:
    """The tensors with contiguous rows, those without features contiguous; a mask as it is."""
    kept = {}
    for name, t in zip(tensors._fields, tensors):
        if isinstance(t, Tensor) and name != "attn_mask":
            kept[name] = rows_contiguous(t) if name in _WITH_FEATURES else t.contiguous()
    return tensors._replace(**kept)


def rows_contiguous(t: Tensor) -> Tensor:
    """The tensor, copied unless its last dimension is contiguous."""
    return t if t.stride()[-1] == 1 else t.contiguous()
