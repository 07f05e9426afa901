// A compiled model in memory: its weights in packed form, and the program over them.
#pragma once

#include <vector>

#include "engine/analysis.h"
#include "engine/program.h"
#include "kernels/kernels.h"
#include "runtime/memory.h"

namespace topg {

// cos and sin of each position's angles: [positions][half].
struct RopeTable {
  int half = 0;
  std::vector<float> cos, sin;

  int positions() const { return half == 0 ? 0 : int(cos.size()) / half; }
};

struct Weight {
  PackedWeight packed;
  LinearKernel kernel;
};

struct ActivationBuffer {
  ActivationFormat format;
  int columns = 0;

  // Dot groups of a row; formats without groups are written in runs of the rotation.
  int group_columns() const { return format.dot_group != 0 ? format.dot_group : kRotationGroup; }
  int groups() const { return (padded_columns() + group_columns() - 1) / group_columns(); }
  // As many as a packed weight has.
  int padded_columns() const {
    if (format.dot_group != 0) return round_up(columns, format.dot_group);
    return format.code == ActivationCode::kBFloat16 ? round_up(columns, 2) : columns;
  }
  // Columns that can be prepared on their own: whole groups and whole rotations.
  int span() const { return format.group > kRotationGroup ? format.group : kRotationGroup; }
};

struct Model {
  std::vector<Weight> weights;
  std::vector<std::vector<float>> vectors;  // filled up with zeros to blocks of 32
  std::vector<int> buffers;                 // widths
  std::vector<ActivationBuffer> activations;
  std::vector<RopeTable> ropes;
  std::vector<Attention> attentions;
  std::vector<ProgramStep> steps;
  ProgramFacts facts;
  KVLayout kv;
  int vocab = 0;       // channels of the logits step
  int token_count = 0;  // token ids every embedding knows
};

// Memory of the packed weights, taken in large pieces: a piece's unused end costs address space only.
class WeightStore {
 public:
  uint8_t* take(size_t bytes);
  size_t size() const { return total_; }

 private:
  std::vector<HugeBuffer> pieces_;
  size_t used_ = 0;  // of the last piece
  size_t total_ = 0;
};

}  // namespace topg
