// Paged attention on a CPU: one call computes a whole mixed batch of prefill and decode.
//
// Work is cut into (request, KV head group, tile of query tokens). The rows of a tile are (token, query
// head of the group), token-major; all accumulation is float32. Keys that no row of the tile sees are never
// read, so null blocks and unused slots may hold anything.
//
// Few rows (decode): scores by dot products straight from the cache. Many rows (prefill): a tile of keys is
// widened and transposed into a small buffer, then both products are register-blocked matrix products.
//
// Of a quantised cache a tile of rows is decoded into float32 first, and then attended to as any other.
//
// Built without -ffast-math: linking with it makes older compilers flush denormals in the whole process.

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "../simd.h"
#include "../slots.h"

namespace {

constexpr int kTileKeys = 64;
constexpr int kTileRows = 64;
constexpr int kDirectRows = 8;
constexpr int kMaxHeadK = 1024;
constexpr float kNegInf = -INFINITY;

// Into the second-level cache: a tile of keys and values ahead would push this one out of the first.
inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// A byte of a quantised cache.
struct Coded {
    uint8_t bits;
};

// How a quantised cache's values lie, and what its codes mean. Strides and offsets are in bytes.
struct Coding {
    const uint8_t* values;
    int64_t stride_b, stride_h, stride_n;
    int64_t k_scales, v_scales;  // from a key's, or a value's, first byte to its scales
    int32_t scales;              // 1: none in the page; 2: a float32; 3: e4m3, one per 16 elements of 4 bits
    float k_scale, v_scale;      // the layer's
};

constexpr int kBlock = 16;

// Every e4m3 code's value, and every e2m1 code's.
struct Tables {
    float e4m3[256], e2m1[16];
    Tables() {
        for (int code = 0; code < 256; ++code) {
            const int exponent = code >> 3 & 15, mantissa = code & 7;
            const float size = exponent ? std::ldexp(8.0f + mantissa, exponent - 10) : std::ldexp(float(mantissa), -9);
            e4m3[code] = (code & 127) == 127 ? NAN : code & 128 ? -size : size;
        }
        const float sizes[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
        for (int code = 0; code < 16; ++code) e2m1[code] = code & 8 ? -sizes[code & 7] : sizes[code & 7];
    }
};
const Tables kTables;

// A row of n elements: `in` and `scales` of the cache, `scale` the layer's.
inline void decode(float* out, const uint8_t* in, const uint8_t* scales, int n, int kind, float scale) {
    if (kind == 3) {
        for (int d = 0; d < n; d += kBlock) {
            const float factor = kTables.e4m3[scales[d / kBlock]] * scale;
            for (int i = 0; i < kBlock; ++i)
                out[d + i] = kTables.e2m1[in[(d + i) / 2] >> (i & 1) * 4 & 15] * factor;
        }
        return;
    }
    float factor = scale;
    if (kind == 2) memcpy(&factor, scales, sizeof factor);
    for (int d = 0; d < n; ++d) out[d] = kTables.e4m3[in[d]] * factor;
}

struct Batch {
    const void* q;
    int32_t q_type;  // also of out: 0 float32, 1 bfloat16
    int64_t q_stride_t, q_stride_h;
    const void* kv;
    int64_t stride_b, stride_h, stride_n;
    void* out;
    int64_t out_stride_t, out_stride_h;
    const int32_t* block_table;
    int64_t table_stride;
    const int32_t* query_start_loc;
    const int32_t* seq_lens;
    const int32_t* group_kv_heads;
    const int32_t* group_query_heads;
    int32_t group_size, num_blocks, num_slots, head_k, head_v;
    float scale;
    int32_t window;      // 0: none
    const float* sinks;  // by query head; null: none
    float soft_cap;      // 0: none
    Coding coding;
};

struct Item {
    int32_t request, group, first_head, num_heads, first_query, num_queries;
};

// Buffers of one thread; sizes are padded to whole vectors.
struct Scratch {
    std::vector<float> q, acc, scores, keys, values, decoded;
    float row_max[kTileRows], row_sum[kTileRows];
};

// out[R][NV vectors] = shrink[R] * out + sum_j p[R][j] * row_j, rows given by pointers.
template <class T, int R, int NV>
inline void accumulate(float* out, int ldo, const float* p, int ldp, const float* shrink,
                       const T* const* rows, int offset, int num_rows, const T* const* next) {
    Floats acc[R][NV];
    for (int i = 0; i < R; ++i)
        for (int c = 0; c < NV; ++c) acc[i][c] = load(out + i * ldo + c * kLanes) * shrink[i];
    for (int j = 0; j < num_rows; ++j) {
        const T* row = rows[j] + offset;
        if (next)
            for (int b = 0; b < int(NV * kLanes * sizeof(T)); b += 64)
                prefetch(reinterpret_cast<const char*>(next[j] + offset) + b);
        Floats v[NV];
        for (int c = 0; c < NV; ++c) v[c] = load(row + c * kLanes);
        for (int i = 0; i < R; ++i)
            for (int c = 0; c < NV; ++c) acc[i][c] += p[i * ldp + j] * v[c];
    }
    for (int i = 0; i < R; ++i)
        for (int c = 0; c < NV; ++c) store(out + i * ldo + c * kLanes, acc[i][c]);
}

template <class T, int R>
void accumulate_rows(float* out, int ldo, int num_vectors, const float* p, int ldp, const float* shrink,
                     const T* const* rows, int offset, int num_rows, const T* const* next) {
    constexpr int kAtOnce = kRegisters / 8;  // with four rows their sums fill half of the registers
    for (int c = 0; c < num_vectors; c += kAtOnce) {
        float* o = out + c * kLanes;
        int off = offset + c * kLanes;
        switch (num_vectors - c < kAtOnce ? num_vectors - c : kAtOnce) {
            case 4: accumulate<T, R, 4>(o, ldo, p, ldp, shrink, rows, off, num_rows, next); break;
            case 3: accumulate<T, R, 3>(o, ldo, p, ldp, shrink, rows, off, num_rows, next); break;
            case 2: accumulate<T, R, 2>(o, ldo, p, ldp, shrink, rows, off, num_rows, next); break;
            default: accumulate<T, R, 1>(o, ldo, p, ldp, shrink, rows, off, num_rows, next);
        }
    }
}

// out[m][num_vectors] = shrink * out + p[m][num_rows] * rows, in blocks of four output rows.
template <class T>
void multiply(float* out, int ldo, int num_vectors, const float* p, int ldp, const float* shrink, int m,
              const T* const* rows, int offset, int num_rows, const T* const* next) {
    for (int i = 0; i < m; i += 4) {
        float* o = out + i * ldo;
        const float *pi = p + i * ldp, *si = shrink + i;
        switch (m - i < 4 ? m - i : 4) {
            case 4: accumulate_rows<T, 4>(o, ldo, num_vectors, pi, ldp, si, rows, offset, num_rows, next); break;
            case 3: accumulate_rows<T, 3>(o, ldo, num_vectors, pi, ldp, si, rows, offset, num_rows, next); break;
            case 2: accumulate_rows<T, 2>(o, ldo, num_vectors, pi, ldp, si, rows, offset, num_rows, next); break;
            default: accumulate_rows<T, 1>(o, ldo, num_vectors, pi, ldp, si, rows, offset, num_rows, next);
        }
        next = nullptr;  // the first pass has fetched it
    }
}

// Lane i of the result is the sum of v[i], of 2 * width vectors: two by two they are folded in half, and lie
// side by side.
template <int width = kLanes / 2>
inline Floats sums(const Floats* v) {
    Floats folded[width];
    for (int i = 0; i < width; ++i)
        folded[i] = runs<width, 0>(v[2 * i], v[2 * i + 1]) + runs<width, 1>(v[2 * i], v[2 * i + 1]);
    if constexpr (width > 1)
        return sums<width / 2>(folded);
    else
        return folded[0];
}

// scores[R][num_rows] = q[R] . rows; kLanes dot products at a time share one reduction.
template <class T, int R>
void dots(float* scores, const float* q, int ldq, int head_k, const T* const* rows, int num_rows,
          const T* const* next) {
    constexpr int kKeys = kLanes / R;
    for (int j = 0; j < num_rows; j += kKeys) {
        const int count = num_rows - j < kKeys ? num_rows - j : kKeys;
        const T* row[kKeys];
        for (int n = 0; n < kKeys; ++n) row[n] = rows[j + (n < count ? n : 0)];
        if (next)
            for (int n = 0; n < kKeys; ++n)
                for (int b = 0; b < int(head_k * sizeof(T)); b += 64)
                    prefetch(reinterpret_cast<const char*>(next[j + n]) + b);
        Floats acc[kLanes] = {};
        for (int d = 0; d < head_k; d += kLanes) {
            Floats query[R];
            for (int i = 0; i < R; ++i) query[i] = load(q + i * ldq + d);
            for (int n = 0; n < kKeys; ++n) {
                Floats key = load(row[n] + d);
                for (int i = 0; i < R; ++i) acc[i * kKeys + n] += query[i] * key;
            }
        }
        Floats result = sums(acc);
        for (int i = 0; i < R; ++i)
            for (int n = 0; n < kKeys; ++n) scores[i * kTileKeys + j + n] = result[i * kKeys + n];
    }
}

template <class T>
void scores_direct(Scratch& s, int ldq, int head_k, int m, const T* const* rows, int num_rows,
                   const T* const* next) {
    for (int i = 0; i < m;) {
        float* out = s.scores.data() + i * kTileKeys;
        const float* q = s.q.data() + i * ldq;
        const int left = m - i;
        if (left >= 4) {
            dots<T, 4>(out, q, ldq, head_k, rows, num_rows, next);
            i += 4;
        } else if (left >= 2) {
            dots<T, 2>(out, q, ldq, head_k, rows, num_rows, next);
            i += 2;
        } else {
            dots<T, 1>(out, q, ldq, head_k, rows, num_rows, next);
            i += 1;
        }
        next = nullptr;
    }
}

// Widen a tile: keys transposed to [head_k][kTileKeys], values to [key][padded head_v]. Pads are zero.
template <class T>
void pack(Scratch& s, const T* const* rows, int num_rows, int head_k, int head_v, int ldv) {
    for (int j = 0; j < num_rows; ++j)
        for (int d = 0; d < head_k; ++d) s.keys[d * kTileKeys + j] = widen(rows[j][d]);
    for (int j = num_rows; j < kTileKeys; ++j)
        for (int d = 0; d < head_k; ++d) s.keys[d * kTileKeys + j] = 0.0f;
    for (int j = 0; j < num_rows; ++j)
        for (int d = 0; d < head_v; ++d) s.values[j * ldv + d] = widen(rows[j][head_k + d]);
}

// Padding lanes are computed too: what they hold is not used.
inline void cap_scores(float* scores, int num_rows, float cap) {
    for (int j = 0; j < num_rows; j += kLanes) store(scores + j, tanh(load(scores + j) / cap) * cap);
}

// Turn a row of scores into weights (the maximum goes first, so that large scores lose nothing to the change
// of base); returns the factor by which what was summed before shrinks.
inline float soften(float* scores, int num_rows, float& row_max, float& row_sum) {
    int padded = (num_rows + kLanes - 1) / kLanes * kLanes;
    for (int j = num_rows; j < padded; ++j) scores[j] = kNegInf;
    Floats best = splat(kNegInf);
    for (int j = 0; j < padded; j += kLanes) {
        Floats x = load(scores + j);
        best = x > best ? x : best;
    }
    float new_max = row_max;
    for (int i = 0; i < kLanes; ++i) new_max = best[i] > new_max ? best[i] : new_max;
    if (new_max == kNegInf) {  // the row sees nothing yet
        for (int j = 0; j < padded; ++j) scores[j] = 0.0f;
        return 1.0f;
    }
    Floats total = splat(0.0f);
    for (int j = 0; j < padded; j += kLanes) {
        Floats p = exp2((load(scores + j) - new_max) * kLog2E);
        store(scores + j, p);
        total += p;
    }
    float shrink = expf(row_max - new_max);
    row_sum = row_sum * shrink + sum(total);
    row_max = new_max;
    return shrink;
}

template <class T>
bool point_at(const T** rows, const Batch& b, const Item& item, int first_key, int end_key) {
    const T* head = static_cast<const T*>(b.kv) + b.group_kv_heads[item.group] * b.stride_h;
    const int32_t* table = b.block_table + item.request * b.table_stride;
    for (int key = first_key, j = 0; key < end_key;) {
        int32_t block = table[key / b.num_slots];
        if (block < 0 || block >= b.num_blocks) return false;
        int slot = key % b.num_slots;
        const T* row = head + block * b.stride_b + slot * b.stride_n;
        for (; slot < b.num_slots && key < end_key; ++slot, ++key, ++j, row += b.stride_n) rows[j] = row;
    }
    return true;
}

// Decode the rows that point_at found, keys then values, and point at those instead.
inline void decode_rows(const float** decoded, Scratch& s, const Coded* const* rows, const Batch& b,
                        const Item& item, int first_key, int num_rows) {
    const Coding& c = b.coding;
    const int content = b.head_k + b.head_v;
    s.decoded.resize(kTileKeys * content);
    const int32_t* table = b.block_table + item.request * b.table_stride;
    const uint8_t* head = c.values + b.group_kv_heads[item.group] * c.stride_h;
    for (int j = 0; j < num_rows; ++j) {
        float* out = s.decoded.data() + j * content;
        const int key = first_key + j;
        const uint8_t* k = &rows[j]->bits;
        const uint8_t* v = head + table[key / b.num_slots] * c.stride_b + key % b.num_slots * c.stride_n;
        decode(out, k, k + c.k_scales, b.head_k, c.scales, c.k_scale);
        decode(out + b.head_k, v, v + c.v_scales, b.head_v, c.scales, c.v_scale);
        decoded[j] = out;
    }
}

// Cut a batch into items of at most kTileRows rows. Groups are padded with -1.
std::vector<Item> cut(const Batch& b, int num_requests, int num_groups) {
    const int piece = b.group_size < kTileRows ? b.group_size : kTileRows;
    const int tile = kTileRows / piece;
    std::vector<int> sizes(num_groups, 0);
    for (int g = 0; g < num_groups; ++g)
        while (sizes[g] < b.group_size && b.group_query_heads[g * b.group_size + sizes[g]] >= 0) ++sizes[g];
    std::vector<Item> items;
    for (int r = 0; r < num_requests; ++r) {
        const int n = b.query_start_loc[r + 1] - b.query_start_loc[r];
        for (int query = 0; query < n; query += tile)
            for (int g = 0; g < num_groups; ++g)
                for (int head = 0; head < sizes[g]; head += piece)
                    items.push_back({r, g, head, sizes[g] - head < piece ? sizes[g] - head : piece, query,
                                     n - query < tile ? n - query : tile});
    }
    return items;
}

template <class T>
inline void scale(float* to, const T* from, int n, float factor) {
    for (int d = 0; d < n; ++d) to[d] = widen(from[d]) * factor;
}

// `from` is padded to whole vectors.
template <class T>
inline void divide(T* to, const float* from, int n, float by) {
    for (int d = 0; d < n; d += kLanes) {
        const Floats v = load(from + d) / by;
        if (n - d < kLanes)
            store(to + d, v, n - d);
        else
            store(to + d, v);
    }
}

template <class T>
bool attend(const Batch& b, const Item& item, Scratch& s) {
    const int32_t* heads = b.group_query_heads + item.group * b.group_size + item.first_head;
    const int num_heads = item.num_heads;
    const int m = num_heads * item.num_queries;
    const int ldq = (b.head_k + kLanes - 1) / kLanes * kLanes;
    const int ldv = (b.head_v + kLanes - 1) / kLanes * kLanes;
    const bool direct = m <= kDirectRows && ldq == b.head_k && ldv == b.head_v;
    const int first_token = b.query_start_loc[item.request];
    const int num_queries = b.query_start_loc[item.request + 1] - first_token;
    const int first_position = b.seq_lens[item.request] - num_queries + item.first_query;

    s.q.assign(m * ldq, 0.0f);
    s.acc.assign(m * ldv, 0.0f);
    s.scores.resize(m * kTileKeys);
    s.keys.resize(ldq * kTileKeys);
    s.values.assign(kTileKeys * ldv, 0.0f);
    for (int i = 0; i < m; ++i) {
        const int64_t at = (first_token + item.first_query + i / num_heads) * b.q_stride_t +
                           heads[i % num_heads] * b.q_stride_h;
        if (b.q_type == 0)
            scale(s.q.data() + i * ldq, static_cast<const float*>(b.q) + at, b.head_k, b.scale);
        else
            scale(s.q.data() + i * ldq, static_cast<const BFloat16*>(b.q) + at, b.head_k, b.scale);
        // A sink is a first key of weight one and value zero; at -inf the first real key wipes it out.
        s.row_max[i] = b.sinks ? b.sinks[heads[i % num_heads]] : kNegInf;
        s.row_sum[i] = b.sinks ? 1.0f : 0.0f;
    }
    using Element = std::conditional_t<std::is_same_v<T, Coded>, float, T>;
    const T* pointers[2][kTileKeys];
    const Element* decoded[kTileKeys];
    const float *key_rows[kMaxHeadK], *value_rows[kTileKeys];
    for (int d = 0; d < b.head_k; ++d) key_rows[d] = s.keys.data() + d * kTileKeys;
    for (int j = 0; j < kTileKeys; ++j) value_rows[j] = s.values.data() + j * ldv;
    const float zeros[kTileRows] = {};

    const int end_key = first_position + item.num_queries;
    int start = b.window && first_position >= b.window ? first_position - b.window + 1 : 0;
    int stop = start + kTileKeys < end_key ? start + kTileKeys : end_key;
    if (!point_at(pointers[0], b, item, start, stop)) return false;
    for (int turn = 0; start < end_key; ++turn) {
        const int num_rows = stop - start;
        const int next_stop = stop + kTileKeys < end_key ? stop + kTileKeys : end_key;
        const T** next = pointers[(turn + 1) % 2];
        if (!point_at(next, b, item, stop, next_stop)) return false;
        const Element** rows = decoded;
        const Element** ahead = nullptr;
        if constexpr (std::is_same_v<T, Coded>) {
            decode_rows(decoded, s, pointers[turn % 2], b, item, start, num_rows);
        } else {
            rows = pointers[turn % 2];
            // Only a whole next tile is fetched ahead.
            if (next_stop - stop == kTileKeys) ahead = next;
        }
        if (direct) {
            scores_direct<Element>(s, ldq, b.head_k, m, rows, num_rows, ahead);
        } else {
            pack(s, rows, num_rows, b.head_k, b.head_v, ldv);
            std::memset(s.scores.data(), 0, m * kTileKeys * sizeof(float));
            multiply<float>(s.scores.data(), kTileKeys, kTileKeys / kLanes, s.q.data(), ldq, zeros, m,
                            key_rows, 0, b.head_k, nullptr);
        }
        float shrink[kTileRows];
        for (int i = 0; i < m; ++i) {
            float* row = s.scores.data() + i * kTileKeys;
            const int position = first_position + i / num_heads;
            if (b.soft_cap > 0.0f) cap_scores(row, num_rows, b.soft_cap);
            for (int j = position + 1 - start; j < num_rows; ++j)
                if (j >= 0) row[j] = kNegInf;
            if (b.window)
                for (int j = 0; j < num_rows && start + j <= position - b.window; ++j) row[j] = kNegInf;
            shrink[i] = soften(row, num_rows, s.row_max[i], s.row_sum[i]);
        }
        if (direct)
            multiply<Element>(s.acc.data(), ldv, ldv / kLanes, s.scores.data(), kTileKeys, shrink, m, rows,
                        b.head_k, num_rows, ahead);
        else
            multiply<float>(s.acc.data(), ldv, ldv / kLanes, s.scores.data(), kTileKeys, shrink, m,
                            value_rows, 0, num_rows, nullptr);
        start = stop;
        stop = next_stop;
    }
    for (int i = 0; i < m; ++i) {
        const int64_t at = (first_token + item.first_query + i / num_heads) * b.out_stride_t +
                           heads[i % num_heads] * b.out_stride_h;
        if (b.q_type == 0)
            divide(static_cast<float*>(b.out) + at, s.acc.data() + i * ldv, b.head_v, s.row_sum[i]);
        else
            divide(static_cast<BFloat16*>(b.out) + at, s.acc.data() + i * ldv, b.head_v, s.row_sum[i]);
    }
    return true;
}

template <class T>
bool attend_all(const Batch& b, const std::vector<Item>& items, int num_threads) {
    std::atomic<bool> good{true};
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
        thread_local Scratch scratch;
#pragma omp for schedule(dynamic)
        for (size_t i = 0; i < items.size(); ++i)
            if (!attend<T>(b, items[i], scratch)) good = false;
    }
    return good;
}

}  // namespace

// q_type: 0 float32, 1 bfloat16, as the result is. kv_type: 0 float32, 1 bfloat16, 2 float16, 3 quantised (kv: keys; coding: the rest; else null). Strides
// are in elements. Returns 0, or 1 when a block table
// entry that is needed is out of range, or 2 when a key is too large. sinks may be null, soft_cap 0.
extern "C" int rayk_paged_attention(
    const void* q, int32_t q_type, int64_t q_stride_t, int64_t q_stride_h, const void* kv, int32_t kv_type,
    int64_t stride_b, int64_t stride_h, int64_t stride_n, void* out, int64_t out_stride_t,
    int64_t out_stride_h, const int32_t* block_table, int64_t table_stride,
    const int32_t* query_start_loc, const int32_t* seq_lens, int32_t num_requests,
    const int32_t* group_kv_heads, const int32_t* group_query_heads, int32_t num_groups,
    int32_t group_size, int32_t num_blocks, int32_t num_slots, int32_t head_k, int32_t head_v,
    float scale, int32_t window, const float* sinks, float soft_cap, const Coding* coding,
    int32_t num_threads) {
    if (head_k > kMaxHeadK) return 2;
    const Batch batch{q,           q_type,          q_stride_t, q_stride_h,      kv,
                      stride_b,    stride_h,        stride_n,   out,
                      out_stride_t, out_stride_h,   block_table, table_stride,
                      query_start_loc, seq_lens,    group_kv_heads, group_query_heads,
                      group_size,  num_blocks,      num_slots,  head_k,
                      head_v,      scale,       window,     sinks,
                      soft_cap,    coding ? *coding : Coding{}};
    const std::vector<Item> items = cut(batch, num_requests, num_groups);
    bool good;
    switch (kv_type) {
        case 0: good = attend_all<float>(batch, items, num_threads); break;
        case 1: good = attend_all<BFloat16>(batch, items, num_threads); break;
        case 3: good = attend_all<Coded>(batch, items, num_threads); break;
        default: good = attend_all<_Float16>(batch, items, num_threads);
    }
    return good ? 0 : 1;
}

RAYK_REPLAYABLE(rayk_paged_attention)
