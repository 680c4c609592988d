// The offsets of a tile's data in global memory, for the 8-bit forward kernel.
#pragma once
#include "quantized_shared.cuh"

#if PACKED_QUERIES
constexpr bool PACKS_SEQUENCES = true;
// Whether the tile's tokens belong to a sequence; tokens outside every sequence attend nothing.
DEVICE bool is_in_sequence(const QuantizedParams& p, const Tile& tile) { return (u32)tile.b < (u32)p.B; }

// The tile's sequence, clamped to an existing one.
DEVICE int batch_row(const QuantizedParams& p, const Tile& tile) { return max(0, min(tile.b, p.B - 1)); }

// The first key of the sequence, and its first block of keys.
DEVICE int2 key_start(const QuantizedParams& p, const Tile& tile) { return p.key_starts[batch_row(p, tile)]; }

// The first token of the tile's batch row in `out`.
DEVICE long long first_token(const QuantizedParams&, const Tile& tile) { return tile.first; }

// The same in arrays of shape (Hq, tokens).
DEVICE long long first_row(const QuantizedParams& p, const Tile& tile) {
  return (long long)tile.h * p.Sq + tile.first;
}

DEVICE long long first_key_scale(const QuantizedParams& p, const Tile& tile) {
  const long long head = tile.h / p.group;
  return head * ((p.Sk + 127) / 128 * 2) + 2 * key_start(p, tile).y;
}
#else
constexpr bool PACKS_SEQUENCES = false;
DEVICE bool is_in_sequence(const QuantizedParams&, const Tile&) { return true; }
DEVICE int batch_row(const QuantizedParams&, const Tile& tile) { return tile.b; }
DEVICE long long first_token(const QuantizedParams& p, const Tile& tile) { return (long long)tile.b * p.Sq; }
DEVICE long long first_row(const QuantizedParams& p, const Tile& tile) {
  return (long long)(tile.b * p.Hq + tile.h) * p.Sq;
}
DEVICE long long first_key_scale(const QuantizedParams& p, const Tile& tile) {
  const long long head = tile.b * (p.Hq / p.group) + tile.h / p.group;
  return head * ((p.Sk + 127) / 128 * 2);
}
#endif
