// The kernels of another processor, for tests/kernels/emulated.py: takes requests from standard input and answers each on
// standard output, until there are no more. What a request and an answer are is told there; all numbers are little-endian.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "kernels.h"

using namespace hvd_dyncomp;

namespace {

enum class Operation : uint64_t { encode, decode, reduce };

struct Request {
    Operation operation;
    uint64_t blocks, block_size, pieces, skip, versions, real;
    int32_t level;
    uint32_t has_residual, dither;
    float factor;
};
static_assert(sizeof(Request) == 72, "as emulated.py packs it");

// False at the end of the input; in the middle of something there is no such end.
bool read_all(void* to, size_t bytes) {
    const size_t got = fread(to, 1, bytes, stdin);
    if (got != bytes && got != 0) exit(2);
    return got == bytes;
}

void read_exactly(void* to, size_t bytes) {
    if (bytes && !read_all(to, bytes)) exit(2);
}

void write_all(const void* from, size_t bytes) {
    if (fwrite(from, 1, bytes, stdout) != bytes) exit(3);
}

// Memory that ends where the allocation ends, and is aligned to its items and to no more.
template <typename Item>
class Buffer {
  public:
    explicit Buffer(size_t count) : count_(count), memory_(new Item[count + 1]) {}
    Item* get() { return memory_.get() + 1; }
    void read() { read_exactly(get(), count_ * sizeof(Item)); }
    void write() { write_all(get(), count_ * sizeof(Item)); }

  private:
    size_t count_;
    std::unique_ptr<Item[]> memory_;
};

void answer(const Variant& variant, const Request& request) {
    const Shape shape = {request.blocks, request.block_size, request.level};
    const size_t count = shape.blocks * shape.block_size, size = shape.blocks * block_bytes(shape.level, shape.block_size);

    std::vector<uint64_t> sizes(request.pieces);
    read_exactly(sizes.data(), sizes.size() * sizeof sizes[0]);
    std::vector<Buffer<float>> values;
    std::vector<Piece> pieces;
    for (const uint64_t of_piece : sizes) {
        values.emplace_back(of_piece);
        values.back().read();
        pieces.push_back({values.back().get(), of_piece});
    }
    std::vector<Buffer<uint8_t>> versions;
    std::vector<const uint8_t*> payloads;
    for (size_t i = 0; i < request.versions; ++i) {
        versions.emplace_back(size);
        versions.back().read();
        payloads.push_back(versions.back().get());
    }
    Buffer<uint16_t> residual(request.has_residual ? count : 0);
    residual.read();
    const Residual own = {request.has_residual ? residual.get() : nullptr, request.dither};

    Buffer<uint8_t> out(size);
    const Values from = {pieces.data(), pieces.size(), request.skip};
    const Versions of = {payloads.data(), payloads.size(), request.factor};
    const size_t bytes = (scratch_bytes(shape.block_size) + 63) / 64 * 64;
    const std::unique_ptr<void, decltype(&free)> scratch(aligned_alloc(64, bytes), free);
    switch (request.operation) {
        case Operation::encode:
            variant.encode(out.get(), from, own, shape, scratch.get());
            break;
        case Operation::decode:
            variant.decode(from, of, shape, scratch.get());
            for (Buffer<float>& piece : values) piece.write();
            return;
        case Operation::reduce:
            variant.reduce(out.get(), of, own, request.real, shape, scratch.get());
            break;
    }
    out.write();
    residual.write();
}

}  // namespace

int main() {
    for (Request request; read_all(&request, sizeof request); fflush(stdout)) answer(kBaseline, request);
    return 0;
}
