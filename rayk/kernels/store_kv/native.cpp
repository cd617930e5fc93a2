// store_kv on a CPU where values need no conversion: rows are copied to their slots.

#include <cstdint>
#include <cstring>

#include "../slots.h"

// k, v [T, H, row], the cache [B, H, N, k's row + v's]; all strides and rows in bytes. Slot -1 stores nothing.
// Returns 0, or 1, and has stored nothing of that token and those after it, where a slot is out of range.
extern "C" int rayk_store_kv(const char* k, int64_t k_stride_t, int64_t k_stride_h, const char* v,
                             int64_t v_stride_t, int64_t v_stride_h, char* cache, int64_t stride_b,
                             int64_t stride_h, int64_t stride_n, const int64_t* slots, int64_t num_tokens,
                             int32_t num_heads, int64_t k_row, int64_t v_row, int64_t num_blocks,
                             int64_t num_slots) {
    for (int64_t t = 0; t < num_tokens; ++t) {
        const int64_t slot = slots[t];
        if (slot == -1) continue;
        if (slot < 0 || slot >= num_blocks * num_slots) return 1;
        char* to = cache + slot / num_slots * stride_b + slot % num_slots * stride_n;
        for (int h = 0; h < num_heads; ++h) {
            memcpy(to + h * stride_h, k + t * k_stride_t + h * k_stride_h, k_row);
            memcpy(to + h * stride_h + k_row, v + t * v_stride_t + h * v_stride_h, v_row);
        }
    }
    return 0;
}

RAYK_REPLAYABLE(rayk_store_kv)
