// Kernels for plain C++: any processor.
#include "kernels/table.h"

namespace topg {

const Kernels& scalar_kernels() {
  static constexpr char kName[] = "scalar";
  static const Kernels kernels = make_kernels(kName);
  return kernels;
}

}  // namespace topg
