// The digest of reference.py in C++; see there for what it is. Same words, same keys, same sums.
//
// One call reads all views of a rank. Mixing keeps up with memory that is read in order, and only then, so
// rows are walked block by block, and in a block from its lowest address up, whatever the layout.

#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ull;
constexpr int64_t kTileRows = 64;

// Rows that are walked together: of one view, or of one unit of it where a unit's rows lie side by side.
// Bytes. `first` to `stop` are its entries.
struct Bundle {
    int64_t base, stride_b, stride_n, first, stop, place;
};

// One field of one unit: where it lies in a bundle's row, K of (layer, field, unit), and not_finite_bits.
struct Entry {
    int64_t offset, bytes;
    uint64_t key, mask, step;
};

// Row i (block_ids[i], slots[i]) holds position rows[i].
struct Place {
    const int64_t *block_ids, *slots, *rows;
    int64_t num_rows, first_group;
};

inline uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

// Sum of mix(word ^ (key + index_keys[i])) over the words of one row of one field. `bad` is given bits of
// mask + step where a word holds a value that is not finite.
template <class Word>
uint64_t row_sum(const char* row, const Entry& entry, uint64_t key, const uint64_t* index_keys, uint64_t& bad) {
    const int64_t n = entry.bytes / static_cast<int64_t>(sizeof(Word));
    const uint64_t mask = entry.mask, step = entry.step;
    uint64_t total = 0, found = 0;
    for (int64_t i = 0; i < n; ++i) {
        Word word;
        memcpy(&word, row + i * sizeof(Word), sizeof(Word));
        const uint64_t wide = static_cast<uint64_t>(static_cast<int64_t>(word));
        total += mix(wide ^ (key + index_keys[i]));
        found |= (wide & mask) + step;
    }
    bad |= found & (mask + step);
    return total;
}

uint64_t field_sum(const char* row, const Entry& entry, uint64_t key, const uint64_t* index_keys, uint64_t& bad) {
    if (entry.bytes % 8 == 0) return row_sum<int64_t>(row, entry, key, index_keys, bad);
    if (entry.bytes % 4 == 0) return row_sum<int32_t>(row, entry, key, index_keys, bad);
    if (entry.bytes % 2 == 0) return row_sum<int16_t>(row, entry, key, index_keys, bad);
    return row_sum<int8_t>(row, entry, key, index_keys, bad);
}

// Rows begin .. end of a place, all in one block.
struct Tile {
    const Place& place;
    int64_t begin, end;
    const int64_t* groups;
};

void digest_tile(const Tile& tile, const Bundle& bundle, const Entry* entries, const int64_t* outs,
                 const uint64_t* index_keys, std::vector<uint64_t>& row_keys, uint64_t* out, uint64_t& bad) {
    const int64_t num_entries = bundle.stop - bundle.first;
    row_keys.resize(num_entries * kTileRows);
    for (int64_t e = 0; e < num_entries; ++e) {
        const uint64_t key = entries[bundle.first + e].key + kGolden;
        for (int64_t i = tile.begin; i < tile.end; ++i) {
            row_keys[e * kTileRows + i - tile.begin] = mix(key ^ static_cast<uint64_t>(tile.place.rows[i]));
        }
    }
    const char* block = reinterpret_cast<const char*>(bundle.base) +
                        tile.place.block_ids[tile.begin] * bundle.stride_b;
    for (int64_t i = tile.begin; i < tile.end; ++i) {
        const char* row = block + tile.place.slots[i] * bundle.stride_n;
        for (int64_t e = 0; e < num_entries; ++e) {
            const Entry& entry = entries[bundle.first + e];
            out[outs[bundle.first + e] + tile.groups[i]] += field_sum(
                row + entry.offset, entry, row_keys[e * kTileRows + i - tile.begin], index_keys, bad);
        }
    }
}

}  // namespace

// bundles in order of (place, base). outs: of each entry, its first word in `out`, one word a row group, which
// is added to. not_finite: whether any value is NaN or infinite. most_words: of any entry. The caller has
// checked every index.
extern "C" void rayk_digest(const Place* places, const Bundle* bundles, int64_t num_bundles,
                            const Entry* entries, const int64_t* outs, int64_t rows_per_group,
                            int64_t most_words, uint64_t* out, uint64_t* not_finite) {
    uint64_t bad = 0;
    std::vector<uint64_t> index_keys(most_words), row_keys;
    for (int64_t i = 0; i < most_words; ++i) index_keys[i] = mix(~kGolden ^ static_cast<uint64_t>(i));
    std::vector<int64_t> groups;
    for (int64_t first = 0, stop = 0; first < num_bundles; first = stop) {
        const Place& place = places[bundles[first].place];
        while (stop < num_bundles && bundles[stop].place == bundles[first].place) ++stop;
        groups.resize(place.num_rows);
        for (int64_t i = 0; i < place.num_rows; ++i) {
            groups[i] = place.rows[i] / rows_per_group - place.first_group;
        }
        for (int64_t begin = 0, end = 0; begin < place.num_rows; begin = end) {
            while (end < place.num_rows && end - begin < kTileRows &&
                   place.block_ids[end] == place.block_ids[begin]) {
                ++end;
            }
            const Tile tile{place, begin, end, groups.data()};
            for (int64_t b = first; b < stop; ++b) {
                digest_tile(tile, bundles[b], entries, outs, index_keys.data(), row_keys, out, bad);
            }
        }
    }
    *not_finite = bad != 0;
}
