// For x86-64 processors with AVX2.
#if defined(__x86_64__)
#include <immintrin.h>

// Holds up to the end of the file, where templates are instantiated.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC target("avx2")
#endif

#define HVD_LANES 8
#define HVD_SMALLER kBaseline
#include "core.h"

namespace hvd_dyncomp {

static bool supported() {
    return __builtin_cpu_supports("avx2");
}

const Variant kAvx2 = {"avx2", supported, encode, decode, reduce};

}  // namespace hvd_dyncomp

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
