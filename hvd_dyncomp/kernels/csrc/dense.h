// Blocks at levels of one bit and more: a code for every value. Included through core.h only.
#pragma once

#include "kernels.h"
#include "packing.h"
#include "residual.h"
#include "scales.h"
#include "sums.h"

namespace hvd_dyncomp {
namespace {

// Where the codes of a level sit: reference.PLACEMENTS.
struct Placement {
    int half;
    bool mid_rise;
    double reach;
    int fine;
    int outer;
    int top;
};

constexpr Placement placement(int bits) {
    const int half = (1 << (bits - 1)) - 1, fine = 1 << (bits - 2 > 0 ? bits - 2 : 0);
    return bits == 1   ? Placement{1, true, 0.0, 0, 0, 1}
           : bits == 2 ? Placement{0, false, 0.7, 0, 4, 4}
           : bits < 8  ? Placement{half, false, 1.0, fine, 0, 4 * (half - fine)}
                       : Placement{half, false, 1.0, 0, 0, half};
}

// reference._scale. Of the `count` values `real` count; the others are zero.
template <int Bits>
HVD_INLINE float block_scale(const float* x, size_t count, size_t real, float known, double* sums) {
    constexpr Placement at = placement(Bits);
    if (real == 0) real = 1;
    if constexpr (Bits == 1) {
        return rounded_up((float)(tree_sum<Absolute>(x, count, sums) * 2.0 / (double)real));
    } else {
        const double most = known >= 0 ? known : maximum(x, count);
        return rounded_up((float)(most * at.reach / at.top));
    }
}

// reference._few_reach, of a block without zeros among its `real` gradients: whether it has three codes at 2 bits.
HVD_INLINE bool few_reach(const float* x, size_t count, size_t real, float scale) {
    return 2 * (size_t)count_from(x, count, (Ints)broadcast(scale * 0.5f)) < real;
}

// The magnitude of one with the sign of the other.
HVD_INLINE Floats with_sign(Floats magnitude, Floats sign) {
    return (Floats)((Ints)magnitude | ((Ints)sign & (-0x7fffffff - 1)));
}

// reference._evenly. A half and a quarter are exact, so it does not matter whether products are rounded.
template <int Bits>
HVD_INLINE Floats evenly(Floats q) {
    constexpr float fine = placement(Bits).fine;
    const Floats size = (Floats)magnitude(q);
    const Floats two_apart = multiply_add(size, broadcast(0.5f), broadcast(fine / 2));
    const Floats four_apart = multiply_add(size, broadcast(0.25f), broadcast(fine));
    return with_sign(at_most(size, at_most(two_apart, four_apart)), q);
}

// reference._round, of a finite block: the integer k as a float. To clip first is the same, because the bounds are codes.
template <int Bits>
HVD_INLINE Floats quantize(Floats x, Floats inverse) {
    constexpr Placement at = placement(Bits);
    Floats q = x * inverse;
    if constexpr (at.fine) q = evenly<Bits>(q);
    // Nothing is beyond the outermost code if that is at the maximum.
    if constexpr (at.mid_rise || at.reach < 1)
        q = at_most(at_least(q, broadcast(-at.half)), broadcast(at.half - at.mid_rise));
    return at.mid_rise ? round_down(q) : round_to_even(q);
}

// Where code k is, in scales.
constexpr float place_of(int k, int fine) {
    const int size = k < 0 ? -k : k, two = 2 * size - fine, four = 4 * (size - fine);
    const int farther = two > four ? two : four, place = !fine || size > farther ? size : farther;
    return (float)(k < 0 ? -place : place);
}

// The values of a block's codes, k + half on the wire: reference._values.
template <int Bits>
class Decoder {
  public:
    HVD_INLINE explicit Decoder(float scale) : scale_(broadcast(scale)) {
        if constexpr (kTables > 0) {
            Floats places[kTables];
            for (int i = 0; i < kTables * kLanes; ++i) places[i / kLanes][i % kLanes] = place_of(i - kAt.half, kAt.fine);
            HVD_UNROLL
            for (int t = 0; t < kTables; ++t) tables_[t] = places[t] * scale_;
        }
    }

    HVD_INLINE Floats operator()(Ints code) const {
        if constexpr (kTables > 0) return looked_up(code);
        const Floats k = __builtin_convertvector(code - kAt.half, Floats);
        if constexpr (kAt.mid_rise) return (k + 0.5f) * scale_;
        if constexpr (kAt.fine) {
            const Floats size = (Floats)magnitude(k);
            const Floats farther = at_least(size * 2.0f - (float)kAt.fine, size * 4.0f - 4.0f * kAt.fine);
            return with_sign(at_least(size, farther), k) * scale_;
        }
        return k * scale_;
    }

  private:
    static constexpr Placement kAt = placement(Bits);
    // Registers that hold all values, where there are instructions that look them up.
#if defined(__x86_64__) && HVD_LANES >= 8
    static constexpr int kTables = kAt.fine && (1 << Bits) <= 2 * kLanes ? ((1 << Bits) + kLanes - 1) / kLanes : 0;
#else
    static constexpr int kTables = 0;
#endif

    HVD_INLINE Floats looked_up([[maybe_unused]] Ints code) const {
#if defined(__x86_64__) && HVD_LANES == 16
        if constexpr (kTables == 1) return (Floats)_mm512_permutexvar_ps((__m512i)code, (__m512)tables_[0]);
        else return (Floats)_mm512_permutex2var_ps((__m512)tables_[0], (__m512i)code, (__m512)tables_[kTables - 1]);
#elif defined(__x86_64__) && HVD_LANES == 8
        const __m256 low = _mm256_permutevar8x32_ps((__m256)tables_[0], (__m256i)code);
        if constexpr (kTables == 1) return (Floats)low;
        const __m256 high = _mm256_permutevar8x32_ps((__m256)tables_[kTables - 1], (__m256i)code);
        return (Floats)_mm256_blendv_ps(low, high, (__m256)(code << 28));  // by bit 3 of the code
#else
        return scale_;
#endif
    }

    Floats scale_;
    Floats tables_[kTables ? kTables : 1];
};

// Two bits, which are a sign and whether a value is an outer or an inner one: reference._inner_or_outer and _of_four. The
// inner codes of `three` are zero.
class TwoBits {
  public:
    HVD_INLINE TwoBits(float scale, bool three) : inner_((Ints)broadcast(three ? 0.0f * scale : scale)) {
        constexpr float outer = placement(2).outer;
        outer_ = (Ints)broadcast(outer * scale);
        step_ = (Ints)broadcast(scale * (three ? outer / 2 : (1 + outer) / 2));
        inner_signs_ = marks_of(!three);
        for (int i = 0; i < kLanes; ++i) table_[i] = i & 1 ? outer_[i] : inner_[i];
        table_ |= (Ints)(lane_numbers() << 30) & kSign;
    }

    // The code of each value, and what it stands for.
    HVD_INLINE Ints operator()(Floats x, Floats* value) const {
        const Marks is_outer = above(magnitude(x), step_);
        const Ints sign = only(is_outer | inner_signs_, (Ints)x & kSign);
        *value = (Floats)(either(is_outer, outer_, inner_) ^ sign);
        return (Ints)((Words)sign >> 30) | only(is_outer, Ints{} + 1);
    }

    // What the codes in the bits from `Shift` on of some bytes stand for.
    template <int Shift>
    HVD_INLINE Floats decoded(Ints bytes) const {
#if defined(__x86_64__) && HVD_LANES == 16
        return (Floats)_mm512_permutexvar_ps((__m512i)(bytes >> Shift), (__m512)table_);
#elif defined(__x86_64__) && HVD_LANES == 8
        return (Floats)_mm256_permutevar8x32_ps((__m256)table_, (__m256i)(bytes >> Shift));
#else
        return (Floats)(either(bytes << (31 - Shift) >> 31, outer_, inner_) ^ (bytes << (30 - Shift) & kSign));
#endif
    }

  private:
    static constexpr int kSign = -0x7fffffff - 1;
    Ints inner_, outer_, step_, table_;
    Marks inner_signs_;
};

// All codes of a block whose scale is zero or NaN stand for k = 0.
template <int Bits>
HVD_INLINE void write_dead_block(uint8_t* packed, size_t count) {
    constexpr int n = streams(Bits);
    Ints codes[n];
    HVD_UNROLL
    for (int s = 0; s < n; ++s) codes[s] = Ints{} + placement(Bits).half;
    const size_t stride = count / n;
    for (size_t i = 0; i < stride; i += kLanes) pack<Bits>(packed, codes, i, stride);
}

// Codes of x, and what they lose into `residual`, unless that is null.
template <int Bits>
HVD_INLINE void write_live_block(uint8_t* packed, const float* x, Residual residual, size_t count, float scale, bool three) {
    const Floats inverse = broadcast(1.0f / scale);
    const Decoder<Bits> decoder(scale);
    const TwoBits two_bits(scale, three);
    constexpr int n = streams(Bits);
    const size_t stride = count / n;
    const Words dither = dithers(residual);
    for (size_t i = 0; i < stride; i += kLanes) {
        Ints codes[n];
        HVD_UNROLL
        for (int s = 0; s < n; ++s) {
            const size_t at = s * stride + i;
            const Floats values = load<Floats>(x + at);
            Floats sent;
            if constexpr (Bits == 2) {
                codes[s] = two_bits(values, &sent);
            } else {
                codes[s] = __builtin_convertvector(quantize<Bits>(values, inverse), Ints) + placement(Bits).half;
                sent = decoder(codes[s]);
            }
            if (residual.values) store_residual(residual.values + at, values - sent, dither);
        }
        pack<Bits>(packed, codes, i, stride);
    }
}

// One block of reference.encode, from x = gradient + residual and its scale on.
template <int Bits>
HVD_INLINE void write_block(uint8_t* to, const float* x, Residual residual, size_t count, float scale, bool three) {
    constexpr float largest = (float)(0x1p127 / placement(Bits).top);  // scales.LARGEST_VALUE
    const bool finite = scale <= largest;  // scales are not negative; false for NaN
    const bool live = finite && scale >= 0x1p-100f;  // scales.SMALLEST_SCALE
    if (live) {
        write_live_block<Bits>(to + kScaleBytes, x, residual, count, scale, three);
        saturate(residual, count, scale);
    } else {
        write_dead_block<Bits>(to + kScaleBytes, count);
        if (residual.values && finite) store_residuals(residual, x, count);
    }
    store_scale(to, live, finite, live && three ? -scale : scale);
}

// The values that position `i` of all streams of one block stands for (reference.decode).
template <int Bits>
HVD_INLINE void read_values(Floats* values, const uint8_t* from, float factor, size_t i, size_t stride) {
    constexpr int n = streams(Bits);
    if constexpr (Bits == 2) {
        const float scale = load_scale(from);
        const TwoBits two_bits(__builtin_fabsf(scale) * factor, __builtin_signbit(scale));
        const Ints bytes = load_bytes(from + kScaleBytes + i);
        values[0] = two_bits.decoded<0>(bytes);
        values[1] = two_bits.decoded<2>(bytes);
        values[2] = two_bits.decoded<4>(bytes);
        values[3] = two_bits.decoded<6>(bytes);
        return;
    }
    Ints codes[n];
    unpack<Bits>(codes, from + kScaleBytes, i, stride);
    const Decoder<Bits> decoder(load_scale(from) * factor);
    HVD_UNROLL
    for (int s = 0; s < n; ++s) values[s] = decoder(codes[s]);
}

// The sum of the versions of one block, which begins `offset` bytes into their payloads (reference.decode_sum). `Stream`:
// past the caches. `Add`: plus `residual`, if that is surely within the bound; otherwise false, and `out` is of no use.
template <int Bits, bool Stream, bool Add>
HVD_INLINE bool read_block(float* out, Versions versions, size_t offset, const uint16_t* residual, size_t count, Seen* seen) {
    constexpr int n = streams(Bits);
    Norms<looks_for_zeros(Bits)> norms;
    const size_t stride = count / n;
    for (size_t i = 0; i < stride; i += kLanes) {
        Floats sum[n];
        read_values<Bits>(sum, versions.payloads[0] + offset, versions.factor, i, stride);
        for (size_t version = 1; version < versions.count; ++version) {
            Floats values[n];
            read_values<Bits>(values, versions.payloads[version] + offset, versions.factor, i, stride);
            HVD_UNROLL
            for (int s = 0; s < n; ++s) sum[s] += values[s];
        }
        HVD_UNROLL
        for (int s = 0; s < n; ++s) {
            const size_t at = s * stride + i;
            if constexpr (Add) {
                fetch_behind(residual + at);
                const Floats own = load_residual(residual + at);
                sum[s] = norms.add(s, sum[s], own);
            }
            if (Stream) stream(out + at, sum[s]);
            else store(out + at, sum[s]);
        }
    }
    if constexpr (Add) *seen = norms.seen();
    return !Add || norms.within(residual_bound(Bits));
}

}  // namespace
}  // namespace hvd_dyncomp
