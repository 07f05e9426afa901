// Memory that the engine takes once, at load.
#pragma once

#include <cstddef>
#include <cstdint>

namespace topg {

// Anonymous zeroed memory, on huge pages where the system has them; the system commits it when it is first written.
// Throws std::bad_alloc.
class HugeBuffer {
 public:
  HugeBuffer() = default;
  explicit HugeBuffer(size_t bytes);
  ~HugeBuffer();
  HugeBuffer(HugeBuffer&& other) noexcept;
  HugeBuffer& operator=(HugeBuffer&& other) noexcept;
  HugeBuffer(const HugeBuffer&) = delete;
  HugeBuffer& operator=(const HugeBuffer&) = delete;

  uint8_t* data() const { return data_; }  // 64-byte aligned at least
  size_t size() const { return size_; }

 private:
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

// Hands out 64-byte aligned pieces of one HugeBuffer.  Sized by a first pass: a plain Arena only counts, `commit` takes the
// memory, and a second pass over the same calls hands out the pieces.
class Arena {
 public:
  template <class T>
  T* take(size_t count) {
    return reinterpret_cast<T*>(take_bytes(count * sizeof(T)));
  }
  void commit();  // after the counting pass
  size_t size() const { return used_; }

 private:
  uint8_t* take_bytes(size_t bytes);

  HugeBuffer memory_;
  size_t used_ = 0;
};

}  // namespace topg
