"""Tiles with the queries of several heads of a group: which rows there are, and when they pay."""

import ctypes

import pytest

from fa_ops.backends.hopper.configs import forward_config, with_packed_heads
from tests.backends.cuda_as_cpp import SOURCES, built, needs_compiler

ROWS = """
#include "ptx.cuh"
#define BLOCK_M 128
static int atomicAdd(int*, int) {{ return 0; }}
struct ForwardParams {{ int B, Hq, section, m_blocks, *tile_counter; }};
{source}
extern "C" void run(int t, ForwardParams* p, int* to) {{
  const Tile tile = tile_at(*p, t);
  to[0] = tile.b;
  for (int i = 0; i < BLOCK_M; i++) {{
    const int row = tile.m0 + i;
    to[1 + 2 * i] = row % 64 < CONSUMER_ROWS ? query_of(row) : -1;
    to[2 + 2 * i] = tile.h + packed_head(row);
  }}
}}
"""


class Params(ctypes.Structure):
    _fields_ = [(n, ctypes.c_int) for n in ("B", "Hq", "section", "m_blocks")] + [
        ("counter", ctypes.c_void_p)
    ]


@needs_compiler
@pytest.mark.parametrize("heads, Hq", [(1, 6), (2, 4), (4, 8), (3, 6), (7, 14), (5, 10), (16, 32)])
def test_every_query_of_every_head_has_a_row(heads, Hq, tmp_path):
    text = (SOURCES / "tile_scheduler.cuh").read_text()
    source = text[text.index("struct Tile {") :]
    macros = f"#define PACKED_HEADS {heads}\n#define HAS_WINDOW {heads % 2}\n"
    macros += "#define HAS_RANGES 0\n#define HAS_MASK 0\n#define IS_BF16 1\n"
    run = built(tmp_path, "rows", macros + ROWS.format(source=source)).run
    B, Sq, per_tile = 3, 77, 2 * (64 // heads)
    m_blocks = -(-Sq // per_tile)
    params, found = Params(B, Hq, 2, m_blocks, None), (ctypes.c_int * 257)()
    seen = []
    for t in range(B * Hq // heads * m_blocks):
        run(t, ctypes.byref(params), found)
        rows = zip(found[1::2], found[2::2])
        seen += [(found[0], query, head) for query, head in rows if 0 <= query < Sq]
    assert len(seen) == len(set(seen)) == B * Hq * Sq
    assert set(seen) == {(b, q, h) for b in range(B) for q in range(Sq) for h in range(Hq)}


@pytest.mark.parametrize(
    "D, B, Hq, Hkv, Sq, heads",
    [
        (128, 8, 32, 8, 64, 4),  # 256 half empty tiles become 128
        (128, 4, 32, 8, 64, 1),  # all run at once anyway
        (128, 64, 28, 4, 77, 7),
        (128, 64, 96, 8, 64, 4),  # 12 heads would leave rows empty
        (64, 16, 64, 8, 64, 8),
        (128, 64, 32, 8, 256, 1),  # tiles are full
        (128, 8, 71, 1, 64, 1),  # no 64 rows hold whole queries of all heads
    ],
)
def test_heads_are_packed_where_tiles_take_fewer_rounds(D, B, Hq, Hkv, Sq, heads):
    config = with_packed_heads(forward_config(D, D), B, Hq, Hkv, Sq, 132)
    assert config.packed_heads == heads
