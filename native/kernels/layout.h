// How weights, activations and KV pages lie in memory.  One layout for every instruction set: kernels differ, data do not.
//
// A packed weight is a run of blocks of 32 output channels, each block one contiguous stream over the input columns.
// "Lane = output channel": a vector of 16 lanes holds 16 channels, so scales are applied to whole vectors and no sum ever
// crosses lanes.  Channels that fill up the last block, and columns that fill up the last group, are zeros.
#pragma once

#include <cstddef>
#include <cstdint>

namespace topg {

constexpr int kBlockChannels = 32;  // output channels of a packed block: two vectors of 16 lanes
constexpr int kLanes = 16;
constexpr int kRotationGroup = 64;  // columns of one Walsh-Hadamard transform
constexpr int kKeyBlock = 256;      // keys whose softmax is computed together; blocks start at multiples of it
constexpr int kTileKeys = 32;       // keys of one tile of a KV page
constexpr int kMaxHeadDim = 512;    // kernels keep heads on the stack

enum class WeightCode : uint8_t { kFloat32, kFloat16, kBFloat16, kInt8, kInt4 };
enum class ScaleType : uint8_t { kNone, kFloat32, kFloat16, kBFloat16 };
enum class ActivationCode : uint8_t { kFloat32, kBFloat16, kInt8 };

constexpr int scale_bytes(ScaleType type) {
  return type == ScaleType::kNone ? 0 : type == ScaleType::kFloat32 ? 4 : 2;
}

// What a linear's input is turned into before it is multiplied.
//   group      columns that share a scale (int8 only)
//   dot_group  columns whose products are summed as integers: the smaller of `group` and the weight's group.  Scales and
//              sums are stored once per dot group, so a kernel never has to look up which group it is in.
//   rotated    each run of 64 columns goes through an orthonormal Walsh-Hadamard transform first
struct ActivationFormat {
  ActivationCode code = ActivationCode::kFloat32;
  int group = 0;
  int dot_group = 0;
  bool rotated = false;

  bool operator==(const ActivationFormat& other) const {
    return code == other.code && group == other.group && dot_group == other.dot_group && rotated == other.rotated;
  }
};

// Grouped formats (kInt8, kInt4): element (channel c, column k of group g) = scale[g][c] * code + minimum[g][c].
//
//   block := for each group: codes, scales[32], minimums[32] where the format has them   (scales of `scale`'s type)
//   kInt8 with int8 activations:  codes u8 [group / 4][2][16 lanes][4 columns], code + 128
//   kInt4:                        codes    [group / 8][2][16 lanes][4 bytes]; byte j holds column j in its low and column
//                                 4 + j in its high nibble (0..15; without minimums a nibble n stands for n - 8)
//   kInt8 with bf16 activations:  codes s8 [group][32 channels]
//
// Plain formats, no groups:
//   kFloat32, kFloat16:           block := [columns][32 channels]
//   kBFloat16:                    block := [columns / 2][2][16 lanes][2 columns]       (columns filled up to even)
struct WeightFormat {
  WeightCode code = WeightCode::kFloat32;
  ActivationCode activation = ActivationCode::kFloat32;
  ScaleType scale = ScaleType::kNone;
  int group = 0;  // 0: plain
  bool minimum = false;

  bool grouped() const { return group != 0; }

  bool operator==(const WeightFormat& other) const {
    return code == other.code && activation == other.activation && scale == other.scale && group == other.group &&
           minimum == other.minimum;
  }
};

constexpr int round_up(int value, int unit) { return (value + unit - 1) / unit * unit; }

// Columns of a packed weight: whole groups, or pairs for bfloat16.
inline int padded_columns(const WeightFormat& format, int columns) {
  if (format.grouped()) return round_up(columns, format.group);
  return format.code == WeightCode::kBFloat16 ? round_up(columns, 2) : columns;
}

// Bytes of one group of a block (codes, scales, minimums), or of the whole block for a plain format.
inline size_t group_bytes(const WeightFormat& format) {
  size_t codes = size_t(format.group) * kBlockChannels / (format.code == WeightCode::kInt4 ? 2 : 1);
  return codes + size_t(kBlockChannels) * scale_bytes(format.scale) * (format.minimum ? 2 : 1);
}

inline size_t block_bytes(const WeightFormat& format, int columns) {
  size_t padded = padded_columns(format, columns);
  if (format.grouped()) return padded / format.group * group_bytes(format);
  return padded * kBlockChannels * (format.code == WeightCode::kFloat32 ? 4 : 2);
}

// A weight in packed form.
struct PackedWeight {
  WeightFormat format;
  int channels = 0;  // output features, before they are filled up to blocks
  int columns = 0;   // input features, before they are filled up to groups
  bool rotated = false;
  const uint8_t* data = nullptr;  // 64-byte aligned

  int blocks() const { return (channels + kBlockChannels - 1) / kBlockChannels; }
  size_t bytes_per_block() const { return block_bytes(format, columns); }
  const uint8_t* block(int index) const { return data + index * bytes_per_block(); }
};

// Rows of a linear's input in the form its kernel multiplies.  `stride` is in elements of `values`, a multiple of 64 bytes.
//   kFloat32: values f32;  kBFloat16: values bf16 bits;  kInt8: values s8, and per row and dot group:
//   scales f32 (not finite when an input of the group was not) and sums, the sum of the group's codes.
struct Activations {
  ActivationFormat format;
  int columns = 0;  // padded
  ptrdiff_t stride = 0;
  void* values = nullptr;
  float* scales = nullptr;   // [rows][groups]
  int32_t* sums = nullptr;   // [rows][groups]
  int groups = 0;            // dot groups of a row

  template <class T>
  T* row(int index) const {
    return static_cast<T*>(values) + index * stride;
  }
};

// ---- KV pages -----------------------------------------------------------------------------------------------------------
//
// A page is [layer][kv_head][tile of 32 tokens][K, V]; `dim` is head_dim filled up with zeros to a multiple of 16.
//   float32   K [dim][32 tokens]                V [32 tokens][dim]
//   bfloat16  K [dim / 2][32 tokens][2]         V [32 / 2][dim][2 tokens]
//   int8      K u8 (code + 128) [dim / 4][32 tokens][4], then V s8 [32 / 4][dim][4 tokens],
//             then f32 scale of each token's K [32], then of its V [32]
// Keys and values of an int8 cache are stored after an orthonormal Walsh-Hadamard transform over the largest power of two
// that divides head_dim (runs of it side by side).  Queries go through the same one, and results through it again: it is its
// own inverse.
enum class KVType : uint8_t { kFloat32, kBFloat16, kInt8 };

struct KVLayout {
  KVType type = KVType::kBFloat16;
  int layers = 0, kv_heads = 0, head_dim = 0, tokens_per_page = 0;

  int dim() const { return round_up(head_dim, kLanes); }
  size_t element_bytes() const { return type == KVType::kFloat32 ? 4 : type == KVType::kBFloat16 ? 2 : 1; }
  size_t half_tile_bytes() const { return size_t(kTileKeys) * dim() * element_bytes(); }
  size_t tile_bytes() const { return 2 * half_tile_bytes() + (type == KVType::kInt8 ? 2 * kTileKeys * sizeof(float) : 0); }
  int tiles_per_page() const { return tokens_per_page / kTileKeys; }
  size_t head_bytes() const { return tiles_per_page() * tile_bytes(); }
  size_t page_bytes() const { return size_t(layers) * kv_heads * head_bytes(); }
  size_t offset(int layer, int kv_head, int tile) const {
    return (size_t(layer) * kv_heads + kv_head) * head_bytes() + tile * tile_bytes();
  }
};

}  // namespace topg
