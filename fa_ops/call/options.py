"""The options of a call as plain data, and facts that follow from shapes and addresses."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Plain data shared by the public functions, the operators and the backends.

# Limits of the GPU kernels, on which backends, compile_passes and hf_integration decide.
MAX_HEAD_DIM = 512  # of all kernels but those that decode over a latent cache
MAX_SELECTED_GRADIENT_DIM = 256  # of gradients of lists of blocks on a GPU
MAX_QUANTIZED_HEAD_DIM = 256  # of products of 8-bit numbers
MAX_LENGTH = 2**29  # queries or keys, so that sums of windows and positions fit 32 bits
MAX_BLOCK = 2**20  # keys of a block, and queries that share a list of blocks
MASK_BLOCK = 128  # queries, and keys, of a tile that `mask_blocks` lists
ALIGNMENT = 16  # bytes: TMA and the widest loads read rows that start at multiples
MAX_DECODING_QUERIES = 16  # with so few queries, keys are split among CTAs
MIN_DECODING_KEYS = 512
MAX_SHORT_ROWS = 128  # queries, and keys, of rows that a program holds whole beside a bias
MAX_SHORT_GRADIENT_ROWS = 64  # the same in a backward pass
MAX_SHORT_HEAD_DIM = 64


class Operands(NamedTuple):
    """Every tensor that a call may have besides query, key and value, None where absent."""

    # bool (True keeps) or float (added), broadcastable to (B, Hq, Sq, Sk)
    attn_mask: Tensor | None = None
    alibi_slopes: Tensor | None = None  # fp32 (Hq,) or (B, Hq)
    sinks: Tensor | None = None  # (Hq,), joins the softmax denominator only
    kv_lens: Tensor | None = None  # int32 (B,)
    key_ranges: Tensor | None = None  # int32 (B or 1, Hq or 1, Sq or 1, 2)
    # int64, one element; in dense calls also int32 (B, Hq, Sq), a word for each row
    dropout_seed: Tensor | None = None
    mask_blocks: Tensor | None = None  # int32, of `mask_blocks_shape`: what attn_mask may skip
    # of sequences that follow one another, int32 (B + 1,)
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    page_table: Tensor | None = None  # int32 (B, max_pages): keys are (pages, page_size, Hkv, D)
    new_key: Tensor | None = None  # (B, Hkv, Sn, D), appended to the kv_lens keys of each row
    new_value: Tensor | None = None  # (B, Hkv, Sn, Dv)
    # Factors of 8-bit numbers, fp32. Of a cache (B, Hkv) or (B, Hkv, S); with a page_table
    # (B, Hkv), (pages, 1, Hkv) or (pages, page_size, Hkv). Of quantised products one element,
    # (B, H), or of query and key (B, H, S) or (B, H, ceil(S / SCALE_BLOCK)), of value (B, H, Dv).
    q_scale: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    rotary_cos: Tensor | None = None  # (positions, R / 2): the first R features are rotated
    rotary_sin: Tensor | None = None
    # fp32 (Hq,): an estimate of each head's largest score; no result depends on it
    unified_max: Tensor | None = None
    # the terms of a program, as `programs.program.Program` says: of floats fp32 (fp64 for fp64),
    # of integers int32, one dimension each
    term_values: Tensor | None = None
    term_indices: Tensor | None = None
    # int32 (B or 1, H or 1, m, 1 + 2 MAX_RUNS): runs of tiles that the program's mask may keep
    tile_runs: Tensor | None = None
    # Blocks of keys that queries attend, int32 (B, Hkv or 1, ceil(Sq / query_block), n), and how
    # many of each list count, int32, the same without n.
    block_indices: Tensor | None = None
    counts: Tensor | None = None
    cu_seqlens: Tensor | None = None  # int32 (N + 1,), of sequences in the only row of a batch


NO_OPERANDS = Operands()  # of calls without any, which compare with it by identity


def selector(positions: Sequence[int]) -> Callable[[Sequence], Sequence]:
    """What returns the elements of a tuple at these positions, by a slice if it can."""
    if not positions:
        return itemgetter(slice(0, 0))
    first, last = positions[0], positions[-1]
    if list(positions) == list(range(first, last + 1)):
        return itemgetter(slice(first, last + 1))
    return itemgetter(*positions)


# Makes operands of a tuple of all of them, in a third of the time of the class's constructor.
new_operands = functools.partial(tuple.__new__, Operands)


class OperandSet:
    """The operands that the calls of one kind may have, or that those of one geometry have."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        positions = [Operands._fields.index(name) for name in names]
        place = {at: i for i, at in enumerate(positions)}
        self.select = selector(positions)  # of operands: those with these names, in order
        # of a tuple of those with these names and of a None behind: all operands, for new_operands
        self.places = itemgetter(*[place.get(i, -1) for i in range(len(Operands._fields))])


_operand_set = functools.cache(OperandSet)
NO_OPERAND_SET = _operand_set(())


def operand_set(operands: Operands) -> OperandSet:
    """The operands that are given."""
    if operands is NO_OPERANDS:
        return NO_OPERAND_SET
    return _operand_set(tuple([n for n, t in zip(Operands._fields, operands) if t is not None]))


class Options(NamedTuple):
    """Every scalar that a call may have. Those up to `backend` are of every function."""

    is_causal: bool = False  # aligned at the bottom right
    dropout_p: float = 0.0
    scale: float | None = None  # None: 1/sqrt(D)
    window_left: int = -1  # keys to the left of the diagonal that stay visible; -1: all
    window_right: int = -1
    softcap: float = 0.0  # 0: off
    deterministic: bool = False  # bitwise repeatable backward
    backend: str | None = None  # None: the current default
    # of packed sequences; None: the number of tokens, a safe upper bound
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    rotary_interleaved: bool = False  # pairs are (0, 1), (2, 3), ...; else (0, R / 2), ...
    num_splits: int = 0  # number of splits of each row's keys; 0: chosen by the backend
    batch_invariant: bool = False  # a row's bits do not depend on the rest of the batch
    qk_dtype: torch.dtype | None = None  # of quantised query and key; None: int8
    smooth_key: bool = True  # subtract the mean of the keys, which no weight depends on
    rotate: bool = False  # rotate the features of query and key alike
    block_size: int = 0  # keys of a block that `block_indices` lists
    query_block: int = 1  # queries that share a list
    packed: bool = False  # query is (T, H, D), tokens of sequences that follow one another
    over_cache: bool = False  # key and value are a cache
    eight_bits: bool = False  # the products are of 8-bit numbers
    program: str | None = None  # changes scores and masks, as text
    max_scores: bool = False  # return the largest score of each query as well


UNBOUNDED = 2**31 - 1  # a window this wide excludes no key


def dtype_name(dtype: torch.dtype) -> str:
    """The name without "torch.", as errors show it."""
    return str(dtype).removeprefix("torch.")


def bounded(side: int) -> int:
    """One side of a window as kernels read it: -1 where it excludes no key."""
    return -1 if side >= UNBOUNDED else side


# What a scale of a cache is for; one of a page of one token is for the page.
NO_SCALES, ROW_SCALES, PAGE_SCALES, TOKEN_SCALES = range(4)


def scales_of(k_scale: Tensor | None, v_scale: Tensor | None, is_paged: bool) -> int:
    """The granularity of a cache's scales, which is the same for keys and values."""
    scale = v_scale if k_scale is None else k_scale
    if scale is None:
        return NO_SCALES
    if scale.dim() == 2:
        return ROW_SCALES
    return PAGE_SCALES if is_paged and scale.shape[1] == 1 else TOKEN_SCALES


SCALE_BLOCK = 64  # keys that share a scale
MEAN_KEYS = 1024  # the mean of the keys is over at most so many


class Gradients(NamedTuple):
    """The results of a backward pass; those after `value` are None if not requested."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    sinks: Tensor | None = None
    term_values: Tensor | None = None


def mask_tiles(mask: Tensor) -> tuple[int, int, int, int]:
    """Batches, heads, and tiles along queries and along keys of a mask of up to four dimensions."""
    B, H, rows, columns = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    return B, H, -(-rows // MASK_BLOCK), -(-columns // MASK_BLOCK)


def mask_blocks_shape(mask: Tensor) -> tuple[int, int, int]:
    """The shape of `mask_blocks` of a mask: for each batch and head, a list of tiles for each row
    of tiles, and one for each column, with their lengths in front.
    """
    B, H, m, n = mask_tiles(mask)
    return B, H, m * (n + 1) + n * (m + 1)


def is_default(value: object, default: object) -> bool:
    """Whether an argument need not be given; tensors are compared by identity."""
    return value is default or (type(value) is float and value == default)
