// Lets a kernel be called with its arguments in an array: RAYK_REPLAYABLE(f) makes f_slots.

#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

namespace {

union Slot {
    int64_t integer;  // also a pointer
    double real;
};

template <class T>
inline T taken(Slot slot) {
    if constexpr (std::is_pointer_v<T>)
        return reinterpret_cast<T>(static_cast<intptr_t>(slot.integer));
    else if constexpr (std::is_floating_point_v<T>)
        return static_cast<T>(slot.real);
    else
        return static_cast<T>(slot.integer);
}

// Returns what f does, 0 if that is nothing.
template <class Result, class... Arguments, size_t... Index>
inline int32_t call(Result (*f)(Arguments...), const Slot* slots, std::index_sequence<Index...>) {
    if constexpr (std::is_void_v<Result>) {
        f(taken<Arguments>(slots[Index])...);
        return 0;
    } else {
        return f(taken<Arguments>(slots[Index])...);
    }
}
template <class Result, class... Arguments>
inline int32_t call(Result (*f)(Arguments...), const Slot* slots) {
    return call(f, slots, std::index_sequence_for<Arguments...>{});
}

}  // namespace

#define RAYK_REPLAYABLE(f) \
    extern "C" int32_t f##_slots(const Slot* slots) { return call(f, slots); }
