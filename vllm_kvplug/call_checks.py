"""Arguments of `allocate_slots` that no call can rightly have: refused before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_kvplug.allocation import SlotDemand
from vllm_kvplug.errors import CallError
from vllm_kvplug.geometry import CacheGeometry

_COUNTS = ("num_computed_tokens", "num_hit_tokens", "num_external_tokens", "num_lookahead_tokens", "num_encoder_tokens")


def check_demand(request_id: str, demand: SlotDemand) -> None:
    """See that the token counts are counts, and that there is something to do.

    Raises:
        CallError: they are not, or there is not.
    """
    if (
        demand.num_new_tokens > 0
        and demand.num_computed_tokens >= 0
        and demand.num_hit_tokens >= 0
        and demand.num_external_tokens >= 0
        and demand.num_lookahead_tokens >= 0
        and demand.num_encoder_tokens >= 0
    ):
        return
    for name in _COUNTS:
        if (num_tokens := getattr(demand, name)) < 0:
            raise CallError(f"request {request_id!r}: {name}: expected at least 0, found {num_tokens}")
    if demand.num_new_tokens < 0 or not (demand.num_new_tokens or demand.num_external_tokens):
        raise CallError(
            f"request {request_id!r}: num_new_tokens: expected more than 0 where no external tokens come, "
            f"found {demand.num_new_tokens}"
        )


def check_hits(
    request_id: str,
    hit_block_ids: Sequence[Sequence[int]],
    num_hit_tokens: int,
    geometry: CacheGeometry,
    *,
    is_ours: bool,
    enable_caching: bool,
) -> None:
    """See that this can be the answer of a lookup: of this pool, for each group, as many blocks as tokens.

    Which blocks they are is each group's to check.

    Raises:
        CallError: it cannot.
    """
    name = f"request {request_id!r}: new_computed_blocks"
    if len(hit_block_ids) != len(geometry.groups):
        raise CallError(
            f"{name}: expected blocks of {len(geometry.groups)} KV cache groups, found {len(hit_block_ids)}"
        )
    if not enable_caching and any(hit_block_ids):
        num_hit_blocks = sum(map(len, hit_block_ids))
        raise CallError(
            f"request {request_id!r}: expected no prefix hits while prefix caching is off, "
            f"found {num_hit_blocks} blocks"
        )
    if not is_ours:
        raise CallError(f"{name}: expected this manager's answer to a lookup, found blocks of another pool")
    for group_id, (group, row) in enumerate(zip(geometry.groups, hit_block_ids, strict=True)):
        num_row_tokens = len(row) * group.num_tokens_per_block
        if num_row_tokens != num_hit_tokens:
            raise CallError(
                f"{name}: expected the blocks of num_new_computed_tokens {num_hit_tokens}, found those of "
                f"{num_row_tokens} tokens in KV cache group {group_id}"
            )
