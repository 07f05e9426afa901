// Attention of query tokens over the pages of their sequence (AttentionKernel), block of keys by block of keys, each with its
// own maximum, sum and output, folded in order (arXiv 2205.14135).
#pragma once

#if defined(__AMX_INT8__)
#include "kernels/attention_amx.h"
#endif
#include "kernels/attention_block.h"
#include "kernels/attention_store.h"
#include "kernels/kernels.h"
#include "kernels/simd.h"
#include "kernels/vector_math.h"

namespace topg {
namespace {

// A block's rows into those before it.  A block without a visible key has a total of 0 and changes nothing; a total of NaN is
// not 0.
inline void fold_rows(const AttentionShape& shape, const AttentionState& to, const BlockResult& block, int rows) {
  const int dim = shape.kv.dim();
  for (int first = 0; first < rows; first += kLanes) {
    const int count = rows - first < kLanes ? rows - first : kLanes;
    const F32 old_maximum = load_first(to.maximum + first, count), new_maximum = load_first(block.maximum + first, count);
    const F32 most = max(old_maximum, new_maximum);
    float before[kLanes], now[kLanes], maximum[kLanes];
    store(before, exp2(old_maximum - most));
    store(now, exp2(new_maximum - most));
    store(maximum, most);
    for (int i = 0; i < count; ++i) {
      const int row = first + i;
      float* out = to.out + ptrdiff_t(row) * dim;
      const float* block_out = block.out + ptrdiff_t(row) * dim;
      if (block.total[row] == 0) continue;
      if (to.total[row] == 0) {
        for (int d = 0; d < dim; d += kLanes) store(out + d, load(block_out + d));
        to.maximum[row] = block.maximum[row];
        to.total[row] = block.total[row];
        continue;
      }
      for (int d = 0; d < dim; d += kLanes) {
        store(out + d, fma(load(out + d), splat(before[i]), load(block_out + d) * splat(now[i])));
      }
      to.total[row] = __builtin_fmaf(to.total[row], before[i], block.total[row] * now[i]);
      to.maximum[row] = maximum[i];
    }
  }
}

inline void fold_block(const AttentionShape& shape, float* out, float* maximum, float* total, const float* block_out,
                       float block_maximum, float block_total) {
  // A row of a block is only read.
  fold_rows(shape, {out, maximum, total}, {const_cast<float*>(block_out), &block_maximum, &block_total}, 1);
}

inline void finish_head(const AttentionShape& shape, const float* out, float total, float* head) {
  const int head_dim = shape.kv.head_dim;
  const F32 inverse = splat(1 / total);
  for (int i = 0; i < head_dim; i += kLanes) {
    const F32 x = load(out + i) * inverse;
    if (i + kLanes <= head_dim) {
      store(head + i, x);
    } else {
      store_first(head + i, x, head_dim - i);
    }
  }
  if (shape.kv.type == KVType::kInt8) transform_head(head, head_dim);  // values lie transformed
}

// The walk of one item over its blocks, and in each of them over its rows.
template <class Attention>
class ItemWalk {
 public:
  ItemWalk(const AttentionShape& shape, const Queries& queries, const uint8_t* pool, int layer, const AttentionItem& item)
      : shape_(shape), queries_(queries), pool_(pool), layer_(layer), item_(item) {}

  void run(const AttentionState& states, bool keep_blocks) {
    const int rows = item_.tokens * shape_.group();
    for (int block = item_.first_block; block < item_.last_block; ++block) {
      const ptrdiff_t kept = keep_blocks ? ptrdiff_t(block - item_.first_block) * rows : 0;
      const bool fresh = keep_blocks || block == item_.first_block;
      for (int row = 0; fresh && row < rows; ++row) states.maximum[kept + row] = -__builtin_inff(), states.total[kept + row] = 0;
      const Visible visible = united(visible_to(0, block), visible_to(rows - 1, block));
      if (!visible.any()) continue;
      BlockTiles tiles = find_tiles(block, visible);
      for (int row = 0; row < rows; row += Attention::kRows) {
        const int count = rows - row < Attention::kRows ? rows - row : Attention::kRows;
        tiles.fetch_values = row == 0;
        if (row + count == rows) find_next_keys(block, tiles);
        attend_rows(block, row, count, tiles, {states.out + kept * shape_.kv.dim(), states.maximum + kept, states.total + kept});
      }
    }
  }

 private:
  using Cache = typename Attention::Cache;
  static constexpr bool kInt8 = Cache::kStepKeys == 4;
  static constexpr int kElementBytes = 4 / Cache::kStepKeys;

  const uint8_t* tile_at(const AttentionItem& item, int token) const {
    const KVLayout& kv = shape_.kv;
    const size_t page = size_t(item.pages[token / kv.tokens_per_page]);
    return pool_ + page * kv.page_bytes() + kv.offset(layer_, item.kv_head, token % kv.tokens_per_page / kTileKeys);
  }

  // The block's tiles as far as any row of the item sees them.
  BlockTiles find_tiles(int block, const Visible& visible) {
    const KVLayout& kv = shape_.kv;
    BlockTiles tiles;
    tiles.shrink_to(visible);
    for (int i = tiles.first; i < tiles.end; ++i) {
      tiles.keys[i] = tile_at(item_, block * kKeyBlock + i * kTileKeys);
      tiles.values[i] = tiles.keys[i] + kv.half_tile_bytes();
    }
    if constexpr (kInt8) {
      collect_scales(visible, tiles);
    } else {
      clean_.apply(kv, visible, tiles);
    }
    return tiles;
  }

  void collect_scales(const Visible& visible, BlockTiles& tiles) {
    for (int i = 0; i < kKeyBlock; i += kLanes) {
      const int tile = i / kTileKeys;
      const bool in_use = tile >= tiles.first && tile < tiles.end;
      const float* scales = in_use ? value_scales(shape_.kv, tiles.keys[tile]) + i % kTileKeys : nullptr;
      const F32 x = in_use ? select(visible_lanes(visible, i), load(scales), zero()) : zero();
      tiles.bad_scales = tiles.bad_scales || any(is_nan(x));
      store(clean_scales_ + i, x);
    }
    tiles.value_scales = clean_scales_;
  }

  // The keys that are read after this block: the item's next block, or the next item's first.
  void find_next_keys(int block, BlockTiles& tiles) const {
    const bool last = block + 1 == item_.last_block;
    const AttentionItem* item = last ? item_.next : &item_;
    if (item == nullptr) return;
    const int first = (last ? item->first_block : block + 1) * kKeyBlock, end = item->position + item->tokens;
    for (int i = tiles.first; i < tiles.end; ++i) {
      const int token = first + i * kTileKeys;
      if (token < end) tiles.next_keys[i] = tile_at(*item, token);
    }
  }

  // Keys of a block that a row sees.
  Visible visible_to(int row, int block) const {
    const int position = item_.position + row / shape_.group() - block * kKeyBlock;
    const int end = position + 1 < kKeyBlock ? position + 1 : kKeyBlock;
    const int begin = shape_.window == 0 ? 0 : position - shape_.window + 1;
    return {begin > 0 ? begin : 0, end};
  }

  void attend_rows(int block, int row, int rows, BlockTiles tiles, const AttentionState& states) {
    Visible visible[Attention::kRows];
    for (int r = 0; r < rows; ++r) visible[r] = visible_to(row + r, block);
    const Visible all = united(visible[0], visible[rows - 1]);
    if (!all.any()) return;
    tiles.shrink_to(all);
    alignas(64) float out[Attention::kRows * kMaxHeadDim];
    float maximum[Attention::kRows], total[Attention::kRows];
    attend_block<Attention>(shape_, queries_at(row, rows), tiles, visible, weights_, {out, maximum, total});
    for (int r = 0; r < rows; ++r) {
      if (!visible[r].any()) total[r] = 0;
    }
    fold_rows(shape_, {states.out + row * ptrdiff_t(shape_.kv.dim()), states.maximum + row, states.total + row},
              {out, maximum, total}, rows);
  }

  QueryTile queries_at(int row, int rows) const {
    const ptrdiff_t index = (ptrdiff_t(item_.kv_head) * queries_.rows + item_.row) * shape_.group() + row;
    const ptrdiff_t row_bytes = shape_.kv.dim() * ptrdiff_t(shape_.kv.element_bytes());
    const uint8_t* values = static_cast<const uint8_t*>(queries_.values) + index * row_bytes;
    return {values, queries_.scales + index, queries_.sums + index, row_bytes, rows};
  }

  const AttentionShape& shape_;
  const Queries& queries_;
  const uint8_t* pool_;
  const int layer_;
  const AttentionItem& item_;
  typename Attention::Weights weights_;
  CleanValues<kInt8 ? 0 : kElementBytes> clean_;
  alignas(64) float clean_scales_[kInt8 ? kKeyBlock : 1];
};

template <class Attention>
void attend(const AttentionShape& shape, const Queries& queries, const uint8_t* pool, int layer, const AttentionItem& item,
            const AttentionState& states, bool keep_blocks) {
  ItemWalk<Attention>(shape, queries, pool, layer, item).run(states, keep_blocks);
}

using Float32Attention = VectorAttention<Float32Cache>;
#if defined(__AMX_INT8__)
using BFloat16Attention = AmxBFloat16Attention;
using Int8Attention = AmxInt8Attention;
#else
using BFloat16Attention = VectorAttention<BFloat16Cache>;
using Int8Attention = VectorAttention<Int8Cache>;
#endif

inline AttentionKernel attention_kernel(KVType type) {
  AttentionKernel kernel;
  kernel.store_query = store_query;
  kernel.store_key = store_key;
  kernel.store_value = store_value;
  kernel.fold = fold_block;
  kernel.finish = finish_head;
  switch (type) {
    case KVType::kFloat32: kernel.name = "paged attention, float32", kernel.attend = attend<Float32Attention>; break;
    case KVType::kBFloat16: kernel.name = "paged attention, bfloat16", kernel.attend = attend<BFloat16Attention>; break;
    case KVType::kInt8: kernel.name = "paged attention, int8", kernel.attend = attend<Int8Attention>; break;
  }
  return kernel;
}

}  // namespace
}  // namespace topg
