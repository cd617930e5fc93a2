// The first of the largest logits of each row, in two passes over it.

#include "../simd.h"
#include "../slots.h"

namespace {

constexpr uint32_t kExponent = 0x7f800000u;

// -1 where a number is not finite.
inline int64_t best(const float* row, int64_t size) {
    Floats most = splat(row[0]);
    Ints bad = {};
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
        const Floats v = load(row + i);
        most = v > most ? v : most;
        bad |= ((Words)v & kExponent) == kExponent;
    }
    if (i < size) {
        Floats v = splat(row[0]);
        memcpy(&v, row + i, (size - i) * sizeof(float));
        most = v > most ? v : most;
        bad |= ((Words)v & kExponent) == kExponent;
    }
    for (int lane = 0; lane < kLanes; ++lane)
        if (bad[lane]) return -1;
    float largest = most[0];
    for (int lane = 1; lane < kLanes; ++lane) largest = most[lane] > largest ? most[lane] : largest;
    for (i = 0; row[i] != largest;) ++i;
    return i;
}

}  // namespace

// logits [num_rows, size] by stride, rows dense, size > 0; out [num_rows].
extern "C" void rayk_best_tokens(const float* logits, int64_t stride, int64_t num_rows, int64_t size, int64_t* out) {
    for (int64_t row = 0; row < num_rows; ++row) out[row] = best(logits + row * stride, size);
}

RAYK_REPLAYABLE(rayk_best_tokens)
