"""Groups by upstream's name: one `SingleTypeKVCacheManager` for each KV cache group. Constructed, it is a group of its
own over a pool's blocks.

Blocks go in and out as objects; inside is a core group, and only their ids count.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

from vllm.v1 import kv_cache_interface as specs

from vllm_kvplug.allocation import GroupPlan, SlotDemand
from vllm_kvplug.block_pool import NULL_BLOCK_ID
from vllm_kvplug.block_pool import BlockPool as CorePool
from vllm_kvplug.block_run import Hit
from vllm_kvplug.block_states import hash_and_group, num_holders
from vllm_kvplug.errors import CallError
from vllm_kvplug.groups import AttentionGroup, group_class
from vllm_kvplug.groups.base import NO_LIMIT
from vllm_kvplug.groups.table import BlockTable, Hold
from vllm_kvplug.vllm_glue.geometry import group_geometry_of
from vllm_kvplug.vllm_glue.upstream_views.blocks import BlockRow
from vllm_kvplug.vllm_glue.upstream_views.pool import BlockPool


class RequestBlocks(MutableMapping[str, Any]):
    """Request id -> its blocks in one group.

    A row that is set becomes the request's: it holds the pool's blocks of these ids, and the given list follows
    what happens to them. Free blocks, and those that `BlockPool.get_new_blocks` handed out, are its own from then on;
    those in the prefix cache or in another table it holds once more, and caches nothing up to the last of them.
    """

    def __init__(self, block_pool: BlockPool, group: AttentionGroup) -> None:
        self._block_pool, self._group = block_pool, group
        self._given: dict[str, tuple[BlockTable, list[Any]]] = {}

    def __getitem__(self, request_id: str) -> Any:
        table, blocks = self._given.get(request_id, (None, None))
        if table is self._group.tables[request_id]:
            return blocks
        return self._row(request_id)

    def __setitem__(self, request_id: str, blocks: list[Any]) -> None:
        block_ids = [block.block_id for block in blocks]
        pool, single = self._block_pool.core, self._block_pool.single_blocks
        pool.check_block_ids(block_ids)
        named = [block_id for block_id in block_ids if block_id != NULL_BLOCK_ID]
        if len(named) != len(set(named)):
            raise CallError(f"request {request_id!r}: expected each block once in its row, found {block_ids}")
        for block_id in {*named} - {*self._group.block_ids(request_id)}:
            single.check_usable(block_id, "hold")
            single.run(block_id)  # or an error, before anything changes
        self._group.free(request_id)
        table = self._group._table(request_id)
        for position, block_id in enumerate(block_ids):
            if block_id != NULL_BLOCK_ID:
                if self._is_for_the_taking(block_id):
                    single.make_loose(block_id)
                else:
                    single.hold([block_id])
                    table.holds.append(Hold(position, single.run(block_id), 1))
                    table.num_cached_blocks = position + 1
            table.block_ids.append(block_id)
        self._given[request_id] = table, blocks

    def _is_for_the_taking(self, block_id: int) -> bool:
        """Whether the block is free or nobody's, and not cached."""
        pool = self._block_pool.core
        tables = [table for group in self._block_pool.groups for table in group.tables.values()]
        is_in_table = any(block_id in table.block_ids for table in tables)
        return hash_and_group(pool, block_id) is None and num_holders(pool, block_id) <= 1 and not is_in_table

    def __delitem__(self, request_id: str) -> None:
        if request_id not in self._group.tables:
            raise KeyError(request_id)
        self._given.pop(request_id, None)
        self._group.free(request_id)

    def __iter__(self) -> Iterator[str]:
        return iter(self._group.tables)

    def __len__(self) -> int:
        return len(self._group.tables)

    def update_given(self, request_id: str) -> None:
        """Write the request's present blocks into the list that was set for it."""
        table, blocks = self._given.get(request_id, (None, None))
        if blocks is not None and table is self._group.tables.get(request_id):
            blocks[:] = self._row(request_id)

    def _row(self, request_id: str) -> BlockRow:
        return BlockRow(self._block_pool.core, self._group.tables[request_id].block_ids)


class SingleTypeKVCacheManager:
    """One KV cache group.

    Args:
        kv_cache_spec: what its layers keep in a block.
        block_pool: where it takes blocks.
        enable_caching: whether its blocks can be cached.
        kv_cache_group_id: its number.
        dcp_world_size, pcp_world_size: context parallel ranks.
    """

    def __init__(
        self,
        kv_cache_spec: specs.KVCacheSpec,
        block_pool: BlockPool,
        enable_caching: bool,
        kv_cache_group_id: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> None:
        num_ranks = dcp_world_size * pcp_world_size
        num_tokens_per_hash = block_pool.hash_block_size if enable_caching else None
        core = block_pool.core
        self._bind(
            _core_group(kv_cache_spec, core, kv_cache_group_id, num_ranks, num_tokens_per_hash=num_tokens_per_hash),
            block_pool,
            enable_caching,
        )

    @staticmethod
    def of_group(group: AttentionGroup, block_pool: BlockPool, spec: specs.KVCacheSpec) -> SingleTypeKVCacheManager:
        """The view of a manager's group."""
        cls = spec_manager_map[type(spec)]
        self = cls.__new__(cls)
        self._bind(group, block_pool, block_pool.enable_caching)
        return self

    def _bind(self, group: AttentionGroup, block_pool: BlockPool, enable_caching: bool) -> None:
        self._group, self.block_pool = group, block_pool
        self.enable_caching = enable_caching
        self.block_size = group.num_tokens_per_block
        self.kv_cache_group_id = group.group_id
        self.req_to_blocks = RequestBlocks(block_pool, group)
        block_pool.groups.append(group)

    @property
    def num_cached_block(self) -> dict[str, int]:
        """Request id -> its leading blocks that are cached, for requests that have taken hits or cached a block."""
        tables = self._group.tables.items()
        return {request_id: table.num_cached_blocks for request_id, table in tables if table.is_admitted}

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: Sequence[bytes],
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: specs.KVCacheSpec,
        use_eagle: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[BlockRow, ...]:
        """The longest prefix that all these groups of one spec have cached: a row of blocks for each group.

        At most `max_length` tokens, and a multiple of `alignment_tokens`. `block_hashes` are each for one block.
        """
        core, num_ranks = block_pool.core, dcp_world_size * pcp_world_size
        # Drafters have no Mamba layers.
        num_blocks_beyond_hit = int(use_eagle and not isinstance(kv_cache_spec, specs.MambaSpec))
        groups = [
            _core_group(kv_cache_spec, core, group_id, num_ranks, num_blocks_beyond_hit=num_blocks_beyond_hit)
            for group_id in kv_cache_group_ids
        ]
        num_tokens_per_block = groups[0].num_tokens_per_block
        num_blocks = max(max_length // num_tokens_per_block - num_blocks_beyond_hit, 0)
        while True:
            hits = [group.match(block_hashes, num_blocks, alignment_tokens // num_tokens_per_block) for group in groups]
            num_blocks = min(map(len, hits))
            if all(len(hit) == num_blocks for hit in hits):
                return tuple(BlockRow(core, hit.block_ids) for hit in hits)

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[Any],
        total_computed_tokens: int,
        num_tokens_main_model: int,
    ) -> int:
        """Free blocks that the request needs to have slots for `num_tokens` tokens in all.

        More than there are where the group cannot serve the hits in the present step.
        """
        demand = self._demand(num_tokens, num_tokens_main_model, total_computed_tokens)
        plan = self._plan(request_id, demand, self._hit(new_computed_blocks, is_for_plan=True))
        return self.block_pool.num_gpu_blocks + 1 if plan.defers else plan.num_free_blocks_needed

    def allocate_new_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[Any],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """Give the request its hits, and blocks for external tokens."""
        num_tokens = num_local_computed_tokens + num_external_computed_tokens
        demand = self._demand(num_tokens, num_tokens, num_local_computed_tokens, num_external_computed_tokens)
        hit = self._hit(new_computed_blocks, is_for_plan=False)
        plan = self._plan(request_id, demand, hit)
        self._group.admit(request_id, plan, hit)
        self._group.take_external(request_id, plan)
        self.req_to_blocks.update_given(request_id)

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> BlockRow:
        """Give the request blocks until it has slots for `num_tokens` tokens; answers the new ones."""
        demand = self._demand(num_tokens, num_tokens_main_model)
        plan = self._group.plan(request_id, demand, is_admission=False)
        block_ids = self._group.take_new(request_id, plan)
        self.req_to_blocks.update_given(request_id)
        return BlockRow(self.block_pool.core, block_ids)

    def _demand(
        self, num_tokens: int, num_tokens_main_model: int, num_hit_tokens: int = 0, num_external_tokens: int = 0
    ) -> SlotDemand:
        return SlotDemand(
            num_computed_tokens=0,
            num_hit_tokens=num_hit_tokens,
            num_external_tokens=num_external_tokens,
            num_new_tokens=num_tokens_main_model - num_hit_tokens - num_external_tokens,
            num_lookahead_tokens=num_tokens - num_tokens_main_model,
            max_model_len=NO_LIMIT,
        )

    def _hit(self, new_computed_blocks: Sequence[Any], *, is_for_plan: bool) -> Hit:
        # Who drives a group alone may invent its hits: they need be of the pool, not cached.
        block_ids = [block.block_id for block in new_computed_blocks]
        return self.block_pool.single_blocks.hit(self.kv_cache_group_id, block_ids, is_for_plan=is_for_plan)

    def _plan(self, request_id: str, demand: SlotDemand, hit: Hit) -> GroupPlan:
        is_admission = not self._group.block_ids(request_id)
        return self._group.plan(request_id, demand, hit, is_admission=is_admission)

    def cache_blocks(self, request: Any, num_tokens: int) -> None:
        """Cache the request's blocks that are full with its first `num_tokens` tokens."""
        self._group.cache_full_blocks(request, num_tokens)

    def remove_skipped_blocks(self, request_id: str, total_computed_tokens: int) -> None:
        """Free the request's blocks that no token after these looks at."""
        self._group.release_skipped(request_id, total_computed_tokens, total_computed_tokens)
        self.req_to_blocks.update_given(request_id)

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Leading tokens that no token after these looks at."""
        return self._group.num_skipped_tokens(num_computed_tokens)

    def free(self, request_id: str) -> None:
        """Give back all blocks of a request."""
        self.req_to_blocks.pop(request_id, None)

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        """Leading blocks of this request that all requests hold."""
        return self._group.num_common_prefix_blocks(running_request_id)

    def take_new_block_ids(self) -> list[int]:
        """Blocks handed out since the last call."""
        return self._group.take_unreported_block_ids()

    def new_step_starts(self) -> None:
        """The scheduler begins a step."""
        self._group.new_step_starts()


def _core_group(
    spec: specs.KVCacheSpec,
    core: CorePool,
    group_id: int,
    num_ranks: int,
    *,
    num_tokens_per_hash: int | None = None,
    num_blocks_beyond_hit: int = 0,
) -> AttentionGroup:
    geometry = group_geometry_of(spec, num_ranks)
    return group_class(geometry)(
        group_id,
        geometry,
        core,
        core._observers,
        num_hashes_per_block=geometry.num_tokens_per_block // num_tokens_per_hash if num_tokens_per_hash else 1,
        num_blocks_beyond_hit=num_blocks_beyond_hit,
    )


class FullAttentionManager(SingleTypeKVCacheManager):
    """A group of full attention or MLA."""


class SlidingWindowManager(SingleTypeKVCacheManager):
    """A group of sliding window attention."""


class ChunkedLocalAttentionManager(SingleTypeKVCacheManager):
    """A group of chunked local attention."""


class MambaManager(SingleTypeKVCacheManager):
    """A group of Mamba layers."""


class CrossAttentionManager(SingleTypeKVCacheManager):
    """A group of cross-attention: all tokens are the encoder's."""

    def _demand(self, num_tokens: int, *_others: int) -> SlotDemand:
        return SlotDemand(0, 0, 0, 0, 0, max_model_len=NO_LIMIT, num_encoder_tokens=num_tokens)


class SinkFullAttentionManager(FullAttentionManager):
    """A group of full attention with sinks; their blocks are the pool's, reserved."""


spec_manager_map: dict[type[specs.KVCacheSpec], type[SingleTypeKVCacheManager]] = {
    specs.FullAttentionSpec: FullAttentionManager,
    specs.MLAAttentionSpec: FullAttentionManager,
    specs.SlidingWindowSpec: SlidingWindowManager,
    specs.ChunkedLocalAttentionSpec: ChunkedLocalAttentionManager,
    specs.MambaSpec: MambaManager,
    specs.CrossAttentionSpec: CrossAttentionManager,
    specs.SinkFullAttentionSpec: SinkFullAttentionManager,
}


def get_manager_for_kv_cache_spec(kv_cache_spec: specs.KVCacheSpec, **kwargs: Any) -> SingleTypeKVCacheManager:
    """The group of this spec, see `SingleTypeKVCacheManager`."""
    return spec_manager_map[type(kv_cache_spec)](kv_cache_spec, **kwargs)
