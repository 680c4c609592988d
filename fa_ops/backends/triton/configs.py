"""Tiles and compiler options of the Triton kernels, by GPU and head dimension."""

from __future__ import annotations

import dataclasses
import functools

import torch

from fa_ops.backends.triton.launch import INTERPRETED, VERSION, Class, padded

# Tile tables of the forward kernel, by GPU and head dimension.


@dataclasses.dataclass(frozen=True)
class Tile:
    """Block sizes and compiler options of one kernel."""

    block_m: int  # query rows
    block_n: int  # keys
    num_warps: int
    num_stages: int
    maxnreg: int | None = None

    def options(self) -> dict[str, int | None]:
        """The compiler options."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "maxnreg": self.maxnreg}


def forward_tile(
    arch: int, dtype: torch.dtype, head_dim: int, kind: Class, mode: str, page: int = 0
) -> Tile:
    """The forward tile for a GPU of capability `arch` and the larger of D and Dv.

    `dtype` is that of the inputs, `mode` that of `matrix_products.product`.
    """
    width, family = padded(head_dim), _family(arch)
    if mode in ("split", "loaded"):
        table = _FORWARD_SPLIT[family] if mode == "split" else _FORWARD_LOADED
        plain, other = table[max(32, width)]
        return other if kind.mask is not None or kind.slopes or kind.softcap else plain
    table = _FORWARD_FP32 if dtype == torch.float32 else _FORWARD[family]
    plain, other = table[max(64, width)]
    if dtype == torch.float32 and arch < 90 and VERSION >= (3, 8):
        # threads of four warps spill sums in the loop, with 255 registers; those of eight have 104
        plain = dataclasses.replace(plain, num_warps=8)
    # more work between the products than masks by position
    heavy = kind.dropout is not None or not kind.fold or kind.mask is not None
    # a smaller tile may lie in one page, and if not, it has fewer addresses
    return other if heavy or page % plain.block_n else plain


def _family(arch: int) -> str:
    """The row of `_FORWARD` for GPUs with the same tensor instructions and similar memory."""
    if arch in (80, 87):
        return "A100"
    if arch == 90:
        return "H100"
    if 100 <= arch < 120:
        return "B200"
    return "consumer"  # 99 KB of shared memory: sm_86, sm_89, sm_120


# Per width of a head: (the plain tile, the tile where scores get more than masks by position).
# A tile has to fit the shared memory, also with a float mask in fp32 in flight, and 255 registers;
# `tests/compile_only` holds every row to that. Figures are TFLOP/s on an H200, bf16, 16384 tokens,
# full and causal, S = 8192. Three stages where they fit: Triton issues a load at the end of the
# iteration before the one that two stages would need it in (D = 128, S = 2048: 441 -> 485).
_FORWARD = {
    "A100": {
        64: (Tile(128, 64, 8, 3), Tile(128, 64, 8, 3)),
        128: (Tile(128, 64, 8, 3), Tile(128, 32, 8, 2)),
        256: (Tile(64, 64, 8, 2), Tile(64, 32, 8, 2)),
        512: (Tile(64, 32, 8, 2), Tile(32, 32, 8, 2)),
    },
    "consumer": {
        64: (Tile(128, 64, 8, 3), Tile(128, 64, 8, 2)),
        128: (Tile(128, 64, 8, 2), Tile(128, 32, 8, 2)),
        256: (Tile(64, 32, 8, 2), Tile(64, 32, 8, 2)),
        512: (Tile(32, 16, 8, 2), Tile(32, 16, 8, 2)),
    },
    "H100": {
        # 419 / 400. 127 registers, so two blocks share a multiprocessor and one's softmax hides
        # under the other's products; 128 x 128 leaves room for one block and takes 1.2x the time;
        # 4 warps 429 / 397 but 333 to 339 for short causal rows; 64 rows 397 / 387
        64: (Tile(128, 64, 8, 3), Tile(128, 64, 8, 3)),
        # 492 / 459. 64 rows, two blocks: 482 / 443. 64 keys read q from shared memory twice as
        # often: 1.1x the time
        128: (Tile(128, 128, 8, 3), Tile(128, 64, 8, 3)),
        # 551 / 504. The output alone takes 128 registers; 32 keys instead of 64: 1.1x the time
        256: (Tile(128, 64, 8, 2), Tile(64, 64, 8, 2)),
        512: (Tile(64, 32, 8, 2), Tile(64, 32, 8, 2)),
    },
    "B200": {
        64: (Tile(128, 64, 8, 3), Tile(128, 64, 8, 3)),
        128: (Tile(128, 64, 8, 3), Tile(128, 64, 8, 3)),
        256: (Tile(64, 64, 8, 2), Tile(64, 64, 8, 2)),
        512: (Tile(64, 32, 8, 2), Tile(64, 16, 8, 2)),
    },
}
# Without tf32 the products run on the ordinary units, one FMA per element and register.
_FORWARD_FP32 = {
    64: (Tile(64, 32, 4, 2), Tile(32, 32, 4, 2)),
    128: (Tile(64, 32, 8, 2), Tile(32, 32, 8, 2)),
    256: (Tile(32, 16, 8, 2), Tile(32, 16, 8, 2)),
    512: (Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
}
# How float32 is multiplied, see `matrix_products`. Calls of up to _SMALL scores times features take
# no second launch: with its allocations it takes the host longer than parts save. Microseconds of
# B1 H8 on an H200 for ordinary units, parts as they are loaded, and parts of a launch, without the
# host's time: D32 S512 (2**26) 57, 29, 23; D64 S128 30, 12, 16.
_SMALL = 1 << 26
# Rows of queries of one head of keys up to which a kernel divides what it loads, on Hopper (causal
# rows attend half). Parts as they are loaded, and of a launch, 16384 tokens, microseconds forward:
# D64 full S128 421, 546; S256 726, 725; causal S512 767, 839; D128 full S256 694, 810; S512 1293,
# 1239; causal S512 788, 917; S1024 1389, 1351. Backward: D64 S128 1319, 1394; S256 2249, 2053; D128
# S256 2558, 2640; S512 4578, 4331.
_LOADED_ROWS = 256


def float32_products(
    arch: int, scores: int, rows: int, head_dim: int, is_causal: bool, backward: bool
) -> str:
    """How a call of so many scores multiplies float32 on a GPU with fast bfloat16: "ieee",
    "loaded" or "split".

    `rows`: queries of the heads that share a head of keys, in a backward pass the larger of it and
    the number of keys; an average over packed sequences.
    """
    most = 128 if backward and head_dim <= 64 else _LOADED_ROWS
    small = scores * head_dim <= _SMALL
    if arch == 90 and (small or rows <= most * (1 + (is_causal and not backward))):
        return "loaded"
    return "ieee" if small else "split"


# float32 in three parts of 16 bits, by width: (the plain tile, the tile with masks and biases).
# TFLOP/s on an H200 at 2048 tokens: 67, 81, 68 (1536); 64 rows and four warps 65, 80, 50
_FORWARD_SPLIT = {
    "A100": {
        32: (Tile(64, 64, 4, 2), Tile(64, 32, 4, 2)),
        64: (Tile(64, 32, 4, 2), Tile(64, 32, 4, 2)),
        128: (Tile(64, 32, 8, 2), Tile(64, 32, 8, 2)),
    },
    "H100": {
        32: (Tile(64, 64, 4, 2, 128), Tile(64, 64, 4, 2, 128)),
        64: (Tile(128, 32, 8, 2, 128), Tile(128, 32, 8, 2, 128)),
        128: (Tile(128, 32, 8, 2), Tile(128, 32, 8, 1)),
    },
}
_FORWARD_SPLIT["B200"] = _FORWARD_SPLIT["A100"]
# The same on Hopper, of float32 that is divided as it is loaded.
_FORWARD_LOADED = {
    32: (Tile(64, 32, 4, 1), Tile(64, 32, 4, 1)),
    64: (Tile(64, 64, 4, 1), Tile(64, 32, 4, 1)),
    128: (Tile(64, 32, 4, 2), Tile(64, 32, 4, 1)),
}


def quantized_tile(arch: int, head_dim: int) -> Tile:
    """The tile of the forward kernel with 8-bit products."""
    family = "Hopper" if arch == 90 else "Blackwell" if 100 <= arch < 120 else "consumer"
    return _QUANTIZED[family][max(64, padded(head_dim))]


# Not measured: the largest that fit registers, beside a second accumulator for sums of fp8 tensor
# cores, and shared memory. On Hopper, the two warpgroups share 64 rows, so that wgmma reads weights
# from shared memory: results of Triton 3.6 are wrong where it reads them, in e4m3, from registers.
_QUANTIZED = {
    "consumer": {64: Tile(128, 64, 8, 3), 128: Tile(128, 64, 8, 3), 256: Tile(64, 64, 8, 2)},
    "Hopper": dict.fromkeys((64, 128, 256), Tile(64, 64, 8, 3)),
    "Blackwell": {64: Tile(128, 128, 8, 3), 128: Tile(128, 128, 8, 3), 256: Tile(64, 64, 8, 3)},
}


@dataclasses.dataclass(frozen=True)
class ShortTile(Tile):
    """The tile of a kernel that loops over the batch, see `short_rows`."""

    per_sm: int = 2  # programs for each multiprocessor

    def chunks(self, batch: int, programs: int, multiprocessors: int) -> int:
        """The number of parts of the batch, of `programs` programs each; equal ones if possible."""
        parts = max(1, min(batch, multiprocessors * self.per_sm // programs))
        return -(-batch // -(-batch // parts))


# Figures are microseconds on an H200, bf16, batch x heads x tokens, the bias shared by the batch:
# `bench forward --preset windows`. Threads of eight warps take 254 instead of 120 (64 tokens, two
# stages), a limit of 128 registers 88 instead of 76; 4 and 8 programs per multiprocessor 81 and 85.


@functools.cache
def short_forward_tile(Sq: int, Sk: int) -> ShortTile:
    """The forward tile that holds whole rows of Sk keys."""
    rows, keys = min(64, padded(Sq)), padded(Sk)
    # 2048 x 8 x 49, D 32: 76; one stage 142, two 120. 1024 x 8 x 64, D 64: 69, 95 and 96.
    # 256 x 12 x 128, D 64: two stages 85, one 110; 128 rows 97, eight warps 150
    return ShortTile(rows, keys, 4, 3 if keys <= 64 else 2)


@functools.cache
def short_backward_tile(Sq: int, Sk: int, head_dim: int, shared: bool) -> ShortTile:
    """The tile that holds all queries and keys of a head, in at least 32 rows each.

    shared: whether one bias is that of the whole batch.
    """
    # 2048 x 8 x 49, D 32: 167; two stages 215, one 320. 512 x 8 x 49 with own biases: one stage 89,
    # three 108. More than 32 features are not measured: with two stages, threads spill in the loop
    stages = 3 if shared and head_dim <= 32 else 1
    return ShortTile(max(32, padded(Sq)), max(32, padded(Sk)), 4, stages)


def holds_short_rows(arch: int, tokens: int, head_dim: int, backward: bool) -> bool:
    """Whether registers hold whole rows: `tests/compile_only` counts what the loop spills.

    The interpreter has no registers. tokens: the larger of Sq and Sk.
    """
    if arch == 90 or INTERPRETED:
        return True
    return tokens <= 64 and not (backward and head_dim > 32)


# Tile tables of the backward kernels, by GPU generation and by the wider of D and Dv.
#
# Times are of one H200, bf16, 16384 tokens and 2048 / D heads, at 2k and 8k tokens per sequence;
# the other generations were only compiled: theirs are the largest tiles that neither spill
# registers nor exceed shared memory. A `query_tile` has at least as many rows as the
# `key_value_tile` beside it, which reads whole blocks of the first kernel's row statistics.

# by generation: (query_tile, key_value_tile) for heads to 64, to 128 and to 256 wide
_HALF = {
    80: (  # 163 KiB of shared memory
        (Tile(128, 64, 8, 2), Tile(32, 128, 8, 2)),
        (Tile(128, 32, 8, 2), Tile(64, 64, 8, 2)),
        (Tile(64, 64, 8, 1), Tile(32, 64, 8, 1)),
    ),
    86: (  # 99 KiB
        (Tile(128, 64, 8, 2), Tile(32, 128, 8, 2)),
        (Tile(128, 32, 8, 2), Tile(64, 64, 8, 1)),
        (Tile(64, 32, 8, 1), Tile(32, 32, 8, 2)),
    ),
    90: (
        # two programs of four warps on a multiprocessor: one's exponentials hide under the other's
        # products; eight warps are 1 % faster for queries of full, 25 % slower of causal attention
        (Tile(128, 64, 4, 3), Tile(64, 64, 4, 3)),
        # key_value: 10 % faster than eight warps with 128 keys, in spite of spills before the loop
        (Tile(128, 64, 8, 3), Tile(64, 64, 4, 2)),
        (Tile(128, 64, 8, 1), Tile(64, 64, 8, 2)),
    ),
    100: (
        (Tile(128, 64, 8, 3), Tile(64, 128, 8, 2)),
        (Tile(128, 64, 8, 2), Tile(32, 64, 8, 2)),
        (Tile(128, 64, 8, 1), Tile(32, 64, 8, 1)),
    ),
}
_SINGLE = (
    (Tile(32, 32, 4, 2), Tile(32, 64, 8, 2)),
    (Tile(32, 32, 4, 2), Tile(32, 32, 8, 2)),
    (Tile(16, 16, 4, 2), Tile(16, 16, 8, 2)),
)
# float32 in three parts of 16 bits, by width
_SPLIT = {
    80: {
        32: (Tile(64, 32, 4, 1), Tile(32, 64, 4, 1)),
        64: (Tile(64, 32, 4, 1), Tile(32, 64, 4, 1)),
        128: (Tile(32, 32, 4, 1), Tile(32, 32, 8, 1)),
    },
    90: {
        32: (Tile(64, 64, 4, 2, 168), Tile(64, 64, 4, 2, 168)),
        64: (Tile(64, 64, 4, 1), Tile(32, 64, 4, 2)),
        128: (Tile(64, 64, 8, 1), Tile(64, 64, 8, 1)),
    },
}

_LOADED_NARROW = Tile(64, 64, 4, 1), Tile(64, 64, 4, 1)  # with 168 registers they spill 576 bytes

# Heads to 512 wide: (query_tile, that of dk, that of dv). dq and dk read from four tiles in shared
# memory, of which Hopper's holds one stage; dv reads from three, and has two.
_WIDE_HALF = {
    80: (Tile(64, 16, 8, 1), Tile(16, 64, 8, 1), Tile(16, 64, 8, 2)),
    86: (Tile(32, 16, 8, 1), Tile(16, 32, 8, 1), Tile(16, 32, 8, 2)),
    90: (Tile(64, 32, 8, 1), Tile(32, 64, 8, 1), Tile(32, 64, 8, 2)),
    100: (Tile(64, 16, 8, 2), Tile(32, 64, 8, 1), Tile(32, 64, 8, 1)),
}
_WIDE_SINGLE = Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)  # 128 KiB


def divides(mode: str, head_dim: int) -> bool:
    """Whether the backward kernels need `matrix_products.divided`: 64 rows for eight warps."""
    return head_dim > (64 if mode in ("split", "loaded") else 256)


def backward_tiles(
    arch: int, dtype: torch.dtype, head_dim: int, mode: str = "ieee"
) -> tuple[Tile, ...]:
    """Tiles of `query_grad_kernel` and of each launch of `key_value_grad_kernel` on a GPU of
    capability `arch`: one for both gradients, or one for dk and one for dv.

    `head_dim` is the larger of D and Dv, `mode` that of `matrix_products.product`.
    """
    if mode in ("split", "loaded"):
        if mode == "loaded" and head_dim <= 32:
            return _LOADED_NARROW
        return _SPLIT[90 if arch == 90 else 80][max(32, padded(head_dim))]
    size = max(padded(head_dim), 64).bit_length() - 7
    if dtype == torch.float32:
        return _WIDE_SINGLE if size == 3 else _SINGLE[size]
    generation = _generation(arch)
    return _WIDE_HALF[generation] if size == 3 else _HALF[generation][size]


def holds_wide_single(arch: int) -> bool:
    """Whether a GPU's shared memory holds the tiles of float32 and heads over 256 wide."""
    return _generation(arch) != 86


def _generation(arch: int) -> int:
    """The key of `_HALF` for GPUs with the same instructions and as much shared memory."""
    if arch in (80, 87):
        return 80
    if 90 <= arch < 120:
        return 90 if arch < 100 else 100
    return 86


# Tiles of the kernels of tangents: of out, of dq, and of dk and dv, by GPU generation and width.
# Four tiles of scores are alive at a time, beside the sums. Measured on an H200 where figures are.
_TANGENTS = {
    80: {
        64: (Tile(128, 64, 8, 2), Tile(64, 64, 4, 1), Tile(32, 64, 4, 1)),
        128: (Tile(128, 32, 8, 2), Tile(64, 32, 8, 1), Tile(32, 64, 8, 1)),
        256: (Tile(64, 32, 8, 1), Tile(32, 16, 8, 1), Tile(16, 32, 8, 1)),
    },
    86: {
        64: (Tile(64, 64, 4, 1), Tile(64, 32, 4, 1), Tile(32, 64, 4, 1)),
        128: (Tile(64, 32, 8, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
        256: (Tile(32, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
    },
    90: {
        # of the tangent of out 3.3 ms at 8k tokens, causal, 128 rows and 8 warps 4.2; 128 wide 3.4;
        # of the gradients' tangents 11.4 and 10.7 ms; eight warps 15 and 36
        64: (Tile(64, 64, 4, 3), Tile(64, 32, 4, 2), Tile(64, 64, 4, 2)),
        128: (Tile(128, 64, 8, 2), Tile(64, 32, 4, 2), Tile(32, 64, 4, 1)),
        256: (Tile(32, 32, 8, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    },
}
_TANGENTS[100] = _TANGENTS[80]
_TANGENTS_SINGLE = {
    64: (Tile(32, 32, 4, 1),) * 3,
    128: (Tile(32, 16, 8, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
    256: (Tile(16, 16, 8, 1),) * 3,
}


def tangent_tiles(arch: int, dtype: torch.dtype, head_dim: int) -> tuple[Tile, Tile, Tile]:
    """Tiles of `tangent_kernel`, `second_query_kernel` and `second_key_kernel`."""
    table = _TANGENTS_SINGLE if dtype == torch.float32 else _TANGENTS[_generation(arch)]
    return table[max(64, padded(head_dim))]


def mask_tile(dtype: torch.dtype, head_dim: int) -> Tile:
    """Tile of `mask_grad_kernel`: q, k, v and dO fill 64 KiB of shared memory, on every GPU."""
    width = padded(head_dim) * dtype.itemsize
    side = 64 if width <= 256 else 32 if width <= 512 else 16
    return Tile(side, side, 4, 1)


# Tiles of the decoding kernels: keys per step, warps, stages, and programs per multiprocessor.


@dataclasses.dataclass(frozen=True)
class DecodeTile:
    """Block sizes and compiler options of the split kernel."""

    block_m: int  # query rows
    block_n: int  # keys
    num_warps: int
    num_stages: int
    per_sm: int  # programs that a multiprocessor holds at once

    def options(self) -> dict[str, int]:
        """The compiler options."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


# Keys of a piece under `batch_invariant`: few enough that one sequence of 32k keys with 8 kv heads
# fills 132 multiprocessors twice, and a multiple of every block_n below.
FIXED_KEYS = 1024

# A call is light if a multiprocessor has at most this many keys to read: then one program, with
# fewer pieces to merge, may suffice; otherwise two, one of which loads while the other computes.
LIGHT_KEYS = 2048

MERGE_WARPS, MERGE_PARTS = 4, 16


def decode_tile(
    arch: int, dtype: torch.dtype, fp8: bool, D: int, Dv: int, rows: int, light: bool
) -> DecodeTile:
    """The tile for `rows` query rows per kv head. More than 32 go to several programs: with 64,
    Triton takes wgmma on Hopper, and there its accumulators spill from D = 256 on."""
    width = min(512, max(64, padded(D), padded(Dv)))
    roomy = arch in (80, 87, 90) or 100 <= arch < 120
    if dtype == torch.float32:
        return _FP32[width]
    table = (_ROOMY_FP8 if fp8 else _ROOMY) if roomy else _SMALL_CACHE
    tile = table[width][light] if roomy else table[width]
    if rows <= 16 or not roomy:
        return tile
    if width == 512 and D <= 512 and not fp8:  # keys and values that share no memory
        return DecodeTile(32, 32, 8, 3, 1)
    return dataclasses.replace(tile, block_m=32, num_warps=8 if width > 128 else tile.num_warps)


# By the larger head dimension: (the tile, the tile of light calls). Bytes in flight decide, some
# 64 to 96 KB per multiprocessor. With heads of 128, two programs of 3 stages are faster than one of
# 4 for light calls too (`bench decode`), but for one row of 8k keys, where they are equal.
_ROOMY = {
    64: (DecodeTile(16, 128, 4, 3, 2), DecodeTile(16, 128, 4, 4, 1)),
    128: (DecodeTile(16, 64, 4, 3, 2), DecodeTile(16, 64, 4, 3, 2)),
    256: (DecodeTile(16, 32, 4, 3, 2), DecodeTile(16, 32, 4, 4, 1)),
    512: (DecodeTile(16, 64, 8, 2, 1), DecodeTile(16, 64, 8, 2, 1)),
}
_ROOMY_FP8 = {
    64: (DecodeTile(16, 128, 4, 4, 3), DecodeTile(16, 128, 4, 4, 1)),
    128: (DecodeTile(16, 64, 4, 4, 3), DecodeTile(16, 128, 4, 4, 1)),
    256: (DecodeTile(16, 64, 4, 3, 2), DecodeTile(16, 64, 4, 4, 1)),
    512: (DecodeTile(16, 64, 8, 2, 1), DecodeTile(16, 64, 8, 2, 1)),
}
_SMALL_CACHE = {  # 99 KB of shared memory
    64: DecodeTile(16, 64, 4, 3, 2),
    128: DecodeTile(16, 32, 4, 3, 2),
    256: DecodeTile(16, 32, 4, 2, 1),
    512: DecodeTile(16, 16, 4, 2, 1),
}
_FP32 = {
    64: DecodeTile(16, 32, 4, 2, 2),
    128: DecodeTile(16, 32, 4, 2, 2),
    256: DecodeTile(16, 16, 4, 2, 1),
    512: DecodeTile(16, 16, 4, 2, 1),
}
