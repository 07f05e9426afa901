// Executor: logits, and the best of each row.
#include <algorithm>

#include "engine/executor.h"
#include "kernels/gemm.h"

namespace topg {

void Executor::logits(const LogitsStep& step, int thread) const {
  const Weight& weight = model_.weights[size_t(step.weight)];
  const int rows = input_.selected_rows(), vocab = weight.packed.channels;
  ThreadSpace& space = workspace_.of(thread);
  const ActivationRows& x = space.current[size_t(step.x)];
  std::fill(space.best, space.best + rows, Best{-__builtin_inff(), -1, false});
  const Range mine = share(weight.packed.blocks(), thread, threads_.size());
  float* c = space.slab;  // what `multiply` hands to the function, not constant: the soft cap is applied in place
  multiply(weight.kernel, weight.packed, x.data, 0, rows, mine.begin, mine.end, c,
           [&](int row, int count, int block, const float*) {
             const int first = block * kBlockChannels, channels = std::min(kBlockChannels, vocab - first);
             if (step.softcap != 0) kernels_.rows.softcap(c, count * kBlockChannels, step.softcap);
             if (output_.best != nullptr) kernels_.blocks.best(c, count, first, channels, space.best + row);
             if (output_.logits == nullptr) return;
             for (int i = 0; i < count; ++i) {
               float* out = output_.logits + size_t(row + i) * size_t(vocab) + first;
               std::copy(c + i * kBlockChannels, c + i * kBlockChannels + channels, out);
             }
           });
  if (output_.best == nullptr) return;
  threads_.barrier(thread);
  choose_best(thread);
}

// The best of what all threads found, for this thread's share of the rows.
void Executor::choose_best(int thread) const {
  const Range mine = share(input_.selected_rows(), thread, threads_.size());
  for (int row = mine.begin; row < mine.end; ++row) {
    Best best = workspace_.of(0).best[row];
    for (int other = 1; other < threads_.size(); ++other) {
      const Best& theirs = workspace_.of(other).best[row];  // of higher channels: equals do not win
      const bool unusable = best.unusable || theirs.unusable;
      if (theirs.value > best.value) best = theirs;
      best.unusable = unusable;
    }
    output_.best[row] = best;
  }
}

}  // namespace topg
