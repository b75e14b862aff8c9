// The arithmetic of reference.py, bit for bit, on vectors of HVD_LANES values. Every variant includes this file once,
// after it has set HVD_LANES and told the compiler for which instructions: everything here, and in the headers that only
// this one includes, is local to the variant.
//
// All is done block by block. A block's values are read from memory once; whatever looks at them again (the maximum,
// the sum, the rounding) finds them in the first-level cache, and nothing but results is written back.
#include "dense.h"
#include "kernels.h"
#include "residual.h"
#include "simd.h"
#include "sparse.h"
#include "values.h"

namespace hvd_dyncomp {
namespace {

template <typename Item>
HVD_INLINE void clear(Item* values, size_t from, size_t to) {
    if (from < to) __builtin_memset(values + from, 0, (to - from) * sizeof(Item));
}

// Quantizes what `next(b, own, buffer, sums)` returns: block b, in `buffer` or where it lies; `own` is the block's
// residual or null. Several blocks are in work at a time: a scale is a long chain of operations on one number (the end of
// the sum, root, quotients), and the processor goes through the next blocks' meanwhile.
template <int Level, typename Next>
HVD_INLINE void write_blocks(uint8_t* out, Residual residual, Shape shape, void* scratch, Next next) {
    constexpr size_t most = 8;
    const size_t count = shape.block_size, bytes = block_bytes(Level, count);
    size_t batch = kBatchValues / count;
    batch = batch < 1 ? 1 : batch > most ? most : batch;
    const size_t values = count > kBatchValues ? count : kBatchValues;
    float* buffers = (float*)scratch;
    float* largest = buffers + values;
    int32_t* places = (int32_t*)(largest + values / kSmallestGroup);
    double* sums = (double*)(places + values / kSmallestGroup);
    const Rows<Level> rows(count);
    const size_t groups = Level < 0 ? groups_kept(-Level, count) : 0;
    const auto largest_of = [=](size_t i) HVD_ALWAYS -> Largest { return {largest + i * groups, places + i * groups}; };
    for (size_t begin = 0; begin < shape.blocks; begin += batch) {
        const size_t here = shape.blocks - begin < batch ? shape.blocks - begin : batch;
        Block block[most];
        float scale[most];
        bool three[most] = {};
        for (size_t i = 0; i < here; ++i) {
            block[i] = next(begin + i, from(residual, begin + i, count), buffers + i * count, sums);
            if constexpr (Level < 0) {
                scale[i] = sparse_scale<-Level>(rows, largest_of(i), block[i].x, count, block[i].real, sums);
            } else {
                scale[i] = block_scale<Level>(block[i].x, count, block[i].real, block[i].seen.most, sums);
                if constexpr (looks_for_zeros(Level))
                    three[i] = block[i].seen.zeros || few_reach(block[i].x, count, block[i].real, scale[i]);
            }
        }
        for (size_t i = 0; i < here; ++i) {
            const size_t b = begin + i;
            if constexpr (Level < 0) {
                write_sparse_block<-Level>(rows, out + b * bytes, block[i].x, largest_of(i), block[i].residual, count, scale[i]);
            } else {
                write_block<Level>(out + b * bytes, block[i].x, block[i].residual, count, scale[i], three[i]);
            }
            if (block[i].residual.values) clear(block[i].residual.values, block[i].real, count);
        }
    }
}

// A block without a residual.
template <int Level>
HVD_INLINE Block alone(const float* gradient, size_t real) {
    return {gradient, {}, real, {-1, looks_for_zeros(Level) && has_zeros(gradient, real)}};
}

template <int Level>
void encode_level(uint8_t* out, Values values, Residual residual, Shape shape, void* scratch) {
    const size_t count = shape.block_size;
    Cursor cursor(values);
    const auto next = [&](size_t, Residual own, float* buffer, double* sums) -> Block {
        const float* gradient = cursor.in_place(count);
        Seen seen;
        if (gradient && !own.values) return alone<Level>(gradient, count);
        if (gradient && add<Level>(buffer, gradient, own.values, count, &seen)) return {buffer, own, count, seen};
        size_t real = count;
        if (!gradient) {
            real = cursor.gather(buffer, count);
            gradient = buffer;
        }
        if (!own.values) return alone<Level>(gradient, real);
        clear(own.values, real, count);
        return add_bounded<Level>(buffer, gradient, own, count, real, sums);
    };
    write_blocks<Level>(out, residual, shape, scratch, next);
}

// From here on results are written past the caches: to decode and then read them once took 0.64 ns a value against 0.75
// at 16 MiB, and 0.64 against 0.49 at 8 MiB.
constexpr size_t kStreamedBytes = 1 << 24;

template <int Level, bool Stream, bool Add>
HVD_INLINE bool read(const Rows<Level>& rows, float* out, Versions versions, size_t offset, const uint16_t* residual, size_t count, Seen* seen = nullptr) {
    if constexpr (Level < 0) return read_sparse_block<-Level, Stream, Add>(rows, out, versions, offset, residual, count);
    else return read_block<Level, Stream, Add>(out, versions, offset, residual, count, seen);
}

template <int Level>
void decode_level(Values values, Versions versions, Shape shape, void* scratch) {
    const size_t count = shape.block_size, bytes = block_bytes(Level, count);
    const Rows<Level> rows(count);
    const bool large = shape.blocks >= kStreamedBytes / sizeof(float) / count;
    Cursor cursor(values);
    for (size_t b = 0; b < shape.blocks; ++b) {
        float* out = cursor.in_place(count);
        if (large && out && (uintptr_t)out % sizeof(Floats) == 0) {
            read<Level, true, false>(rows, out, versions, b * bytes, nullptr, count);
        } else {
            read<Level, false, false>(rows, out ? out : (float*)scratch, versions, b * bytes, nullptr, count);
            if (!out) cursor.scatter((float*)scratch, count);
        }
    }
    if (large) end_stream();
}

template <int Level>
void reduce_level(uint8_t* out, Versions versions, Residual residual, size_t real, Shape shape, void* scratch) {
    const size_t count = shape.block_size, bytes = block_bytes(Level, count);
    const Rows<Level> rows(count);
    const auto next = [&](size_t b, Residual own, float* buffer, double* sums) -> Block {
        const size_t behind = real > b * count ? real - b * count : 0, here = behind < count ? behind : count;
        Seen seen;
        if (here == count && own.values && read<Level, false, true>(rows, buffer, versions, b * bytes, own.values, count, &seen))
            return {buffer, own, here, seen};
        read<Level, false, false>(rows, buffer, versions, b * bytes, nullptr, count);
        clear(buffer, here, count);
        if (!own.values) return alone<Level>(buffer, here);
        clear(own.values, here, count);
        return add_bounded<Level>(buffer, buffer, own, count, here, sums);
    };
    write_blocks<Level>(out, residual, shape, scratch, next);
}

// The streams of a block, or its groups, have to fill a vector; shorter blocks are for a variant with shorter vectors. There
// is none below four lanes: these take what does not fill a vector.
HVD_INLINE bool too_short(Shape shape) {
    return kLanes > 4 && shape.block_size < (size_t)(shape.level < 0 ? -8 * shape.level : 8) * kLanes;
}

#define HVD_EACH_LEVEL(CASE) \
    switch (shape.level) {   \
        CASE(-8)             \
        CASE(-4)             \
        CASE(-2)             \
        CASE(1)              \
        CASE(2)              \
        CASE(3)              \
        CASE(4)              \
        CASE(5)              \
        CASE(6)              \
        CASE(7)              \
        CASE(8)              \
        CASE(16)             \
    }

void encode(uint8_t* out, Values values, Residual residual, Shape shape, void* scratch) {
    if (too_short(shape)) return HVD_SMALLER.encode(out, values, residual, shape, scratch);
#define HVD_CASE(LEVEL) \
    case LEVEL:         \
        return encode_level<LEVEL>(out, values, residual, shape, scratch);
    HVD_EACH_LEVEL(HVD_CASE)
#undef HVD_CASE
}

void decode(Values values, Versions versions, Shape shape, void* scratch) {
    if (too_short(shape)) return HVD_SMALLER.decode(values, versions, shape, scratch);
#define HVD_CASE(LEVEL) \
    case LEVEL:         \
        return decode_level<LEVEL>(values, versions, shape, scratch);
    HVD_EACH_LEVEL(HVD_CASE)
#undef HVD_CASE
}

void reduce(uint8_t* out, Versions versions, Residual residual, size_t real, Shape shape, void* scratch) {
    if (too_short(shape)) return HVD_SMALLER.reduce(out, versions, residual, real, shape, scratch);
#define HVD_CASE(LEVEL) \
    case LEVEL:         \
        return reduce_level<LEVEL>(out, versions, residual, real, shape, scratch);
    HVD_EACH_LEVEL(HVD_CASE)
#undef HVD_CASE
}

#undef HVD_EACH_LEVEL

}  // namespace
}  // namespace hvd_dyncomp
