"""The bounded queues between the stages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from topg.errors import CapacityError

Item = TypeVar("Item")


class BoundedQueue(Generic[Item]):
    """First in, first out, never more than `capacity` items.  The owner keeps threads apart."""

    def __init__(self, name: str, capacity: int) -> None:
        self.name = name
        self.capacity = capacity
        self._items: deque[Item] = deque()

    def __len__(self) -> int:
        return len(self._items)

    @property
    def full(self) -> bool:
        return len(self._items) >= self.capacity

    def put(self, item: Item) -> None:
        """Append; raises CapacityError, having changed nothing, when the queue is full."""
        if self.full:
            raise CapacityError(f"the {self.name} queue holds {len(self)} items, which is its limit; try again later")
        self._items.append(item)

    def take(self) -> Item | None:
        """Remove and return the oldest item; None when there is none."""
        return self._items.popleft() if self._items else None

    def discard(self, unwanted: Callable[[Item], bool]) -> None:
        """Remove the items that `unwanted` is true for."""
        self._items = deque(item for item in self._items if not unwanted(item))
