"""Mamba and other linear attention: the next token needs the state at the end of the tokens before it, nothing else.

A block holds a state, not tokens' keys and values: the one at the block's end once it is full, the running one until
then. So a prefix can be hit if the block at its very end is cached, and a request gives back every state that it has
passed.

A block that was cached in this very step has no content yet that another request of the step could start from (a kernel
copies it between steps), so such a hit is deferred to the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm_kvplug.allocation import GroupPlan, SlotDemand
from vllm_kvplug.block_pool import NULL_BLOCK_ID
from vllm_kvplug.block_run import NO_HIT, Hit
from vllm_kvplug.geometry import GroupGeometry
from vllm_kvplug.groups.base import AttentionGroup, num_free_among
from vllm_kvplug.groups.holding import take_out
from vllm_kvplug.groups.table import BlockTable, Hold


class MambaGroup(AttentionGroup):
    """Running states only, or a state at each block's end (modes `none` and `all`)."""

    grows_plainly = False

    def __init__(self, group_id: int, geometry: GroupGeometry, *args: Any, **kwargs: Any) -> None:
        super().__init__(group_id, geometry, *args, **kwargs)
        self._num_speculative_blocks = geometry.num_speculative_blocks
        self._hashes_cached_this_step: set[bytes] = set()

    @classmethod
    def min_num_blocks(cls, geometry: GroupGeometry, num_tokens: int, num_step_tokens: int = 1) -> int:
        return 1 + geometry.num_speculative_blocks if num_tokens else 0

    def match(self, block_hashes: Sequence[bytes], max_num_blocks: int, alignment_blocks: int = 1) -> Hit:
        index = self._pool.indexes[self.group_id]
        for num_hit_blocks in range(max_num_blocks - max_num_blocks % alignment_blocks, 0, -alignment_blocks):
            position = num_hit_blocks - 1
            if index.run(block_hashes[position]) is not None:
                hit = index.match(block_hashes, num_hit_blocks, position)
                return Hit([NULL_BLOCK_ID] * position + list(hit.block_ids), hit.parts)
        return NO_HIT

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return num_computed_tokens - 1

    def plan(self, request_id: str, demand: SlotDemand, hit: Hit = NO_HIT, *, is_admission: bool) -> GroupPlan:
        if self._was_cached_this_step(hit):
            return GroupPlan(defers=True)
        return super().plan(request_id, demand, hit, is_admission=is_admission)

    def _was_cached_this_step(self, hit: Hit) -> bool:
        if not hit.parts:
            return False
        last = hit.parts[-1]
        return last.run.block_hashes[last.offset + last.num_blocks - 1] in self._hashes_cached_this_step

    def _num_slot_tokens(self, demand: SlotDemand) -> int:
        return demand.num_slot_tokens + self._num_speculative_blocks * self.num_tokens_per_block

    def _publish_run(self, table: BlockTable, all_hashes: Sequence[bytes], first: int, end: int) -> None:
        row = table.block_ids
        for position in range(first, end):
            if row[position] != NULL_BLOCK_ID:
                # A run for each state: it is hit and given back alone.
                block_hash = all_hashes[position]
                run = self._pool.cache(self.group_id, position, [row[position]], [block_hash])
                table.holds.append(Hold(position, run, 1))
                self._hashes_cached_this_step.add(block_hash)

    def new_step_starts(self) -> None:
        self._hashes_cached_this_step.clear()

    def release_skipped(self, request_id: str, num_computed_tokens: int, num_confirmed_tokens: int) -> None:
        table = self.tables.get(request_id)
        if table is not None:
            self._release_passed(table, self._num_safe_tokens(num_computed_tokens))

    def _num_safe_tokens(self, num_computed_tokens: int) -> int:
        """Computed tokens, if every draft of the last step were rejected: a state before that may be needed again."""
        return max(num_computed_tokens - self._num_speculative_blocks, 0)

    def _release_passed(self, table: Any, num_safe_tokens: int) -> None:
        self._release_leading(table, self.num_skipped_tokens(num_safe_tokens))

    def _capacity_tokens(self, table: BlockTable) -> int:
        return (len(table.block_ids) - self._num_speculative_blocks) * self.num_tokens_per_block

    def quiet_limit_of_window(self, table: BlockTable) -> int:
        return (self._first_held_position(table) + 1) * self.num_tokens_per_block


@dataclass(slots=True)
class AlignedMambaPlan(GroupPlan):
    """See `GroupPlan`.

    Attributes:
        num_positions: length that the step wants the table to have.
    """

    num_positions: int = 0


class AlignedMambaTable(BlockTable):
    """A table whose last 1 + (speculative blocks) positions hold the running states.

    Attributes:
        previous_state_position: where the state before the running one is; None: there is none.
        has_running_state: the request was given blocks for its running states.
    """

    __slots__ = ("has_running_state", "previous_state_position")

    def __init__(self) -> None:
        super().__init__()
        self.previous_state_position: int | None = None
        self.has_running_state = False


class AlignedMambaGroup(MambaGroup):
    """Only the states at which a step ends (mode `align`): a step's positions in between stay null."""

    _table_class = AlignedMambaTable

    def plan(self, request_id: str, demand: SlotDemand, hit: Hit = NO_HIT, *, is_admission: bool) -> GroupPlan:
        if self._was_cached_this_step(hit):
            return GroupPlan(defers=True)
        table = self.tables.get(request_id)
        num_positions = len(table.block_ids) if table is not None else 0
        has_running_state = table is not None and table.has_running_state
        # Lookahead tokens have no state: drafters have no Mamba layers.
        num_wanted_positions = self._num_blocks(demand.num_tokens_after_step) + self._num_speculative_blocks
        num_counted_blocks = 0
        if num_wanted_positions > num_positions + len(hit):
            # As 0.17.1 counts, which can be more than is taken.
            num_counted_blocks = 1 if has_running_state else 1 + self._num_speculative_blocks
        prefix = self._plan_prefix(table, demand, hit) if is_admission else GroupPlan()
        num_positions += prefix.num_prefix_positions
        num_new_blocks = self._num_new_blocks(num_positions, num_wanted_positions, has_running_state)
        return AlignedMambaPlan(
            num_null_blocks=prefix.num_null_blocks,
            num_hit_blocks=prefix.num_hit_blocks,
            hit_parts=prefix.hit_parts,
            num_free_hit_blocks=num_free_among(hit.parts),
            num_external_blocks=prefix.num_external_blocks,
            num_new_blocks=num_new_blocks,
            num_spare_blocks=max(num_counted_blocks - prefix.num_external_blocks - num_new_blocks, 0),
            num_positions=num_wanted_positions,
        )

    def _num_new_blocks(self, num_positions: int, num_wanted_positions: int, has_running_state: bool) -> int:
        # After a rejection a step may want fewer positions than there are: the states at hand serve.
        if num_wanted_positions <= num_positions:
            return 0
        first_running = num_wanted_positions - self._num_speculative_blocks - 1
        num_filled = max(num_positions, first_running)
        if has_running_state:
            num_filled += len(self._passed_speculative(num_positions, first_running))
        return num_wanted_positions - num_filled

    def _passed_speculative(self, num_positions: int, first_running: int) -> range:
        """Positions of speculative blocks that lie before the new running state."""
        return range(num_positions - self._num_speculative_blocks, min(num_positions, first_running))

    def take_new(self, request_id: str, plan: GroupPlan) -> list[int]:
        """Move on to the running states of this step; speculative blocks that it passes are used again at its end.

        Answers all positions that the table grew by, nulls included.
        """
        assert isinstance(plan, AlignedMambaPlan)
        table = self._table(request_id)
        block_ids = table.block_ids
        num_positions = len(block_ids)
        if plan.num_positions <= num_positions:
            return []
        first_running = plan.num_positions - self._num_speculative_blocks - 1
        passed = range(0)
        if table.has_running_state:
            table.previous_state_position = num_positions - 1 - self._num_speculative_blocks
            passed = self._passed_speculative(num_positions, first_running)
        elif num_positions:
            table.previous_state_position = num_positions - 1
        block_ids += [NULL_BLOCK_ID] * (first_running - num_positions)
        for position in passed:
            block_ids.append(block_ids[position])
            block_ids[position] = NULL_BLOCK_ID
        self._take(table, plan.num_new_blocks)
        table.has_running_state = True
        return list(block_ids[num_positions:])

    def _release_passed(self, table: AlignedMambaTable, num_safe_tokens: int) -> None:
        super()._release_passed(table, num_safe_tokens)
        # The state before the running one was copied from in the last step; now it may lie between nulls.
        position = table.previous_state_position
        if position is not None and position < self._num_blocks(num_safe_tokens) - 1:
            released = take_out(self._pool, self.group_id, table, position, position + 1)
            table.block_ids[position] = NULL_BLOCK_ID
            self._pool.release(released)
