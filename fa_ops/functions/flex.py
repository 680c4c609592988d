"""flex_attention: attention whose scores and masks are Python functions of single elements."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from fa_ops import tracing
from fa_ops.call import checks
from fa_ops.call.call import PROGRAMMED, PROGRAMMED_MAX, Call
from fa_ops.call.options import NO_OPERANDS, Operands
from fa_ops.call.python_types import (
    MaskMod,
    ScoreMod,
    Window,
    need_bool,
    need_int,
    need_tensor,
    read_scale,
    refuse_unknown,
    sides,
)
from fa_ops.functions import largest_scores, tile_cache
from fa_ops.functions.attention import DENSE_FUNCTION
from fa_ops.functions.largest_scores import ScoreChanges, answer, need_request
from fa_ops.functions.tile_cache import MaskedCall, TensorStates
from fa_ops.ops import autocast, programmed
from fa_ops.ops.eager import PublicFunction, run
from fa_ops.programs import tiles
from fa_ops.programs.expressions import BOOL, INT, Expressions, Node
from fa_ops.programs.identity import identity_of
from fa_ops.programs.program import TILE_SIZE, ScoreProgram, constants_of
from fa_ops.programs.reader import name_of, read
from fa_ops.programs.splitting import Prologue, Split, split

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask
    from typing_extensions import Unpack

    from fa_ops.call.python_types import FlexOptions

PROGRAMMED_FUNCTION = PublicFunction(
    PROGRAMMED, lambda call, with_lse: programmed.OPERATORS.forward, autocast.cast_attention,
    programmed.OPERATORS,
)  # fmt: skip
PROGRAMMED_MAX_FUNCTION = PublicFunction(
    PROGRAMMED_MAX, lambda call, with_lse: programmed.MAX_OPERATORS.forward,
    autocast.cast_attention, programmed.MAX_OPERATORS,
)  # fmt: skip


@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: ScoreMod | None = None,
    block_mask: BlockMask | Tensor | None = None, scale: float | Tensor | None = None,
    enable_gqa: bool = False, return_lse: Literal[False] = False,
    kernel_options: dict[str, Any] | None = None,
    *, return_aux: None = None, **options: Unpack[FlexOptions],
) -> Tensor: ...  # fmt: skip
@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: ScoreMod | None = None,
    block_mask: BlockMask | Tensor | None = None, scale: float | Tensor | None = None,
    enable_gqa: bool = False, *, return_lse: Literal[True],
    kernel_options: dict[str, Any] | None = None, return_aux: None = None,
    **options: Unpack[FlexOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: ScoreMod | None = None,
    block_mask: BlockMask | Tensor | None = None, scale: float | Tensor | None = None,
    enable_gqa: bool = False, return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *, return_aux: None = None, **options: Unpack[FlexOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: ScoreMod | None = None,
    block_mask: BlockMask | Tensor | None = None, scale: float | Tensor | None = None,
    enable_gqa: bool = False, return_lse: Literal[False] = False,
    kernel_options: dict[str, Any] | None = None,
    *, return_aux: AuxRequest, **options: Unpack[FlexOptions],
) -> tuple[Tensor, AuxOutput]: ...  # fmt: skip
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | Tensor | None = None,
    scale: float | Tensor | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
    mask_mod: MaskMod | None = None,
    buffers: Sequence[Tensor] = (),
    is_causal: bool = False,
    window: Window | None = None,
    key_ranges: Tensor | None = None,
    kv_lens: Tensor | None = None,
    sinks: Tensor | None = None,
    deterministic: bool = False,
    backend: str | None = None,
    **unknown: object,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    r"""Attention whose scores and masks are changed by Python functions of single elements.

    The arguments up to ``return_aux`` are those of torch's ``flex_attention``. The functions are
    read once: they become options of :func:`attention` where they can, small tensors that are
    computed before the kernel, and a program that the kernel runs. No ``torch.compile`` is needed,
    and scores are never stored. Gradients flow to query, key, value, sinks, and to the tensors that
    the functions capture.

    Args:
        query: ``(B, Hq, Sq, D)``, as :func:`attention` takes it, here and below.
        key: ``(B or 1, Hkv, Sk, D)``.
        value: ``(B or 1, Hkv, Sk, Dv)``.
        score_mod: ``score_mod(score, b, h, q_idx, kv_idx)`` gives the score in place of ``scale *
            query . key``. All are tensors of one element: the score float32 (float64 for float64),
            the indices int32. Indices count from 0, so that a causal mask is ``q_idx >= kv_idx``
            aligned at the **top left**. It may index captured tensors by indices.
        block_mask: torch's ``BlockMask``: blocks that it does not list are masked out, its
            ``mask_mod`` decides in those that it lists, and not in full ones. Or what
            :func:`mask_tiles` returned for ``mask_mod``.
        scale: as in :func:`attention`.
        enable_gqa: whether ``Hkv`` may be less than ``Hq``.
        return_lse: also return lse, of the changed scores.
        kernel_options: options of torch's kernels, which do not apply; an eager call warns once.
        return_aux: torch's ``AuxRequest``: return ``AuxOutput`` with ``lse`` and ``max_scores``:
            the largest score of each query behind ``score_mod``, in the dtype of lse, -inf for
            queries without keys, without a gradient.
        mask_mod: ``mask_mod(b, h, q_idx, kv_idx)``, a bool: False masks a key out.
        buffers: tensors that are given to ``score_mod`` and ``mask_mod`` behind the indices,
            instead of being captured.
        is_causal: masks keys out besides, aligned at the **bottom right** as in :func:`attention`.
        window: likewise.
        key_ranges: likewise.
        kv_lens: likewise.
        sinks: as in :func:`attention`.
        deterministic: a bitwise repeatable backward pass, also of captured tensors.
        backend: as in :func:`attention`.
        **unknown: refused.

    Returns:
        ``out`` ``(B, Hq, Sq, Dv)``, with ``return_lse`` ``(out, lse)``, with ``return_aux`` ``(out,
        AuxOutput)``; as :func:`attention` returns them.

    Raises:
        ValueError, TypeError: as :func:`attention`; a function that returns the wrong type.
        NotImplementedError: a function does what programs do not have, with its name, file and
            line; or no backend can run the call.

    Source: Dong et al., Flex Attention, https://arxiv.org/abs/2412.05496.

    Examples:
        >>> slopes = 2.0 ** -torch.arange(1, 9)
        >>> alibi = lambda s, b, h, i, j: s - slopes[h] * (i - j).abs()
        >>> q, k, v = (torch.randn(1, 8, 512, 64) for _ in range(3))
        >>> out = fa_ops.flex_attention(q, k, v, alibi, mask_mod=lambda b, h, i, j: i >= j)
    """
    if unknown:
        refuse_unknown(flex_attention, unknown)
    for name, flag in (("enable_gqa", enable_gqa), ("return_lse", return_lse)):
        if type(flag) is not bool:
            need_bool(name, flag)
    if return_aux is not None:
        need_request(return_aux, return_lse)
    if kernel_options is not None and not isinstance(kernel_options, dict):
        raise TypeError(
            f"kernel_options must be a dict or None, got {type(kernel_options).__name__}: it holds "
            "options of torch's kernels by name, and may be left out"
        )
    if kernel_options and not tracing.is_traced_by_dynamo():
        _warn_once("kernel_options", "kernel_options are of torch's kernels, and do not apply here")
    given = Arguments(
        query, key, value, score_mod, block_mask, read_scale(scale), enable_gqa, mask_mod,
        tuple(buffers), is_causal, window, key_ranges, kv_lens, sinks, deterministic, backend,
    )  # fmt: skip
    if return_aux is None:
        return attend(given, return_lse)
    return answer(return_aux, functools.partial(attend, given))


def attend(given: Arguments, with_lse: bool, with_max: bool = False) -> Tensor | tuple[Tensor, ...]:
    """out, or (out, lse), or (out, lse, largest scores)."""
    if tracing.is_traced_by_dynamo():  # which cannot trace how a function is read
        from fa_ops.functions import flex_graphs

        return flex_graphs.attend(given, with_lse, with_max)
    if given.score_changes is not None:
        largest_scores.check(given)
    elif _shares_keys(*given[:3]):
        key, value = (t.expand(given.query.shape[0], -1, -1, -1) for t in given[1:3])
        given = given._replace(key=key, value=value)
    call = _with_tiles(given, described(given, with_max))
    return run(*given[:3], call.operands, call.scalars, call.function, with_lse)


def _shares_keys(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether all rows of the batch attend one row of keys."""
    tensors = query, key, value
    if not all(isinstance(t, Tensor) and t.dim() == 4 for t in tensors):
        return False
    return key.shape[0] == value.shape[0] == 1 and query.shape[0] != 1


_warned: set[str] = set()


def _warn_once(name: str, message: str) -> None:
    if name not in _warned:
        _warned.add(name)
        warnings.warn(message, stacklevel=3)


class Arguments(NamedTuple):
    """The arguments of `flex_attention` that decide what is computed."""

    query: Tensor
    key: Tensor
    value: Tensor
    score_mod: ScoreMod | None = None
    block_mask: BlockMask | Tensor | None = None
    scale: float | None = None
    enable_gqa: bool = False
    mask_mod: MaskMod | None = None
    buffers: tuple[Tensor, ...] = ()
    is_causal: bool = False
    window: Window | None = None
    key_ranges: Tensor | None = None
    kv_lens: Tensor | None = None
    sinks: Tensor | None = None
    deterministic: bool = False
    backend: str | None = None
    score_changes: ScoreChanges | None = None  # of `attention`, in place of a score_mod

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(B, Hq, Sq, Sk)."""
        return (*self.query.shape[:3], self.key.shape[2])

    @property
    def dtype(self) -> torch.dtype:
        """That of scores and float terms."""
        return checks.lse_dtype(self.query.dtype)


class FlexCall(NamedTuple):
    """The call that computes what `flex_attention` is asked for."""

    function: PublicFunction
    operands: Operands
    scalars: tuple
    split: Split
    captured: Sequence[Tensor] = ()  # tensors by the number by which the split reads them

    def masked(self, given: Arguments) -> MaskedCall | None:
        """The call as its tiles depend on it; None if it has no mask that leaves tiles empty."""
        t, Sk = self.operands, tile_cache.hint(given.sizes[3])
        if self.function is DENSE_FUNCTION or self.split.program.mask is None:
            return None
        left, right = map(tile_cache.hint, self.scalars[3:5])
        right = 0 if self.scalars[0] else right
        keys = Sk if left < 0 and right < 0 else Sk // 2 if left < 0 or right < 0 else left + right
        has_backward = any(map(tracing.is_differentiated, given[:3]))
        return MaskedCall(
            self.split, self.captured, t.term_values, t.term_indices, given.sizes,
            given.query.shape[3] + given.value.shape[3], min(keys + 1, Sk), has_backward,
            given.query.device,
        )  # fmt: skip


def _with_tiles(given: Arguments, call: FlexCall) -> FlexCall:
    """The call with runs of tiles, where it has none and they pay."""
    masked = call.masked(given) if call.operands.tile_runs is None else None
    if masked is None:
        return call
    find = tile_cache.traced_runs_of if tracing.is_compiling() else tile_cache.runs_of
    runs = find(masked)
    if runs is None:
        return call
    return call._replace(operands=call.operands._replace(tile_runs=runs))


def described(given: Arguments, with_max: bool = False) -> FlexCall:
    """The call of attention, or of a program, with all of its tensors."""
    changes = given.score_changes
    if changes is not None:
        given = given._replace(score_mod=largest_scores.score_mod_of(given))
    _check(given)
    masks, table, runs = _masks(given)
    found, tensors = _split_of(given, masks, table)
    if with_max:
        found = found.by_program()
    is_checked = tracing.can_read(*tensors)
    prologue = Prologue(
        found, tensors, given.sizes, given.dtype, given.query.device, is_checked=is_checked
    )
    left, right, lower, upper = _bounds(given, found)
    operands = Operands(sinks=given.sinks, kv_lens=given.kv_lens)
    bias, mask, e = found.bias, found.dense_mask, found.expressions
    if bias is not None and mask is not None:
        bias, mask = e.make("where", mask, bias, e.constant(float("-inf"), "float")), None
    if mask is not None:  # which says alone what is kept
        k = e.argument("k")
        for bound, pair in ((lower, (lower, k)), (upper, (k, upper))):
            if bound is not None:
                mask = e.make("and", mask, e.make("le" if bound is lower else "lt", *pair))
        lower = upper = None
        if given.key_ranges is not None:
            raise ValueError(
                "key_ranges and a mask_mod that reads a tensor by query and key both say which "
                "keys are kept: put the ranges into mask_mod"
            )
    if bias is not None or mask is not None:
        dense = prologue.of_pairs(mask if bias is None else bias, given.query.dtype, torch.float32)
        operands = operands._replace(attn_mask=dense)
    elif changes is not None:
        operands = operands._replace(attn_mask=changes.attn_mask)
    ranges = _both_ranges(prologue.key_ranges(lower, upper), given.key_ranges)
    operands = operands._replace(key_ranges=ranges)
    causal = right == 0
    scalars = (
        causal, 0.0, given.scale, left, -1 if causal else right, found.softcap,
        given.deterministic, given.backend,
    )  # fmt: skip
    is_plain = found.program is None
    if (
        not with_max
        and found.has_options
        and given.kv_lens is None
        and given.query.shape[2] == given.key.shape[2]
    ):
        is_plain = True
        if found.slopes is not None:
            operands = operands._replace(alibi_slopes=prologue.slopes(found.slopes))
    if is_plain:
        function = DENSE_FUNCTION
    else:
        function = PROGRAMMED_MAX_FUNCTION if with_max else PROGRAMMED_FUNCTION
        values, indices = prologue.packed_terms(writes=not tracing.is_dispatched())
        operands = operands._replace(term_values=values, term_indices=indices)
        if found.program.mask is not None:  # else all of it is a window, or bounds of keys
            operands = operands._replace(tile_runs=runs)
        scalars = (*scalars[:5], 0.0, *scalars[6:], str(found.program))
    if all(t is None for t in operands):
        operands = NO_OPERANDS
    return FlexCall(function, operands, scalars, found, tensors)


def _check(given: Arguments) -> None:
    """Raise ValueError or TypeError unless the tensors fit each other, and heads may differ."""
    q, k, v = (need_tensor(n, t) for n, t in zip(given._fields, given[:3]))
    checks.dense(Call(q, k, v))
    if not given.enable_gqa and q.shape[1] != k.shape[1]:
        raise ValueError(
            f"query has {q.shape[1]} heads, but key has {k.shape[1]}: pass enable_gqa=True"
        )
    for name, function in (("score_mod", given.score_mod), ("mask_mod", given.mask_mod)):
        if function is not None and not callable(function):
            raise TypeError(f"{name} must be a function, got {type(function).__name__}")
    for t in given.buffers:
        need_tensor("buffers", t)


def _both_ranges(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """The key ranges of rows that both leave."""
    if a is None or b is None:
        return b if a is None else a
    lower, upper = torch.maximum(a[..., 0], b[..., 0]), torch.minimum(a[..., 1], b[..., 1])
    return torch.stack((lower, upper), -1)


def _bounds(given: Arguments, found: Split) -> tuple[int, int, Node | None, Node | None]:
    """The sides of the window, aligned at the bottom right, and bounds that it does not express."""
    e, q, shift = (
        found.expressions,
        found.expressions.argument("q"),
        given.sizes[3] - given.sizes[2],
    )
    (left, right), lower, upper = sides(given.window), found.lower, found.upper
    if type(given.is_causal) is not bool:
        need_bool("is_causal", given.is_causal)
    if given.is_causal:
        right = 0
    aligned = given.kv_lens is None
    own_left, own_right = found.window
    if own_right is not None:
        side = own_right - shift
        if aligned and side >= 0:
            right = side if right < 0 else min(right, side)
        else:
            bound = e.make("add", q, e.constant(own_right + 1, INT))
            upper = bound if upper is None else e.make("min", upper, bound)
    if own_left is not None:
        side = own_left + shift
        if aligned and side >= 0:
            left = side if left < 0 else min(left, side)
        else:
            bound = e.make("sub", q, e.constant(own_left, INT))
            lower = bound if lower is None else e.make("max", lower, bound)
    return left, right, lower, upper


# Functions to expressions.


class _Table(NamedTuple):
    """What a BlockMask lists: 0 where a block is not, 1 where it is, 2 where it is full."""

    states: Tensor  # int8 (B or 1, H or 1, blocks of queries, blocks of keys)
    block: tuple[int, int]


def _masks(given: Arguments) -> tuple[list[MaskMod], _Table | None, Tensor | None]:
    """The mask_mods of a call, the lists that change what they keep, and runs of tiles."""
    block_mask = given.block_mask
    masks = [] if given.mask_mod is None else [given.mask_mod]
    if block_mask is None:
        return masks, None, None
    if isinstance(block_mask, Tensor):
        if given.mask_mod is None:
            raise ValueError("block_mask holds runs of tiles, which are of a mask_mod: pass both")
        return masks, None, block_mask
    if not hasattr(block_mask, "kv_num_blocks"):
        kind = type(block_mask).__name__
        raise TypeError(f"block_mask must be a BlockMask or what mask_tiles returned, got {kind}")
    Sq, Sk = given.sizes[2:]
    if block_mask.kv_num_blocks.device != given.query.device:
        raise ValueError(
            f"block_mask is on {block_mask.kv_num_blocks.device}, but query is on "
            f"{given.query.device}: pass block_mask.to(query.device)"
        )
    block = tuple(block_mask.BLOCK_SIZE)
    if min(block) < 2**30 and tuple(block_mask.seq_lengths) != (Sq, Sk):
        raise ValueError(
            f"block_mask is of lengths {tuple(block_mask.seq_lengths)}, but query and key have "
            f"{(Sq, Sk)}: make it for these"
        )
    own = block_mask.mask_mod
    if getattr(own, "__name__", "") == "_sliced_mask_mod_error":
        raise ValueError("block_mask is a part of another one, which has no mask_mod any more: "
                         "make one for these queries")  # fmt: skip
    if min(block) >= max(Sq, Sk) and block_mask.full_kv_num_blocks is None:
        return [*masks, own], None, None
    table = _table_of(given, block_mask)
    if table is None or not tracing.is_compiling():
        return [*masks, own], table, None
    # an eager call finds its tiles by intervals; a full block says nothing of other masks
    is_alone = not masks and given.score_mod is None
    runs = tiles.runs_of_blocks(table.states, block, given.sizes, keep_full=is_alone)
    return [*masks, own], table if getattr(block_mask, "decides", True) else None, runs


def _states(block_mask: BlockMask, Sk: int) -> Tensor:
    """The states of the blocks of a BlockMask."""
    counts, columns = block_mask.kv_num_blocks, -(-Sk // block_mask.BLOCK_SIZE[1])
    states = torch.zeros((*counts.shape, columns + 1), dtype=torch.int8, device=counts.device)
    lists = (
        (counts, block_mask.kv_indices, 1),
        (block_mask.full_kv_num_blocks, block_mask.full_kv_indices, 2),
    )
    for count, indices, state in lists:
        if count is not None:
            place = torch.arange(indices.shape[-1], device=counts.device)
            listed = torch.where(place < count.unsqueeze(-1), indices, columns).long()
            states = states.scatter(-1, listed, state)
    return states[..., :columns]


class _KnownTable(NamedTuple):
    """The table of a BlockMask, None where it changes nothing, while tensors are as they were."""

    key: tuple  # of the mask_mod and the sizes
    states: TensorStates
    table: _Table | None


_tables: weakref.WeakKeyDictionary[BlockMask, _KnownTable] = weakref.WeakKeyDictionary()


def _table_of(given: Arguments, block_mask: BlockMask) -> _Table | None:
    """The lists of a BlockMask, unless they are proved to be those of its mask_mod.

    Then they change nothing. The proof is by intervals, once for each BlockMask.
    """
    names = "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"
    lists = [t for t in (getattr(block_mask, name) for name in names) if t is not None]
    identity = identity_of(block_mask.mask_mod)
    key, tensors = (identity.key, given.sizes), [*identity.tensors, *lists]
    is_known = identity.key is not None and tracing.can_read(*tensors, waiting=True)
    is_known = is_known and not tracing.in_functorch()
    known = _tables.get(block_mask) if is_known else None
    if known is not None and known.key == key and known.states.hold(tensors):
        return known.table
    table = _Table(_states(block_mask, given.sizes[3]), tuple(block_mask.BLOCK_SIZE))
    if not is_known:
        return table
    blocks = table.states.shape[2] * table.states.shape[3]
    if blocks <= 2**20 and _is_proved(given, block_mask.mask_mod, table):
        table = None
    _tables[block_mask] = _KnownTable(key, TensorStates(tensors), table)
    return table


def _is_proved(given: Arguments, mask_mod: MaskMod, table: _Table) -> bool:
    program, terms = _whole_mask(mask_mod, (), given.sizes, given.query.device)
    if program is None:
        return False
    states = table.states.cpu().numpy()
    by_batch, by_head = tiles.differs(program)
    for b in range(given.sizes[0] if by_batch else states.shape[0]):
        for h in range(given.sizes[1] if by_head else states.shape[1]):
            intervals = tiles.MaskIntervals(program, terms, b, h, given.sizes)
            found = tiles.classes(intervals, table.block)
            listed = states[min(b, states.shape[0] - 1), min(h, states.shape[1] - 1)]
            if (found[listed == 0] != tiles.EMPTY).any() or (
                found[listed == 2] != tiles.FULL
            ).any():
                return False
    return True


def _whole_mask(
    mask_mod: MaskMod, buffers: tuple, sizes: tuple, device: torch.device
) -> tuple[ScoreProgram | None, list[Tensor]]:
    """A mask as a program alone and its terms; None where it reads by query and key."""
    program, packed = packed_mask(mask_mod, buffers, sizes, device)
    return program, [] if program is None else program.views(*packed, *sizes)


def packed_mask(
    mask_mod: MaskMod, buffers: tuple, sizes: tuple, device: torch.device
) -> tuple[ScoreProgram | None, tuple[Tensor | None, Tensor | None]]:
    """The same with the terms as operators take them, floats and integers."""
    identity = identity_of(mask_mod)
    captured = *identity.tensors, *buffers
    of_buffers = tuple((t.dtype, tuple(t.shape)) for t in buffers)
    key = identity.key, of_buffers, _equal_places(captured), device
    known = None if identity.key is None else _whole_masks.get(key)
    if known is None:
        e, tensors = Expressions(), []
        reading = read(mask_mod, "mask_mod", e, device, torch.float32, tensors, buffers)
        name = name_of("mask_mod", mask_mod)
        found = split(e, None, [reading.root], [False] * len(tensors), name, whole=True)
        known = found, _places_of(tensors, captured, reading.made)
        if identity.key is not None and not any(place == -1 for place, _ in known[1]):
            if len(_whole_masks) >= _LIMIT:
                _whole_masks.clear()
            _whole_masks[key] = known
    found, places = known
    if found.program is None or found.dense_mask is not None:
        return None, (None, None)
    tensors = [captured[place] if place >= 0 else t for place, t in places]
    prologue = Prologue(found, tensors, sizes, torch.float32, device)
    return found.program, tuple(prologue.packed_terms())


_LIMIT = 1024
_whole_masks: dict[tuple, tuple[Split, tuple]] = {}
_splits: dict[tuple, tuple[Split, tuple]] = {}


def _split_of(
    given: Arguments, masks: list[MaskMod], table: _Table | None
) -> tuple[Split, list[Tensor]]:
    """The split of the functions of a call, and the tensors that it reads."""
    functions = [] if given.score_mod is None else [("score_mod", given.score_mod)]
    functions += [("mask_mod", f) for f in masks]
    identities = [identity_of(f) for _, f in functions]
    captured = [t for identity in identities for t in identity.tensors]
    captured += given.buffers if table is None else (*given.buffers, table.states)
    keys = [identity.key for identity in identities]
    grads = tuple(map(tracing.is_differentiated, captured))
    described_buffers = tuple((t.dtype, tuple(t.shape)) for t in given.buffers)
    equal = _equal_places(captured)
    states = None if table is None else (table.block, tuple(table.states.shape))
    key = (
        given.score_mod is None, given.mask_mod is None, *keys, described_buffers, grads, equal,
        states, given.query.device, given.dtype, torch.is_grad_enabled(),
    )  # fmt: skip
    is_keyed = None not in keys and not _has_symbols(given, captured)
    known = _splits.get(key) if is_keyed else None
    if known is None:
        known = _read_and_split(given, functions, captured, table)
        is_kept = is_keyed and not any(place == -1 for place, _ in known[1])
        if is_kept:
            if len(_splits) >= _LIMIT:
                _splits.clear()
            _splits[key] = known
        elif functions and not tracing.is_compiling():
            name = getattr(functions[0][1], "__qualname__", "a function")
            _warn_once(f"read again {name}", f"{name} is read in every call, as something that it "
                       "captures cannot be compared: capture numbers and tensors")  # fmt: skip
    found, places = known
    return found, [captured[place] if place >= 0 else t for place, t in places]


def _equal_places(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Of each tensor the place of the first that is the same object: it is read as that one."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(t), i) for i, t in enumerate(tensors))


def _has_symbols(given: Arguments, captured: Sequence[Tensor]) -> bool:
    """Whether sizes vary, which make no keys, in a graph that is traced."""
    tensors = *captured, *given.buffers, given.query, given.key
    return any(type(n) is not int for t in tensors for n in t.shape)


def _read_and_split(
    given: Arguments, functions: list, captured: list[Tensor], table: _Table | None
) -> tuple[Split, tuple]:
    """A split, and of each tensor that it reads the place in `captured`, or -1 and the tensor.

    A place of -2 is of a tensor that a function makes itself.
    """
    e, tensors, made, score, conditions = Expressions(), [], set(), None, []
    device = given.query.device
    for what, function in functions:
        own = what == "score_mod" or function is given.mask_mod
        buffers = given.buffers if own else ()
        reading = read(function, what, e, device, given.dtype, tensors, buffers)
        made |= reading.made
        if what == "score_mod":
            score = reading.root
        else:
            conditions.append(reading.root)
    if table is not None:
        conditions[-1] = _in_blocks(e, conditions[-1], table, len(tensors))
        tensors.append(table.states)
    grads = [tracing.is_differentiated(t) for t in tensors]
    name = " or ".join(name_of(what, function) for what, function in functions)
    found = split(e, score, conditions, grads, name)
    varying = frozenset() if found.program is None else _varying_constants(str(found.program))
    if varying:
        found = split(e, score, conditions, grads, name, varying=varying)
    return found, _places_of(tensors, captured, made)


def _places_of(tensors: Sequence[Tensor], captured: Sequence[Tensor], made: set[int]) -> tuple:
    """Of each tensor its place in `captured`; or -1, -2 if a function made it, and the tensor."""
    places = []
    for i, t in enumerate(tensors):
        at = next((at for at, x in enumerate(captured) if x is t), -2 if i in made else -1)
        places.append((at, t if at < 0 else None))
    return tuple(places)


_programs: dict[str, tuple[list[str], set[int]]] = {}  # by their text without constants


def _varying_constants(text: str) -> frozenset[str]:
    """The constants of a program in whose places another one had others.

    A program that differs from an earlier one by numbers alone reads them as terms: whatever they
    are next, nothing is compiled again.
    """
    form, constants = constants_of(text)
    if len(_programs) >= _LIMIT:
        _programs.clear()
    first, places = _programs.setdefault(form, (constants, set()))
    places |= {i for i, pair in enumerate(zip(first, constants)) if pair[0] != pair[1]}
    return frozenset(constants[i] for i in places)


def _in_blocks(e: Expressions, condition: Node, table: _Table, tensor: int) -> Node:
    """A mask where a block is listed, and all of it where that is full."""
    index = [
        e.constant(0, INT) if size == 1 else e.argument(name)
        for name, size in zip(("b", "h"), table.states.shape)
    ]
    for name, size in zip(("q", "k"), table.block, strict=True):
        block = e.constant(size, INT)
        index.append(e._node("floordiv", (e.argument(name), block), INT))
    state = e.load(tensor, tuple(index), INT)
    is_full, is_listed = (e.make("eq", state, e.constant(n, INT)) for n in (2, 1))
    return e.make("or", is_full, e.make("and", is_listed, e.cast(condition, BOOL)))


def tile_lines(given: Arguments, call: FlexCall) -> list[str]:
    """How many tiles the program's mask leaves empty, full and mixed, of the first head.

    And whether the call skips them.
    """
    masked, t = call.masked(given), call.operands
    if masked is None:
        return []
    if t.tile_runs is not None:
        skipping = "empty tiles are skipped, as block_mask lists the others"
    else:
        skipping = tile_cache.explanation(masked)
    m, n = masked.grid
    if not tracing.can_read(*given[:3], waiting=True) or m * n > 2**20:
        return [skipping]
    program = call.split.program
    terms = program.views(t.term_values, t.term_indices, *given.sizes)
    intervals = tiles.MaskIntervals(program, terms, 0, 0, given.sizes)
    found = tiles.classes(intervals, (TILE_SIZE, TILE_SIZE))
    counts = [int((found == kind).sum()) for kind in (tiles.EMPTY, tiles.FULL, tiles.MIXED)]
    return ["tiles of the mask: {} empty, {} full, {} mixed".format(*counts), skipping]


def mask_tiles(
    mask_mod: MaskMod, B: int | None, H: int | None, Sq: int, Sk: int,
    device: torch.device | str | None = None, buffers: Sequence[Tensor] = (),
) -> Tensor:  # fmt: skip
    r"""Lists the tiles of a mask that :func:`flex_attention` may skip, without its elements.

    The mask's function is analysed by intervals, in memory linear in the lengths: on a GPU by a
    kernel, which nothing waits for, if that is where the function's tensors or the result are. Pass
    the result as ``block_mask`` beside the same ``mask_mod``, made once for all layers. Results do
    not depend on it while what the function captures keeps its values.

    Args:
        mask_mod: ``mask_mod(b, h, q_idx, kv_idx)``, as :func:`flex_attention` takes it. The values
            of what it captures are read.
        B: rows of the batch; None: 1.
        H: query heads; None: 1.
        Sq: queries.
        Sk: keys.
        device: of the result; None: that of captured tensors, or the CPU. Tensors elsewhere are
            analysed where they are.
        buffers: tensors that are given to ``mask_mod`` behind the indices.

    Returns:
        int32 ``(B or 1, H or 1, m + n, 33)`` for ``m`` rows and ``n`` columns of tiles of 128
        queries and 128 keys, see :doc:`the semantics <../semantics>`.

    Raises:
        ValueError, TypeError: a size that is no number of elements.
        NotImplementedError: the mask reads a tensor by query and key, or does what programs do not
            have.

    Examples:
        >>> window = lambda b, h, i, j: (i >= j) & (i - j < 4096)
        >>> tiles = fa_ops.mask_tiles(window, None, None, 2**17, 2**17)
        >>> out = fa_ops.flex_attention(q, k, v, None, tiles, mask_mod=window)
    """
    if not callable(mask_mod):
        raise TypeError(f"mask_mod must be a function, got {type(mask_mod).__name__}")
    sizes = 1 if B is None else B, 1 if H is None else H, Sq, Sk
    for name, size in zip(("B", "H", "Sq", "Sk"), sizes):
        if need_int(name, size) < 0:
            raise ValueError(f"{name} must be at least 0, got {size}: it is a number of elements")
    captured = (*identity_of(mask_mod).tensors, *buffers)
    wanted = None if device is None else torch.device(device)
    where = captured[0].device if captured else wanted or torch.device("cpu")
    if not tracing.can_read(*captured, waiting=True) or tracing.in_functorch():
        raise NotImplementedError("mask_tiles reads the values that mask_mod captures, which are "
                                  "not known while this is traced: call it before")  # fmt: skip
    program, packed = packed_mask(mask_mod, tuple(buffers), sizes, where)
    if program is None:
        raise NotImplementedError(
            f"{name_of('mask_mod', mask_mod)} reads a tensor by query and key: "
            "its tiles are known from the tensor alone, by fa_ops.mask_blocks"
        )
    return tile_cache.runs_of_program(str(program), *packed, sizes, where).to(wanted or where)
