// Names in Python for the enumerations of kernels and programs.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

#include "engine/program.h"
#include "kernels/layout.h"

namespace topg {

template <class Enum, size_t N>
Enum named(const std::string& name, const char* what, const std::pair<const char*, Enum> (&known)[N]) {
  std::string allowed;
  for (const auto& [text, value] : known) {
    if (name == text) return value;
    allowed += (allowed.empty() ? "" : ", ") + std::string(text);
  }
  throw std::invalid_argument("no " + std::string(what) + " is called '" + name + "'; allowed: " + allowed);
}

inline WeightCode weight_code(const std::string& name) {
  return named<WeightCode, 5>(name, "weight format",
                              {{"float32", WeightCode::kFloat32}, {"float16", WeightCode::kFloat16},
                               {"bfloat16", WeightCode::kBFloat16}, {"int8", WeightCode::kInt8}, {"int4", WeightCode::kInt4}});
}

inline ScaleType scale_type(const std::string& name) {
  return named<ScaleType, 4>(name, "scale format",
                             {{"none", ScaleType::kNone}, {"float32", ScaleType::kFloat32}, {"float16", ScaleType::kFloat16},
                              {"bfloat16", ScaleType::kBFloat16}});
}

inline ActivationCode activation_code(const std::string& name) {
  return named<ActivationCode, 3>(name, "activation format",
                                  {{"float32", ActivationCode::kFloat32}, {"bfloat16", ActivationCode::kBFloat16},
                                   {"int8", ActivationCode::kInt8}});
}

inline KVType kv_type(const std::string& name) {
  return named<KVType, 3>(name, "KV type",
                          {{"float32", KVType::kFloat32}, {"bfloat16", KVType::kBFloat16}, {"int8", KVType::kInt8}});
}

inline ActivationFunction activation_function(const std::string& name) {
  return named<ActivationFunction, 4>(name, "activation function",
                                      {{"silu", ActivationFunction::kSilu}, {"gelu", ActivationFunction::kGelu},
                                       {"gelu_tanh", ActivationFunction::kGeluTanh}, {"relu", ActivationFunction::kRelu}});
}

inline NormKind norm_kind(const std::string& name) {
  return named<NormKind, 2>(name, "norm", {{"rms", NormKind::kRms}, {"layer", NormKind::kLayer}});
}

inline Epilogue epilogue(const std::string& name) {
  return named<Epilogue, 4>(name, "epilogue", {{"store", Epilogue::kStore}, {"add", Epilogue::kAdd},
                                               {"activate", Epilogue::kActivate}, {"gate", Epilogue::kGate}});
}

}  // namespace topg
