// The largest of the values of a block, and sums over a fixed tree. Included through core.h only.
#pragma once

#include "simd.h"

namespace hvd_dyncomp {
namespace {

// The largest of a vector of magnitudes.
HVD_INLINE float largest(Ints most) {
    HVD_UNROLL
    for (int by = kLanes / 2; by > 0; by /= 2)
        most = larger(most, (Ints)swap_lanes((Floats)most, by, (Ints)lane_numbers() ^ by));
    return ((Floats)most)[0];
}

// max |x|; a NaN if there is one.
HVD_INLINE float maximum(const float* x, size_t count) {
    Ints most[4] = {};
    for (size_t i = 0; i < count; i += 4 * kLanes)
        HVD_UNROLL
        for (int s = 0; s < 4; ++s) most[s] = larger(most[s], magnitude(load<Floats>(x + i + s * kLanes)));
    return largest(larger(larger(most[0], most[1]), larger(most[2], most[3])));
}

struct Square {
    static HVD_INLINE Doubles of(const float* x) {
        const Doubles wide = widen(load<HalfFloats>(x));
        return wide * wide;
    }
    static HVD_INLINE Doubles of(const uint16_t* x) {  // bfloat16s
        const Doubles wide = widen((HalfFloats)load_half_of_upper_halves(x));
        return wide * wide;
    }
};

struct Absolute {
    static HVD_INLINE Doubles of(const float* x) { return widen((HalfFloats)(load<HalfInts>(x) & 0x7fffffff)); }
};

// Vector `i` of `Left` that are left of `All` vectors, after rounds of scales.tree_sum.
template <int All, int Left>
HVD_INLINE Doubles left_of(const double* sums, int i) {
    if constexpr (Left == All) return load<Doubles>(sums + i * kDoubleLanes);
    else return left_of<All, 2 * Left>(sums, i) + left_of<All, 2 * Left>(sums, i + Left);
}

// scales.tree_sum, in place. What fits there is summed in registers: a round through memory waits for the one before.
HVD_INLINE double halved(double* sums, size_t rest) {
    while (rest > 8 * kDoubleLanes) {
        rest /= 2;
        for (size_t i = 0; i < rest; i += kDoubleLanes)
            store(sums + i, load<Doubles>(sums + i) + load<Doubles>(sums + i + rest));
    }
    if (rest == 8 * kDoubleLanes) return halved(left_of<8, 1>(sums, 0));
    if (rest == 4 * kDoubleLanes) return halved(left_of<4, 1>(sums, 0));
    if (rest == 2 * kDoubleLanes) return halved(left_of<2, 1>(sums, 0));
    if (rest == kDoubleLanes) return halved(load<Doubles>(sums));
    while (rest > 1) {
        rest /= 2;
        for (size_t i = 0; i < rest; ++i) sums[i] += sums[i + rest];
    }
    return sums[0];
}

// scales.tree_sum of terms of the values: halves are added to each other until one is left. The first three rounds
// are one pass over x; the rest is done in `sums`, count / 8 doubles.
template <typename Term, typename Item>
HVD_INLINE double tree_sum(const Item* x, size_t count, double* sums) {
    size_t rest = count / 8;
    for (size_t i = 0; i < rest; i += kDoubleLanes) {
        const Item* at = x + i;
        const Doubles even = (Term::of(at) + Term::of(at + 4 * rest)) + (Term::of(at + 2 * rest) + Term::of(at + 6 * rest));
        at += rest;
        const Doubles odd = (Term::of(at) + Term::of(at + 4 * rest)) + (Term::of(at + 2 * rest) + Term::of(at + 6 * rest));
        store(sums + i, even + odd);
    }
    return halved(sums, rest);
}

}  // namespace
}  // namespace hvd_dyncomp
