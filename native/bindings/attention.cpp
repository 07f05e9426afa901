// Paged attention on numpy arrays, for tests.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/kernel_call.h"
#include "bindings/names.h"
#include "kernels/kernels.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace topg {
namespace {

using Pool = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Heads = nb::ndarray<const float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;  // [tokens][heads][head_dim]
using PageTable = Vector<int32_t>;

constexpr int kLargestCount = 1 << 16;  // of heads, layers, tokens
constexpr int kQueryRowsBefore = 3;     // unused rows of queries, so that no test depends on the first row's index being 0

void require_range(const char* name, long value, long least, long most) {
  require(value >= least && value <= most, std::string(name) + " is " + std::to_string(value) + "; allowed: " +
                                               std::to_string(least) + " to " + std::to_string(most));
}

// Softmax states of rows, and the memory they lie in.
class States {
 public:
  States(size_t count, int dim) : out_(count * size_t(dim)), maximum_(count), total_(count), dim_(dim) {}

  AttentionState state(size_t first = 0) {
    return {out_.data() + first * size_t(dim_), maximum_.data() + first, total_.data() + first};
  }

 private:
  std::vector<float> out_, maximum_, total_;
  int dim_;
};

// Queries of some tokens, and the memory they lie in.
class StoredQueries {
 public:
  StoredQueries(const AttentionShape& shape, int tokens)
      : values_(size_t(tokens) * size_t(shape.heads) * size_t(shape.kv.dim()) * shape.kv.element_bytes()),
        scales_(size_t(tokens) * size_t(shape.heads)), sums_(scales_.size()) {
    queries_ = {values_.data(), scales_.data(), sums_.data(), tokens};
  }

  const Queries& queries() const { return queries_; }

 private:
  std::vector<uint8_t> values_;
  std::vector<float> scales_;
  std::vector<int32_t> sums_;
  Queries queries_;
};

class PagedAttention {
 public:
  PagedAttention(std::string isa, const std::string& kv_dtype, int layers, int heads, int kv_heads, int head_dim,
                 int tokens_per_page, float scale, float softcap, int window)
      : isa_(std::move(isa)) {
    require_range("layers", layers, 1, kLargestCount);
    require_range("kv_heads", kv_heads, 1, kLargestCount);
    require_range("heads", heads, kv_heads, kLargestCount);
    require(heads % kv_heads == 0, std::to_string(heads) + " heads cannot share " + std::to_string(kv_heads) + " KV heads");
    require_range("head_dim", head_dim, 1, kMaxHeadDim);
    require_range("tokens_per_page", tokens_per_page, kTileKeys, kLargestCount);
    require(tokens_per_page % kTileKeys == 0, "tokens_per_page must be a multiple of " + std::to_string(kTileKeys));
    require(std::isfinite(scale), "scale must be finite");
    require(std::isfinite(softcap) && softcap >= 0, "softcap must be finite, and 0 for none");
    require_range("window", window, 0, INT32_MAX);
    shape_.kv = {kv_type(kv_dtype), layers, kv_heads, head_dim, tokens_per_page};
    shape_.heads = heads;
    shape_.scale = scale;
    shape_.softcap = softcap;
    shape_.window = window;
    kernel_ = kernels_for(isa_).attention(shape_.kv.type);
    require(kernel_.name != nullptr, "this KV type has no kernel");
  }

  size_t page_bytes() const { return shape_.kv.page_bytes(); }

  void append(const Pool& pool, int layer, const PageTable& pages, int start, const Heads& key, const Heads& value) const {
    const int tokens = check(pool, layer, pages, start, key, shape_.kv.kv_heads);
    require(check(pool, layer, pages, start, value, shape_.kv.kv_heads) == tokens, "keys and values must be as many");
    call_kernels(isa_, [&](const Kernels&) {
      for (int i = 0; i < tokens; ++i) {
        for (int head = 0; head < shape_.kv.kv_heads; ++head) {
          const size_t from = (size_t(i) * size_t(shape_.kv.kv_heads) + size_t(head)) * size_t(shape_.kv.head_dim);
          uint8_t* tile = tile_of(pool, layer, pages, start + i, head);
          kernel_.store_key(shape_, key.data() + from, tile, (start + i) % kTileKeys);
          kernel_.store_value(shape_, value.data() + from, tile, (start + i) % kTileKeys);
        }
      }
    });
  }

  // Items of `item_tokens` tokens.  With `item_blocks` != 0, items of that many key blocks, which are kept and folded after.
  nb::ndarray<nb::numpy, float> attend(const Pool& pool, int layer, const PageTable& pages, int start, const Heads& query,
                                       int item_tokens, int item_blocks) const {
    const int tokens = check(pool, layer, pages, start, query, shape_.heads);
    require_range("item_tokens", item_tokens, 1, tokens);
    require_range("item_blocks", item_blocks, 0, kLargestCount);
    const size_t width = size_t(shape_.heads) * size_t(shape_.kv.head_dim);
    nb::ndarray<nb::numpy, float> result = new_matrix<float>(size_t(tokens), width);
    std::vector<AttentionItem> items;
    for (int first = 0; first < tokens; first += item_tokens) {
      for (int kv_head = 0; kv_head < shape_.kv.kv_heads; ++kv_head) {
        const int count = std::min(item_tokens, tokens - first), position = start + first;
        items.push_back({kQueryRowsBefore + first, count, position, kv_head, first_block(position),
                         (position + count - 1) / kKeyBlock + 1, pages.data(), nullptr});
      }
    }
    for (size_t i = 0; i + 1 < items.size(); ++i) items[i].next = &items[i + 1];
    call_kernels(isa_, [&](const Kernels&) {
      const StoredQueries stored = store(query, tokens);
      for (const AttentionItem& item : items) {
        attend_item(stored.queries(), pool.data(), layer, item, item_blocks,
                    result.data() + size_t(item.row - kQueryRowsBefore) * width);
      }
    });
    return result;
  }

 private:
  // The number of tokens, after all indices that follow from the arguments have been found inside their arrays.
  int check(const Pool& pool, int layer, const PageTable& pages, int start, const Heads& heads, int head_count) const {
    checked_size(heads, "an array of heads");
    require(reinterpret_cast<uintptr_t>(pool.data()) % alignof(float) == 0, "the pool must be aligned to 4 bytes");
    require(heads.shape(1) == size_t(head_count) && heads.shape(2) == size_t(shape_.kv.head_dim),
            "an array of heads must be [tokens, " + std::to_string(head_count) + ", " + std::to_string(shape_.kv.head_dim) + "]");
    require_range("layer", layer, 0, shape_.kv.layers - 1);
    require_range("tokens", long(heads.shape(0)), 1, kLargestCount);
    require_range("start", start, 0, INT32_MAX / 2);
    const int tokens = int(heads.shape(0));
    const size_t needed = size_t(start + tokens + shape_.kv.tokens_per_page - 1) / size_t(shape_.kv.tokens_per_page);
    require(pages.size() >= needed, std::to_string(pages.size()) + " pages; " + std::to_string(needed) + " are needed");
    const long page_count = long(pool.size() / page_bytes());
    for (size_t i = 0; i < needed; ++i) require_range("a page", pages.data()[i], 0, page_count - 1);
    return tokens;
  }

  uint8_t* tile_of(const Pool& pool, int layer, const PageTable& pages, int token, int kv_head) const {
    const KVLayout& kv = shape_.kv;
    const size_t page = size_t(pages.data()[token / kv.tokens_per_page]);
    return pool.data() + page * page_bytes() + kv.offset(layer, kv_head, token % kv.tokens_per_page / kTileKeys);
  }

  int first_block(int position) const {
    return shape_.window == 0 ? 0 : std::max(0, position - shape_.window + 1) / kKeyBlock;
  }

  StoredQueries store(const Heads& query, int tokens) const {
    StoredQueries stored(shape_, kQueryRowsBefore + tokens);
    for (int i = 0; i < tokens; ++i) {
      for (int head = 0; head < shape_.heads; ++head) {
        const size_t from = (size_t(i) * size_t(shape_.heads) + size_t(head)) * size_t(shape_.kv.head_dim);
        kernel_.store_query(shape_, query.data() + from, stored.queries(), kQueryRowsBefore + i, head);
      }
    }
    return stored;
  }

  // The heads of one KV head of the item's tokens; out [tokens][heads][head_dim].
  void attend_item(const Queries& queries, const uint8_t* pool, int layer, const AttentionItem& whole, int item_blocks,
                   float* out) const {
    const size_t rows = size_t(whole.tokens) * size_t(shape_.group());
    const bool keep = item_blocks != 0;
    States states(rows * (keep ? size_t(whole.last_block - whole.first_block) : 1), shape_.kv.dim());
    if (!keep) kernel_.attend(shape_, queries, pool, layer, whole, states.state(), false);
    for (int block = whole.first_block; keep && block < whole.last_block; block += item_blocks) {
      AttentionItem item = whole;
      item.first_block = block;
      item.last_block = std::min(block + item_blocks, whole.last_block);
      kernel_.attend(shape_, queries, pool, layer, item, states.state(size_t(block - whole.first_block) * rows), true);
    }
    for (size_t row = 0; row < rows; ++row) {
      const AttentionState state = states.state(row);
      for (int block = 1; keep && block < whole.last_block - whole.first_block; ++block) {
        const AttentionState later = states.state(size_t(block) * rows + row);
        kernel_.fold(shape_, state.out, state.maximum, state.total, later.out, *later.maximum, *later.total);
      }
      const size_t group = size_t(shape_.group()), head = size_t(whole.kv_head) * group + row % group;
      const size_t place = (row / group * size_t(shape_.heads) + head) * size_t(shape_.kv.head_dim);
      kernel_.finish(shape_, state.out, *state.total, out + place);
    }
  }

  std::string isa_;
  AttentionShape shape_;
  AttentionKernel kernel_;
};

}  // namespace

void bind_attention(nb::module_& module) {
  nb::class_<PagedAttention>(module, "PagedAttention", "One attention over a pool of KV pages.")
      .def(nb::init<std::string, const std::string&, int, int, int, int, int, float, float, int>(), "isa"_a, nb::kw_only(),
           "kv_dtype"_a, "layers"_a, "heads"_a, "kv_heads"_a, "head_dim"_a, "tokens_per_page"_a, "scale"_a,
           "softcap"_a = 0.0f, "window"_a = 0)
      .def_prop_ro("page_bytes", &PagedAttention::page_bytes)
      .def("append", &PagedAttention::append, "pool"_a.noconvert(), "layer"_a, "pages"_a, "start"_a, "key"_a, "value"_a,
           "Keys and values [tokens, kv_heads, head_dim] of the tokens from position `start` on, into their pages.")
      .def("attend", &PagedAttention::attend, "pool"_a.noconvert(), "layer"_a, "pages"_a, "start"_a, "query"_a,
           "item_tokens"_a, "item_blocks"_a,
           "Results [tokens, heads * head_dim] of the queries from position `start` on, in items of `item_tokens` tokens; "
           "with `item_blocks`, of that many key blocks as well, folded afterwards.");
}

}  // namespace topg
