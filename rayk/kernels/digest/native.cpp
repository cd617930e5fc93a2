// The digest of reference.py in C++; see there for what it is. Same words, same keys, same sums.

#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ull;

inline uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

// Sum of mix(word ^ (key + index_keys[i])) over the words of one row of one field.
template <class Word>
uint64_t row_sum(const char* row, int64_t num_bytes, uint64_t key, const uint64_t* index_keys) {
    const int64_t n = num_bytes / static_cast<int64_t>(sizeof(Word));
    uint64_t total = 0;
    for (int64_t i = 0; i < n; ++i) {
        Word word;
        memcpy(&word, row + i * sizeof(Word), sizeof(Word));
        total += mix(static_cast<uint64_t>(static_cast<int64_t>(word)) ^ (key + index_keys[i]));
    }
    return total;
}

uint64_t field_sum(const char* row, int64_t num_bytes, uint64_t key, const uint64_t* index_keys) {
    if (num_bytes % 8 == 0) return row_sum<int64_t>(row, num_bytes, key, index_keys);
    if (num_bytes % 4 == 0) return row_sum<int32_t>(row, num_bytes, key, index_keys);
    if (num_bytes % 2 == 0) return row_sum<int16_t>(row, num_bytes, key, index_keys);
    return row_sum<int8_t>(row, num_bytes, key, index_keys);
}

}  // namespace

// Strides, starts and sizes are in bytes. keys [num_fields, num_heads] hold K of (layer, field, unit); out
// [num_fields, num_heads, num_groups] is added to. The caller has checked every index.
extern "C" void rayk_digest(const char* kv, int64_t stride_b, int64_t stride_h, int64_t stride_n,
                            const int64_t* block_ids, const int64_t* slots, const int64_t* rows,
                            int64_t num_rows, const uint64_t* keys, const int64_t* field_starts,
                            const int64_t* field_bytes, int64_t num_fields, int64_t num_heads,
                            int64_t rows_per_group, int64_t first_group, int64_t num_groups,
                            uint64_t* out) {
    int64_t most = 0;
    for (int64_t f = 0; f < num_fields; ++f) most = field_bytes[f] > most ? field_bytes[f] : most;
    std::vector<uint64_t> index_keys(most);
    for (int64_t i = 0; i < most; ++i) index_keys[i] = mix(~kGolden ^ static_cast<uint64_t>(i));
    for (int64_t i = 0; i < num_rows; ++i) {
        const int64_t group = rows[i] / rows_per_group - first_group;
        for (int64_t h = 0; h < num_heads; ++h) {
            const char* row = kv + block_ids[i] * stride_b + h * stride_h + slots[i] * stride_n;
            for (int64_t f = 0; f < num_fields; ++f) {
                const int64_t at = f * num_heads + h;
                const uint64_t key = mix((keys[at] + kGolden) ^ static_cast<uint64_t>(rows[i]));
                out[at * num_groups + group] +=
                    field_sum(row + field_starts[f], field_bytes[f], key, index_keys.data());
            }
        }
    }
}
