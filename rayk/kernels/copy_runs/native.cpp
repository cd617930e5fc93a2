// Copies byte runs, the same for every block, from one buffer into another. See __init__.py for what it is.

#include <cstdint>
#include <cstring>

namespace {

struct Length {
    int64_t bytes;
    void copy(char* to, const char* from) const { memcpy(to, from, static_cast<size_t>(bytes)); }
};

// Short runs of one length: their copies compile to a few wide moves, without a call.
template <int64_t kBytes>
struct FixedLength {
    void copy(char* to, const char* from) const { memcpy(to, from, kBytes); }
};

struct Runs {
    const int64_t *from, *to, *lengths, *from_strides, *to_strides;
    int64_t count;
};

// Pages are written one after the other: a block's runs come in the order of their destination.
template <class Fixed>
void copy_alike(const char* source, char* destination, const Runs& runs, const int64_t* source_blocks,
                const int64_t* destination_blocks, int64_t num_blocks, Fixed length) {
    for (int64_t b = 0; b < num_blocks; ++b) {
        const int64_t here = source_blocks[b], there = destination_blocks[b];
        for (int64_t r = 0; r < runs.count; ++r) {
            length.copy(destination + runs.to[r] + there * runs.to_strides[r],
                        source + runs.from[r] + here * runs.from_strides[r]);
        }
    }
}

void copy_unlike(const char* source, char* destination, const Runs& runs, const int64_t* source_blocks,
                 const int64_t* destination_blocks, int64_t num_blocks) {
    for (int64_t b = 0; b < num_blocks; ++b) {
        const int64_t here = source_blocks[b], there = destination_blocks[b];
        for (int64_t r = 0; r < runs.count; ++r) {
            memcpy(destination + runs.to[r] + there * runs.to_strides[r],
                   source + runs.from[r] + here * runs.from_strides[r], static_cast<size_t>(runs.lengths[r]));
        }
    }
}

}  // namespace

// rows [5, num_runs]: from, to, length, from_stride, to_stride, in bytes. The caller has checked the bounds.
extern "C" void rayk_copy_runs(const char* source, char* destination, const int64_t* rows, int64_t num_runs,
                               const int64_t* source_blocks, const int64_t* destination_blocks,
                               int64_t num_blocks) {
    const Runs runs{rows,
                    rows + num_runs,
                    rows + 2 * num_runs,
                    rows + 3 * num_runs,
                    rows + 4 * num_runs,
                    num_runs};
    bool is_alike = true;
    for (int64_t r = 1; r < num_runs; ++r) is_alike &= runs.lengths[r] == runs.lengths[0];
    if (!is_alike) {
        copy_unlike(source, destination, runs, source_blocks, destination_blocks, num_blocks);
        return;
    }
#define RAYK_ALIKE(LENGTH) \
    copy_alike(source, destination, runs, source_blocks, destination_blocks, num_blocks, LENGTH)
    switch (runs.lengths[0]) {
        case 8: RAYK_ALIKE(FixedLength<8>{}); return;
        case 16: RAYK_ALIKE(FixedLength<16>{}); return;
        case 32: RAYK_ALIKE(FixedLength<32>{}); return;
        case 64: RAYK_ALIKE(FixedLength<64>{}); return;
        case 128: RAYK_ALIKE(FixedLength<128>{}); return;
        case 256: RAYK_ALIKE(FixedLength<256>{}); return;
        case 512: RAYK_ALIKE(FixedLength<512>{}); return;
        default: RAYK_ALIKE(Length{runs.lengths[0]});
    }
#undef RAYK_ALIKE
}
