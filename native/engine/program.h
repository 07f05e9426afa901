// A compiled plan: steps over numbered buffers.  The Python compiler (backends/native/compiler.py) fuses a plan's ops into
// these steps; `Engine` runs them.
//
// All threads run the same steps ("SPMD").  A step of few rows (below Engine's row-mode limit) splits every step's output
// channels over the threads, with a barrier between steps.  A step of many rows splits the rows instead: between two
// attentions everything is row-local, so a thread takes a block of rows through all steps up to the next attention, and the
// threads meet twice a layer.
#pragma once

#include <variant>
#include <vector>

#include "kernels/kernels.h"

namespace topg {

// Ids index the engine's tables.  kNone: absent.  kScratch: as a buffer, the running thread's own row; it lives until the
// end of the row step.
constexpr int kNone = -1;
constexpr int kScratch = -2;

enum class NormKind : uint8_t { kRms, kLayer };

// Normalisation of runs of `width` values side by side.
struct Norm {
  NormKind kind = NormKind::kRms;
  int weight = kNone;  // vector
  int bias = kNone;    // vector
  int width = 0;
  int runs = 1;
  float eps = 0;
};

// ---- work on whole rows -------------------------------------------------------------------------------------------------

struct EmbedOp { int weight, out; };                      // out = row of the weight named by the token
struct NormOp { Norm norm; int input, out; };
struct AddOp { int left, right, out; };
struct ScaleOp { int input; float factor; int out; };
struct ActivateOp { ActivationFunction function; int input, out; };
struct GateOp { ActivationFunction function; int gate, up, out; };
struct SelectOp { int input, out; };                      // out row i = input row of the i-th row whose logits are wanted
struct PrepareOp { int input, activations; };             // into the form a linear multiplies
// Normalise (optional), rotate, and put query, key and value heads where attention finds them.
struct HeadsOp { int attention, query, key, value; Norm query_norm, key_norm; };  // norm.weight == kNone: no norm

using RowOp = std::variant<EmbedOp, NormOp, AddOp, ScaleOp, ActivateOp, GateOp, SelectOp, PrepareOp, HeadsOp>;

// Ops applied one after the other to each row.
struct RowStep { std::vector<RowOp> ops; };

// ---- linears ------------------------------------------------------------------------------------------------------------

enum class Epilogue : uint8_t {
  kStore,     // buffer = result
  kAdd,       // buffer += result
  kActivate,  // function(result), into `buffer` or `activations`
  kGate,      // function(gate) * up, into `buffer` or `activations`; the weight's blocks hold 16 gate and 16 up channels
};

struct LinearPart {
  int weight = kNone;
  int bias = kNone;  // vector over the weight's packed channels
  Epilogue epilogue = Epilogue::kStore;
  ActivationFunction function = ActivationFunction::kSilu;
  int buffer = kNone;
  int activations = kNone;
};

// Linears that share an input.  With `heads`, the parts are query, key and value, and each thread finishes the heads whose
// channels it computed.
struct LinearStep {
  int x = kNone;  // activations
  std::vector<LinearPart> parts;
  bool has_heads = false;
  HeadsOp heads{};
};

// ---- attention and logits -----------------------------------------------------------------------------------------------

struct Attention {
  int layer = 0;
  AttentionShape shape;
  int rope = kNone;  // table
};

struct AttentionStep { int attention, buffer, activations; };  // into one of `buffer` and `activations`, the other kNone

struct LogitsStep { int x, weight; float softcap; };  // softcap 0: none

using ProgramStep = std::variant<RowStep, LinearStep, AttentionStep, LogitsStep>;

}  // namespace topg
