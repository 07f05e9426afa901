#include "engine/kv_cache.h"

#include <climits>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

namespace topg {
namespace {

constexpr int kMaxTokensPerPage = 1 << 20;
constexpr double kMaxBytes = 0x1p62;

void check(const char* name, int value, int least, int most) {
  if (value >= least && value <= most) return;
  throw std::invalid_argument(std::string("the cache has ") + name + " " + std::to_string(value) + "; allowed: " +
                              std::to_string(least) + " to " + std::to_string(most));
}

}  // namespace

void check_layout(const KVLayout& layout) {
  check("layers", layout.layers, 1, 1 << 16);
  check("kv_heads", layout.kv_heads, 1, 1 << 16);
  check("head_dim", layout.head_dim, 1, kMaxHeadDim);
  check("tokens_per_page", layout.tokens_per_page, kTileKeys, kMaxTokensPerPage);
  if (layout.tokens_per_page % kTileKeys != 0) {
    throw std::invalid_argument("a page has " + std::to_string(layout.tokens_per_page) +
                                " tokens; it must be a multiple of " + std::to_string(kTileKeys));
  }
  // In float64, which does not wrap.
  const double bytes = double(layout.layers) * layout.kv_heads * double(layout.head_bytes());
  if (bytes > kMaxBytes) throw std::invalid_argument("a page of the cache would be larger than any memory");
}

KVCache::KVCache(const KVLayout& layout, int pages) : layout_(layout), pages_(pages) {
  check_layout(layout);
  check("pages", pages, 1, INT_MAX / layout.tokens_per_page);
  if (double(pages) * double(layout.page_bytes()) > kMaxBytes) throw std::bad_alloc();
  memory_ = HugeBuffer(size_t(pages) * layout.page_bytes());
}

void KVCache::copy_page(int source, int target) {
  for (int page : {source, target}) {
    if (page < 0 || page >= pages_) {
      throw std::invalid_argument("page " + std::to_string(page) + " cannot be copied; the pool has pages 0 to " +
                                  std::to_string(pages_ - 1));
    }
  }
  if (source == target) return;
  const size_t bytes = layout_.page_bytes();
  std::memcpy(memory_.data() + size_t(target) * bytes, memory_.data() + size_t(source) * bytes, bytes);
}

}  // namespace topg
