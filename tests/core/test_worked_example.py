"""The worked example of vLLM's document on prefix caching: block size 4, ten blocks.

The document numbers blocks from 0; here, as in vLLM's code, block 0 is the null block, so every number is one higher.
"""

from __future__ import annotations

from tests.core.pools import free_ids
from tests.core.support import FakeRequest, make_manager, run_decode, run_prefill
from vllm_kvplug.block_states import num_holders
from vllm_kvplug.invariants import check_invariants


def as_in_the_document(block_ids: list[int]) -> list[int]:
    return [block_id - 1 for block_id in block_ids]


def test_worked_example() -> None:
    manager = make_manager(11)
    cached = manager.pool.indexes[0]

    # Request 0 has 15 tokens: four blocks, three of them full and cached.
    request_0 = FakeRequest("0", list(range(15)))
    num_hit_tokens, block_ids = run_prefill(manager, request_0)
    assert (num_hit_tokens, as_in_the_document(block_ids)) == (0, [0, 1, 2, 3])
    assert len(cached) == 3

    # A decoded token fills block 3, which is cached; the next one asks for block 4.
    assert run_decode(manager, request_0, 100).get_block_ids(allow_none=True) is None
    assert len(cached) == 4
    assert as_in_the_document(run_decode(manager, request_0, 101).get_block_ids()[0]) == [4]

    # Request 1 has 14 tokens and shares the first ten: two full blocks are hit.
    request_1 = FakeRequest("1", [*range(10), 90, 91, 92, 93])
    num_hit_tokens, block_ids = run_prefill(manager, request_1)
    assert (num_hit_tokens, as_in_the_document(block_ids)) == (8, [0, 1, 5, 6])
    assert [num_holders(manager.pool, block_id) for block_id in block_ids] == [2, 2, 1, 1]

    # Both are freed, the last block of each first; what they share goes when the second lets go.
    manager.free(request_0)
    manager.free(request_1)
    assert as_in_the_document(free_ids(manager.pool)) == [7, 8, 9, 4, 3, 2, 6, 5, 1, 0]

    # 29 tokens, of which 12 are request 0's: three blocks are hit, five are new.
    request_2 = FakeRequest("2", [*range(12), *range(200, 217)])
    num_hit_tokens, block_ids = run_prefill(manager, request_2)
    assert (num_hit_tokens, as_in_the_document(block_ids)) == (12, [0, 1, 2, 7, 8, 9, 4, 3])
    assert as_in_the_document(free_ids(manager.pool)) == [6, 5]
    check_invariants(manager)
