// The pool of KV pages.
#pragma once

#include "kernels/layout.h"
#include "runtime/memory.h"

namespace topg {

// Throws std::invalid_argument for a shape that makes no sense.
void check_layout(const KVLayout& layout);

// The system commits a page's memory when it is first written.  Which pages are in use is the caller's business.
class KVCache {
 public:
  KVCache() = default;
  // Throws std::invalid_argument for a shape that makes no sense, std::bad_alloc.
  KVCache(const KVLayout& layout, int pages);

  const KVLayout& layout() const { return layout_; }
  int pages() const { return pages_; }
  int tokens() const { return pages_ * layout_.tokens_per_page; }
  const uint8_t* data() const { return memory_.data(); }
  size_t bytes() const { return memory_.size(); }

  // The tile that holds a token: `slot` is the token's place in the page.
  uint8_t* tile(int page, int layer, int kv_head, int slot) const {
    return memory_.data() + size_t(page) * layout_.page_bytes() + layout_.offset(layer, kv_head, slot / kTileKeys);
  }
  // All layers of a page.  Throws std::invalid_argument for pages that do not exist.
  void copy_page(int source, int target);

 private:
  KVLayout layout_;
  int pages_ = 0;
  HugeBuffer memory_;
};

}  // namespace topg
