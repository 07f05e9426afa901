// What a program's steps mean for one another: worked out once, when the program is complete.
#pragma once

#include <vector>

#include "engine/program.h"

namespace topg {

struct ProgramFacts {
  size_t first_selected = 0;  // the first step that works on the rows whose logits are wanted
  // By step: every thread may run it on few rows for itself, into activations of its own.  It writes nothing else, and what
  // it reads stays as it is until the threads have met.
  std::vector<bool> own_copies;
  // By activations: written and read between the same two attentions, so that the thread that takes a block of rows through
  // the steps there can keep them to itself.
  std::vector<bool> local;
};

// Throws std::invalid_argument when a step that follows a selection of rows needs all of them.
ProgramFacts analyse(const std::vector<ProgramStep>& steps, size_t activations);

// Whether a step works on each row alone, so that a block of rows can be taken through it and its neighbours.
bool is_row_local(const ProgramStep& step);

}  // namespace topg
