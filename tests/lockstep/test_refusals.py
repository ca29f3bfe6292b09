"""Mixes that no traffic is drawn for: ours refuses them at construction, in one line, where upstream asserts or raises
at construction or in a request's first step; and what is accepted beside them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from vllm.v1.core.kv_cache_manager import KVCacheManager as UpstreamManager

from tests.lockstep.mixes import GroupSetup, Mix, kv_cache_config
from tests.lockstep.twins import Twin
from vllm_kvplug.errors import CallError, UnsupportedError
from vllm_kvplug.vllm_glue.manager import KVCacheManager as OurManager

FULL = GroupSetup("full", 4)
MLA = GroupSetup("mla", 4)
WINDOW = GroupSetup("sliding", 4, window=9)
CHUNKED = GroupSetup("chunked", 4, chunk=8)
MAMBA = GroupSetup("mamba", 4, mode="align")
CROSS = GroupSetup("cross", 4)
SINK = GroupSetup("sink", 4, num_sink_blocks=1)


def _mix(*groups: GroupSetup, dcp: int = 1, pcp: int = 1, hash_block_size: int | None = None) -> Mix:
    return Mix(groups, dcp, pcp, hash_block_size or 4 * dcp * pcp)


def _build(manager_class: type[Any], mix: Mix, *, caching: bool = True, eagle: bool = False) -> Any:
    return manager_class(
        kv_cache_config=kv_cache_config(40, mix.groups, mix.dcp * mix.pcp, unequal=False),
        max_model_len=100,
        hash_block_size=mix.hash_block_size,
        enable_caching=caching,
        use_eagle=eagle,
        dcp_world_size=mix.dcp,
        pcp_world_size=mix.pcp,
    )


def _serve_one(manager: Any, request: Any) -> None:
    """A request's first step, and the lookup of one with the same tokens."""
    blocks, num_hit_tokens = manager.get_computed_blocks(request)
    manager.allocate_slots(request, 30 - num_hit_tokens, num_hit_tokens, blocks, num_encoder_tokens=8)
    manager.get_computed_blocks(request)


def _request(mix: Mix) -> Twin:
    options = {"salt": 0, "lora": 0, "image": 0, "skips_reading": 0}
    return Twin("r0", 0, list(range(30)), mix.hash_block_size, 0, options)


REFUSED = {
    "chunked local attention with eagle": (_mix(CHUNKED), {"eagle": True}),
    "full and chunked local attention with eagle": (_mix(FULL, CHUNKED), {"eagle": True}),
    "cross-attention with prefix caching": (_mix(CROSS), {}),
    "full and cross-attention with prefix caching": (_mix(FULL, CROSS), {}),
    "sliding window over ranks": (_mix(WINDOW, dcp=2), {}),
    "chunked local attention over ranks": (_mix(CHUNKED, pcp=2), {}),
    "Mamba over ranks": (_mix(MAMBA, dcp=2), {}),
    "several groups over decode ranks": (_mix(FULL, MLA, dcp=2), {}),
    "several groups over prefill ranks": (_mix(FULL, WINDOW, pcp=2), {}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_ours_refuses_at_construction_where_upstream_fails(name: str) -> None:
    mix, options = REFUSED[name]
    with pytest.raises(UnsupportedError) as caught:
        _build(OurManager, mix, **options)
    assert "\n" not in str(caught.value)
    with pytest.raises((AssertionError, NotImplementedError, ValueError)):
        _serve_one(_build(UpstreamManager, mix, **options), _request(mix).upstream)


def test_a_second_group_with_sinks_is_refused() -> None:
    # Upstream takes it, and both groups' layers then read their sinks from the same blocks.
    for caching in (True, False):
        with pytest.raises(UnsupportedError, match="sink"):
            _build(OurManager, _mix(SINK, replace(SINK, num_sink_blocks=2)), caching=caching)


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW)])
def test_block_hashes_that_fit_no_block_are_refused(groups: tuple[GroupSetup, ...]) -> None:
    mix = _mix(*groups, hash_block_size=3)
    with pytest.raises(CallError, match="3"):
        _build(OurManager, mix)
    with pytest.raises(AssertionError):
        _build(UpstreamManager, mix)


ACCEPTED = {
    "full over decode ranks": (_mix(FULL, dcp=2), {}),
    "MLA over prefill ranks": (_mix(MLA, pcp=2), {}),
    "sinks over ranks": (_mix(SINK, dcp=2, pcp=2), {}),
    "a window over ranks, caching off": (_mix(WINDOW, dcp=2), {"caching": False}),
    "chunked local attention with eagle, caching off": (_mix(FULL, CHUNKED), {"eagle": True, "caching": False}),
    "cross-attention, caching off": (_mix(FULL, CROSS), {"caching": False}),
    "no groups, caching off": (Mix((), 1, 1, 4), {"caching": False}),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_their_neighbours_are_served_by_both(name: str) -> None:
    mix, options = ACCEPTED[name]
    request = _request(mix)
    for manager_class, side in ((OurManager, request.ours), (UpstreamManager, request.upstream)):
        manager = _build(manager_class, mix, **options)
        _serve_one(manager, side)
        assert [len(row) for row in manager.get_block_ids("r0")] == [
            2 if group.kind == "cross" else -(-30 // (4 * mix.dcp * mix.pcp)) for group in mix.groups
        ]
