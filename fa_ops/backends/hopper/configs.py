"""Tile sizes and shared memory of the Hopper kernels, each with its measured reason."""

from __future__ import annotations

import dataclasses
import functools

from fa_ops.call.options import ALIGNMENT, MAX_LENGTH, PAGE_SCALES, TOKEN_SCALES

_MASK_BYTES = 64 * 16 + 16  # of a consumer: a bit for each of its rows and 128 keys, two barriers
_TILE_BYTES = 32  # of a tile that the backward's producer publishes
_WORK_BYTES = 2 * 48 + 8  # two work items of cuda/tiles.cuh, and their alignment
SHARED_LIMIT = 227 * 1024  # bytes of shared memory one CTA may use on sm_90
MAX_NARROW_DIM = 256  # head dimension of all kernels but one
_HEAD_DIM_MULTIPLE = ALIGNMENT // 2  # of 2 bytes: rows are aligned
_LARGEST_SCALE = 2.0**24  # times NEVER of cuda/softmax.cuh, a float32
COPIED_PAGES = (4, 8, 16, 32)  # keys of pages that one TMA copy brings

# Features of kernels with their default: what `kernel_plan.macros` may be given.
_FORWARD = dict.fromkeys(
    ("window", "left", "kv_lens", "ranges", "softcap", "alibi", "sinks", "mask", "dropout"), 0
) | {"splits": 0, "program": 0}  # fmt: skip
_QUANTIZED = {"is_int8": 1} | dict.fromkeys(
    ("window", "left", "kv_lens", "ranges", "softcap", "sinks", "signs", "head_scales"), 0
) | {"rotated": 0}  # fmt: skip
_BACKWARD = dict.fromkeys(
    ("window", "kv_lens", "ranges", "softcap", "alibi", "mask", "dropout", "split"), 0
)
_MLA = {"paged": 0, "kv_lens": 1}
_DECODE = _MLA | dict.fromkeys(("ranges", "softcap", "alibi", "sinks", "shares_tokens"), 0)


def limit_error(scale: float, queries: int, keys: int) -> str | None:
    """Why scale or lengths exceed what the kernels can represent, or None."""
    if scale <= 0:
        return f"needs a positive scale, got {scale}"
    if not scale <= _LARGEST_SCALE:
        return f"needs a scale of at most {_LARGEST_SCALE:.0f}, got {scale}"
    if max(queries, keys) > MAX_LENGTH:
        return f"attends {MAX_LENGTH} queries and keys at most, got {queries} and {keys}"
    return None


def head_dim_error(D: int, Dv: int, widest: int = MAX_NARROW_DIM) -> str | None:
    """Why the kernels do not have these head dimensions, or None."""
    unit = _HEAD_DIM_MULTIPLE
    if D % unit or Dv % unit or max(D, Dv) > widest:
        return (
            f"needs head dims that are multiples of {unit} and at most {widest}, got {D} and {Dv}"
        )
    return None


def copy_keys(page: int) -> int:
    """The number of keys of a page that one TMA copy brings, or 1 where keys are gathered.

    `page`: keys of a page; 0 for a contiguous cache.
    """
    if page % 64 == 0:
        return 64
    return page if page in COPIED_PAGES else 1


def page_error(page: int) -> str | None:
    """Why prompts do not attend pages of so many keys, or None."""
    if copy_keys(page) < 16:
        return f"needs pages of 16, 32 or a multiple of 64 keys, got {page}"
    return None


@dataclasses.dataclass(frozen=True)
class HeadDims:
    """Head dimensions of a dense kernel, multiples of 8. Products compute these features only."""

    head_features: int  # of q and k
    value_features: int

    @functools.cached_property
    def head_dim(self) -> int:
        """Features of q and k in shared memory, where the copies fill whole columns with zeros."""
        return padded(self.head_features)

    @functools.cached_property
    def value_dim(self) -> int:
        """Features of v in shared memory."""
        return padded(self.value_features)


@dataclasses.dataclass(frozen=True)
class Config(HeadDims):
    """The forward's tile: `block_m / 64` consumer warpgroups share the keys one producer brings."""

    block_m: int
    block_n: int
    stages: int = 2
    query_stages: int = 1  # with 2, the next tile's queries are copied before this one ends
    rescale_threshold: int = 8  # a running max moves when a weight would exceed 2^this
    bias_bits: int = 0  # of an element of a float mask; 0: there is none
    copy_keys: int = 0  # that one copy brings from a page; 0: keys have no pages
    whole_rows: bool = False  # a copy from a page brings keys with all their features
    packed_heads: int = 1  # of a group, whose rows share a tile
    ctas: int = 1  # that a multiprocessor holds at once
    packs_queries: bool = False  # of sequences with pages: a tile looks up where its sequence is
    skips_tiles: bool = False  # that `mask_blocks` do not list

    kernel, features = "forward", _FORWARD

    def __post_init__(self) -> None:
        # the product with the values takes 16 keys at a time
        assert self.block_m % 64 == 0 and self.block_n % 16 == 0, self

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.block_m * 2 + 128

    @property
    def consumer_queries(self) -> int:
        """Queries in the 64 rows of a consumer."""
        return 64 // self.packed_heads

    @property
    def tile_queries(self) -> int:
        """Queries in the rows of a tile."""
        return self.block_m // 64 * (64 // self.packed_heads)

    def shared_bytes(self, has_mask: bool = False) -> int:
        """Bytes of shared memory of a CTA."""
        consumers = self.block_m // 64
        keys = self.stages * self.block_n * (self.head_dim + self.value_dim)
        barriers = 2 * self.query_stages * consumers + 4 * self.stages + 4
        tiles = 2 * (self.query_stages * self.block_m * self.head_dim + keys)
        bias = self.block_m * self.block_n * self.bias_bits // 8 + 16 * consumers
        tiles += bias if self.bias_bits else 0
        tiles += 4 * self.stages if self.copy_keys else 0
        tiles += 2 * 16 if self.packs_queries else 0  # of two work items
        tiles += (8 + 4) * self.stages if self.skips_tiles else 0  # which block a stage holds
        return tiles + 8 * barriers + _WORK_BYTES + has_mask * consumers * _MASK_BYTES

    def defines(self, mask: int = 0, **_: int) -> dict[str, int]:
        """The macros of this configuration."""
        return {
            "HEAD_DIM": self.head_dim, "VALUE_DIM": self.value_dim,
            "HEAD_FEATURES": self.head_features, "VALUE_FEATURES": self.value_features,
            "BLOCK_M": self.block_m, "BLOCK_N": self.block_n,
            "STAGES": self.stages, "QUERY_STAGES": self.query_stages,
            "RESCALE_THRESHOLD": self.rescale_threshold, "BIAS_BITS": self.bias_bits,
            "IS_PAGED": int(self.copy_keys > 0), "COPY_KEYS": self.copy_keys,
            "WHOLE_ROWS": int(self.whole_rows), "PACKED_HEADS": self.packed_heads,
            "CTAS": self.ctas, "PACKED_QUERIES": int(self.packs_queries),
            "SKIPS_TILES": int(self.skips_tiles), "SHARED_BYTES": self.shared_bytes(mask > 0),
        }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class WideConfig(HeadDims):
    """The forward's tile of 257 to 512 features: a cluster of two CTAs, 64 queries each.

    Keys are in slots of 64 features of a block, values in slots of half their columns.
    """

    key_slots: int = 6
    value_slots: int = 3
    rescale_threshold: int = 8  # as the forward's

    kernel, features = "forward_wide", _FORWARD
    threads, tile_queries, packed_heads, whole_rows = 384, 128, 1, False
    block_n, copy_keys = 64, 32  # each CTA copies half of a block to both
    value_dim = 512

    def shared_bytes(self, has_mask: bool = False) -> int:
        """Bytes of shared memory of a CTA."""
        columns = self.head_dim // 64 + self.key_slots + self.value_slots * self.value_dim // 128
        barriers = 5 + 2 * self.key_slots + 2 * self.value_slots
        weights = 2 * 64 * 64 * 2
        return columns * 64 * 128 + weights + 4 * 64 * 4 + 8 * barriers

    def defines(self, mask: int = 0, **_: int) -> dict[str, int]:
        """The macros of this configuration."""
        return {
            "HEAD_DIM": self.head_dim, "VALUE_DIM": self.value_dim, "BLOCK_M": self.tile_queries,
            "BLOCK_N": self.block_n, "KEY_SLOTS": self.key_slots, "VALUE_SLOTS": self.value_slots,
            "RESCALE_THRESHOLD": self.rescale_threshold, "PACKED_HEADS": self.packed_heads,
            "BIAS_BITS": 0, "IS_PAGED": 0, "PACKED_QUERIES": 0,
            "SHARED_BYTES": self.shared_bytes(mask > 0),
        }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class QuantizedConfig:
    """The tile of the forward with 8-bit products: a consumer warpgroup for each 64 queries.

    Two consumers have registers for both products of a step at once; three have not, and take
    turns at the tensor cores.
    """

    head_features: int  # of q and k, a multiple of 16
    value_features: int  # a multiple of 8
    block_m: int = 192
    stages: int = 3
    query_stages: int = 2  # 1: two work items share a slot of queries
    summed_keys: int = 1024  # whose products with values tensor cores add up
    quantises_queries: bool = False  # which have 16 bits
    packs_queries: bool = False  # of sequences that follow one another
    copy_keys: int = 0  # that one copy brings from a page; 0: keys have no pages

    kernel, features = "quantized", _QUANTIZED
    block_n = 128  # a row of transposed values is one swizzle atom

    @property
    def head_dim(self) -> int:
        """Bytes of a row of q or k in shared memory, whole swizzle atoms."""
        return -(-self.head_features // 128) * 128

    @property
    def sums_by_product(self) -> bool:
        """Whether row sums are products with ones: registers hold those beside 128 channels."""
        return self.value_features <= 128

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.block_m * 2 + 128

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a CTA."""
        ones = 8 * self.sums_by_product
        keys = self.stages * self.block_n * (self.head_dim + self.value_features + ones)
        barriers = 2 * self.query_stages * (self.block_m // 64) + 4 * self.stages + 4
        queries = self.query_stages * self.block_m * self.head_dim
        if self.quantises_queries:
            queries += self.block_m * -(-self.head_features // 64) * 128
        totals = self.block_m * -(-self.value_features // 16) * 16 * 2
        work = _WORK_BYTES + (2 * 16 if self.packs_queries else 0)
        pages = 4 * self.stages if self.copy_keys else 0
        return queries + keys + totals + 8 * barriers + work + pages

    def defines(self, rotated: int = 0, **_: int) -> dict[str, int]:
        """The macros of this configuration."""
        packed = {"PACKED_QUERIES": 1, "LONGEST_FIRST": 1} if self.packs_queries else {}
        if self.copy_keys:
            packed |= {"IS_PAGED": 1, "COPY_KEYS": self.copy_keys}
        return packed | {
            "QUANTISES_QUERIES": int(self.quantises_queries),
            "HEAD_DIM": self.head_dim, "HEAD_FEATURES": self.head_features,
            "VALUE_FEATURES": self.value_features, "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n, "STAGES": self.stages, "QUERY_STAGES": self.query_stages,
            "SHARED_BYTES": self.shared_bytes, "SUMMED_KEYS": self.summed_keys,
            "SUMS_BY_PRODUCT": int(self.sums_by_product),
            "ROTATED_BITS": rotated_bits(rotated) if self.quantises_queries else 0,
        }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class BackwardConfig(HeadDims):
    """A CTA owns `block_n` keys and passes over blocks of `block_m` queries.

    It keeps dK and dV, 64 keys a consumer; or, where it is wide, one consumer keeps dK and one dV
    of 64 keys. It adds up dQ too, or a kernel with 128 queries a CTA makes that in a pass over
    `query_block_n` keys at a time, each block of K or V in one of `query_stages` slots.

    Paired, the two CTAs of a cluster own half of the keys each, and add up half the columns of dQ
    each.
    """

    is_wide: bool = False
    is_paired: bool = False
    adds_dq: bool = True
    block_m: int = 64
    block_n: int = 128
    stages: int = 2
    query_block_n: int = 64
    query_stages: int = 3
    bias_bits: int = 0  # as the forward's
    skips_tiles: bool = False
    buffers: int = 2  # of weights, from the consumer of dV to that of dK
    whole_heads: bool = False  # a CTA passes over all keys of a head, and writes dQ itself
    sums_rows: bool = False  # with whole heads: it also sums rows, in place of `preprocess`
    key_slots: int = 1  # with 2, the next keys are copied while these are used
    sums_distances: bool = False  # gradients of scores along diagonals, for a term of distances

    features = _BACKWARD
    products = "backward", "backward_queries"  # the kernels: the second one unless `adds_dq`

    @property
    def threads(self) -> int:
        """Threads of a CTA: a warpgroup copies, two compute; of a pair a third computes dQ."""
        return 512 if self.is_paired else 384

    @property
    def ctas_of_block(self) -> int:
        """CTAs that share a block of keys."""
        return 2 if self.is_paired else 1

    @property
    def is_persistent(self) -> bool:
        """Whether CTAs take one block of keys after another."""
        return not (self.is_wide or self.is_paired)

    @property
    def needs_parts_of_heads(self) -> bool:
        """Whether no CTA can pass over all keys of a head: if it does not compute all of dQ, or if
        a thread does not always compute the same elements of it."""
        return not self.adds_dq or self.alternates

    @property
    def sums_dq(self) -> bool:
        """Whether `postprocess` converts sums of dQ."""
        return self.adds_dq and not self.whole_heads

    @property
    def waves(self) -> int:
        """Blocks of keys that each multiprocessor should have, see `group_parts`.

        In one pass parts add to the same sums, and 9 are 1.05x to 1.09x as fast as 6 with 32 query
        heads and 8 of keys, D 128, and 64 and 8, D 64, in causal calls of 8192 tokens.
        """
        return 9 if self.is_persistent and self.adds_dq else 6

    @property
    def grad_stages(self) -> int:
        """Slots for dO in shared memory, of a block each, in pairs of half its columns."""
        return 3 if self.is_paired else self.stages

    def query_ctas(self, m_blocks: int) -> int:
        """CTAs of a head of the pass for dQ, each with 128 queries."""
        return -(-m_blocks // 2)

    @property
    def alternates(self) -> bool:
        """Whether the consumers compute dQ of blocks of queries in turn.

        Else each has half the queries of a block of 128, or half the columns of dQ, which can begin
        inside a column of 64 features but not cross into the next one.
        """
        return self.adds_dq and self.block_m == 64 and self.sum_features % 64 != 0

    @property
    def sum_features(self) -> int:
        """Columns of the sums of dQ. Registers do not hold 104, but they hold half of 128."""
        if self.is_paired:
            return self.head_dim
        return 128 if 96 < self.head_features < 128 else self.head_features

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of the kernel `backward`."""
        dims = self.head_dim + self.value_dim
        keys = self.key_slots * (self.block_n // self.ctas_of_block * dims * 2 + _TILE_BYTES)
        keys += (4 * 16 + 32) * self.whole_heads  # targets, and what is not finite
        of_query, of_grad = (
            self.head_dim * 2 + 4 + (8 + 4) * (self.key_slots == 1),  # ranges and seeds of dropout
            self.value_dim * 2 // self.ctas_of_block + 4,
        )
        queries = self.block_m * (self.stages * of_query + self.grad_stages * of_grad)
        bias = self.block_m * self.block_n * self.bias_bits // 8 + 16 if self.bias_bits else 0
        barriers = 4 + self.key_slots + 2 * (self.stages + self.grad_stages)
        diagonals = self.block_n // 16 * 8 * 88 * 4 * self.sums_distances
        return keys + queries + self._exchange_bytes + bias + diagonals + 8 * barriers

    @property
    def _exchange_bytes(self) -> int:
        scores = self.block_m * self.block_n
        if self.is_wide:
            return scores * 4 * self.buffers
        if self.is_paired:  # the other CTA's keys, dS of all keys, own weights
            return self.block_n // 2 * self.head_dim + scores * 2 + scores * 2
        left = self.key_slots * self.block_n * self.head_dim * 2  # of dV, and dK where dS stays
        return scores * 4 + left if self.adds_dq else 0

    @property
    def query_shared_bytes(self) -> int:
        """Bytes of shared memory of the kernel `backward_queries`."""
        queries = 128 * (self.head_dim + self.value_dim) * 2
        slots = self.query_stages * self.query_block_n * self.head_dim * 2
        return queries + slots + 8 * (2 + 2 * self.query_stages)

    def defines(self, **_: int) -> dict[str, int]:
        """The macros of this configuration."""
        return {
            "HEAD_DIM": self.head_dim, "VALUE_DIM": self.value_dim,
            "HEAD_FEATURES": self.head_features, "VALUE_FEATURES": self.value_features,
            "SUM_FEATURES": self.sum_features, "ALTERNATES": int(self.alternates),
            "BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "STAGES": self.stages,
            "EXCHANGE_BYTES": self._exchange_bytes,
            "SHARED_BYTES": self.shared_bytes, "QUERY_SHARED_BYTES": self.query_shared_bytes,
            "GRAD_STAGES": self.grad_stages,
            "IS_WIDE": int(self.is_wide), "IS_PAIRED": int(self.is_paired),
            "ADDS_DQ": int(self.adds_dq),
            "QUERY_BLOCK_N": self.query_block_n, "QUERY_STAGES": self.query_stages,
            "BIAS_BITS": self.bias_bits, "SKIPS_TILES": int(self.skips_tiles),
            "WHOLE_HEADS": int(self.whole_heads), "SUMS_ROWS": int(self.sums_rows),
            "KEY_SLOTS": self.key_slots,
        }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class WideBackwardConfig(BackwardConfig):
    """The tiles of 257 to 512 features: a cluster of two CTAs owns 64 keys, or 64 queries for dQ.

    A CTA holds one tensor of these, passes over blocks of 64 tokens of one of the others, and gives
    the other CTA its scores. Heads are filled with zeros up to 512 features.
    """

    adds_dq: bool = False
    block_n: int = 64

    threads = 512  # a warpgroup copies, one computes scores, and two share a gradient's columns
    products = "wide_keys", "wide_queries"
    ctas_of_block = 2
    is_persistent = False

    def query_ctas(self, m_blocks: int) -> int:
        """CTAs of a head of the pass for dQ."""
        return self.ctas_of_block * m_blocks

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of either kernel."""
        half = 64 * self.head_dim
        slots = 5  # of halves of blocks; half of the own tokens is in registers
        exchange = 4 * 64 * 64 * 2  # two blocks to the other CTA, and two from it
        numbers = (slots + 1) // 2 * 64 * (4 + 8) + 8 * 4  # of queries, and flags of warps
        return 6 * half + exchange + numbers + 8 * (5 + 2 * slots)

    query_shared_bytes = shared_bytes


@dataclasses.dataclass(frozen=True)
class MaskGradientConfig:
    """Sums of 128 queries by 64 keys, twice as many registers for 128: a stage has both."""

    backward: BackwardConfig

    rows = 128
    columns = 64
    threads = 384

    @property
    def stages(self) -> int:
        """Pipeline stages that shared memory holds."""
        return min(4, (SHARED_LIMIT - 128) // self._stage_bytes)

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a CTA."""
        return self.stages * (self._stage_bytes + 16)

    @property
    def _stage_bytes(self) -> int:
        return (self.rows + self.columns) * (self.backward.head_dim + self.backward.value_dim) * 2

    def defines(self) -> dict[str, int]:
        """The macros that are added to the backward's."""
        return {
            "QUERY_BLOCK_N": self.columns,
            "MASK_STAGES": self.stages,
            "MASK_SHARED_BYTES": self.shared_bytes,
        }


def rotated_bits(D: int) -> int:
    """The binary logarithm of the features that are rotated together."""
    return max((D & -D).bit_length() - 1, 0)


def padded(dim: int) -> int:
    """Round a head dimension up to columns of 64 features."""
    return -(-dim // 64) * 64


def forward_config(
    D: int,
    Dv: int,
    bias_bits: int = 0,
    few_registers: bool = False,
    page: int = 0,
    differs_by_row: bool = False,
    skips_tiles: bool = False,
) -> Config | WideConfig:
    """The forward's tile.

    `few_registers`: a mask's bits or dropout take registers and warps. `page`: keys of a cache's
    page, 16, 32 or a multiple of 64; 0: contiguous. `differs_by_row`: key ranges or ALiBi.
    `skips_tiles`: a mask has `mask_blocks`.
    """
    if max(D, Dv) > 256:
        return WideConfig(D, Dv)
    config = _forward_config(D, Dv, few_registers or bias_bits > 0)
    varies = differs_by_row or skips_tiles
    if 64 < D <= 112 and not (page or bias_bits) and _has_three_consumers(D, Dv, varies):
        config = Config(D, Dv, 192, 96, stages=3)
    if skips_tiles:  # queries of one list; keys of one tile, where other numbers are not faster
        block_n = 64 if config.head_dim > 128 and config.block_n != 128 else config.block_n
        config = dataclasses.replace(config, block_m=128, block_n=block_n, skips_tiles=True)
    if page:  # blocks of whole copies
        block_n = config.block_n // 64 * 64
        whole_rows = D % 64 == Dv % 64 == 0 and D > 64  # of one column a copy brings as much
        return dataclasses.replace(
            config, block_n=block_n, copy_keys=min(page, 64), whole_rows=whole_rows
        )
    if bias_bits == 0:
        return config
    # a tile of the bias beside the others, of whole boxes: what shared memory holds
    return dataclasses.replace(
        config,
        bias_bits=bias_bits,
        stages=2,
        block_n=128 if config.head_dim <= 128 else 64,
    )


def quantized_config(D: int, Dv: int, has_16_bits: bool = False) -> QuantizedConfig:
    """The tile of the forward with 8-bit products; `has_16_bits`: of a call of 16-bit tensors.

    On an H200, 128 features take 1.07x to 1.09x of the time with two consumers, 1.00x to 1.03x with
    one slot for queries, 1.05x with sums of 512 keys, 1.01x to 1.04x where consumers take turns
    until their products end. A quarter of the exponentials as polynomials take 1.00x to 1.01x, and
    0.98x to 1.00x with 64 features. 256 features take 1.01x to 1.02x where two consumers take
    turns, 1.11x to 1.12x with 64 keys, 1.23x to 1.26x where exponentials too are computed during
    the product with values.
    """
    if max(D, Dv) > 128:  # what shared memory holds
        return QuantizedConfig(D, Dv, 128, stages=2 if Dv > 128 else 3, query_stages=1)
    return QuantizedConfig(
        D, Dv, stages=4 if Dv <= 64 else 3, query_stages=1 if has_16_bits else 2,
        quantises_queries=has_16_bits,
    )  # fmt: skip


def short_config(config: Config, Sq: int, keys: int) -> Config:
    """The tile in place of `config`, for heads of up to 64 features, where sequences are so short
    that 256 rows are mostly empty, and its loop over keys has few steps.

    On an H200, 6784 heads of 77 tokens take 87 us with two CTAs of 128 rows, 147 with one of 256;
    10464 of 50 tokens 77 with three CTAs of 64 rows, 157 with one. From 197 tokens on one is
    faster, unless a second tile would be nearly empty: 1.15x with 257 tokens.
    """
    if config.head_dim > 64 or config.block_m != 256 or config.copy_keys or keys > 512:
        return config
    dims = config.head_features, config.value_features
    if Sq <= 64:
        return Config(*dims, 64, 96, stages=2, ctas=3)
    rows, fewer = -(-Sq // 256) * 256, -(-Sq // 128) * 128
    return (
        Config(*dims, 128, 48, stages=3, query_stages=2, ctas=2) if rows >= 1.3 * fewer else config
    )


def _has_three_consumers(D: int, Dv: int, differs_by_row: bool) -> bool:
    """Whether three consumers and 96 keys are faster than two and 128 for D from 72 to 112.

    On an H200 by 1.05x to 1.10x with D a multiple of 16, and by 1.3x to 1.4x with others, as 128
    keys and such columns of values make slow products; with ALiBi and ranges of documents 0.93x to
    1.05x. Registers of three consumers hold no more features.
    """
    makes_slow_products = D % 16 > 0 or Dv % 16 > 0
    return Dv <= 112 and (makes_slow_products or not differs_by_row)


def _forward_config(D: int, Dv: int, few_registers: bool) -> Config:
    head_dim = padded(D)
    if head_dim == 64 and few_registers:
        # slower with two stages, and with two consumers of more keys
        return Config(D, Dv, 192, 128, stages=3)
    if head_dim == 64:
        # what registers hold: exponentials and products overlap best with four consumers; slower
        # with three of 96 to 128 keys, but for 2 % in full attention of 16k. The second slot for
        # queries matters where tiles are short
        return Config(D, Dv, 256, 64, stages=4, query_stages=2)
    if head_dim == 128:
        # slower with a threshold of 0, with two stages, as keys are held to the end of a step, and
        # with 144 to 176 keys but for full attention from 8k on
        return Config(D, Dv, 128, 128, stages=3)
    if head_dim == 192:
        # what shared memory holds
        return Config(D, Dv, 128, 128 if Dv <= 128 else 112)
    # as fast as 64 keys; slower with a threshold of 0, as rescaling 256 columns is expensive
    return Config(D, Dv, 128, 80)


def backward_config(
    D: int, Dv: int, deterministic: bool = False, bias_bits: int = 0, few_registers: bool = False,
    prefers_pairs: bool = False, skips_tiles: bool = False, whole_heads: bool = False,
    differs_by_row: bool = False, sums_rows: bool = False, sums_distances: bool = False,
) -> BackwardConfig:  # fmt: skip
    """The backward's tiles.

    `few_registers`: a mask's bits, dropout or a softcap take registers. `prefers_pairs`: whether
    pairs of CTAs are faster where both are possible, see `backward.py`. `skips_tiles`: as the
    forward's. `whole_heads`: whether a CTA for all keys of a head is faster, see `backward.py`;
    it adds in the same order every time. `sums_rows`: it needs no other kernel before it.
    `differs_by_row`: key ranges, lengths or ALiBi. `sums_distances`: the gradient of a term of
    distances is wanted.
    """
    if max(D, Dv) > 256:
        return WideBackwardConfig(512, 512)
    can_pair = min(D, Dv) > 240 and not (deterministic or bias_bits or few_registers)
    if can_pair and prefers_pairs:
        return BackwardConfig(padded(D), padded(Dv), is_paired=True)
    config = _backward_config(D, Dv, deterministic and not whole_heads)
    head_dim = config.head_dim
    if head_dim == 64 and config.adds_dq and not (bias_bits or few_registers):
        # what registers hold: fewer meetings of the consumers, and fewer, larger additions to dQ;
        # what shared memory holds: with a second slot for keys, 1.02x to 1.09x as fast on an H200,
        # most with few keys, but for key ranges, and not timed with lengths and ALiBi
        config = dataclasses.replace(config, block_m=128, key_slots=1 if differs_by_row else 2)
    if whole_heads:
        if config.needs_parts_of_heads:
            return backward_config(D, Dv, deterministic)
        config = dataclasses.replace(config, whole_heads=True, sums_rows=sums_rows)
    buffers = 1 if head_dim == 256 and bias_bits else 2
    return dataclasses.replace(
        config, bias_bits=bias_bits, buffers=buffers, skips_tiles=skips_tiles,
        sums_distances=sums_distances,
    )  # fmt: skip


def _backward_config(D: int, Dv: int, deterministic: bool) -> BackwardConfig:
    if padded(D) == padded(Dv) <= 128:
        # registers hold dK and dV of 64 keys, and dQ; a consumer with both has as many of each
        config = BackwardConfig(max(D, Dv), max(D, Dv), adds_dq=not deterministic)
        if config.head_dim == 64:
            return dataclasses.replace(config, query_block_n=128, query_stages=4)
        return dataclasses.replace(config, query_block_n=64, query_stages=6)
    # what shared memory holds
    slots = 3 if padded(D) == 256 else 5
    return BackwardConfig(D, Dv, is_wide=True, adds_dq=False, block_n=64, query_stages=slots)


def group_parts(group: int, items: int, processors: int, waves: int = 6) -> int:
    """Into how many parts the backward cuts a group of query heads: the fewest, of equal size, that
    make enough work of `items` blocks of keys: `waves` for each processor, so that the longest of a
    causal call end evenly. Where there are several, dK and dV are added in memory."""
    for parts in range(1, group):
        if group % parts == 0 and items * parts >= waves * processors:
            return parts
    return group


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """One CTA on a multiprocessor, and a ring of tiles of 16 keys for each attending warp."""

    head_dim: int
    value_dim: int
    rows: int  # queries of a kv head, padded
    copy_keys: int  # that one copy brings; 1: keys are gathered by 16-byte copies
    warps: int  # that attend
    whole_rows: bool  # a copy brings keys with all their features
    is_e4m3: bool = False  # keys and values, of one byte
    scales: int = 0  # one of the constants of `types`

    kernel, features, merge_threads = "decode", _DECODE, 256
    # bytes of an element of a partial result, and statistics of a row, as in the kernel
    partial_bytes, stats_per_row = 4, 1

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 32 * (self.warps + (2 if self.copy_keys == 1 else 1))

    @property
    def block_n(self) -> int:
        """Keys of a tile."""
        return 16 * self.warps

    @property
    def stages(self) -> int:
        """About 100 KB in flight."""
        return max(2, (96 << 10) // self._tile_bytes)

    @property
    def whole_tiles(self) -> int:
        """Tiles that one CTA attends as fast as several CTAs attend parts and others merge these.

        Where few CTAs read memory, a tile of 64 KB takes about 0.8 us and one of 32 KB 0.43 us, and
        a second kernel 2.4 us.
        """
        return 1 + (192 << 10) // self._tile_bytes

    def row_bytes(self, dim: int) -> int:
        """Bytes of a key or value in a column of shared memory."""
        return 64 if self.is_e4m3 and dim <= 64 else 128

    @property
    def _tile_bytes(self) -> int:
        size = 1 if self.is_e4m3 else 2
        rows = ((dim * size, self.row_bytes(dim)) for dim in (self.head_dim, self.value_dim))
        return self.block_n * sum(-(-width // column) * column for width, column in rows)

    @property
    def _scales_bytes(self) -> int:
        """Bytes of a tile's scales: a key's and a value's for each copy, or for each token."""
        copies = self.block_n // self.copy_keys if self.copy_keys >= 16 else self.block_n
        count = {PAGE_SCALES: copies, TOKEN_SCALES: self.block_n}
        return 8 * count.get(self.scales, 0)

    @property
    def _pages_bytes(self) -> int:
        """Bytes of the bits that tell which copies, or gathered keys, have a page."""
        return -(-self.stages * 4 * _words(self.block_n // self.copy_keys) // 8) * 8

    @property
    def _fixed_bytes(self) -> int:
        queries = 2 * (self.rows * self.head_dim * 2 + 48)
        return queries + self.warps * self.rows * (self.value_dim * 4 + 8)

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a CTA."""
        tiles = self.stages * (self._tile_bytes + self._scales_bytes)
        barriers = 8 * (4 + 3 * self.stages)
        return tiles + self._fixed_bytes + self._pages_bytes + barriers

    def defines(self, **_: int) -> dict[str, int]:
        """The macros of this configuration."""
        return {
            "HEAD_DIM": self.head_dim, "VALUE_DIM": self.value_dim, "ROWS": self.rows,
            "WARPS": self.warps, "STAGES": self.stages, "COPY_KEYS": self.copy_keys,
            "WHOLE_ROWS": int(self.whole_rows), "SHARED_BYTES": self.shared_bytes,
            "WHOLE_TILES": self.whole_tiles, "IS_E4M3": int(self.is_e4m3),
            "HAS_SCALES": self.scales,
        }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class MlaConfig:
    """Two warpgroups attend 64 rows, in two buffers of 64 keys that hold their values too."""

    copy_keys: int  # that one copy brings; 1: keys are gathered by 16-byte copies
    head_dim: int = 576
    value_dim: int = 512
    rescale_threshold: int = 8  # as the forward's

    kernel, features, threads, merge_threads = "mla", _MLA, 384, 512
    rows = 64
    block_n = 64
    partial_bytes, stats_per_row = 2, 2  # as in DecodeConfig

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a CTA."""
        tiles = (self.rows + 2 * self.block_n) * self.head_dim * 2
        barriers = 2 + 2 * self.head_dim // 64 + 4 + 2
        staged = 8 * 16 * 64  # of each warp 32 columns of its rows
        pages = 2 * 4 * _words(self.block_n // self.copy_keys)
        return tiles + staged + 6 * self.rows * 4 + 2 * 32 + pages + 8 * barriers

    def defines(self, **_: int) -> dict[str, int]:
        """The macros of this configuration."""
        return {
            "HEAD_DIM": self.head_dim, "VALUE_DIM": self.value_dim, "BLOCK_N": self.block_n,
            "COPY_KEYS": self.copy_keys, "RESCALE_THRESHOLD": self.rescale_threshold,
            "ROWS": self.rows, "SCALES_DIFFERENCES": 1, "SHARED_BYTES": self.shared_bytes,
        }  # fmt: skip


def _words(bits: int) -> int:
    """Words of 32 bits."""
    return -(-bits // 32)


def decode_config(
    D: int, Dv: int, rows: int, page: int, is_e4m3: bool = False, scales: int = 0
) -> DecodeConfig:
    """The decoding kernel's configuration; `rows`: queries of a KV head."""
    head_dim, value_dim = padded(D), padded(Dv)
    warps = 8 if max(head_dim, value_dim) <= 128 else 4  # what shared memory holds
    keys, rows = copy_keys(page), 8 if rows <= 8 else 16
    # of other dims a copy would bring features of the next row; 128 of e4m3 are one column
    whole_rows = D == Dv == 128 and not is_e4m3 and keys > 1
    return DecodeConfig(head_dim, value_dim, rows, keys, warps, whole_rows, is_e4m3, scales)


def mla_config(page: int) -> MlaConfig:
    """The configuration of decoding over a latent cache."""
    keys = copy_keys(page)
    return MlaConfig(keys if keys >= 8 else 1)


def has_latent_dims(D: int, Dv: int) -> bool:
    """Whether head dimensions are those of the kernel for latent caches."""
    return (D, Dv) == (MlaConfig.head_dim, MlaConfig.value_dim)
