// Values that lie in pieces. Included through core.h only.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace hvd_dyncomp {
namespace {

// Goes through values that lie in pieces, block by block.
class Cursor {
  public:
    explicit Cursor(Values values) : piece_(values.pieces), end_(values.pieces + values.count), skip_(values.skip) {}

    // The next `count` values where they are, or null when they are not all in one piece: then `gather` or `scatter`
    // must follow.
    HVD_INLINE float* in_place(size_t count) {
        while (piece_ != end_ && skip_ >= piece_->count) skip_ -= (piece_++)->count;
        if (piece_ == end_ || piece_->count - skip_ < count) return nullptr;
        float* at = piece_->address + skip_;
        skip_ += count;
        return at;
    }

    // Copies the next `count` values to `out`; zeros where there are none. Returns how many there were.
    size_t gather(float* out, size_t count) {
        const size_t found = each_part(count, [out](size_t done, float* part, size_t size) {
            __builtin_memcpy(out + done, part, size * sizeof(float));
        });
        __builtin_memset(out + found, 0, (count - found) * sizeof(float));
        return found;
    }

    // Copies `x` to where the next `count` values are; drops what is behind the last of them.
    void scatter(const float* x, size_t count) {
        each_part(count, [x](size_t done, float* part, size_t size) {
            __builtin_memcpy(part, x + done, size * sizeof(float));
        });
    }

  private:
    template <typename Action>
    HVD_INLINE size_t each_part(size_t count, Action action) {
        size_t done = 0;
        for (; done < count && piece_ != end_; skip_ = 0, ++piece_) {
            if (skip_ >= piece_->count) continue;  // an empty piece: in_place() has skipped the others
            const size_t rest = piece_->count - skip_, size = rest < count - done ? rest : count - done;
            action(done, piece_->address + skip_, size);
            done += size;
            if (size < rest) {
                skip_ += size;
                break;
            }
        }
        return done;
    }

    const Piece* piece_;
    const Piece* end_;
    size_t skip_;  // values of the piece, or of all that follow, that are done
};

}  // namespace
}  // namespace hvd_dyncomp
