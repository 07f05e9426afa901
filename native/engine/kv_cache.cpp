#include "engine/kv_cache.h"

#include <climits>
#include <cstring>
#include <stdexcept>
#include <string>

namespace topg {
namespace {

constexpr int kMaxTokensPerPage = 1 << 20;

void check(const char* name, int value, int least, int most) {
  if (value >= least && value <= most) return;
  throw std::invalid_argument(std::string("the cache has ") + name + " " + std::to_string(value) + "; allowed: " +
                              std::to_string(least) + " to " + std::to_string(most));
}

}  // namespace

KVCache::KVCache(const KVLayout& layout, int pages) : layout_(layout), pages_(pages) {
  check("layers", layout.layers, 1, 1 << 16);
  check("kv_heads", layout.kv_heads, 1, 1 << 16);
  check("head_dim", layout.head_dim, 1, kMaxHeadDim);
  check("tokens_per_page", layout.tokens_per_page, kTileKeys, kMaxTokensPerPage);
  if (layout.tokens_per_page % kTileKeys != 0) {
    throw std::invalid_argument("a page has " + std::to_string(layout.tokens_per_page) +
                                " tokens; it must be a multiple of " + std::to_string(kTileKeys));
  }
  check("pages", pages, 1, INT_MAX / layout.tokens_per_page);
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
