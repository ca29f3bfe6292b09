"""D3 of docs/deviations.md: a streaming session's next input takes the place of the last sampled token.

F18's neighbour: a session that grows beyond the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from tests.glue.support import ENGINE_ARGS, model_folder
from tests.lockstep.twins import prepare_hashing
from tests.scheduler.cases import Case, build_scheduler
from vllm_kvplug import get_request_block_hasher


@pytest.fixture(scope="module")
def engine_config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    prepare_hashing()
    model = model_folder(tmp_path_factory.mktemp("models") / "tiny-qwen2")
    return EngineArgs(model=model, **ENGINE_ARGS).create_engine_config()


def request(request_id: str, tokens: Sequence[int], *, is_session: bool = False) -> Request:
    """A request that samples one token; blocks of 4 tokens."""
    return Request(
        request_id=request_id,
        prompt_token_ids=list(tokens),
        sampling_params=SamplingParams(max_tokens=1, ignore_eos=True),
        pooling_params=None,
        block_hasher=get_request_block_hasher(4, sha256),
        resumable=is_session,
    )


def step(scheduler: Any, sampled_token: int) -> dict[str, str]:
    """One step; the reasons of those that ended in it."""
    scheduled = scheduler.schedule()
    request_ids = list(scheduled.num_scheduled_tokens)
    sampled = [[sampled_token] for _ in request_ids]
    answer = ModelRunnerOutput(
        req_ids=request_ids,
        req_id_to_index={request_id: position for position, request_id in enumerate(request_ids)},
        sampled_token_ids=sampled,
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )
    outputs = scheduler.update_from_output(scheduled, answer)
    return {one.request_id: str(one.finish_reason) for each in outputs.values() for one in each.outputs}


@pytest.mark.parametrize(("manager", "num_hit_tokens"), [("upstream", 8), ("kvplug", 4)])
def test_d3_a_dropped_token_is_in_no_hash(engine_config: Any, manager: str, num_hit_tokens: int) -> None:
    scheduler = build_scheduler(Case("session", num_blocks=41), engine_config, manager)
    scheduler.add_request(request("s", range(7), is_session=True))
    step(scheduler, sampled_token=77)  # it completes the block of tokens 4 to 7
    scheduler.add_request(request("s", [900, 901, 902, 903, 904], is_session=True))  # token 7 is 900 now
    step(scheduler, sampled_token=5)
    # Upstream's 8: the second block holds the keys and values of 4, 5, 6 and 900.
    assert scheduler.kv_cache_manager.get_computed_blocks(request("x", [*range(7), 77, 1, 2]))[1] == num_hit_tokens
    same_session = request("y", [*range(7), 900, 901, 902, 903, 904])
    assert scheduler.kv_cache_manager.get_computed_blocks(same_session)[1] == (8 if manager == "kvplug" else 4)


def test_f18_neighbour_a_session_that_grows_beyond_the_pool_ends_with_an_error(engine_config: Any) -> None:
    scheduler = build_scheduler(Case("session", num_blocks=11), engine_config, "kvplug")
    scheduler.add_request(request("s", range(20), is_session=True))
    step(scheduler, sampled_token=7)
    scheduler.add_request(request("other", range(100, 104)))
    scheduler.add_request(request("s", range(200, 230), is_session=True))  # 50 tokens, 40 slots
    reasons = [step(scheduler, sampled_token=7) for _ in range(3)]
    assert {"s": "error"} in reasons
    assert {"other": "length"} in reasons
    assert scheduler.kv_cache_manager.usage == 0
