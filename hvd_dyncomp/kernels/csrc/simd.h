// Vectors of HVD_LANES values, in the vector extensions of GCC and Clang. They compile for any processor; where the
// compilers make poor code of them, there is an intrinsic of x86. Included by the variants only, through core.h.
#pragma once

#include <stddef.h>
#include <stdint.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// Every helper has to vanish into its caller: a vector in a call has an ABI of its own for each instruction set.
#define HVD_ALWAYS __attribute__((always_inline))
#define HVD_INLINE inline HVD_ALWAYS

// Loops over vectors that have to stay in registers.
#if defined(__clang__)
#define HVD_UNROLL _Pragma("unroll")
#else
#define HVD_UNROLL _Pragma("GCC unroll 8")
#endif

namespace hvd_dyncomp {
namespace {

constexpr int kLanes = HVD_LANES;

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Shorts __attribute__((vector_size(2 * kLanes)));
typedef uint8_t Bytes __attribute__((vector_size(kLanes)));

// Half as many lanes: the same bytes in doubles.
typedef float HalfFloats __attribute__((vector_size(2 * kLanes)));
typedef int32_t HalfInts __attribute__((vector_size(2 * kLanes)));
typedef double Doubles __attribute__((vector_size(4 * kLanes)));
constexpr int kDoubleLanes = kLanes / 2;

// Memory is not aligned to anything.
template <typename Vector>
HVD_INLINE Vector load(const void* from) {
    Vector vector;
    __builtin_memcpy(&vector, from, sizeof vector);
    return vector;
}

template <typename Vector>
HVD_INLINE void store(void* to, Vector vector) {
    __builtin_memcpy(to, &vector, sizeof vector);
}

HVD_INLINE Floats broadcast(float value) { return value - Floats{}; }  // not plus: -0 has to stay -0

HVD_INLINE Words lane_numbers() {
    Words words;
    for (int i = 0; i < kLanes; ++i) words[i] = i;
    return words;
}

// Bits of |x|. They order as |x| does, and a NaN is above every number.
HVD_INLINE Ints magnitude(Floats x) { return (Ints)x & 0x7fffffff; }

// a * b + c, rounded once or twice: for estimates only.
HVD_INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__x86_64__) && HVD_LANES == 16
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return a * b + c;
#endif
}

// Lane i has what was in lane i xor `by`, a number below kLanes; `numbers` are the numbers of the lanes xor `by`.
HVD_INLINE Floats swap_lanes(Floats x, int by, Ints numbers) {
#if defined(__x86_64__) && HVD_LANES == 16
    return (Floats)_mm512_permutexvar_ps((__m512i)numbers, (__m512)x);
#elif defined(__x86_64__) && HVD_LANES == 8
    return (Floats)_mm256_permutevar8x32_ps((__m256)x, (__m256i)numbers);
#elif defined(__GNUC__) && !defined(__clang__) && HVD_LANES == 4
    if (by & 1) x = __builtin_shuffle(x, Ints{1, 0, 3, 2});
    if (by & 2) x = __builtin_shuffle(x, Ints{2, 3, 0, 1});
    return x;
#else
    Floats swapped;
    for (int i = 0; i < kLanes; ++i) swapped[i] = x[i ^ by];
    return swapped;
#endif
}

// The sum of all lanes, halves added to each other until one is left.
HVD_INLINE double halved(Doubles x) {
#if defined(__x86_64__) && HVD_LANES >= 8
#if HVD_LANES == 16
    const __m256d four = _mm512_castpd512_pd256((__m512d)x) + _mm512_extractf64x4_pd((__m512d)x, 1);
#else
    const __m256d four = (__m256d)x;
#endif
    const __m128d two = _mm256_castpd256_pd128(four) + _mm256_extractf128_pd(four, 1);
    return two[0] + two[1];
#else
    double sums[kDoubleLanes];
    store(sums, x);
    for (int half = kDoubleLanes / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
    return sums[0];
#endif
}

// The results of comparisons. The compilers make vectors of AVX-512's masks, and back.
#if defined(__x86_64__) && HVD_LANES == 16
typedef __mmask16 Marks;
HVD_INLINE Marks zeros(Floats x) { return _mm512_cmp_ps_mask((__m512)x, _mm512_setzero_ps(), _CMP_EQ_OQ); }
HVD_INLINE Marks above(Ints a, Ints b) { return _mm512_cmpgt_epi32_mask((__m512i)a, (__m512i)b); }
HVD_INLINE Ints only(Marks marks, Ints x) { return (Ints)_mm512_maskz_mov_epi32(marks, (__m512i)x); }
HVD_INLINE Ints either(Marks marks, Ints a, Ints b) { return (Ints)_mm512_mask_blend_epi32(marks, (__m512i)b, (__m512i)a); }
HVD_INLINE Marks marks_of(bool all) { return all ? 0xffff : 0; }
HVD_INLINE bool any(Marks marks) { return marks; }
#else
typedef Ints Marks;
HVD_INLINE Marks zeros(Floats x) { return x == 0.0f; }
HVD_INLINE Marks above(Ints a, Ints b) { return a > b; }
HVD_INLINE Ints only(Marks marks, Ints x) { return marks & x; }
HVD_INLINE Ints either(Marks marks, Ints a, Ints b) { return b ^ (marks & (a ^ b)); }
HVD_INLINE Marks marks_of(bool all) { return Ints{} - all; }
HVD_INLINE bool any(Marks marks) {
    HVD_UNROLL
    for (int by = kLanes / 2; by > 0; by /= 2) marks |= (Ints)swap_lanes((Floats)marks, by, (Ints)lane_numbers() ^ by);
    return marks[0];
}
#endif

// How many values have at least a magnitude of the given bits.
HVD_INLINE uint32_t count_from(const float* x, size_t count, Ints least) {
#if defined(__x86_64__) && HVD_LANES == 16
    uint32_t found[4] = {};
    for (size_t i = 0; i < count; i += 4 * kLanes)
        HVD_UNROLL
        for (int s = 0; s < 4; ++s)
            found[s] += __builtin_popcount(_mm512_cmpge_epi32_mask((__m512i)magnitude(load<Floats>(x + i + s * kLanes)), (__m512i)least));
    return (found[0] + found[1]) + (found[2] + found[3]);
#else
    Ints found[4] = {};
    for (size_t i = 0; i < count; i += 4 * kLanes)
        HVD_UNROLL
        for (int s = 0; s < 4; ++s) found[s] -= magnitude(load<Floats>(x + i + s * kLanes)) >= least;
    Ints all = (found[0] + found[1]) + (found[2] + found[3]);
    HVD_UNROLL
    for (int by = kLanes / 2; by > 0; by /= 2) all += (Ints)swap_lanes((Floats)all, by, (Ints)lane_numbers() ^ by);
    return (uint32_t)all[0];
#endif
}

#if defined(__x86_64__) && HVD_LANES == 16

HVD_INLINE Ints larger(Ints a, Ints b) { return (Ints)_mm512_max_epi32((__m512i)a, (__m512i)b); }
HVD_INLINE Floats at_least(Floats x, Floats low) { return (Floats)_mm512_max_ps((__m512)x, (__m512)low); }
HVD_INLINE Floats at_most(Floats x, Floats high) { return (Floats)_mm512_min_ps((__m512)x, (__m512)high); }
HVD_INLINE Floats round_to_even(Floats x) { return (Floats)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT); }
HVD_INLINE Floats round_down(Floats x) { return (Floats)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEG_INF); }
HVD_INLINE Ints load_bytes(const uint8_t* from) {
    return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
}
HVD_INLINE Ints load_shorts(const uint8_t* from) {
    return (Ints)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
}
HVD_INLINE void store_bytes(uint8_t* to, Ints x) { _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)x)); }
HVD_INLINE void store_shorts(uint8_t* to, Ints x) {
    _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16((__m512i)x));
}
HVD_INLINE Doubles widen(HalfFloats x) { return (Doubles)_mm512_cvtps_pd((__m256)x); }
HVD_INLINE HalfInts load_half_of_upper_halves(const uint16_t* from) {
    return (HalfInts)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from)) << 16;
}
HVD_INLINE Ints load_upper_halves(const uint16_t* from) {
    return (Ints)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)) << 16;
}
HVD_INLINE void store_upper_halves(uint16_t* to, Ints x) {
    const __m512i upper = (__m512i)(lane_numbers() * 0x40004 + 0x30001);  // words 1, 3, 5 and so on
    _mm256_storeu_si256((__m256i*)to, _mm512_castsi512_si256(_mm512_permutexvar_epi16(upper, (__m512i)x)));
}

#elif defined(__x86_64__) && HVD_LANES == 8

HVD_INLINE Ints larger(Ints a, Ints b) { return (Ints)_mm256_max_epi32((__m256i)a, (__m256i)b); }
HVD_INLINE Floats at_least(Floats x, Floats low) { return (Floats)_mm256_max_ps((__m256)x, (__m256)low); }
HVD_INLINE Floats at_most(Floats x, Floats high) { return (Floats)_mm256_min_ps((__m256)x, (__m256)high); }
HVD_INLINE Floats round_to_even(Floats x) {
    return (Floats)_mm256_round_ps((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
HVD_INLINE Floats round_down(Floats x) {
    return (Floats)_mm256_round_ps((__m256)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}
HVD_INLINE Ints load_bytes(const uint8_t* from) {
    return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
}
HVD_INLINE Ints load_shorts(const uint8_t* from) {
    return (Ints)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from));
}
HVD_INLINE __m128i narrow(Ints x) {
    return _mm_packus_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
}
HVD_INLINE void store_bytes(uint8_t* to, Ints x) {
    _mm_storel_epi64((__m128i*)to, _mm_packus_epi16(narrow(x), narrow(x)));
}
HVD_INLINE void store_shorts(uint8_t* to, Ints x) { _mm_storeu_si128((__m128i*)to, narrow(x)); }
HVD_INLINE Doubles widen(HalfFloats x) { return (Doubles)_mm256_cvtps_pd((__m128)x); }
HVD_INLINE HalfInts load_half_of_upper_halves(const uint16_t* from) {
    return (HalfInts)_mm_cvtepu16_epi32(_mm_loadl_epi64((const __m128i*)from)) << 16;
}
HVD_INLINE Ints load_upper_halves(const uint16_t* from) { return load_shorts((const uint8_t*)from) << 16; }
HVD_INLINE void store_upper_halves(uint16_t* to, Ints x) {
    const __m256i upper = _mm256_set1_epi64x(0x0f0e0b0a07060302);  // words 1, 3, 5 and 7 of each half of the vector
    const __m256i shorts = _mm256_permute4x64_epi64(_mm256_shuffle_epi8((__m256i)x, upper), 0b1000);
    _mm_storeu_si128((__m128i*)to, _mm256_castsi256_si128(shorts));
}

#else

HVD_INLINE Ints larger(Ints a, Ints b) { return a > b ? a : b; }
HVD_INLINE Floats at_least(Floats x, Floats low) { return x > low ? x : low; }  // `low` for a NaN, as above
HVD_INLINE Floats at_most(Floats x, Floats high) { return x < high ? x : high; }

HVD_INLINE Doubles widen(HalfFloats x) { return __builtin_convertvector(x, Doubles); }
HVD_INLINE HalfInts load_half_of_upper_halves(const uint16_t* from) { return HalfInts{from[0] << 16, from[1] << 16}; }

// Adding 1.5 * 2^23 leaves no bits for a fraction. For |x| <= 2^22; the sign of a zero is kept, as by the instruction.
HVD_INLINE Floats round_to_even(Floats x) {
    const Ints sign = (Ints)x & (-0x7fffffff - 1);
    return (Floats)((Ints)((x + 12582912.0f) - 12582912.0f) | sign);
}
HVD_INLINE Floats round_down(Floats x) {
    const Floats nearest = round_to_even(x);
    return nearest > x ? nearest - 1.0f : nearest;
}

#if defined(__x86_64__)  // SSE2
HVD_INLINE Ints load_shorts(const uint8_t* from) {
    return (Ints)_mm_unpacklo_epi16(_mm_loadl_epi64((const __m128i*)from), _mm_setzero_si128());
}
HVD_INLINE Ints load_bytes(const uint8_t* from) {
    const __m128i bytes = _mm_cvtsi32_si128(load<int>(from));
    return (Ints)_mm_unpacklo_epi16(_mm_unpacklo_epi8(bytes, _mm_setzero_si128()), _mm_setzero_si128());
}
HVD_INLINE void store_bytes(uint8_t* to, Ints x) {
    const __m128i shorts = _mm_packs_epi32((__m128i)x, (__m128i)x);
    store(to, _mm_cvtsi128_si32(_mm_packus_epi16(shorts, shorts)));
}
HVD_INLINE void store_shorts(uint8_t* to, Ints x) {  // SSE2 packs signed numbers only: move the range and back
    const __m128i middle = _mm_set1_epi32(0x8000);
    const __m128i shorts = _mm_packs_epi32(_mm_sub_epi32((__m128i)x, middle), _mm_setzero_si128());
    _mm_storel_epi64((__m128i*)to, _mm_add_epi16(shorts, _mm_set1_epi16(-0x8000)));
}
HVD_INLINE Ints load_upper_halves(const uint16_t* from) {
    return (Ints)_mm_unpacklo_epi16(_mm_setzero_si128(), _mm_loadl_epi64((const __m128i*)from));
}
HVD_INLINE void store_upper_halves(uint16_t* to, Ints x) {  // signed they fit, and lose nothing
    _mm_storel_epi64((__m128i*)to, _mm_packs_epi32(_mm_srai_epi32((__m128i)x, 16), _mm_setzero_si128()));
}
#else
HVD_INLINE Ints load_bytes(const uint8_t* from) { return __builtin_convertvector(load<Bytes>(from), Ints); }
HVD_INLINE Ints load_shorts(const uint8_t* from) { return __builtin_convertvector(load<Shorts>(from), Ints); }
HVD_INLINE void store_bytes(uint8_t* to, Ints x) { store(to, __builtin_convertvector(x, Bytes)); }
HVD_INLINE void store_shorts(uint8_t* to, Ints x) { store(to, __builtin_convertvector(x, Shorts)); }
HVD_INLINE Ints load_upper_halves(const uint16_t* from) { return load_shorts((const uint8_t*)from) << 16; }
HVD_INLINE void store_upper_halves(uint16_t* to, Ints x) { store_shorts((uint8_t*)to, (Ints)((Words)x >> 16)); }
#endif

#endif

// Past the caches, without reading first what is overwritten. `to` is aligned as a vector is; `end_stream` must follow
// before anyone else may look.
HVD_INLINE void stream(float* to, Floats x) {
#if defined(__x86_64__) && HVD_LANES == 16
    _mm512_stream_ps(to, (__m512)x);
#elif defined(__x86_64__) && HVD_LANES == 8
    _mm256_stream_ps(to, (__m256)x);
#elif defined(__x86_64__)
    _mm_stream_ps(to, (__m128)x);
#else
    store(to, x);
#endif
}

HVD_INLINE void end_stream() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

}  // namespace
}  // namespace hvd_dyncomp
