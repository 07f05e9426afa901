// The table of kernels of one instruction set.  Each table is built in its own translation unit (isa_*.cpp), compiled with
// that instruction set's flags; everything else in the project is compiled for the baseline and calls through the table.
//
// Every kernel computes a row from that row alone and adds in an order fixed by the shape, so that results are the same bits
// in every batch.  Kernels allocate nothing and keep no state.
#pragma once

#include "kernels/layout.h"

namespace topg {

enum class ActivationFunction : uint8_t { kSilu, kGelu, kGeluTanh, kRelu };

// ---- linear -------------------------------------------------------------------------------------------------------------

constexpr int kStepColumns = 4;  // input columns of an inner step

struct TileArguments {
  const Activations* x;
  int row;                  // first row of x
  int rows;                 // 1 .. LinearKernel::max_rows
  const uint8_t* block;     // packed block of 32 channels
  float* out;               // [rows][32], 64-byte aligned
  const uint8_t* prefetch;  // what will be read next, or null: fetched into L2 spread over the tile's inner loop
  int prefetch_bytes;       // how much of it per inner step (kStepColumns x 32 channels)
};

// rows of x times one block of channels, over all columns.
struct LinearKernel {
  const char* name = nullptr;  // null: this format has no kernel
  int max_rows = 0;
  void (*tile)(const WeightFormat& format, const TileArguments& arguments) = nullptr;
};

// ---- attention ----------------------------------------------------------------------------------------------------------

struct AttentionShape {
  KVLayout kv;
  int heads = 0;
  float scale = 1;    // of the scores, before softcap
  float softcap = 0;  // 0: none
  int window = 0;     // 0: none; a token sees itself and the window - 1 before it

  int group() const { return heads / kv.kv_heads; }  // query heads that share a KV head
};

// Queries of one step, ready for the score kernel.  [kv_head][row][group][dim], elements of the cache's type (float32,
// bfloat16 bits, int8); int8 also has a scale and the sum of codes per (kv_head, row, group).
struct Queries {
  void* values = nullptr;
  float* scales = nullptr;
  int32_t* sums = nullptr;
  int rows = 0;  // capacity: rows of one KV head
};

// A run of consecutive query tokens of one sequence against key blocks [first_block, last_block) of one KV head.
struct AttentionItem {
  int row;                      // first query row of the step
  int tokens;                   // query tokens
  int position;                 // of the first query token in its sequence
  int kv_head;
  int first_block, last_block;  // in units of kKeyBlock
  const int32_t* pages;         // page table of the sequence
  const AttentionItem* next;    // what will be attended to next, for prefetching; may be null
};

// Softmax of one (row, head) so far: out [dim] is the unnormalised weighted sum of values.
// total is 0 and maximum -inf where no key was visible.
struct AttentionState {
  float* out;      // [states][dim]
  float* maximum;  // [states]
  float* total;    // [states]
};

struct AttentionKernel {
  const char* name = nullptr;
  // One query head (float32 [head_dim], rotated) into its place of `queries`.
  void (*store_query)(const AttentionShape& shape, const float* head, const Queries& queries, int row, int head_index);
  // One key or value head (float32 [head_dim], key rotated) into slot `token` (0..31) of a tile.  Slots after it that share
  // a vector element group with it are cleared, so that what an earlier sequence left there is never multiplied.
  void (*store_key)(const AttentionShape& shape, const float* head, uint8_t* tile, int token);
  void (*store_value)(const AttentionShape& shape, const float* head, uint8_t* tile, int token);
  // Attend and fold the item's blocks in ascending order into states [tokens][group].  With `keep_blocks`, block b goes into
  // states[(b - first_block)][tokens][group] of its own instead, to be folded by `fold` later.
  void (*attend)(const AttentionShape& shape, const Queries& queries, const uint8_t* pool, int layer,
                 const AttentionItem& item, const AttentionState& states, bool keep_blocks);
  // state 0 += state 1, the later block.  The same arithmetic as inside `attend`.
  void (*fold)(const AttentionShape& shape, float* out, float* maximum, float* total, const float* block_out,
               float block_maximum, float block_total);
  // out / total -> float32 [head_dim].
  void (*finish)(const AttentionShape& shape, const float* out, float total, float* head);
};

// ---- rows ---------------------------------------------------------------------------------------------------------------

struct RowKernels {
  // x [columns] -> row `row` of `out`; columns up to out.columns are filled with zeros.  Rounding as docs/precision.md says:
  // scale = amax / 127, codes round half to even, clamped to +-127.  A group with a value that is not finite gets scale NaN.
  void (*prepare)(const float* x, int columns, const Activations& out, int row);
  // The same for dot groups [first, last) only; x points at the first column of group `first`, `columns` of it exist.
  // (first * dot_group must be a multiple of the group and of the rotation.  Formats without groups count runs of 64.)
  void (*prepare_groups)(const float* x, int columns, const Activations& out, int row, int first, int last);

  void (*rms_norm)(const float* x, const float* weight, const float* bias, int width, float eps, float* out);
  void (*layer_norm)(const float* x, const float* weight, const float* bias, int width, float eps, float* out);
  void (*add)(const float* left, const float* right, int width, float* out);
  void (*scale)(const float* x, float factor, int width, float* out);
  void (*activate)(ActivationFunction function, const float* x, int width, float* out);
  void (*gate)(ActivationFunction function, const float* gate, const float* up, int width, float* out);
  void (*softcap)(float* x, int width, float cap);  // x = cap * tanh(x / cap)
  // Rotate the pairs (i, i + half) of the first 2 * half values of a head in place.
  void (*rotate_pairs)(float* head, const float* cos, const float* sin, int half);
  // One row (channel) of a packed weight as float32 [columns], with its rotation undone: an embedding lookup.
  void (*unpack_row)(const PackedWeight& weight, int channel, float* out);
  // Index of the largest value, the lowest index among equals; -1 when a value is NaN or none is finite.
  int (*argmax)(const float* x, int count);
};

// ---- blocks of results --------------------------------------------------------------------------------------------------

// The best logit of a row so far.
struct Best {
  float value;    // -inf at first
  int channel;    // -1 at first; the lowest among equals
  bool unusable;  // a logit was NaN or +inf
};

// c [rows][32 channels] is what a tile gave; bias [32] or null is added first.
struct BlockKernels {
  void (*store)(const float* c, int rows, const float* bias, float* out, ptrdiff_t stride);  // out [rows][32] = result
  void (*add)(const float* c, int rows, const float* bias, float* out, ptrdiff_t stride);    // out [rows][32] += result
  void (*activate)(ActivationFunction function, const float* c, int rows, const float* bias, float* out, ptrdiff_t stride);
  // out [rows][16] = function(channels 0..15) * channels 16..31
  void (*gate)(ActivationFunction function, const float* c, int rows, const float* bias, float* out, ptrdiff_t stride);
  // The block's first `channels` channels against best [rows]; blocks must come in ascending order.
  void (*best)(const float* c, int rows, int first_channel, int channels, Best* best);
};

// ---- sampling -----------------------------------------------------------------------------------------------------------

constexpr int kSampleRun = 32;  // logits whose maximum, or the sum up to whose end, is kept

struct SamplingKernels {
  void (*widen)(const float* x, int count, double* out);
  // maxima[i] = the largest of run i of x; no value is NaN.
  void (*run_maxima)(const double* x, int count, double* maxima);
  // weights[i] = exp((logits[i] - maximum) / temperature); exactly 1 at the maximum, exactly 0 below exp(-708).
  // sums[i] = weights[0] + weights[1] + .. up to the end of run i, added one after the other.
  void (*weights)(const double* logits, int count, double maximum, double temperature, double* weights, double* sums);
};

// ---- limits -------------------------------------------------------------------------------------------------------------

// Loops of nothing but the instruction that bounds a kind of linear; each returns how many multiply-adds it did.
struct PeakKernels {
  double (*int8)(long iterations);
  double (*bfloat16)(long iterations);
  double (*float32)(long iterations);
  void (*read)(const uint8_t* data, size_t bytes);  // loads every byte once
};

struct Kernels {
  const char* isa = nullptr;
  RowKernels rows;
  BlockKernels blocks;
  SamplingKernels sampling;
  PeakKernels peaks;
  LinearKernel (*linear)(const WeightFormat& format);
  AttentionKernel (*attention)(KVType type);
};

const Kernels& scalar_kernels();
#if defined(TOPG_X86)
const Kernels& avx2_kernels();
const Kernels& avx512_vnni_kernels();
const Kernels& avx512_vnni_bf16_kernels();
const Kernels& amx_kernels();
#endif

}  // namespace topg
