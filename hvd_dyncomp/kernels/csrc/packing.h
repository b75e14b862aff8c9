// How codes of a few bits lie in bytes: packing.py. Included through core.h only.
#pragma once

#include "simd.h"

namespace hvd_dyncomp {
namespace {

// A block is gone through in "streams", a stride of block_size / streams apart: the vectors at position i of all streams
// are in hand together. There are as many as the level's narrowest field has places in a byte, so that what is in hand
// fills whole bytes in every section (packing.pack).
constexpr int streams(int bits) { return bits == 16 ? 1 : 8 / (bits & -bits); }

// The section with fields of `Width` bits holds bits [shift, shift + Width) of the codes, and is preceded by sections
// with `shift` bits of every code.
template <int Bits, int Width>
struct Section {
    static constexpr bool present = Bits & Width;
    static constexpr int shift = Bits & ~(2 * Width - 1);
    static constexpr int places = 8 / Width;                 // fields in a byte
    static constexpr int vectors = streams(Bits) / places;   // of bytes, that the codes in hand fill
    static constexpr int mask = (1 << Width) - 1;
    static HVD_INLINE size_t start(size_t stride) { return stride * streams(Bits) / 8 * shift; }
};

template <int Bits, int Width>
HVD_INLINE void pack_section(uint8_t* packed, const Ints* codes, size_t i, size_t stride) {
    using Here = Section<Bits, Width>;
    if constexpr (Here::present) {
        uint8_t* to = packed + Here::start(stride) + i;
        HVD_UNROLL
        for (int v = 0; v < Here::vectors; ++v) {
            Ints bytes = {};
            HVD_UNROLL
            for (int place = 0; place < Here::places; ++place) {
                Ints field = codes[v + place * Here::vectors] >> Here::shift;
                if (Here::shift + Width < Bits) field &= Here::mask;  // else there is nothing above it
                bytes |= field << (Width * place);
            }
            store_bytes(to + v * stride, bytes);
        }
    }
}

// Codes are the vectors at position `i` of all streams; `packed` is where the block's codes begin on the wire.
template <int Bits>
HVD_INLINE void pack(uint8_t* packed, const Ints* codes, size_t i, size_t stride) {
    if constexpr (Bits == 16) {
        store_shorts(packed + 2 * i, codes[0]);
    } else {
        pack_section<Bits, 8>(packed, codes, i, stride);
        pack_section<Bits, 4>(packed, codes, i, stride);
        pack_section<Bits, 2>(packed, codes, i, stride);
        pack_section<Bits, 1>(packed, codes, i, stride);
    }
}

template <int Bits, int Width>
HVD_INLINE void unpack_section(Ints* codes, const uint8_t* packed, size_t i, size_t stride) {
    using Here = Section<Bits, Width>;
    if constexpr (Here::present) {
        const uint8_t* from = packed + Here::start(stride) + i;
        HVD_UNROLL
        for (int v = 0; v < Here::vectors; ++v) {
            const Ints bytes = load_bytes(from + v * stride);
            HVD_UNROLL
            for (int place = 0; place < Here::places; ++place) {
                Ints field = bytes >> (Width * place);
                if (place + 1 < Here::places) field &= Here::mask;
                codes[v + place * Here::vectors] |= field << Here::shift;
            }
        }
    }
}

template <int Bits>
HVD_INLINE void unpack(Ints* codes, const uint8_t* packed, size_t i, size_t stride) {
    if constexpr (Bits == 16) {
        codes[0] = load_shorts(packed + 2 * i);
    } else {
        constexpr int n = streams(Bits);
        HVD_UNROLL
        for (int s = 0; s < n; ++s) codes[s] = Ints{};
        unpack_section<Bits, 8>(codes, packed, i, stride);
        unpack_section<Bits, 4>(codes, packed, i, stride);
        unpack_section<Bits, 2>(codes, packed, i, stride);
        unpack_section<Bits, 1>(codes, packed, i, stride);
    }
}

}  // namespace
}  // namespace hvd_dyncomp
