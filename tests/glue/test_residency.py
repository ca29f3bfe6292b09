"""vLLM's sampling of block residency (--kv-cache-metrics): the same calls for the same blocks, in the same order."""

from __future__ import annotations

from typing import Any

import pytest

from tests.faults.support import FULL, ours, prompt, request, run, sliding_window, upstream


class RecordingCollector:
    """Takes the place of vLLM's collector."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int | None]] = []

    def on_block_allocated(self, block: Any) -> None:
        self.calls.append(("allocated", block.block_id))

    def on_block_accessed(self, block: Any) -> None:
        self.calls.append(("accessed", block.block_id))

    def on_block_evicted(self, block: Any) -> None:
        self.calls.append(("evicted", block.block_id))

    def reset(self) -> None:
        self.calls.append(("reset", None))


@pytest.mark.parametrize("enable_caching", [True, False])
@pytest.mark.parametrize("specs", [[FULL], [FULL, sliding_window(40)]], ids=["full", "full and window"])
def test_the_collector_hears_what_upstreams_would_tell_it(specs: list[Any], enable_caching: bool) -> None:
    heard = []
    for build in (upstream, ours):
        collector = RecordingCollector()
        serve(build(specs, 30, enable_caching=enable_caching, metrics_collector=collector))
        heard.append(collector.calls)
    assert heard[0] == heard[1]
    kinds = {kind for kind, _ in heard[1]}
    assert kinds == {"allocated", "evicted", "reset"} | ({"accessed"} if enable_caching else set())


def serve(manager: Any) -> None:
    for number in range(6):
        one = request(str(number), [*prompt(48), *range(1000 * number, 1000 * number + 20)])
        assert run(manager, one) is not None
        # Of a block that a request holds, kvplug evicts what was computed from it, too (F15): so one that nobody holds.
        own_block_id = manager.get_block_ids(one.request_id)[0][3]
        if number != 1:
            manager.free(one)
            manager.evict_blocks({own_block_id})
    assert manager.reset_prefix_cache() is False
    manager.free(request("1", prompt(1)))
    assert manager.reset_prefix_cache() is True
