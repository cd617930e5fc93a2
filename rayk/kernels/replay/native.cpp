// Calls kernels one after the other, from a table of calls that was written once.

#include "../slots.h"

namespace {

struct Call {
    int32_t (*kernel)(const Slot*);
    const Slot* arguments;
};

}  // namespace

// Returns 0, or 1 plus the number of the first call that failed; those after it are not made.
extern "C" int64_t rayk_replay(const Call* calls, int64_t num_calls) {
    for (int64_t i = 0; i < num_calls; ++i)
        if (calls[i].kernel(calls[i].arguments) != 0) return i + 1;
    return 0;
}
