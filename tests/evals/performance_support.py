"""What the tests of `kvplug bench manager` share: sides whose managers are small, kept, and watched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_kvplug.evals.performance.sides import BenchedSide, Prompt
from vllm_kvplug.evals.sides import SideChoice

NUM_BLOCKS = 1_000


class Watched:
    """A manager, and what was asked of it. Whatever is not watched goes straight to the manager.

    Attributes:
        allocations: (request, answer, blocks that came into use) of each `allocate_slots`.
        freed: blocks that each `free` gave back.
        hits: (request id, tokens hit) of each `get_computed_blocks`.
        ids: answers of `get_block_ids`.
        common: answers of `get_num_common_prefix_blocks`.
        evicted: of each `evict_blocks`.
    """

    def __init__(self, manager: Any, num_blocks: int) -> None:
        self.watched, self.num_blocks = manager, num_blocks
        self.allocations: list[tuple[Any, Any, int]] = []
        self.freed: list[int] = []
        self.hits: list[tuple[str, int]] = []
        self.ids: list[Any] = []
        self.common: list[list[int]] = []
        self.evicted: list[set[int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.watched, name)

    @property
    def num_used(self) -> int:
        """Blocks in use, by what the contract's `usage` says; the null block is none."""
        return round(self.watched.usage * (self.num_blocks - 1))

    def allocate_slots(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        before = self.num_used
        answer = self.watched.allocate_slots(request, *args, **kwargs)
        self.allocations.append((request, answer, self.num_used - before))
        return answer

    def free(self, request: Any) -> None:
        before = self.num_used
        self.watched.free(request)
        self.freed.append(before - self.num_used)

    def get_computed_blocks(self, request: Any) -> Any:
        answer = self.watched.get_computed_blocks(request)
        self.hits.append((request.request_id, answer[1]))
        return answer

    def get_block_ids(self, request_id: str) -> Any:
        self.ids.append(self.watched.get_block_ids(request_id))
        return self.ids[-1]

    def get_num_common_prefix_blocks(self, request_id: str) -> Any:
        self.common.append(self.watched.get_num_common_prefix_blocks(request_id))
        return self.common[-1]

    def evict_blocks(self, block_ids: set[int]) -> None:
        self.evicted.append(block_ids)
        self.watched.evict_blocks(block_ids)


class WatchedSide(BenchedSide):
    """A side that keeps its managers, watched."""

    def __init__(self, name: str) -> None:
        super().__init__(SideChoice(name, name))
        self.managers: list[Watched] = []

    def manager(self, num_blocks: int = NUM_BLOCKS, num_windows: int = 0) -> Any:
        self.managers.append(Watched(super().manager(num_blocks, num_windows), num_blocks))
        return self.managers[-1]

    def num_hit_tokens(self, prompt: Prompt) -> int:
        """What a request with this prompt and one more token would hit in the last manager."""
        request = self.request([*prompt.tolist(), 0])
        return int(self.managers[-1].watched.get_computed_blocks(request)[1])


def new_ids(answer: Any) -> Any:
    """Ids of the blocks that an `allocate_slots` gave, by group; None where there are none."""
    return answer.get_block_ids(allow_none=True)


def times(number: int, repeat: Callable[[], float]) -> list[float]:
    """What so many repeats measured."""
    return [repeat() for _ in range(number)]
