// What stands between the matrix products of a layer, each in one pass over its input on a CPU.
//
// Rounding is that of the same steps in torch: float32 inside, and a result in bfloat16 wherever torch would
// have made a tensor of one. Rows come by their strides and go out dense.

#include <cmath>
#include <vector>

#include "../simd.h"
#include "../slots.h"

namespace {

constexpr int64_t kMinParallel = 1 << 15;  // elements below which threads cost more than they bring

// v as a tensor of T would hold it.
template <class T>
inline Floats rounded(Floats v) {
    if constexpr (sizeof(T) == sizeof(float)) return v;
    T some[kLanes];
    store(some, v);
    return load(some);
}

// A product that is rounded before it is added to: no multiply-add is made of it.
inline Floats apart(Floats v) {
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
    return __builtin_assoc_barrier(v);
#else
    return v;
#endif
}

// e^x for x <= 0, right to a unit or two in the last place (after Cephes' expf), which exp2 of x * log2(e) is
// not where x is large; 0 below the normal range.
inline Floats exp(Floats x) {
    const Floats magic = splat(12582912.0f);  // adding 1.5 * 2^23 rounds to an integer
    const Floats clamped = x < -87.0f ? splat(-87.0f) : x;
    const Floats n = (clamped * kLog2E + magic) - magic;
    const Floats r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;  // log(2) in two parts
    Floats p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    const Ints power = (__builtin_convertvector(n, Ints) + 127) << 23;
    return x < -87.0f ? splat(0.0f) : (p * (r * r) + r + 1.0f) * (Floats)power;
}

inline Floats silu(Floats x) {
    const Floats size = x < 0.0f ? -x : x;
    const Floats e = exp(-size);
    return (x < 0.0f ? x * e : x) / (1.0f + e);
}

inline Floats gelu_tanh(Floats x) {
    const Floats inner = (x + x * x * x * 0.044715f) * 0.7978845608f;
    return x * 0.5f * (1.0f + tanh(inner));
}

// Calls body(d, n) for each stretch of n lanes from d.
template <class F>
inline void lanes(int size, F body) {
    int d = 0;
    for (; d + kLanes <= size; d += kLanes) body(d, kLanes);
    if (d < size) body(d, size - d);
}
template <class T>
inline Floats take(const T* p, int n) {
    return n == kLanes ? load(p) : load(p, n);
}
template <class T>
inline void give(T* p, Floats v, int n) {
    if (n == kLanes)
        store(p, v);
    else
        store(p, v, n);
}

// The first n lanes; the others are zero.
inline Floats first(Floats v, int n) {
    for (int i = n; i < kLanes; ++i) v[i] = 0.0f;
    return v;
}

inline double sum_of_lanes(Floats v) {
    double sum = 0.0;
    for (int i = 0; i < kLanes; ++i) sum += v[i];
    return sum;
}

template <class T, class W>
void norm(const T* x, int64_t stride_t, int64_t stride_h, const W* weight, int64_t stride_w, const T* added,
          T* total, int64_t stride_a, T* out, int64_t num_tokens, int num_heads, int size, float eps, bool centred,
          bool wide, int num_threads) {
    const int64_t rows = num_tokens * num_heads;
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && rows * size > kMinParallel)
    for (int64_t row = 0; row < rows; ++row) {
        const T* in = x + row / num_heads * stride_t + row % num_heads * stride_h;
        const W* w = weight + row % num_heads * stride_w;
        T* to = out + row * size;
        if (added) {
            const T* more = added + row * stride_a;
            T* sums = total + row * size;
            lanes(size, [&](int d, int n) { give(sums + d, take(in + d, n) + take(more + d, n), n); });
            in = sums;
        }
        Floats mean = splat(0.0f), squares = splat(0.0f);
        if (centred) {
            Floats sums = splat(0.0f);
            lanes(size, [&](int d, int n) { sums += take(in + d, n); });
            mean = splat(static_cast<float>(sum_of_lanes(sums) / size));
        }
        lanes(size, [&](int d, int n) {
            const Floats v = first(take(in + d, n) - mean, n);
            squares += v * v;
        });
        // An error of the factor is one of the whole row.
        const Floats factor = splat(static_cast<float>(1.0 / std::sqrt(sum_of_lanes(squares) / size + eps)));
        lanes(size, [&](int d, int n) {
            Floats v = (take(in + d, n) - mean) * factor;
            if (weight) v = (wide ? v : rounded<T>(v)) * take(w + d, n);
            give(to + d, v, n);
        });
    }
}

enum Order { kGateNorm, kNormGate, kPlain };

template <class T, class W>
void gated_norm(const T* x, int64_t stride_x, const T* gates, int64_t stride_g, const W* weight, int64_t stride_w,
                T* out, int64_t num_tokens, int num_groups, int size, float eps, int order, bool wide,
                int num_threads) {
    const int64_t rows = num_tokens * num_groups;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1 && rows * size > kMinParallel)
    {
        std::vector<float> row(size);
#pragma omp for
        for (int64_t i = 0; i < rows; ++i) {
            const int64_t token = i / num_groups, group = i % num_groups;
            const T* in = x + token * stride_x + group * size;
            const T* gate = gates + token * stride_g + group * size;
            const W* w = weight + group * stride_w;
            T* to = out + i * size;
            Floats squares = splat(0.0f);
            lanes(size, [&](int d, int n) {
                Floats v = take(in + d, n);
                if (order != kNormGate) v *= silu(take(gate + d, n));
                squares += v * v;
                give(row.data() + d, v, n);
            });
            const double mean = sum_of_lanes(squares) / size;
            const float factor = order == kPlain ? 1.0f : static_cast<float>(1.0 / std::sqrt(mean + eps));
            lanes(size, [&](int d, int n) {
                Floats v = take(row.data() + d, n) * splat(factor);
                if (order != kPlain && weight) v = (wide ? v : rounded<T>(v)) * take(w + d, n);
                if (order != kPlain && !wide) v = rounded<T>(v);
                if (order == kNormGate) v *= silu(take(gate + d, n));
                give(to + d, v, n);
            });
        }
    }
}

// Elements 2i and 2i + 1 of the 2 * n at p.
template <class T>
inline void take_pairs(const T* p, int n, Floats& even, Floats& odd) {
    T some[2 * kLanes] = {};
    memcpy(some, p, 2 * n * sizeof(T));
    const Floats a = load(some), b = load(some + kLanes);
    even = runs<1, 0>(a, b);
    odd = runs<1, 1>(a, b);
}
template <class T>
inline void give_pairs(T* p, Floats even, Floats odd, int n) {
    T some[2 * kLanes];
    store(some, zipped<0>(even, odd));
    store(some + kLanes, zipped<1>(even, odd));
    memcpy(p, some, 2 * n * sizeof(T));
}

// What turns together: i with i + half, pairs of neighbours, or these, which come out as i and i + half.
enum Pairing { kHalves, kPairs, kIntoHalves };

// A of the angles: T, or float where only the result is rounded.
template <class T, class A, Pairing pairing>
void rotate(const T* x, int64_t stride_t, int64_t stride_h, const A* cos, const A* sin, T* out, int64_t out_t,
            int64_t out_h, int64_t num_tokens, int num_heads, int size, int half, int num_threads) {
    const int64_t rows = num_tokens * num_heads;
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && rows * size > kMinParallel)
    for (int64_t row = 0; row < rows; ++row) {
        const int64_t token = row / num_heads, head = row % num_heads;
        const T* in = x + token * stride_t + head * stride_h;
        T* to = out + token * out_t + head * out_h;
        lanes(half, [&](int d, int n) {
            Floats a, b;
            if (pairing == kHalves)
                a = take(in + d, n), b = take(in + half + d, n);
            else
                take_pairs(in + 2 * d, n, a, b);
            const Floats c = take(cos + token * half + d, n), s = take(sin + token * half + d, n);
            const Floats ac = apart(a * c), bs = apart(b * s), bc = apart(b * c), as = apart(a * s);
            if (pairing == kPairs) {
                give_pairs(to + 2 * d, ac - bs, bc + as, n);
            } else {
                give(to + d, rounded<T>(ac) - rounded<T>(bs), n);
                give(to + half + d, rounded<T>(bc) + rounded<T>(as), n);
            }
        });
        if (to != in) memcpy(to + 2 * half, in + 2 * half, (size - 2 * half) * sizeof(T));
    }
}

template <class T, Floats (*activate)(Floats)>
void gate(const T* x, int64_t stride, T* out, int64_t num_tokens, int size, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && num_tokens * size > kMinParallel)
    for (int64_t t = 0; t < num_tokens; ++t) {
        const T* in = x + t * stride;
        lanes(size, [&](int d, int n) {
            const Floats v = rounded<T>(activate(take(in + d, n)));
            give(out + t * size + d, v * take(in + size + d, n), n);
        });
    }
}

template <class T>
void add(const T* x, int64_t stride_x, const T* y, int64_t stride_y, T* out, int64_t num_tokens, int size,
         int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && num_tokens * size > kMinParallel)
    for (int64_t t = 0; t < num_tokens; ++t)
        lanes(size, [&](int d, int n) {
            give(out + t * size + d, take(x + t * stride_x + d, n) + take(y + t * stride_y + d, n), n);
        });
}

}  // namespace

// type: 0 float32, 1 bfloat16. Strides are in elements; rows are dense. x [T, H, size].

// weight: null, or [H, size] by stride_w, float32 where `wide` and else of `type`. added: null, or [T, size] by
// stride_a; the sum goes to total (dense) and is normed in place of x. One head then. centred: less its mean.
extern "C" void rayk_rms_norm(const void* x, int64_t stride_t, int64_t stride_h, const void* weight,
                              int64_t stride_w, const void* added, void* total, int64_t stride_a, void* out,
                              int64_t num_tokens, int32_t num_heads, int32_t size, float eps, int32_t centred,
                              int32_t wide, int32_t type, int32_t num_threads) {
    if (type == 0)
        norm(static_cast<const float*>(x), stride_t, stride_h, static_cast<const float*>(weight), stride_w,
             static_cast<const float*>(added), static_cast<float*>(total), stride_a, static_cast<float*>(out), num_tokens,
             num_heads, size, eps, centred, wide, num_threads);
    else if (wide)
        norm(static_cast<const BFloat16*>(x), stride_t, stride_h, static_cast<const float*>(weight), stride_w,
             static_cast<const BFloat16*>(added), static_cast<BFloat16*>(total), stride_a, static_cast<BFloat16*>(out), num_tokens,
             num_heads, size, eps, centred, wide, num_threads);
    else
        norm(static_cast<const BFloat16*>(x), stride_t, stride_h, static_cast<const BFloat16*>(weight), stride_w,
             static_cast<const BFloat16*>(added), static_cast<BFloat16*>(total), stride_a, static_cast<BFloat16*>(out), num_tokens,
             num_heads, size, eps, centred, wide, num_threads);
}

// x, gates [T, G * size] by stride. weight: null, or [G, size] by stride_w, float32 where `wide` and else of `type`.
// order: 0 gate then norm, 1 norm then gate, 2 only gate.
extern "C" void rayk_gated_norm(const void* x, int64_t stride_x, const void* gates, int64_t stride_g,
                                const void* weight, int64_t stride_w, void* out, int64_t num_tokens,
                                int32_t num_groups, int32_t size, float eps, int32_t order, int32_t wide,
                                int32_t type, int32_t num_threads) {
    if (type == 0)
        gated_norm(static_cast<const float*>(x), stride_x, static_cast<const float*>(gates), stride_g,
                   static_cast<const float*>(weight), stride_w, static_cast<float*>(out), num_tokens, num_groups, size,
                   eps, order, wide, num_threads);
    else if (wide)
        gated_norm(static_cast<const BFloat16*>(x), stride_x, static_cast<const BFloat16*>(gates), stride_g,
                   static_cast<const float*>(weight), stride_w, static_cast<BFloat16*>(out), num_tokens, num_groups, size,
                   eps, order, wide, num_threads);
    else
        gated_norm(static_cast<const BFloat16*>(x), stride_x, static_cast<const BFloat16*>(gates), stride_g,
                   static_cast<const BFloat16*>(weight), stride_w, static_cast<BFloat16*>(out), num_tokens, num_groups, size,
                   eps, order, wide, num_threads);
}

namespace {

template <class T, class A, Pairing pairing>
void rotate_any(const void* x, int64_t stride_t, int64_t stride_h, const void* cos, const void* sin, void* out,
                int64_t out_t, int64_t out_h, int64_t num_tokens, int num_heads, int size, int half,
                int num_threads) {
    rotate<T, A, pairing>(static_cast<const T*>(x), stride_t, stride_h, static_cast<const A*>(cos),
                          static_cast<const A*>(sin), static_cast<T*>(out), out_t, out_h, num_tokens, num_heads,
                          size, half, num_threads);
}

}  // namespace

// cos, sin [T, half], dense, float32 where `wide` and else of `type`; wide only with pairing 1. Dimensions from
// 2 * half on stay. out may be x with pairing 0, by the same strides. pairing: 0 dimension i turns with i + half,
// 1 neighbours turn, 2 neighbours turn and come out as i and i + half.
extern "C" void rayk_rotate(const void* x, int64_t stride_t, int64_t stride_h, const void* cos, const void* sin,
                            void* out, int64_t out_t, int64_t out_h, int64_t num_tokens, int32_t num_heads,
                            int32_t size, int32_t half, int32_t pairing, int32_t wide, int32_t type,
                            int32_t num_threads) {
    auto run = rotate_any<float, float, kHalves>;
    if (type == 0)
        run = pairing == 0   ? rotate_any<float, float, kHalves>
              : pairing == 1 ? rotate_any<float, float, kPairs>
                             : rotate_any<float, float, kIntoHalves>;
    else
        run = pairing == 0   ? rotate_any<BFloat16, BFloat16, kHalves>
              : pairing == 2 ? rotate_any<BFloat16, BFloat16, kIntoHalves>
              : wide         ? rotate_any<BFloat16, float, kPairs>
                             : rotate_any<BFloat16, BFloat16, kPairs>;
    run(x, stride_t, stride_h, cos, sin, out, out_t, out_h, num_tokens, num_heads, size, half, num_threads);
}

// x [T, 2 * size] by stride: gates, then what they are multiplied with. kind: 0 silu, 1 gelu_tanh.
extern "C" void rayk_gate(const void* x, int64_t stride, void* out, int64_t num_tokens, int32_t size,
                          int32_t kind, int32_t type, int32_t num_threads) {
    if (type == 0) {
        const float* in = static_cast<const float*>(x);
        float* to = static_cast<float*>(out);
        (kind == 0 ? gate<float, silu> : gate<float, gelu_tanh>)(in, stride, to, num_tokens, size, num_threads);
    } else {
        const BFloat16* in = static_cast<const BFloat16*>(x);
        BFloat16* to = static_cast<BFloat16*>(out);
        (kind == 0 ? gate<BFloat16, silu> : gate<BFloat16, gelu_tanh>)(in, stride, to, num_tokens, size,
                                                                        num_threads);
    }
}

// x, y [T, size] by stride; their sum goes to out, dense.
extern "C" void rayk_add(const void* x, int64_t stride_x, const void* y, int64_t stride_y, void* out,
                         int64_t num_tokens, int32_t size, int32_t type, int32_t num_threads) {
    if (type == 0)
        add(static_cast<const float*>(x), stride_x, static_cast<const float*>(y), stride_y,
            static_cast<float*>(out), num_tokens, size, num_threads);
    else
        add(static_cast<const BFloat16*>(x), stride_x, static_cast<const BFloat16*>(y), stride_y,
            static_cast<BFloat16*>(out), num_tokens, size, num_threads);
}

RAYK_REPLAYABLE(rayk_rms_norm)
RAYK_REPLAYABLE(rayk_gated_norm)
RAYK_REPLAYABLE(rayk_rotate)
RAYK_REPLAYABLE(rayk_gate)
RAYK_REPLAYABLE(rayk_add)
