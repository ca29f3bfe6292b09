"""Which requests can never fit, from the geometry alone."""

from __future__ import annotations

import pytest

from vllm_kvplug.geometry import AttentionKind, CacheGeometry, GroupGeometry, MambaMode
from vllm_kvplug.sizing import (
    NeverFits,
    geometry_from_json,
    geometry_to_json,
    max_fitting_prompt_tokens,
    never_fits,
    num_needed_blocks,
    peak_blocks,
)

FULL = GroupGeometry(AttentionKind.FULL, 16)
WINDOW = GroupGeometry(AttentionKind.SLIDING_WINDOW, 16, window_tokens=32)
CHUNKED = GroupGeometry(AttentionKind.CHUNKED_LOCAL, 16, chunk_tokens=64)
MAMBA = GroupGeometry(AttentionKind.MAMBA, 64, mamba_mode=MambaMode.ALIGN, num_speculative_blocks=1)
SINK = GroupGeometry(AttentionKind.SINK, 16, num_sink_blocks=2)
CROSS = GroupGeometry(AttentionKind.CROSS, 16)


def cache(num_blocks: int, *groups: GroupGeometry, max_model_len: int = 1024) -> CacheGeometry:
    return CacheGeometry(num_blocks, max_model_len, groups)


def test_the_reproduction_of_f18() -> None:
    assert never_fits(cache(5, FULL), 160) == NeverFits(num_needed_blocks=10, num_usable_blocks=4)


@pytest.mark.parametrize(("num_tokens", "fits"), [(1, True), (63, True), (64, True), (65, False), (1024, False)])
def test_the_last_token_that_fits_is_the_last_of_the_last_usable_block(num_tokens: int, fits: bool) -> None:
    assert (never_fits(cache(5, FULL), num_tokens) is None) is fits


def test_groups_share_the_pool() -> None:
    # 32 tokens are two blocks in each of two groups: three usable blocks do not do.
    assert never_fits(cache(5, FULL, FULL), 32) is None
    assert never_fits(cache(4, FULL, FULL), 32) == NeverFits(4, 3)


def test_the_blocks_of_sinks_are_no_requests() -> None:
    assert cache(6, SINK).num_usable_blocks == 3
    assert never_fits(cache(6, SINK), 48) is None
    assert never_fits(cache(6, SINK), 49) == NeverFits(4, 3)


@pytest.mark.parametrize("group", [WINDOW, CHUNKED, MAMBA])
def test_groups_that_look_back_only_so_far_never_need_more(group: GroupGeometry) -> None:
    assert never_fits(cache(8, group, max_model_len=100_000), 100_000) is None


def test_beside_such_a_group_full_attention_has_less_room() -> None:
    alone, beside = (max_fitting_prompt_tokens(cache(20, *groups), 1) for groups in ((FULL,), (FULL, WINDOW)))
    assert alone == 19 * 16
    assert 16 * 15 <= beside < alone


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW), (FULL, CHUNKED), (FULL, MAMBA), (SINK, WINDOW, WINDOW)])
@pytest.mark.parametrize("num_blocks", [7, 20, 64])
def test_the_longest_that_fits_fits_and_one_token_more_does_not(
    groups: tuple[GroupGeometry, ...], num_blocks: int
) -> None:
    geometry = cache(num_blocks, *groups, max_model_len=10_000)
    longest = max_fitting_prompt_tokens(geometry, 1)
    assert never_fits(geometry, longest) is None
    assert never_fits(geometry, longest + 1) is not None


def test_the_need_rises_and_falls_where_a_window_passes_blocks() -> None:
    needs = [peak_blocks(cache(9, CHUNKED), num_tokens) for num_tokens in (16, 17, 64, 65, 1000)]
    assert needs == [1, 2, 4, 4, 4]
    # 65 tokens need one block, but 64 needed four.
    geometry = cache(4, CHUNKED)
    assert never_fits(geometry, 65) is None
    assert max_fitting_prompt_tokens(geometry, 1) == 48


def test_the_peak_is_that_of_every_length() -> None:
    for groups in ((FULL, WINDOW, CHUNKED), (MAMBA, WINDOW), (CHUNKED, GroupGeometry(AttentionKind.FULL, 48))):
        geometry = cache(10_000, *groups)
        needs = [never_fits(cache(1, *groups), num_tokens).num_needed_blocks for num_tokens in range(1, 301)]
        assert [peak_blocks(geometry, num_tokens) for num_tokens in range(1, 301)] == [
            max(needs[:num_tokens]) for num_tokens in range(1, 301)
        ]


def test_no_length_beyond_max_model_len_is_promised() -> None:
    assert max_fitting_prompt_tokens(cache(1000, FULL, max_model_len=256), 1) == 256


def test_a_model_without_a_cache_fits_whatever_comes() -> None:
    assert never_fits(cache(1), 1024) is None
    assert max_fitting_prompt_tokens(cache(1), 1) == 1024


@pytest.mark.parametrize("groups", [(), (FULL,), (FULL, WINDOW, CHUNKED, MAMBA, SINK, CROSS)])
def test_a_geometry_comes_back_from_json(groups: tuple[GroupGeometry, ...]) -> None:
    geometry = cache(100, *groups)
    assert geometry_from_json(geometry_to_json(geometry)) == geometry


def test_what_is_no_geometry_is_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks"):
        geometry_from_json('{"max_model_len": 10, "groups": []}')


@pytest.mark.parametrize("max_step_tokens", [1, 7, 16, 40, 64, 2048])
@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW), (WINDOW,), (CHUNKED, FULL), (MAMBA, FULL)])
def test_a_prompt_that_fits_in_steps_is_the_longest_one(
    groups: tuple[GroupGeometry, ...], max_step_tokens: int
) -> None:
    geometry = cache(14, *groups, max_model_len=400)

    def fits(num_tokens: int) -> bool:
        ends = [*range(max_step_tokens, num_tokens, max_step_tokens), num_tokens]
        steps = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        return all(num_needed_blocks(geometry, end, step) <= 13 for end, step in zip(ends, steps, strict=True))

    longest = max_fitting_prompt_tokens(geometry, max_step_tokens)
    assert [fits(num_tokens) for num_tokens in range(1, 401)] == [num_tokens <= longest for num_tokens in range(1, 401)]


def test_a_windows_prompt_needs_more_the_more_a_step_computes() -> None:
    geometry = cache(20, FULL, WINDOW)
    longest = [max_fitting_prompt_tokens(geometry, max_step_tokens) for max_step_tokens in (1, 64, 2048)]
    assert longest == sorted(longest, reverse=True)
    assert longest[-1] == 9 * 16  # all at once: as many blocks in the window's group as in the other
