#include "kernels/pack.h"

#include <cstring>

namespace topg {
namespace {

// Every layout is a transposition: a row is a run of units, columns that stay together, and unit u of lane l of half h lies
// at [u][h][l].  Rows are read in step, so that whole cache lines are written.

// The rows of a source that become the 16 lanes of half a block.
struct HalfRows {
  const StoredWeight* source;
  int first;
  int count;  // lanes after these have no row
};

HalfRows half_rows(const StoredWeight* sources, int source_count, int block, int half) {
  const StoredWeight* source = source_count == 1 ? sources : sources + half;
  const int first = source_count == 1 ? block * kBlockChannels + half * kLanes : block * kLanes;
  const int left = source->rows - first;
  return {source, first, left < 0 ? 0 : left < kLanes ? left : kLanes};
}

template <class Unit>
Unit load_unit(const uint8_t* p) {
  Unit unit;
  std::memcpy(&unit, p, sizeof(unit));  // stored arrays need not be aligned
  return unit;
}

// Units [0, count) of the rows, each as `convert` makes it.  rows: of lane 0; lanes without a row get `missing`.
template <class Unit, class Convert>
void transpose(const uint8_t* rows, size_t row_bytes, int lanes, int count, Unit missing, Unit* out, Convert convert) {
  for (int unit = 0; unit < count; unit++, rows += sizeof(Unit), out += kBlockChannels) {
    if (lanes == kLanes) {
      for (int lane = 0; lane < kLanes; lane++) out[lane] = convert(load_unit<Unit>(rows + lane * row_bytes));
      continue;
    }
    for (int lane = 0; lane < lanes; lane++) out[lane] = convert(load_unit<Unit>(rows + lane * row_bytes));
    for (int lane = lanes; lane < kLanes; lane++) out[lane] = missing;
  }
}

template <class Unit>
void transpose(const uint8_t* rows, size_t row_bytes, int lanes, int count, Unit* out) {
  transpose(rows, row_bytes, lanes, count, Unit(0), out, [](Unit unit) { return unit; });
}

// Four nibbles of 16 bits as the low nibbles of four bytes.
uint32_t spread_nibbles(uint32_t x) {
  x = (x | x << 8) & 0x00ff00ff;
  return (x | x << 4) & 0x0f0f0f0f;
}

// From column 2 i beside 2 i + 1 to column i beside 4 + i.
uint32_t regroup_nibbles(uint32_t stored) { return spread_nibbles(stored & 0xffff) | spread_nibbles(stored >> 16) << 4; }

void pack_codes(const WeightFormat& format, const uint8_t* rows, size_t row_bytes, int lanes, int half, uint8_t* out) {
  if (format.code == WeightCode::kInt4) {
    const uint32_t missing = format.minimum ? 0 : 0x88888888;
    transpose(rows, row_bytes, lanes, format.group / 8, missing, reinterpret_cast<uint32_t*>(out) + half * kLanes,
              regroup_nibbles);
  } else if (format.activation == ActivationCode::kInt8) {
    constexpr uint32_t kBias = 0x80808080;  // flips the sign bits: code + 128
    transpose(rows, row_bytes, lanes, format.group / 4, kBias, reinterpret_cast<uint32_t*>(out) + half * kLanes,
              [](uint32_t codes) { return codes ^ kBias; });
  } else {
    transpose(rows, row_bytes, lanes, format.group, out + half * kLanes);
  }
}

// Scales or minimums of one group: stored [rows, groups].
void pack_scales(ScaleType type, const void* stored, const HalfRows& rows, int groups, int group, int half, uint8_t* out) {
  const size_t size = scale_bytes(type);
  const uint8_t* first = static_cast<const uint8_t*>(stored) + (size_t(rows.first) * groups + group) * size;
  out += half * kLanes * size;
  if (type == ScaleType::kFloat32) {
    transpose(first, groups * size, rows.count, 1, reinterpret_cast<uint32_t*>(out));
  } else {
    transpose(first, groups * size, rows.count, 1, reinterpret_cast<uint16_t*>(out));
  }
}

void pack_grouped(const WeightFormat& format, const HalfRows& rows, int half, uint8_t* out) {
  const int groups = padded_columns(format, rows.source->columns) / format.group;
  const size_t code_bytes = size_t(format.group) / (format.code == WeightCode::kInt4 ? 2 : 1);  // of a row and group
  const size_t scales_bytes = size_t(kBlockChannels) * scale_bytes(format.scale);
  const size_t row_bytes = groups * code_bytes;
  const uint8_t* codes = static_cast<const uint8_t*>(rows.source->values) + rows.first * row_bytes;
  for (int group = 0; group < groups; group++, codes += code_bytes) {
    pack_codes(format, codes, row_bytes, rows.count, half, out);
    out += code_bytes * kBlockChannels;
    pack_scales(format.scale, rows.source->scales, rows, groups, group, half, out);
    out += scales_bytes;
    if (!format.minimum) continue;
    pack_scales(format.scale, rows.source->minimums, rows, groups, group, half, out);
    out += scales_bytes;
  }
}

void pack_plain(const WeightFormat& format, const HalfRows& rows, int half, uint8_t* out) {
  const int columns = rows.source->columns;
  const size_t row_bytes = size_t(columns) * (format.code == WeightCode::kFloat32 ? 4 : 2);
  const uint8_t* values = static_cast<const uint8_t*>(rows.source->values) + rows.first * row_bytes;
  if (format.code == WeightCode::kFloat16) {
    transpose(values, row_bytes, rows.count, columns, reinterpret_cast<uint16_t*>(out) + half * kLanes);
    return;
  }
  uint32_t* units = reinterpret_cast<uint32_t*>(out) + half * kLanes;
  const int count = format.code == WeightCode::kFloat32 ? columns : columns / 2;
  transpose(values, row_bytes, rows.count, count, units);
  if (format.code == WeightCode::kFloat32 || columns % 2 == 0) return;
  units += size_t(count) * kBlockChannels;  // the last column, beside one of zeros
  for (int lane = 0; lane < kLanes; lane++) {
    units[lane] = lane < rows.count ? load_unit<uint16_t>(values + lane * row_bytes + row_bytes - 2) : 0;
  }
}

}  // namespace

void pack_blocks(const WeightFormat& format, const StoredWeight* sources, int source_count, int first_block, int last_block,
                 uint8_t* out) {
  const size_t bytes = block_bytes(format, sources[0].columns);
  for (int block = first_block; block < last_block; block++) {
    for (int half = 0; half < 2; half++) {
      const HalfRows rows = half_rows(sources, source_count, block, half);
      if (format.grouped()) {
        pack_grouped(format, rows, half, out + block * bytes);
      } else {
        pack_plain(format, rows, half, out + block * bytes);
      }
    }
  }
}

}  // namespace topg
