// Attention of query tokens over the pages of their sequence (AttentionKernel), block of keys by block of keys, each with its
// own maximum, sum and output, folded in order (arXiv 2205.14135).
#pragma once

#include "kernels/attention_block.h"
#include "kernels/attention_store.h"
#include "kernels/kernels.h"
#include "kernels/simd.h"
#include "kernels/vector_math.h"

namespace topg {
namespace {

TOPG_INLINE float power_of_two(float x) {
  float lanes[kLanes];
  store(lanes, exp2(splat(x)));
  return lanes[0];
}

// A block without a visible key has a total of 0 and changes nothing; a total of NaN is not 0.
inline void fold_block(const AttentionShape& shape, float* out, float* maximum, float* total, const float* block_out,
                       float block_maximum, float block_total) {
  if (block_total == 0) return;
  const int dim = shape.kv.dim();
  if (*total == 0) {
    __builtin_memcpy(out, block_out, size_t(dim) * sizeof(float));
    *maximum = block_maximum;
    *total = block_total;
    return;
  }
  const float most = *maximum > block_maximum ? *maximum : block_maximum;
  const float before = power_of_two(*maximum - most), now = power_of_two(block_maximum - most);
  for (int i = 0; i < dim; i += kLanes) {
    store(out + i, fma(load(out + i), splat(before), load(block_out + i) * splat(now)));
  }
  *total = __builtin_fmaf(*total, before, block_total * now);
  *maximum = most;
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
}

// The walk of one item over its rows and blocks.
template <class Cache>
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
      find_tiles(block);
      for (int row = 0; row < rows; row += kQueryRows) {
        tile_of_rows(block, row, rows - row < kQueryRows ? rows - row : kQueryRows, states, kept);
      }
    }
  }

 private:
  // Where the block's tiles lie, as far as the item's last token sees them.
  void find_tiles(int block) {
    const KVLayout& kv = shape_.kv;
    const int last = item_.position + item_.tokens - 1;
    const int keys = last + 1 - block * kKeyBlock < kKeyBlock ? last + 1 - block * kKeyBlock : kKeyBlock;
    tiles_.count = (keys + kTileKeys - 1) / kTileKeys;
    for (int i = 0; i < tiles_.count; ++i) {
      const int token = block * kKeyBlock + i * kTileKeys;
      const size_t page = size_t(item_.pages[token / kv.tokens_per_page]);
      const int tile = token % kv.tokens_per_page / kTileKeys;
      tiles_.tile[i] = pool_ + page * kv.page_bytes() + kv.offset(layer_, item_.kv_head, tile);
    }
  }

  Visible visible_to(int row, int block) const {
    const int position = item_.position + row / shape_.group() - block * kKeyBlock;
    const int end = position + 1 < kKeyBlock ? position + 1 : kKeyBlock;
    const int begin = shape_.window == 0 ? 0 : position - shape_.window + 1;
    return {begin > 0 ? begin : 0, end};
  }

  void tile_of_rows(int block, int row, int rows, const AttentionState& states, ptrdiff_t kept) {
    Visible visible[kQueryRows];
    int keys = 0;
    for (int r = 0; r < rows; ++r) {
      visible[r] = visible_to(row + r, block);
      if (visible[r].begin < visible[r].end && visible[r].end > keys) keys = visible[r].end;
    }
    if (keys == 0) return;
    BlockTiles tiles = tiles_;
    tiles.count = (keys + kTileKeys - 1) / kTileKeys;
    alignas(64) float out[kQueryRows * kMostDim];
    float maximum[kQueryRows], total[kQueryRows];
    attend_rows<kQueryRows>(rows, queries_at(row), tiles, keys, visible, {out, maximum, total});
    const int dim = shape_.kv.dim();
    for (int r = 0; r < rows; ++r) {
      if (visible[r].begin >= visible[r].end) continue;
      const ptrdiff_t state = kept + row + r;
      fold_block(shape_, states.out + state * dim, states.maximum + state, states.total + state, out + r * dim, maximum[r],
                 total[r]);
    }
  }

  template <int R>
  void attend_rows(int rows, const QueryTile& q, const BlockTiles& tiles, int keys, const Visible* visible,
                   const BlockResult& result) {
    if constexpr (R > 1) {
      if (rows < R) return attend_rows<R - 1>(rows, q, tiles, keys, visible, result);
    }
    attend_block<Cache, R>(shape_, q, tiles, keys, visible, result);
  }

  QueryTile queries_at(int row) const {
    const KVLayout& kv = shape_.kv;
    const ptrdiff_t index = (ptrdiff_t(item_.kv_head) * queries_.rows + item_.row) * shape_.group() + row;
    const uint8_t* values = static_cast<const uint8_t*>(queries_.values) + index * kv.dim() * ptrdiff_t(kv.element_bytes());
    return {values, queries_.scales + index, queries_.sums + index};
  }

  const AttentionShape& shape_;
  const Queries& queries_;
  const uint8_t* pool_;
  const int layer_;
  const AttentionItem& item_;
  BlockTiles tiles_{};
};

template <class Cache>
void attend(const AttentionShape& shape, const Queries& queries, const uint8_t* pool, int layer, const AttentionItem& item,
            const AttentionState& states, bool keep_blocks) {
  for (int i = 0; item.next != nullptr && i < 64; ++i) prefetch_l2(item.next + i * 64);
  ItemWalk<Cache>(shape, queries, pool, layer, item).run(states, keep_blocks);
}

inline AttentionKernel attention_kernel(KVType type) {
  AttentionKernel kernel;
  kernel.store_query = store_query;
  kernel.store_key = store_key;
  kernel.store_value = store_value;
  kernel.fold = fold_block;
  kernel.finish = finish_head;
  switch (type) {
    case KVType::kFloat32: kernel.name = "paged attention, float32 cache", kernel.attend = attend<Float32Cache>; break;
    case KVType::kBFloat16: kernel.name = "paged attention, bfloat16 cache", kernel.attend = attend<BFloat16Cache>; break;
    case KVType::kInt8: kernel.name = "paged attention, int8 cache", kernel.attend = attend<Int8Cache>; break;
  }
  return kernel;
}

}  // namespace
}  // namespace topg
