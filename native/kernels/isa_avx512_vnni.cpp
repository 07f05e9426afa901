// Kernels for AVX-512 with VNNI.
#include "kernels/table.h"

namespace topg {

const Kernels& avx512_vnni_kernels() {
  static constexpr char kName[] = "avx512_vnni";
  static const Kernels kernels = make_kernels(kName);
  return kernels;
}

}  // namespace topg
