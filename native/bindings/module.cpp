// The Python module topg._native.
#include "bindings/bindings.h"

NB_MODULE(_native, module) {
  module.doc() = "ToPG's native code.  Its Python interface is internal: use topg.LLM.";
  topg::bind_runtime(module);
#if defined(TOPG_BIND_LINEAR)
  topg::bind_linear(module);
#endif
#if defined(TOPG_BIND_ROWS)
  topg::bind_rows(module);
#endif
#if defined(TOPG_BIND_ATTENTION)
  topg::bind_attention(module);
#endif
#if defined(TOPG_BIND_SAMPLING)
  topg::bind_sampling(module);
#endif
#if defined(TOPG_BIND_ENGINE)
  topg::bind_engine(module);
#endif
}
