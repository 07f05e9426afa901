#include "runtime/memory.h"

#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <utility>

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#endif

namespace topg {
namespace {

constexpr size_t kHugePage = size_t(2) << 20;
constexpr size_t kLine = 64;

size_t round_up_to(size_t bytes, size_t unit) {
  if (bytes > SIZE_MAX - unit) throw std::bad_alloc();
  return (bytes + unit - 1) / unit * unit;
}

}  // namespace

#if defined(__unix__) || defined(__APPLE__)

// Maps one huge page more than asked for and gives the ends back, so that the buffer begins at a huge page.
HugeBuffer::HugeBuffer(size_t bytes) : size_(bytes) {
  if (bytes == 0) return;
  const size_t wanted = round_up_to(bytes, bytes < kHugePage ? 4096 : kHugePage);
  const size_t mapped = round_up_to(wanted, kHugePage) + kHugePage;
  void* whole = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (whole == MAP_FAILED) throw std::bad_alloc();
  auto* first = static_cast<uint8_t*>(whole);
  auto* aligned = reinterpret_cast<uint8_t*>(round_up_to(reinterpret_cast<uintptr_t>(first), kHugePage));
  if (aligned != first) munmap(first, size_t(aligned - first));
  const size_t kept = size_t(aligned - first) + wanted;
  if (kept < mapped) munmap(aligned + wanted, mapped - kept);
#if defined(MADV_HUGEPAGE)
  if (wanted >= kHugePage) madvise(aligned, wanted, MADV_HUGEPAGE);  // a wish: without huge pages it is only slower
#endif
  data_ = aligned;
}

HugeBuffer::~HugeBuffer() {
  if (data_ != nullptr) munmap(data_, round_up_to(size_, size_ < kHugePage ? 4096 : kHugePage));
}

#else

HugeBuffer::HugeBuffer(size_t bytes) : size_(bytes) {
  if (bytes == 0) return;
  data_ = static_cast<uint8_t*>(::operator new(bytes, std::align_val_t(kLine)));
  std::memset(data_, 0, bytes);
}

HugeBuffer::~HugeBuffer() {
  if (data_ != nullptr) ::operator delete(data_, std::align_val_t(kLine));
}

#endif

HugeBuffer::HugeBuffer(HugeBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

HugeBuffer& HugeBuffer::operator=(HugeBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

void Arena::commit() {
  memory_ = HugeBuffer(used_);
  used_ = 0;
}

uint8_t* Arena::take_bytes(size_t bytes) {
  const size_t begin = used_;
  used_ = round_up_to(begin + bytes, kLine);
  if (memory_.data() == nullptr) return nullptr;
  if (used_ > round_up_to(memory_.size(), kLine)) throw std::logic_error("the arena was sized for fewer pieces");
  return memory_.data() + begin;
}

}  // namespace topg
