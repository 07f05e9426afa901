// What each binding file adds to the module.
#pragma once

#include <nanobind/nanobind.h>

namespace topg {

void bind_runtime(nanobind::module_& module);
void bind_linear(nanobind::module_& module);
void bind_rows(nanobind::module_& module);
void bind_attention(nanobind::module_& module);
void bind_sampling(nanobind::module_& module);
void bind_engine(nanobind::module_& module);

}  // namespace topg
