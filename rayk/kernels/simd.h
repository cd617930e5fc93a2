// A vector of floats, for every kernel in C++: as wide as the CPU's registers are. GCC splits wider ones, and
// moves the parts through memory: products are then 30 times as slow as they could be.

#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kRegisters = 32;
#elif defined(__AVX__)
constexpr int kLanes = 8, kRegisters = 16;
#else
constexpr int kLanes = 4, kRegisters = 16;
#endif
constexpr float kLog2E = 1.44269504088896341f;

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
typedef _Float16 HalfFloats __attribute__((vector_size(2 * kLanes)));
typedef float Floats16 __attribute__((vector_size(64)));
typedef float Floats8 __attribute__((vector_size(32)));
typedef float Floats4 __attribute__((vector_size(16)));

struct BFloat16 {
    uint16_t bits;
};

inline Floats load(const float* p) {
    Floats v;
    memcpy(&v, p, sizeof v);
    return v;
}

inline Floats load(const BFloat16* p) {
    Halves h;
    memcpy(&h, p, sizeof h);
    return (Floats)(__builtin_convertvector(h, Words) << 16);
}

inline Floats load(const _Float16* p) {
    // GCC 12 converts _Float16 vectors lane by lane.
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#endif
    HalfFloats h;
    memcpy(&h, p, sizeof h);
    return __builtin_convertvector(h, Floats);
}

inline void store(float* p, Floats v) { memcpy(p, &v, sizeof v); }

inline void store(BFloat16* p, Floats v) {
    Words bits = (Words)v;
    bits = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    Words nan = (Words)(v != v);
    Halves h = __builtin_convertvector((bits & ~nan) | (nan & 0x7fc0), Halves);
    memcpy(p, &h, sizeof h);
}

// The first n < kLanes of what load and store would touch; the other lanes are zero.
template <class T>
inline Floats load(const T* p, int n) {
    T some[kLanes] = {};
    memcpy(some, p, n * sizeof(T));
    return load(some);
}
template <class T>
inline void store(T* p, Floats v, int n) {
    T some[kLanes];
    store(some, v);
    memcpy(p, some, n * sizeof(T));
}

inline float widen(float x) { return x; }
inline float widen(_Float16 x) { return static_cast<float>(x); }
inline float widen(BFloat16 x) {
    uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

inline Floats splat(float x) { return x - Floats{}; }

inline float sum(Floats4 v) { return (v[0] + v[2]) + (v[1] + v[3]); }
inline float sum(Floats8 v) {
    Floats4 halves[2];
    memcpy(halves, &v, sizeof v);
    return sum(halves[0] + halves[1]);
}
inline float sum(Floats16 v) {
    Floats8 halves[2];
    memcpy(halves, &v, sizeof v);
    return sum(halves[0] + halves[1]);
}

// Of a's and b's lanes in a row, every other run of `width`: the first, third, ... or the second, fourth, ...
template <int width, int odd, size_t... i>
inline Floats runs_of(Floats a, Floats b, std::index_sequence<i...>) {
    return __builtin_shufflevector(a, b, (i / width * 2 + odd) * width + i % width...);
}
template <int width, int odd>
inline Floats runs(Floats a, Floats b) {
    return runs_of<width, odd>(a, b, std::make_index_sequence<kLanes>());
}

// a[0], b[0], a[1], ...: its first lanes, or its last.
template <int half, size_t... i>
inline Floats zipped_of(Floats a, Floats b, std::index_sequence<i...>) {
    return __builtin_shufflevector(a, b, (half * kLanes + i) / 2 + i % 2 * kLanes...);
}
template <int half>
inline Floats zipped(Floats a, Floats b) {
    return zipped_of<half>(a, b, std::make_index_sequence<kLanes>());
}

// 2^x for x <= 0, relative error about 1e-7; 0 below the normal range.
inline Floats exp2(Floats x) {
    const Floats magic = splat(12582912.0f);  // adding 1.5 * 2^23 rounds to an integer
    Floats clamped = x < -126.0f ? splat(-126.0f) : x;
    Floats n = (clamped + magic) - magic;
    Floats r = clamped - n;  // within [-0.5, 0.5]; Taylor's remainder is below 6e-9
    Floats p = splat(1.52527338e-5f);
    p = p * r + 1.54035304e-4f;
    p = p * r + 1.33335581e-3f;
    p = p * r + 9.61812911e-3f;
    p = p * r + 5.55041087e-2f;
    p = p * r + 2.40226507e-1f;
    p = p * r + 6.93147181e-1f;
    p = p * r + 1.0f;
    Ints power = (__builtin_convertvector(n, Ints) + 127) << 23;
    return x < -126.0f ? splat(0.0f) : p * (Floats)power;
}

// Single precision tanh: a polynomial near zero (after Cephes' tanhf), exponentials elsewhere.
inline Floats tanh(Floats x) {
    Floats size = x < 0.0f ? -x : x;
    Floats e = exp2(size * (-2.0f * kLog2E));
    Floats far = 1.0f - 2.0f * e / (1.0f + e);  // not (1 - e) / (1 + e), which rounds twice more
    Floats s = x * x;
    Floats p = splat(-5.70498872745e-3f);
    p = p * s + 2.06390887954e-2f;
    p = p * s - 5.37397155531e-2f;
    p = p * s + 1.33314422036e-1f;
    p = p * s - 3.33332819422e-1f;
    return size < 0.625f ? p * s * x + x : (x < 0.0f ? -far : far);
}

}  // namespace
