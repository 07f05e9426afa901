// The vectors of the instruction set that this translation unit is compiled for.
#pragma once

#if defined(__AVX512F__)
#include "kernels/simd_avx512.h"
#elif defined(__AVX2__)
#include "kernels/simd_avx2.h"
#else
#include "kernels/simd_generic.h"
#endif
