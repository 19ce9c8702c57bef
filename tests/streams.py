"""An allocator whose blocks other streams use, as torch's `record_stream` says: once freed, they wait for these."""

from __future__ import annotations

from collections import deque
from typing import Any

from simulator.allocator.caching import Allocator, Block


class StreamAllocator(Allocator):
    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.users: dict[Block, set[int]] = {}
        self.left: dict[Block, int] = {}  # streams that a freed block waits for
        self.waiting: dict[int, deque[Block]] = {}  # stream -> freed blocks whose event it has not passed
        self.ready: dict[int, int] = {}  # stream -> how many of these it has passed meanwhile

    def record_stream(self, block: Block, stream: int) -> None:
        if stream != block.stream:
            self.users.setdefault(block, set()).add(stream)

    def free(self, block: Block) -> None:
        streams = self.users.pop(block, set())
        if not streams:
            super().free(block)
            return
        self.request_free(block)
        self.left[block] = len(streams)
        for stream in sorted(streams):
            self.waiting.setdefault(stream, deque()).append(block)

    def stream_done(self, stream: int) -> None:
        """The stream has passed all that was queued on it; the next malloc notices."""
        if self.waiting.get(stream):
            self.ready[stream] = len(self.waiting[stream])

    def malloc(self, *args: Any, **more: Any) -> Block:
        self.collect()
        return super().malloc(*args, **more)

    def release_cached(self) -> None:
        self.ready = {stream: len(queue) for stream, queue in self.waiting.items() if queue}
        self.collect()
        super().release_cached()

    def collect(self) -> None:
        for stream in sorted(self.ready):
            for _ in range(self.ready[stream]):
                block = self.waiting[stream].popleft()
                self.left[block] -= 1
                if not self.left[block]:
                    self.complete_free(block)
        self.ready = {}
