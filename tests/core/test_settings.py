"""Settings are validated once; every refusal names the key, what is allowed and what was found."""

from __future__ import annotations

import pytest

from vllm_kvplug.errors import CallError, SettingsError, UnsupportedError
from vllm_kvplug.geometry import AttentionKind, CacheGeometry, GroupGeometry, num_blocks_for
from vllm_kvplug.settings import Settings


def test_defaults_are_upstreams_behaviour() -> None:
    assert Settings.parse(None) == Settings.parse({}) == Settings(eviction="lru")
    settings = Settings(eviction="lru")
    assert Settings.parse(settings) is settings


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"evictoin": "lru"}, r"unknown setting 'evictoin'; known settings: .*eviction"),
        ({"eviction": "mru"}, r"setting 'eviction': expected one of lru, found 'mru'"),
        ({"eviction": 3}, r"setting 'eviction': .*string.*, found 3"),
        ({"eviction": None}, r"setting 'eviction': .*string.*, found None"),
        ({3: "lru"}, r"unknown setting 3"),
        (["eviction"], r"expected an object of settings, found \['eviction'\]"),
        ("lru", r"expected an object of settings, found 'lru'"),
    ],
)
def test_refusals(values: object, message: str) -> None:
    with pytest.raises(SettingsError, match=message) as caught:
        Settings.parse(values)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_geometry_refuses_sizes_that_cannot_be() -> None:
    group = GroupGeometry(AttentionKind.FULL, 16)
    with pytest.raises(CallError, match="num_tokens_per_block: expected at least 1, found 0"):
        GroupGeometry(AttentionKind.FULL, 0)
    with pytest.raises(CallError, match=r"num_blocks: expected at least 1.*found 0"):
        CacheGeometry(0, 10, (group,))
    with pytest.raises(CallError, match="max_model_len: expected at least 1 token, found 0"):
        CacheGeometry(10, 0, (group,))
    with pytest.raises(CallError, match="sliding_window group: window_tokens: expected at least 1, found 0"):
        GroupGeometry(AttentionKind.SLIDING_WINDOW, 16)
    with pytest.raises(CallError, match="chunked_local group: chunk_tokens: expected at least 1, found 0"):
        GroupGeometry(AttentionKind.CHUNKED_LOCAL, 16)
    with pytest.raises(CallError, match="num_speculative_blocks: expected at least 0, found -1"):
        GroupGeometry(AttentionKind.MAMBA, 16, num_speculative_blocks=-1)
    with pytest.raises(CallError, match=r"num_tokens_per_hash: expected a divisor of .* 16 tokens, found 5"):
        CacheGeometry(10, 10, (group,), 5)
    sink = GroupGeometry(AttentionKind.SINK, 16, num_sink_blocks=2)
    with pytest.raises(CallError, match=r"num_blocks: expected at least 3 .*found 2"):
        CacheGeometry(2, 10, (sink,))
    with pytest.raises(UnsupportedError, match="several KV cache groups of sink attention"):
        CacheGeometry(10, 10, (sink, sink))
    cross = GroupGeometry(AttentionKind.CROSS, 16)
    with pytest.raises(UnsupportedError, match="group 1 of cross-attention: expected prefix caching off"):
        CacheGeometry(10, 10, (group, cross), 16)


def test_num_blocks_rounds_up() -> None:
    assert [num_blocks_for(num_tokens, 4) for num_tokens in (0, 1, 4, 5)] == [0, 1, 1, 2]
