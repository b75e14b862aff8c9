// What the variants for different processors provide and what module.cpp calls.
//
// The arithmetic itself is in core.h and what it includes, which every variant compiles for itself. No variant may call a function of the
// C++ library: an inline one would be compiled once for each processor under one name, and the linker keeps any of them.
#ifndef HVD_DYNCOMP_KERNELS_H
#define HVD_DYNCOMP_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the wire is little-endian, and so must the processor be"
#endif
#if defined(__FAST_MATH__) || (defined(__FLT_EVAL_METHOD__) && __FLT_EVAL_METHOD__ != 0)
#error "the kernels equal their specification bit for bit only with plain IEEE float32 and float64"
#endif

namespace hvd_dyncomp {

constexpr size_t kScaleBytes = 2;      // scales.SCALE_BYTES: a bfloat16
constexpr uint16_t kWireNan = 0x7fc0;  // the scale of a block that is not finite

// Levels are numbers as levels.level_code makes them: bits, and below one bit -2, -4, -8 for 0.5, 0.25, 0.125.
static inline size_t block_bytes(int level, size_t block_size) {
    return kScaleBytes + (level < 0 ? block_size / (size_t)(-8 * level) : block_size * (size_t)level / 8);
}

// What error feedback has left: bfloat16s, null for none; and reference.stored's dither of the first of them.
struct Residual {
    uint16_t* values;
    uint32_t dither;
};

// A run of float32 in memory.
struct Piece {
    float* address;
    size_t count;
};

// The pieces one after the other, from element `skip` on, followed by zeros without end: a bucket's parameters.
struct Values {
    const Piece* pieces;
    size_t count;
    size_t skip;
};

// One message: blocks of `block_size` values, a power of two of at least 64, quantized to `level`.
struct Shape {
    size_t blocks;
    size_t block_size;
    int level;
};

// Versions of the same blocks, to be summed in this order; `factor` is multiplied into their scales.
struct Versions {
    const uint8_t* const* payloads;
    size_t count;
    float factor;
};

// So many values are in work at a time, if that is more than a block. With 2048, and with gradients fetched by
// instructions, encoding took 1.4 times as long (AMD EPYC with AVX-512).
constexpr size_t kBatchValues = 1024;

// Values of a group below one bit are at least so many; of each group in work the largest value is kept, and its place.
constexpr size_t kSmallestGroup = 16;

// Bytes of working memory that a call needs, 64-byte aligned: the values in work, what is kept of their groups, and the
// doubles of a block's sum.
static inline size_t scratch_bytes(size_t block_size) {
    const size_t values = block_size > kBatchValues ? block_size : kBatchValues;
    return values * sizeof(float) + values / kSmallestGroup * (sizeof(float) + sizeof(int32_t)) +
           block_size / 8 * sizeof(double);
}

// The operations of hvd_dyncomp/kernels/__init__.py. A residual's values may be null. Nothing needs to be aligned
// but `scratch`. Of what is reduced the first `real` values count; the others are padding.
struct Variant {
    const char* name;
    bool (*supported)();
    void (*encode)(uint8_t* out, Values, Residual, Shape, void* scratch);
    void (*decode)(Values, Versions, Shape, void* scratch);
    void (*reduce)(uint8_t* out, Versions, Residual, size_t real, Shape, void* scratch);
};

extern const Variant kAvx512;
extern const Variant kAvx2;
extern const Variant kBaseline;

}  // namespace hvd_dyncomp

#endif
