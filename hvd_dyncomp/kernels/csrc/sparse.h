// Blocks at levels below one bit: of every group of values the largest travels, as sparse.py says. Included through core.h
// only.
//
// The lanes of a vector are groups. Row s of a block, values s n to s n + n of it, has the values at place s of the n groups,
// that of group j in column j xor ((s xor s / n) mod n). What is said of V vectors holds for so many side by side, which fill
// a line of the cache where that can be, or share what is said of a row.
#pragma once

#include "kernels.h"
#include "residual.h"
#include "scales.h"
#include "simd.h"
#include "sums.h"

namespace hvd_dyncomp {
namespace {

// What the magnitudes of a level may be: sparse.MAGNITUDES. `Part` of a bit: 2, 4 or 8.
struct Magnitudes {
    int most;
    double rms, maximum;
};

constexpr Magnitudes magnitudes(int part) {
    return part == 2   ? Magnitudes{7, 0.22, 0.03}
           : part == 4 ? Magnitudes{3, 0.40, 0.05}
                       : Magnitudes{1, 0.80, 0.10};
}

constexpr int group_size(int part) { return 8 * part; }
constexpr int place_bits(int part) { return part == 2 ? 4 : part == 4 ? 5 : 6; }

// The largest values of a block's groups, and where in the group they are. There is room for a whole vector at least.
struct Largest {
    float* values;
    int32_t* places;
};

// So much room there is for what is kept of a block.
HVD_INLINE size_t groups_kept(int part, size_t count) {
    const size_t n = count / (size_t)group_size(part);
    return n < (size_t)kLanes ? kLanes : n;
}

HVD_INLINE Floats select(Ints mask, Floats a, Floats b) { return mask ? a : b; }
HVD_INLINE Floats only(Ints mask, Floats x) { return (Floats)((Ints)x & mask); }

// `Short`: groups that do not fill a vector, of which there are `n`; the other lanes are zero, and are not written.
template <bool Short, typename Vector>
HVD_INLINE Vector load_groups(const void* from, size_t n) {
    if constexpr (!Short) return load<Vector>(from);
    Vector vector = {};
    __builtin_memcpy(&vector, from, n * sizeof vector[0]);
    return vector;
}

template <bool Short, typename Vector>
HVD_INLINE void store_groups(void* to, Vector vector, size_t n) {
    if constexpr (Short) __builtin_memcpy(to, &vector, n * sizeof vector[0]);
    else store(to, vector);
}

template <bool Short>
HVD_INLINE Floats load_residual_groups(const uint16_t* from, size_t n) {
    if constexpr (!Short) return load_residual(from);
    uint16_t some[kLanes] = {};
    __builtin_memcpy(some, from, n * sizeof some[0]);
    return load_residual(some);
}

template <bool Short>
HVD_INLINE void store_residual_groups(uint16_t* to, Floats lost, Words dithers, size_t n) {
    uint16_t some[kLanes];
    store_residual(Short ? some : to, lost, dithers);
    if (Short) __builtin_memcpy(to, some, n * sizeof some[0]);
}

// How many vectors are in hand: several, or one, or a part of one.
template <int Vectors, bool Shorter>
struct Width {
    static constexpr int vectors = Vectors;
    static constexpr bool shorter = Shorter;
};

// Calls `action` with the width for `n` groups.
template <typename Action>
HVD_INLINE void with_width(size_t n, Action action) {
    constexpr int wide = kLanes == 4 ? 4 : 2;
    if (n >= wide * kLanes) return action(Width<wide, false>());
    if (n >= kLanes) return action(Width<1, false>());
    if constexpr (kLanes == 4) action(Width<1, true>());  // the other variants leave these blocks to one with shorter vectors
}

// Where the values of a row are: those of a vector of groups in a vector of columns, with their lanes swapped.
struct Row {
    size_t start, column;  // of the row, and of the vector that has the first groups
    Ints numbers, place;   // of the lanes, swapped; and the number of the row
    int lane;              // to which the first is swapped

    HVD_INLINE size_t at(size_t group) const { return start + (group ^ column); }
    HVD_INLINE Floats swapped(Floats x) const { return swap_lanes(x, lane, numbers); }
};

// The rows of a block at a level below one bit: made once for many blocks.
template <int Level>
class Rows {
  public:
    explicit Rows(size_t count) {
        if constexpr (Level < 0) {
            const size_t n = count / kRows;
            const int exponent = __builtin_ctzll(n);
            for (size_t s = 0; s < kRows; ++s) {
                const size_t by = (s ^ s >> exponent) & (n - 1), lane = by & (kLanes - 1);
                rows_[s] = {s * n, by - lane, (Ints)lane_numbers() ^ (int)lane, Ints{} + (int)s, (int)lane};
            }
        }
    }
    HVD_INLINE const Row& operator[](int s) const { return rows_[s]; }

  private:
    static constexpr size_t kRows = Level < 0 ? -8 * Level : 1;
    Row rows_[kRows];
};

// ---- encoding --------------------------------------------------------------------------------------------------------

template <int Part, int V, bool Short>
HVD_INLINE void find_largest(const Rows<-Part>& rows, Largest found, const float* x, size_t n) {
    for (size_t i = 0; i < n; i += V * kLanes) {
        Ints most[V] = {}, place[V] = {};
        Floats value[V] = {};
        for (int s = 0; s < group_size(Part); ++s) {
            const Row& row = rows[s];
            HVD_UNROLL
            for (int v = 0; v < V; ++v) {
                const Floats here = row.swapped(load_groups<Short, Floats>(x + row.at(i + v * kLanes), n));
                const Ints size = magnitude(here), above = size > most[v];
                value[v] = select(above, here, value[v]);
                place[v] = above ? row.place : place[v];
                most[v] = larger(most[v], size);
            }
        }
        HVD_UNROLL
        for (int v = 0; v < V; ++v) {
            store(found.values + i + v * kLanes, value[v]);
            store(found.places + i + v * kLanes, place[v]);
        }
    }
}

// sparse._scale, before it is rounded to bfloat16. Of the `n` groups those with index below `real` are not padding throughout.
template <int Part>
HVD_INLINE float largest_scale(const float* largest, size_t n, size_t real, double* sums) {
    constexpr Magnitudes at = magnitudes(Part);
    int32_t most = 0;
    for (size_t i = 0; i < n; ++i) {
        const int32_t size = load<int32_t>(largest + i) & 0x7fffffff;
        most = size > most ? size : most;
        sums[i] = (double)largest[i] * (double)largest[i];
    }
    real = real < 1 ? 1 : real < n ? real : n;
    const double rms = __builtin_sqrt(halved(sums, n) / (double)real);
    return (float)(rms * at.rms + (double)load<float>(&most) * at.maximum);
}

// The scale of a block, and what it sends.
template <int Part>
HVD_INLINE float sparse_scale(const Rows<-Part>& rows, Largest found, const float* x, size_t count, size_t real, double* sums) {
    const size_t n = count / group_size(Part);
    with_width(n, [&](auto width) HVD_ALWAYS { find_largest<Part, width.vectors, width.shorter>(rows, found, x, n); });
    return rounded_to_bfloat16(largest_scale<Part>(found.values, n, real, sums));
}

// Codes of the groups, and what is lost of x into `residual`, unless that is null.
template <int Part, int V, bool Short>
HVD_INLINE void write_groups(const Rows<-Part>& rows, uint8_t* codes, const float* x, Largest found, Residual residual, size_t n, float scale) {
    constexpr int most = magnitudes(Part).most, places = place_bits(Part);
    const Floats scales = broadcast(scale), inverse = broadcast(1.0f / scale);
    const Words dither = dithers(residual);
    for (size_t i = 0; i < n; i += V * kLanes) {
        Floats sent[V];
        Ints place[V];
        HVD_UNROLL
        for (int v = 0; v < V; ++v) {
            const Floats q = load<Floats>(found.values + i + v * kLanes) * inverse;
            const Floats k = round_to_even(at_most(at_least(q, broadcast(-most)), broadcast(most)));
            place[v] = load<Ints>(found.places + i + v * kLanes);
            sent[v] = k * scales;
            const Ints size = __builtin_convertvector((Floats)magnitude(k), Ints);
            const Ints sign = (Ints)((Words)(Ints)k >> 31);
            const Ints code = (place[v] | sign << places | size << (places + 1)) & (size > 0);
            uint8_t bytes[kLanes];
            store_bytes(bytes, code);
            __builtin_memcpy(codes + i + v * kLanes, bytes, Short ? n : kLanes);
        }
        if (!residual.values) continue;
        for (int s = 0; s < group_size(Part); ++s) {
            const Row& row = rows[s];
            HVD_UNROLL
            for (int v = 0; v < V; ++v) {
                const size_t to = row.at(i + v * kLanes);
                const Floats here = load_groups<Short, Floats>(x + to, n);
                const Floats lost = here - row.swapped(only(place[v] == row.place, sent[v]));
                store_residual_groups<Short>(residual.values + to, lost, Short ? dithers(residual, to) : dither, n);
            }
        }
    }
}

// One block of reference.encode, from x = gradient + residual, its largest values and its scale on.
template <int Part>
HVD_INLINE void write_sparse_block(const Rows<-Part>& rows, uint8_t* to, const float* x, Largest found, Residual residual, size_t count, float scale) {
    constexpr float largest = (float)(0x1p127 / magnitudes(Part).most);  // scales.LARGEST_VALUE
    const bool finite = scale <= largest;         // scales are not negative; false for NaN
    const bool live = finite && scale >= 0x1p-100f;  // scales.SMALLEST_SCALE
    const size_t n = count / group_size(Part);
    store_scale(to, live, finite, scale);
    if (live) {
        with_width(n, [&](auto width) HVD_ALWAYS {
            write_groups<Part, width.vectors, width.shorter>(rows, to + kScaleBytes, x, found, residual, n, scale);
        });
        saturate(residual, count, scale);
    } else {
        __builtin_memset(to + kScaleBytes, 0, n);
        if (residual.values && finite) store_residuals(residual, x, count);
    }
}

// ---- decoding --------------------------------------------------------------------------------------------------------

// The codes of some groups, ready to be laid out.
template <int V>
struct Sent {
    Floats value[V], others;
    Ints place[V];
};

template <int Part, int V, bool Short>
HVD_INLINE Sent<V> read_groups(const uint8_t* from, float factor, size_t i, size_t n) {
    constexpr int places = place_bits(Part);
    const Floats scale = broadcast(load_scale(from) * factor);
    Sent<V> sent;
    sent.others = Floats{} * scale;
    HVD_UNROLL
    for (int v = 0; v < V; ++v) {
        uint8_t bytes[kLanes] = {};
        __builtin_memcpy(bytes, from + kScaleBytes + i + v * kLanes, Short ? n : kLanes);
        const Ints code = load_bytes(bytes), negative = -(code >> places & 1);
        const Ints k = (code >> (places + 1) ^ negative) - negative;
        sent.value[v] = __builtin_convertvector(k, Floats) * scale;
        sent.place[v] = code & (group_size(Part) - 1);
    }
    return sent;
}

// As `read_block`, for the groups from `i` on.
template <int Part, int V, bool Short, bool Stream, bool Add>
HVD_INLINE void read_sparse(const Rows<-Part>& rows, float* out, Versions versions, size_t offset, const uint16_t* residual,
                            size_t i, size_t n, Norms<false>& norms) {
    constexpr int together = 2;  // versions, whose codes are in registers
    for (size_t first = 0; first < versions.count; first += together) {
        const bool second = first + 1 < versions.count, last = first + together >= versions.count;
        const uint8_t* const* from = versions.payloads + first;
        const Sent<V> a = read_groups<Part, V, Short>(from[0] + offset, versions.factor, i, n);
        const Sent<V> b = second ? read_groups<Part, V, Short>(from[1] + offset, versions.factor, i, n) : a;
        for (int four = 0; four < group_size(Part); four += 4)
            HVD_UNROLL
            for (int slot = 0; slot < 4; ++slot) {
                const Row& row = rows[four + slot];
                HVD_UNROLL
                for (int v = 0; v < V; ++v) {
                    const size_t at = row.at(i + v * kLanes);
                    Floats sum = select(a.place[v] == row.place, a.value[v], a.others);
                    if (first) sum = row.swapped(load_groups<Short, Floats>(out + at, n)) + sum;
                    if (second) sum += select(b.place[v] == row.place, b.value[v], b.others);
                    sum = row.swapped(sum);
                    if (Add && last) {
                        fetch_behind(residual + at);
                        const Floats own = load_residual_groups<Short>(residual + at, n);
                        sum = norms.add(slot, sum, own);
                    }
                    if constexpr (Stream && !Short) {
                        if (last) {
                            stream(out + at, sum);
                            continue;
                        }
                    }
                    store_groups<Short>(out + at, sum, n);
                }
            }
    }
}

template <int Part, bool Stream, bool Add>
HVD_INLINE bool read_sparse_block(const Rows<-Part>& rows, float* out, Versions versions, size_t offset,
                                  const uint16_t* residual, size_t count) {
    const size_t n = count / group_size(Part);
    Norms<false> norms;
    with_width(n, [&](auto width) HVD_ALWAYS {
        for (size_t i = 0; i < n; i += width.vectors * kLanes)
            read_sparse<Part, width.vectors, width.shorter, Stream, Add>(rows, out, versions, offset, residual, i, n, norms);
    });
    return !Add || norms.within(residual_bound(-Part));
}

}  // namespace
}  // namespace hvd_dyncomp
