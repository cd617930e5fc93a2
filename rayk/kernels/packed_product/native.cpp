// x [M, K] times a weight [N, K] transposed, with the weight in panels of 32 outputs: what one step of K reads
// lies together, so that a weight is streamed once whatever the number of rows.
//
// Every output is summed in the same order whatever M and the number of threads: kDepth products at a time,
// then those sums.

#include <algorithm>

#include "../simd.h"
#include "../slots.h"

namespace {

constexpr int kPanel = 32;          // outputs of a panel
constexpr int kVectors = kPanel / kLanes;
constexpr int64_t kDepth = 512;     // products that are summed before their sum is added up
constexpr int64_t kRowsKept = 96;   // rows of x that stay in the cache while all panels pass
constexpr int64_t kMinParallel = 1 << 16;  // products per output row below which threads cost more than they bring
constexpr int kSums = kRegisters * 3 / 4;  // registers that hold sums
// Of half a panel twice as many rows fit, but each pass would read half of what the memory brings together: 4 to 9
// rows would take half as long again, or more.
constexpr int kMaxRows = kSums / std::min(kVectors, 4);

// Vectors of a panel that are summed at once for so many rows.
constexpr int at_once(int num_rows, int vectors = kVectors) {
    return vectors <= 2 || num_rows * vectors <= kSums ? vectors : at_once(num_rows, vectors / 2);
}

// A step of K: one float32, or a pair of bfloat16, of each of the 32 outputs.
template <class T>
struct Step {
    static constexpr int kDeep = sizeof(float) / sizeof(T);
};

inline Floats times(float a, Floats w, Floats sum) { return sum + a * w; }

// `a` and each lane of w: two bfloat16, the earlier one low.
inline Floats times(uint32_t a, Words w, Floats sum) {
#ifdef __AVX512BF16__
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(a), (__m512bh)w);
#else
    const Floats low = splat(widen(BFloat16{static_cast<uint16_t>(a)}));
    const Floats high = splat(widen(BFloat16{static_cast<uint16_t>(a >> 16)}));
    return sum + low * (Floats)(w << 16) + high * (Floats)(w & 0xffff0000u);
#endif
}

inline float value_at(const float* x, int64_t step) { return x[step]; }
inline uint32_t value_at(const BFloat16* x, int64_t step) {
    uint32_t pair;
    memcpy(&pair, x + 2 * step, sizeof pair);
    return pair;
}
inline Floats weights_at(const float* w) { return load(w); }
inline Words weights_at(const BFloat16* w) {
    Words pairs;
    memcpy(&pairs, w, sizeof pairs);
    return pairs;
}

// The sums of M rows and V vectors of a panel.
template <int M, int V, class T>
inline void multiply(const T* x, int64_t stride, const T* panel, int64_t num_steps, Floats (*total)[V]) {
    constexpr int64_t kWidth = kPanel * Step<T>::kDeep;  // elements of a step
    for (int m = 0; m < M; ++m)
        for (int v = 0; v < V; ++v) total[m][v] = splat(0.0f);
    for (int64_t first = 0; first < num_steps; first += kDepth) {
        const int64_t end = std::min(num_steps, first + kDepth);
        Floats sums[M][V];
        for (int m = 0; m < M; ++m)
            for (int v = 0; v < V; ++v) sums[m][v] = splat(0.0f);
        for (int64_t step = first; step < end; ++step) {
            const T* at = panel + step * kWidth;
            decltype(weights_at(at)) w[V];
            for (int v = 0; v < V; ++v) w[v] = weights_at(at + v * kLanes * Step<T>::kDeep);
#pragma GCC unroll 16
            for (int m = 0; m < M; ++m) {
                const auto a = value_at(x + m * stride, step);
                for (int v = 0; v < V; ++v) sums[m][v] = times(a, w[v], sums[m][v]);
            }
        }
        for (int m = 0; m < M; ++m)
            for (int v = 0; v < V; ++v) total[m][v] += sums[m][v];
    }
}

// num_rows <= M rows and one panel; num_outputs <= kPanel of its outputs are kept.
template <class T, int M = kMaxRows>
inline void tile(int num_rows, const T* x, int64_t stride, const T* panel, int64_t num_steps, const T* bias,
                 T* out, int64_t out_stride, int num_outputs) {
    if constexpr (M > 1) {
        if (num_rows < M)
            return tile<T, M - 1>(num_rows, x, stride, panel, num_steps, bias, out, out_stride, num_outputs);
    }
    constexpr int V = at_once(M);
    for (int begin = 0; begin < num_outputs; begin += V * kLanes) {
        Floats total[M][V];
        multiply<M, V>(x, stride, panel + begin * Step<T>::kDeep, num_steps, total);
        for (int m = 0; m < M; ++m)
            for (int v = 0; v < V; ++v) {
                const int first = begin + v * kLanes, n = std::min(kLanes, num_outputs - first);
                if (n <= 0) continue;
                Floats result = total[m][v];
                if (bias) result += n == kLanes ? load(bias + first) : load(bias + first, n);
                T* to = out + m * out_stride + first;
                if (n == kLanes)
                    store(to, result);
                else
                    store(to, result, n);
            }
    }
}

template <class T>
void product(const T* x, int64_t stride, const T* panels, const T* bias, T* out, int64_t num_rows,
             int64_t num_inputs, int64_t num_outputs, int num_threads) {
    const int64_t num_panels = (num_outputs + kPanel - 1) / kPanel, num_steps = num_inputs / Step<T>::kDeep;
    const bool is_parallel = num_threads > 1 && num_inputs * num_outputs > kMinParallel;
    for (int64_t kept = 0; kept < num_rows; kept += kRowsKept) {
        const int64_t end = std::min(num_rows, kept + kRowsKept);
#pragma omp parallel for num_threads(num_threads) if (is_parallel)
        for (int64_t p = 0; p < num_panels; ++p) {
            const int n = static_cast<int>(std::min<int64_t>(kPanel, num_outputs - p * kPanel));
            for (int64_t row = kept, rows; row < end; row += rows) {
                const int64_t left = end - row;
                // Two halves where less than two tiles are left: a tile of a row or two keeps few units busy.
                rows = left <= kMaxRows ? left : left < 2 * kMaxRows ? (left + 1) / 2 : kMaxRows;
                tile<T>(static_cast<int>(rows), x + row * stride, stride, panels + p * kPanel * num_inputs,
                        num_steps, bias ? bias + p * kPanel : nullptr, out + row * num_outputs + p * kPanel,
                        num_outputs, n);
            }
        }
    }
}

}  // namespace

// type: 0 float32, 1 bfloat16 (num_inputs even). x [num_rows, num_inputs] by stride, rows dense; panels
// [panel, step of inputs, 32 outputs(, 2)]; bias null or [num_outputs]; out [num_rows, num_outputs] dense.
extern "C" void rayk_packed_product(const void* x, int64_t stride, const void* panels, const void* bias, void* out,
                                    int64_t num_rows, int64_t num_inputs, int64_t num_outputs, int32_t type,
                                    int32_t num_threads) {
    if (type == 0)
        product(static_cast<const float*>(x), stride, static_cast<const float*>(panels),
                static_cast<const float*>(bias), static_cast<float*>(out), num_rows, num_inputs, num_outputs,
                num_threads);
    else
        product(static_cast<const BFloat16*>(x), stride, static_cast<const BFloat16*>(panels),
                static_cast<const BFloat16*>(bias), static_cast<BFloat16*>(out), num_rows, num_inputs, num_outputs,
                num_threads);
}

RAYK_REPLAYABLE(rayk_packed_product)
