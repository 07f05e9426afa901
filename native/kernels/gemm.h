// Rows of activations times blocks of a packed weight: how both are cut into register tiles.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/kernels.h"

namespace topg {

constexpr int kCacheLine = 64;

// Floats of the slab that `multiply` needs.
inline size_t slab_floats(const LinearKernel& kernel) { return size_t(kernel.max_rows) * kBlockChannels; }

// Rows [first, first + count) in as few tiles as max_rows allows, as even as possible: two tiles of 4 beat one of 6 and one
// of 2, because small tiles reload the weights more often.
struct RowTiles {
  int count, tiles;

  RowTiles(int rows, int max_rows) : count(rows), tiles((rows + max_rows - 1) / max_rows) {}
  int begin(int tile) const { return int(int64_t(count) * tile / tiles); }
  int size(int tile) const { return begin(tile + 1) - begin(tile); }
};

// Fetches the block after the current one, evenly over the inner steps of all its row tiles: in bursts, fetching would hold up
// the loads of the current block.
class BlockPrefetch {
 public:
  BlockPrefetch(const PackedWeight& weight, int tiles) {
    const int64_t steps = round_up(padded_columns(weight.format, weight.columns), 4) / 4;
    bytes_per_step_ = int((int64_t(weight.bytes_per_block()) + steps * tiles - 1) / (steps * tiles));
    bytes_per_tile_ = steps * bytes_per_step_;
  }

  // What row tile `tile` fetches of the block at `next`, which may be null.
  void set(TileArguments& arguments, const uint8_t* next, int tile) const {
    arguments.prefetch = next != nullptr ? next + tile * bytes_per_tile_ : nullptr;
    arguments.prefetch_bytes = next != nullptr ? bytes_per_step_ : 0;
  }

 private:
  int bytes_per_step_;
  int64_t bytes_per_tile_;
};

// For each block of [first_block, last_block) and each tile of the rows [first_row, first_row + rows):
//   epilogue(row, tile_rows, block, c)   with c [tile_rows][32] the products of rows row .. row + tile_rows - 1
// A block's tiles come one after the other, so its weights are read from L2 or nearer after the first.
// `slab` holds slab_floats(kernel) floats, 64-byte aligned.
template <class Epilogue>
void multiply(const LinearKernel& kernel, const PackedWeight& weight, const Activations& x, int first_row, int rows,
              int first_block, int last_block, float* slab, Epilogue&& epilogue) {
  if (rows <= 0) return;
  const RowTiles tiles(rows, kernel.max_rows);
  const BlockPrefetch prefetch(weight, tiles.tiles);
  TileArguments arguments{&x, 0, 0, nullptr, slab, nullptr, 0};
  for (int block = first_block; block < last_block; block++) {
    arguments.block = weight.block(block);
    const uint8_t* next = block + 1 < last_block ? weight.block(block + 1) : nullptr;
    for (int tile = 0; tile < tiles.tiles; tile++) {
      arguments.row = first_row + tiles.begin(tile);
      arguments.rows = tiles.size(tile);
      prefetch.set(arguments, next, tile);
      kernel.tile(weight.format, arguments);
      epilogue(arguments.row, arguments.rows, block, static_cast<const float*>(slab));
    }
  }
}

}  // namespace topg
