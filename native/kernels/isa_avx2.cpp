// Kernels for AVX2, FMA and F16C.
#include "kernels/table.h"

namespace topg {

const Kernels& avx2_kernels() {
  static constexpr char kName[] = "avx2";
  static const Kernels kernels = make_kernels(kName);
  return kernels;
}

}  // namespace topg
