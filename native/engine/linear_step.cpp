// Executor: linears and what happens to their results.
#include <algorithm>

#include "engine/executor.h"
#include "kernels/gemm.h"

namespace topg {
namespace {

// Columns of a result that a block of 32 channels gives.
int result_channels(const LinearPart& part) { return part.epilogue == Epilogue::kGate ? kLanes : kBlockChannels; }

}  // namespace

// A unit is what one thread must compute together: a whole head, or whole groups of the activations the result goes into.
int Executor::unit_blocks(const LinearStep& step, const LinearPart& part) const {
  if (step.has_heads) return model_.kv.head_dim / kBlockChannels;
  if (part.activations == kNone) return 1;
  return model_.activations[size_t(part.activations)].span() / result_channels(part);
}

int Executor::unit_count(const LinearStep& step, const LinearPart& part) const {
  const int unit = unit_blocks(step, part);
  return (model_.weights[size_t(part.weight)].packed.blocks() + unit - 1) / unit;
}

void Executor::linear_by_channels(const LinearStep& step, int rows, int thread) const {
  const int threads = threads_.size();
  for (size_t i = 0; i < step.parts.size(); ++i) {
    const LinearPart& part = step.parts[i];
    if (part.activations != kNone) place(part.activations, 0, Copies::kShared, thread);
    // Who gets a unit more than the others changes from part to part.
    const Range mine = share(unit_count(step, part), (thread + int(i)) % threads, threads);
    linear_part(step, i, {0, rows}, mine, thread);
  }
}

void Executor::linear_by_rows(const LinearStep& step, Rows rows, int thread) const {
  for (size_t i = 0; i < step.parts.size(); ++i) {
    const LinearPart& part = step.parts[i];
    if (part.activations != kNone) place(part.activations, rows.begin, Copies::kLocal, thread);
    linear_part(step, i, rows, {0, unit_count(step, part)}, thread);
  }
}

// Some units of one part.  Results are finished tile by tile, while they are close.
void Executor::linear_part(const LinearStep& step, size_t index, Rows rows, Range units, int thread) const {
  const LinearPart& part = step.parts[index];
  const Weight& weight = model_.weights[size_t(part.weight)];
  ThreadSpace& space = workspace_.of(thread);
  const ActivationRows& x = space.current[size_t(step.x)];
  const int unit = unit_blocks(step, part), blocks = weight.packed.blocks(), channels = result_channels(part);
  const bool into_buffer = part.buffer != kNone;
  const ptrdiff_t stride = into_buffer ? workspace_.stride(part.buffer) : workspace_.span();
  multiply(weight.kernel, weight.packed, x.data, rows.begin - x.first_row, rows.count(), units.begin * unit,
           std::min(units.end * unit, blocks), space.slab, [&](int x_row, int count, int block, const float* c) {
             const Rows done{x_row + x.first_row, x_row + x.first_row + count};
             float* columns = space.columns + (done.begin - rows.begin) * stride;
             float* out = into_buffer ? workspace_.row(part.buffer, done.begin) + block * channels
                                      : columns + block % unit * channels;
             write_block(part, c, count, block, out, stride);
             if ((block + 1) % unit != 0 && block + 1 != blocks) return;
             if (step.has_heads) heads(step.heads, HeadKind(index), done, {block / unit, block / unit + 1});
             if (!into_buffer) prepare_unit(part, done, block / unit, columns, thread);
           });
}

void Executor::write_block(const LinearPart& part, const float* c, int rows, int block, float* out,
                           ptrdiff_t stride) const {
  const float* bias = part.bias == kNone ? nullptr : model_.vectors[size_t(part.bias)].data() + block * kBlockChannels;
  const BlockKernels& k = kernels_.blocks;
  switch (part.epilogue) {
    case Epilogue::kStore: return k.store(c, rows, bias, out, stride);
    case Epilogue::kAdd: return k.add(c, rows, bias, out, stride);
    case Epilogue::kActivate: return k.activate(part.function, c, rows, bias, out, stride);
    case Epilogue::kGate: return k.gate(part.function, c, rows, bias, out, stride);
  }
}

// columns: the results of one unit, for the rows.
void Executor::prepare_unit(const LinearPart& part, Rows rows, int unit, const float* columns, int thread) const {
  const ActivationBuffer& buffer = model_.activations[size_t(part.activations)];
  const ActivationRows& target = workspace_.of(thread).current[size_t(part.activations)];
  const int span = buffer.span(), groups = span / buffer.group_columns(), first = unit * span;
  const int count = std::min(span, buffer.columns - first);
  // The last unit also fills the activations up to whole groups.
  const int last_group = first + span >= buffer.columns ? buffer.groups() : (unit + 1) * groups;
  for (int row = rows.begin; row < rows.end; ++row, columns += workspace_.span()) {
    kernels_.rows.prepare_groups(columns, count, target.data, row - target.first_row, unit * groups, last_group);
  }
}

}  // namespace topg
