// Rows of activations times blocks of a packed weight: how both are cut into register tiles.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/kernels.h"

namespace topg {

constexpr int kCacheLine = 64;
constexpr int kMaxPrefetchLines = 4;

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

// Fetches the block after `block` evenly over the row tiles of the current one.
class BlockPrefetch {
 public:
  BlockPrefetch(const PackedWeight& weight, int tiles) {
    const int64_t steps = int64_t(padded_columns(weight.format, weight.columns)) / 4;
    const int64_t lines = int64_t(weight.bytes_per_block() + kCacheLine - 1) / kCacheLine;
    const int64_t needed = (lines + steps * tiles - 1) / (steps * tiles);
    lines_per_step_ = int(needed < kMaxPrefetchLines ? needed : kMaxPrefetchLines);
    bytes_per_tile_ = steps * lines_per_step_ * kCacheLine;
  }

  // What row tile `tile` fetches of the block at `next`; the first tiles fetch all of it when there are many.
  void set(TileArguments& arguments, const uint8_t* next, int64_t next_bytes, int tile) const {
    const int64_t offset = tile * bytes_per_tile_;
    const bool useful = next != nullptr && offset < next_bytes;
    arguments.prefetch = useful ? next + offset : nullptr;
    arguments.prefetch_lines = useful ? lines_per_step_ : 0;
  }

 private:
  int lines_per_step_;
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
  const int64_t block_size = int64_t(weight.bytes_per_block());
  TileArguments arguments{&x, 0, 0, nullptr, slab, nullptr, 0};
  for (int block = first_block; block < last_block; block++) {
    arguments.block = weight.block(block);
    const uint8_t* next = block + 1 < last_block ? arguments.block + block_size : nullptr;
    for (int tile = 0; tile < tiles.tiles; tile++) {
      arguments.row = first_row + tiles.begin(tile);
      arguments.rows = tiles.size(tile);
      prefetch.set(arguments, next, block_size, tile);
      kernel.tile(weight.format, arguments);
      epilogue(arguments.row, arguments.rows, block, static_cast<const float*>(slab));
    }
  }
}

}  // namespace topg
