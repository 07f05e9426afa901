// Weight formats that come from Python, checked.
#pragma once

#include <string>

#include "bindings/kernel_call.h"
#include "bindings/names.h"
#include "kernels/layout.h"

namespace topg {

// A format that layout.h describes; whether an instruction set has a kernel for it is another question.
inline WeightFormat checked_weight_format(const std::string& code, const std::string& activation, const std::string& scale,
                                          int group, bool minimum) {
  const WeightFormat format{weight_code(code), activation_code(activation), scale_type(scale), group, minimum};
  const bool codes = format.code == WeightCode::kInt8 || format.code == WeightCode::kInt4;
  require(codes == (format.scale != ScaleType::kNone) && codes == (group != 0) && (codes || !minimum),
          code + " weights with " + scale + " scales in groups of " + std::to_string(group) +
              "; allowed: groups and scales for int8 and int4, neither (\"none\", 0, no minimum) for the other formats");
  require(group == 0 || (group >= kLanes && group <= 256 && (group & (group - 1)) == 0),
          "group is " + std::to_string(group) + "; allowed: powers of two from 16 to 256");
  require(codes || format.activation != ActivationCode::kInt8, code + " weights cannot have int8 activations");
  require(format.code != WeightCode::kInt4 || format.activation == ActivationCode::kInt8, "int4 needs int8 activations");
  return format;
}

}  // namespace topg
