// Kernels for AVX-512 and AMX tiles.
#include "kernels/table.h"

namespace topg {

const Kernels& amx_kernels() {
  static constexpr char kName[] = "amx";
  static const Kernels kernels = make_kernels(kName);
  return kernels;
}

}  // namespace topg
