// Residuals, and gradient + bounded residual of a block: reference.stored and reference._add. Included through core.h only.
#pragma once

#include "kernels.h"
#include "sums.h"

namespace hvd_dyncomp {
namespace {

// reference.residual_bound, of a level's number.
constexpr double residual_bound(int level) { return level < 0 ? -2.0 * level : 2.0; }

constexpr uint32_t kDitherStep = 0x9E3779B1;  // reference.DITHER_STEP
constexpr int kDithers = 4;                    // reference.DITHERS

// The residual of block `b` and those behind it.
HVD_INLINE Residual from(Residual residual, size_t b, size_t count) {
    return {residual.values ? residual.values + b * count : nullptr, residual.dither + (uint32_t)b * kDithers * kDitherStep};
}

// A bfloat16 is the upper half of a float32.
HVD_INLINE Floats load_residual(const uint16_t* from) { return (Floats)load_upper_halves(from); }

// Fetches what is kBatchValues behind, which need not exist. While it decodes, the processor itself fetches that late: reducing
// took a tenth longer.
HVD_INLINE void fetch_behind(const uint16_t* residual) {
    __builtin_prefetch((const void*)((uintptr_t)residual + kBatchValues * sizeof *residual), 1);
}

// What is added to the bits of a vector of a block's values. `at`: which of them is the vector's first. Only the rest of a
// division by kDithers counts: for whole vectors it is zero.
HVD_INLINE Words dithers(Residual of_block, size_t at = 0) {
    return ((lane_numbers() + (uint32_t)at) % kDithers * kDitherStep + of_block.dither) >> 16;
}

// reference.stored, but for what becomes infinite.
HVD_INLINE void store_residual(uint16_t* to, Floats lost, Words dithers) {
    store_upper_halves(to, (Ints)((Words)(Ints)lost + dithers));
}

// The rest of reference.stored, for a block with this scale. In others no value is that large: none of a block is above 2^15
// times its scale.
HVD_INLINE void saturate(Residual residual, size_t count, float scale) {
    if (!residual.values || scale < 0x1p100f) return;
    for (size_t i = 0; i < count; ++i) residual.values[i] -= (residual.values[i] & 0x7fff) == 0x7f80;
}

// The same for a whole block.
HVD_INLINE void store_residuals(Residual to, const float* lost, size_t count) {
    for (size_t i = 0; i < count; i += kLanes)
        store_residual(to.values + i, load<Floats>(lost + i), dithers(to));
}

// Whether a level's codes depend on zeros among the gradients.
constexpr bool looks_for_zeros(int level) { return level == 2; }

// What is known of a block's values: the largest magnitude, if it is not negative; whether a gradient is zero.
struct Seen {
    float most = -1;
    bool zeros = false;
};

HVD_INLINE bool has_zeros(const float* gradient, size_t count) {
    int32_t found = 0;
    for (size_t i = 0; i < count; ++i) found |= gradient[i] == 0.0f;
    return found;
}

// A quick look at the norms of a block's gradient and residual, for the passes that add them: whether the residual is
// surely below its bound, as nearly all are. The exact comparison needs two sums over the tree.
template <bool Zeros>
class Norms {
  public:
    // Returns their sum.
    HVD_INLINE Floats add(int slot, Floats gradient, Floats residual) {
        const Floats sum = gradient + residual;
        of_gradient_[slot % 4] = multiply_add(gradient, gradient, of_gradient_[slot % 4]);
        of_residual_[slot % 4] = multiply_add(residual, residual, of_residual_[slot % 4]);
        of_sum_ = larger(of_sum_, magnitude(sum));
        if constexpr (Zeros) zeros_ |= zeros(gradient);
        return sum;
    }

    // max |x| of the sums; a NaN if there is one.
    HVD_INLINE Seen seen() const { return {largest(of_sum_), Zeros && any(zeros_)}; }

    // The sums are off by less than 1e-3 of themselves (16384 additions one after the other, for the largest block and the
    // shortest vectors), and by less than 1e-40 for what was too small to be squared. False where anything is not finite,
    // a square included, or all is zero.
    HVD_INLINE bool within(double bound) const {
        const Floats gradient = (of_gradient_[0] + of_gradient_[1]) + (of_gradient_[2] + of_gradient_[3]);
        const Floats residual = (of_residual_[0] + of_residual_[1]) + (of_residual_[2] + of_residual_[3]);
        Floats rest = gradient - residual * (float)(1.004 / (bound * bound));
        HVD_UNROLL
        for (int by = kLanes / 2; by > 0; by /= 2) rest += swap_lanes(rest, by, (Ints)lane_numbers() ^ by);
        return rest[0] > 1e-34f && rest[0] <= 0x1.fffffep127f;
    }

  private:
    Floats of_gradient_[4] = {}, of_residual_[4] = {};
    Ints of_sum_ = {};
    Marks zeros_ = {};
};

// out = gradient + residual, if that is surely within the level's bound; otherwise false, and `out` is of no use.
template <int Level>
HVD_INLINE bool add(float* out, const float* gradient, const uint16_t* residual, size_t count, Seen* seen) {
    Norms<looks_for_zeros(Level)> norms;
    for (size_t i = 0; i < count; i += 4 * kLanes)
        HVD_UNROLL
        for (int s = 0; s < 4; ++s) {
            const size_t at = i + s * kLanes;
            const Floats a = load<Floats>(gradient + at), b = load_residual(residual + at);
            store(out + at, norms.add(s, a, b));
        }
    *seen = norms.seen();
    return norms.within(residual_bound(Level));
}

// A block on its way to the wire.
struct Block {
    const float* x;     // gradient + bounded residual, zeros behind the real values
    Residual residual;  // where to leave what is lost; null for nowhere
    size_t real;        // values that are not padding
    Seen seen;
};

// reference._add, for any block.
template <int Level>
HVD_INLINE Block add_bounded(float* out, const float* gradient, Residual residual, size_t count, size_t real, double* sums) {
    constexpr double bound = residual_bound(Level);
    const Seen seen = {-1, looks_for_zeros(Level) && has_zeros(gradient, real)};
    const double of_gradient = tree_sum<Square>(gradient, count, sums);
    if (of_gradient == 0.0) return {gradient, {}, real, seen};  // a zero block, and what is owed waits
    const double of_residual = tree_sum<Square>(residual.values, count, sums);
    float factor = 1.0f;
    if (of_residual > bound * bound * of_gradient)
        factor = (float)(bound * __builtin_sqrt(of_gradient / of_residual));
    for (size_t i = 0; i < count; i += kLanes)
        store(out + i, load<Floats>(gradient + i) + load_residual(residual.values + i) * factor);
    return {out, residual, real, seen};
}

}  // namespace
}  // namespace hvd_dyncomp
