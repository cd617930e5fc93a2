"""Keep a heap whose items have names, so that any of them can leave."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Any)


class KeyedHeap(Generic[K]):
    """Orders names by their keys, least first. `push` and `discard` cost O(log n); heapq could only mark an
    item as gone, and keeps it."""

    def __init__(self) -> None:
        self._items: list[tuple[K, str]] = []
        self._at: dict[str, int] = {}  # name -> its index

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, name: str) -> bool:
        return name in self._at

    @property
    def first(self) -> str | None:
        return self._items[0][1] if self._items else None

    def key_of(self, name: str) -> K:
        return self._items[self._at[name]][0]

    def push(self, name: str, key: K) -> None:
        assert name not in self._at, f"{name} is there already"
        self._items.append((key, name))
        self._rise(len(self._items) - 1)

    def discard(self, name: str) -> None:
        """Remove the name if it is there."""
        index = self._at.pop(name, None)
        if index is None:
            return
        last = self._items.pop()
        if index < len(self._items):
            self._items[index] = last
            self._sink(self._rise(index))

    def _rise(self, index: int) -> int:
        """Swap an item with its parents until it is not less than one; returns its place."""
        item = self._items[index]
        while index and item[0] < self._items[parent := (index - 1) // 2][0]:
            self._put(index, self._items[parent])
            index = parent
        self._put(index, item)
        return index

    def _sink(self, index: int) -> None:
        """Swap an item with the lesser of its children until neither is less."""
        item = self._items[index]
        while (child := 2 * index + 1) < len(self._items):
            if child + 1 < len(self._items) and self._items[child + 1][0] < self._items[child][0]:
                child += 1
            if not self._items[child][0] < item[0]:
                break
            self._put(index, self._items[child])
            index = child
        self._put(index, item)

    def _put(self, index: int, item: tuple[K, str]) -> None:
        self._items[index] = item
        self._at[item[1]] = index
