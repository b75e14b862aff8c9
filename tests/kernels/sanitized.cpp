// Runs every operation of every variant on buffers of exactly the size they need, at every alignment, for the address and
// undefined-behaviour sanitizers to watch: any bytes for a payload, any bits for a float. tests/test_sanitizers.py builds it
// together with the variants. What the results are is for tests/test_native.py; here they must agree between variants.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "kernels.h"

using namespace hvd_dyncomp;

namespace {

uint64_t state = 1;

uint32_t random_word() {  // xorshift64*
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return (uint32_t)((state * 0x2545F4914F6CDD1Dull) >> 32);
}

// `count` items of memory that ends where the allocation ends, `shift` bytes after an aligned address.
template <typename Item>
struct Exact {
    Exact(size_t count, size_t shift)
        : bytes(count * sizeof(Item)), memory(new uint8_t[bytes + shift]), items((Item*)(memory.get() + shift)) {}
    size_t bytes;
    std::unique_ptr<uint8_t[]> memory;
    Item* items;
};

void fill(void* to, size_t bytes, int kind) {
    static const uint32_t special[] = {0, 0x80000000, 1, 0x807fffff, 0x7f7fffff, 0xff800000, 0x7fc00000, 0x7f800001};
    for (size_t i = 0; i + 4 <= bytes; i += 4) {
        uint32_t word = random_word();
        if (kind == 1) word = 0x3f000000 | (word & 0x80ffffff);          // ordinary values
        if (kind == 2) word = special[word % (sizeof special / 4)];
        memcpy((uint8_t*)to + i, &word, 4);
    }
    for (size_t i = bytes / 4 * 4; i < bytes; ++i) ((uint8_t*)to)[i] = (uint8_t)random_word();
}

struct Case {
    int level, kind;
    size_t block_size, blocks, shift;
    bool with_residual;
};

struct Scratch {
    explicit Scratch(size_t block_size) : memory(aligned_alloc(64, (scratch_bytes(block_size) + 63) / 64 * 64)) {}
    ~Scratch() { free(memory); }
    void* memory;
};

// All bytes that a case produces.
std::vector<uint8_t> run(const Variant& variant, const Case& at) {
    state = (uint64_t)(at.level + 8) * 1000003 + at.block_size + at.shift * 77 + at.kind;
    const Shape shape = {at.blocks, at.block_size, at.level};
    const size_t count = at.blocks * at.block_size, size = at.blocks * block_bytes(at.level, at.block_size);
    const size_t skip = at.shift, tail = at.block_size / 2 + at.shift;  // the last block is not all there
    const size_t head = count / 3;
    Exact<float> first(head + skip, 4 * (at.shift % 4)), second(count - head - tail, 4);
    Exact<uint16_t> residual(count, 2 * (at.shift % 5));
    Exact<uint8_t> out(size, at.shift), version(size, at.shift + 1);
    fill(first.items, first.bytes, at.kind);
    fill(second.items, second.bytes, at.kind);
    fill(residual.items, residual.bytes, at.kind);
    fill(version.items, version.bytes, 0);
    const Piece pieces[] = {{first.items, head + skip}, {nullptr, 0}, {second.items, count - head - tail}};
    const Residual own = {at.with_residual ? residual.items : nullptr, random_word()};
    const Scratch scratch(at.block_size);

    std::vector<uint8_t> all;
    const auto keep = [&](const void* data, size_t bytes) { all.insert(all.end(), (const uint8_t*)data, (const uint8_t*)data + bytes); };
    variant.encode(out.items, {pieces, 3, skip}, own, shape, scratch.memory);
    keep(out.items, size);
    keep(residual.items, residual.bytes);
    Exact<uint8_t> reduced(size, at.shift + 2);
    const uint8_t* versions[] = {out.items, version.items};
    variant.reduce(reduced.items, {versions, 2, 1.0f}, own, count - tail, shape, scratch.memory);
    keep(reduced.items, size);
    keep(residual.items, residual.bytes);
    variant.decode({pieces, 3, skip}, {versions, 2, 0.5f}, shape, scratch.memory);  // NaNs of any bits: not kept
    return all;
}

std::vector<Case> cases() {
    std::vector<Case> all;
    for (int level : {-8, -4, -2, 1, 2, 3, 4, 5, 6, 7, 8, 16})
        for (size_t block_size = 64; block_size <= 65536; block_size *= block_size < 2048 ? 2 : 32)
            for (size_t blocks : {1, 2, 9})
                for (int kind : {0, 1, 2}) {
                    if (blocks == 9 && block_size > 2048) continue;
                    const size_t shift = ((level + 8) * 5 + blocks + block_size / 64 + kind) % 9;
                    all.push_back({level, kind, block_size, blocks, shift, (blocks + kind) % 4 != 0});
                    all.push_back({level, kind, block_size, blocks, shift + 3, true});
                }
    return all;
}

// A result that is written past the caches, at an aligned address and at another.
void run_large(const Variant& variant, int level) {
    const size_t blocks = (1 << 22) / 512 + 1, count = blocks * 512;
    Exact<uint8_t> payload(blocks * block_bytes(level, 512), 1);
    memset(payload.items, 0x3f, payload.bytes);
    const Scratch scratch(512);
    for (size_t shift : {0, 1}) {
        float* memory = (float*)aligned_alloc(64, (count + 16) * sizeof(float));
        const Piece piece = {memory + 16 - shift, count};
        const uint8_t* version = payload.items;
        variant.decode({&piece, 1, 0}, {&version, 1, 1.0f}, {blocks, 512, level}, scratch.memory);
        free(memory);
    }
}

}  // namespace

int main() {
    const Variant* variants[] = {
        &kBaseline,
#if defined(__x86_64__)
        &kAvx2, &kAvx512,
#endif
    };
    size_t runs = 0;
    for (const Case& at : cases()) {
        const std::vector<uint8_t> expected = run(kBaseline, at);
        for (const Variant* variant : variants) {
            if (!variant->supported() || variant == &kBaseline) continue;
            ++runs;
            if (run(*variant, at) == expected) continue;
            printf("%s differs: level %d, kind %d, %zu blocks of %zu\n", variant->name, at.level, at.kind, at.blocks, at.block_size);
            return 1;
        }
    }
    for (const Variant* variant : variants)
        for (int level : {-8, -2, 4})
            if (variant->supported()) run_large(*variant, level);
    printf("%zu comparisons\n", runs);
    return 0;
}
