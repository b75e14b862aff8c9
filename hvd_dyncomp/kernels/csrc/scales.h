// The scale of a block: how it is rounded, and its form on the wire. Included through core.h only.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace hvd_dyncomp {
namespace {

// scales.rounded_up. `x` is not negative; a NaN stays one.
HVD_INLINE float rounded_up(float x) {
    const uint32_t bits = (load<uint32_t>(&x) + 0xffff) & 0xffff0000;
    return x != x ? x : load<float>(&bits);
}

// To nearest, ties to even. `x` is not negative; a NaN stays one.
HVD_INLINE float rounded_to_bfloat16(float x) {
    const uint32_t bits = load<uint32_t>(&x);
    if (x != x) return x;
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
    return load<float>(&rounded);
}

// A scale that has been rounded; at 2 bits it may be negative. A block that counts as zero has none, and one that is not finite has a NaN.
HVD_INLINE void store_scale(uint8_t* to, bool live, bool finite, float scale) {
    store(to, !finite ? kWireNan : live ? (uint16_t)(load<uint32_t>(&scale) >> 16) : (uint16_t)0);
}

HVD_INLINE float load_scale(const uint8_t* from) {
    const uint32_t bits = (uint32_t)load<uint16_t>(from) << 16;
    return load<float>(&bits);
}

}  // namespace
}  // namespace hvd_dyncomp
