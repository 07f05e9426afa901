// Executor: work on whole rows.
#include <cstring>

#include "engine/executor.h"
#include "engine/overloaded.h"

namespace topg {

void Executor::row_step(const RowStep& step, Rows rows, Copies copies, int thread) const {
  for (const RowOp& op : step.ops) {
    if (const auto* prepare = std::get_if<PrepareOp>(&op)) place(prepare->activations, rows.begin, copies, thread);
  }
  for (int row = rows.begin; row < rows.end; ++row) {
    for (const RowOp& op : step.ops) row_op(op, row, thread);
  }
}

float* Executor::buffer(int id, int row, int thread) const {
  return id == kScratch ? workspace_.of(thread).scratch : workspace_.row(id, row);
}

void Executor::row_op(const RowOp& op, int row, int thread) const {
  const RowKernels& k = kernels_.rows;
  const auto at = [&](int id) { return buffer(id, row, thread); };
  const auto width = [&](int id) { return model_.buffers[size_t(id)]; };
  std::visit(
      Overloaded{
          [&](const EmbedOp& o) {
            k.unpack_row(model_.weights[size_t(o.weight)].packed, input_.token(row), at(o.out));
          },
          [&](const NormOp& o) { apply_norm(o.norm, o.norm.runs, at(o.input), at(o.out)); },
          [&](const AddOp& o) { k.add(at(o.left), at(o.right), width(o.out), at(o.out)); },
          [&](const ScaleOp& o) { k.scale(at(o.input), o.factor, width(o.out), at(o.out)); },
          [&](const ActivateOp& o) { k.activate(o.function, at(o.input), width(o.out), at(o.out)); },
          [&](const GateOp& o) { k.gate(o.function, at(o.gate), at(o.up), width(o.out), at(o.out)); },
          [&](const SelectOp& o) {
            std::memcpy(at(o.out), workspace_.row(o.input, input_.selected(row)), size_t(width(o.input)) * sizeof(float));
          },
          [&](const PrepareOp& o) {
            const ActivationRows& target = workspace_.of(thread).current[size_t(o.activations)];
            const int columns = model_.activations[size_t(o.activations)].columns;
            k.prepare(at(o.input), columns, target.data, row - target.first_row);
          },
          [&](const HeadsOp& o) {
            const AttentionShape& shape = model_.attentions[size_t(o.attention)].shape;
            heads(o, HeadKind::kQuery, {row, row + 1}, {0, shape.heads});
            heads(o, HeadKind::kKey, {row, row + 1}, {0, shape.kv.kv_heads});
            heads(o, HeadKind::kValue, {row, row + 1}, {0, shape.kv.kv_heads});
          },
      },
      op);
}

void Executor::apply_norm(const Norm& norm, int runs, const float* x, float* out) const {
  const auto function = norm.kind == NormKind::kRms ? kernels_.rows.rms_norm : kernels_.rows.layer_norm;
  const auto vector = [&](int id) { return id == kNone ? nullptr : model_.vectors[size_t(id)].data(); };
  for (int run = 0; run < runs; ++run) {
    const int first = run * norm.width;
    function(x + first, vector(norm.weight), vector(norm.bias), norm.width, norm.eps, out + first);
  }
}

// Normalises and rotates heads [heads.begin, heads.end) of some rows where they stand, and puts them where attention finds
// them: queries beside the others of the step, keys and values into pages.
void Executor::heads(const HeadsOp& op, HeadKind kind, Rows rows, Heads heads) const {
  const Attention& attention = model_.attentions[size_t(op.attention)];
  const AttentionShape& shape = attention.shape;
  const AttentionKernel kernel = kernels_.attention(shape.kv.type);
  const bool is_query = kind == HeadKind::kQuery, is_value = kind == HeadKind::kValue;
  const int id = is_query ? op.query : is_value ? op.value : op.key;
  const Norm& norm = is_query ? op.query_norm : op.key_norm;
  for (int row = rows.begin; row < rows.end; ++row) {
    const int position = input_.position(row), slot = position % shape.kv.tokens_per_page;
    for (int head = heads.begin; head < heads.end; ++head) {
      float* x = workspace_.row(id, row) + head * shape.kv.head_dim;
      if (!is_value && norm.weight != kNone) apply_norm(norm, 1, x, x);
      if (!is_value && attention.rope != kNone) {
        const RopeTable& rope = model_.ropes[size_t(attention.rope)];
        const size_t angles = size_t(position) * size_t(rope.half);
        kernels_.rows.rotate_pairs(x, rope.cos.data() + angles, rope.sin.data() + angles, rope.half);
      }
      if (is_query) {
        kernel.store_query(shape, x, workspace_.queries(), row, head);
        continue;
      }
      uint8_t* tile = cache_.tile(input_.page(row), attention.layer, head, slot);
      (is_value ? kernel.store_value : kernel.store_key)(shape, x, tile, slot % kTileKeys);
    }
  }
}

}  // namespace topg
