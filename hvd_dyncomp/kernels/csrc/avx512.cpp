// For x86-64 processors with AVX-512.
#if defined(__x86_64__)
#include <immintrin.h>

// Holds up to the end of the file, where templates are instantiated.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#endif

#define HVD_LANES 16
#define HVD_SMALLER kAvx2
#include "core.h"

namespace hvd_dyncomp {

static bool supported() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

const Variant kAvx512 = {"avx512", supported, encode, decode, reduce};

}  // namespace hvd_dyncomp

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
