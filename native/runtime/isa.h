// Which instruction set the kernels use.
#pragma once

#include <string>
#include <vector>

#include "kernels/kernels.h"

namespace topg {

// Names of the instruction sets this build has, slowest first: "scalar", "avx2", "avx512_vnni", "amx".
std::vector<std::string> built_isas();
// Those of them that this processor and operating system can run.
std::vector<std::string> usable_isas();
// The kernels of an instruction set; "" chooses the best usable one.  Throws std::invalid_argument naming what was asked for,
// what this processor lacks, and what can be used.
const Kernels& kernels_for(const std::string& isa);
// Must be called once by each thread before it runs kernels of `isa` (AMX needs permission and a tile configuration; all
// flush denormals to zero).
void enter_isa(const Kernels& kernels);

}  // namespace topg
