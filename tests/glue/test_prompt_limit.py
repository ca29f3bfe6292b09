"""Prompts that no pool could hold, refused by the front end: what it learns of its engines, and where it looks."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

import vllm_kvplug
from tests.glue import managers
from tests.glue.support import fake_engine_core, is_hooked, run_python, with_choice
from vllm_kvplug.geometry import AttentionKind, CacheGeometry, GroupGeometry
from vllm_kvplug.sizing import geometry_from_json, geometry_to_json
from vllm_kvplug.vllm_glue import metrics, prompt_limit, report, seams


def geometry(num_blocks: int) -> CacheGeometry:
    return CacheGeometry(num_blocks, 1024, (GroupGeometry(AttentionKind.FULL, 16),))


def answer(num_blocks: int) -> dict[str, str]:
    return {"manager": "kvplug", report.GEOMETRY: geometry_to_json(geometry(num_blocks)), report.STEP_TOKENS: "2048"}


def front_end(*answers: dict[str, str]) -> Any:
    found = SimpleNamespace(input_processor=SimpleNamespace())
    prompt_limit.learn(found, answers)
    return found


def request(num_tokens: int, rank: int | None = None, embeds: Any = None) -> Any:
    token_ids = None if embeds is not None else [1] * num_tokens
    return SimpleNamespace(prompt_token_ids=token_ids, prompt_embeds=embeds, data_parallel_rank=rank)


def process(to: Any, made: Any) -> Any:
    return prompt_limit.around_process_inputs(lambda processor, *args: made, to.input_processor, "id", "prompt")


def test_the_engine_tells_its_own_geometry(kv_cache_config: Any) -> None:
    sizes = {"kv_cache_config": kv_cache_config, "max_model_len": 256, "hash_block_size": 16}
    manager = vllm_kvplug.KVCacheManager(**sizes)
    told = report.of_engine_core(fake_engine_core(with_choice("kvplug"), manager, kv_cache_config), "kvplug", "{}")
    assert geometry_from_json(told[report.GEOMETRY]) == manager.geometry
    assert json.loads(told[report.GEOMETRY])["num_blocks"] == 64

    theirs = "tests.glue.managers:Plain"
    engine_core = fake_engine_core(with_choice(theirs), managers.Plain(**sizes), kv_cache_config)
    assert report.GEOMETRY not in report.of_engine_core(engine_core, theirs, "{}")


def test_a_prompt_that_fits_passes_as_it_is() -> None:
    made = request(64)
    assert process(front_end(answer(5)), made) is made


@pytest.mark.parametrize("made", [request(65), request(0, embeds=[[0.5]] * 65)])
def test_a_prompt_that_does_not_is_refused_with_both_numbers_and_a_way_out(made: Any) -> None:
    with pytest.raises(ValueError, match="The prompt of 65 tokens needs 5 KV cache blocks") as refusal:
        process(front_end(answer(5)), made)
    for part in (
        "has 4 for all",
        "Prompts that fit have at most 64 tokens.",
        "--num-gpu-blocks-override",
        "gpu-memory-utilization",
    ):
        assert part in str(refusal.value)
    assert refusal.value.parameter == "input_tokens"  # type: ignore[attr-defined]


def test_of_several_engines_the_smallest_counts_and_a_named_one_itself() -> None:
    several = front_end(answer(9), answer(5), answer(7))
    with pytest.raises(ValueError, match="has 4 for"):
        process(several, request(65))
    for rank, num_tokens in ((0, 128), (1, 64), (2, 96), (3, 64), (None, 64)):
        process(several, request(num_tokens, rank))
        with pytest.raises(ValueError, match=f"needs {num_tokens // 16 + 1} KV"):
            process(several, request(num_tokens + 1, rank))


def test_a_front_end_that_knows_nothing_refuses_nothing() -> None:
    for unknowing in (front_end(), front_end({"manager": "theirs"})):
        assert process(unknowing, request(10**6)).data_parallel_rank is None


TOKENS = {"type": "token", "prompt_token_ids": [1] * 65}


@pytest.mark.parametrize(
    ("prompt", "refused"),
    [
        (TOKENS, True),
        ({**TOKENS, "prompt_token_ids": [1] * 64}, False),
        ({"type": "embeds", "prompt_embeds": [[0.5]] * 65}, True),
        ({"type": "multimodal", "prompt_token_ids": [1] * 65, "mm_kwargs": {}}, True),
        # The encoder's tokens take no blocks of these groups.
        ({"type": "enc_dec", "encoder_prompt": TOKENS, "decoder_prompt": {"prompt_token_ids": [1]}}, False),
        ({"type": "enc_dec", "encoder_prompt": {"prompt_token_ids": [1]}, "decoder_prompt": TOKENS}, True),
        # Not tokenized yet, or a stream of prompts: process_inputs looks at these.
        ("text " * 1000, False),
        ({"prompt": "text " * 1000}, False),
        (request(65), False),
    ],
)
@pytest.mark.parametrize("by_name", [False, True])
def test_generate_looks_before_the_generator_runs(prompt: Any, refused: bool, by_name: bool) -> None:
    async_llm = front_end(answer(5))
    asked: list[Any] = []
    call = ((), {"prompt": prompt, "request_id": "1"}) if by_name else ((prompt, "params", "1"), {})

    def generate(_: Any, *args: Any, **kwargs: Any) -> str:
        asked.append((args, kwargs))
        return "generator"

    if refused:
        with pytest.raises(ValueError, match="needs 5 KV cache blocks"):
            prompt_limit.around_generate(generate, async_llm, *call[0], **call[1])
        assert asked == []
    else:
        assert prompt_limit.around_generate(generate, async_llm, *call[0], **call[1]) == "generator"
        assert asked == [call]


def test_generate_looks_at_the_engine_that_is_named() -> None:
    several = front_end(answer(9), answer(5))
    prompt_limit.around_generate(lambda *args, **kwargs: None, several, TOKENS, data_parallel_rank=0)
    with pytest.raises(ValueError, match="needs 5"):
        prompt_limit.around_generate(lambda *args, **kwargs: None, several, TOKENS, data_parallel_rank=1)


class Client:
    """As much of vLLM's client as asks engines; each has an answer."""

    def __init__(self, *answers: dict[str, str]) -> None:
        self.answers = dict(enumerate(answers))
        self.core_engines = list(self.answers)
        self.asked: list[Any] = []

    async def _call_utility_async(self, *question: Any, engine: Any) -> Any:
        self.asked.append((engine, *question))
        await asyncio.sleep(0.01 / (1 + engine))  # the last answers first
        return self.answers[engine]

    async def call_utility_async(self, *question: Any) -> Any:
        return await self._call_utility_async(*question, engine=0)

    def call_utility(self, *question: Any) -> Any:
        self.asked.append((0, *question))
        return self.answers[0]


@pytest.mark.parametrize("num_engines", [1, 3])
def test_an_async_front_end_asks_every_engine_once(num_engines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    published: list[Any] = []
    monkeypatch.setattr(metrics, "publish", published.append)

    async def tasks(_: Any) -> tuple[str]:
        return ("generate",)

    async def ask_twice() -> None:
        for _ in range(2):
            assert await metrics.around_get_supported_tasks(tasks, async_llm) == ("generate",)

    client = Client(*(answer(9 - engine) for engine in range(num_engines)))
    async_llm = SimpleNamespace(
        vllm_config=with_choice("kvplug"), engine_core=client, input_processor=SimpleNamespace()
    )
    asyncio.run(ask_twice())
    assert client.asked == [(engine, "kvplug_report", "kvplug", "{}") for engine in range(num_engines)]
    assert published == [client.answers[0]]
    smallest = 9 - num_engines
    process(async_llm, request(16 * smallest))
    with pytest.raises(ValueError, match=f"has {smallest} for all"):
        process(async_llm, request(16 * smallest + 1))


@pytest.mark.parametrize("in_process", [False, True])
def test_an_llm_engine_asks_once(in_process: bool) -> None:
    client = Client(answer(5))
    if in_process:
        core = SimpleNamespace(kvplug_report=lambda *question: client.call_utility("kvplug_report", *question))
        engine_core: Any = SimpleNamespace(engine_core=core)
    else:
        engine_core = client
    llm_engine = SimpleNamespace(
        vllm_config=with_choice("kvplug"), engine_core=engine_core, input_processor=SimpleNamespace()
    )
    for _ in range(2):
        assert prompt_limit.around_llm_engine_get_supported_tasks(lambda engine: "tasks", llm_engine) == "tasks"
    assert client.asked == [(0, "kvplug_report", "kvplug", "{}")]
    with pytest.raises(ValueError, match="has 4 for all"):
        process(llm_engine, request(65))


def test_without_a_choice_no_engine_is_asked() -> None:
    llm_engine = SimpleNamespace(vllm_config=with_choice(None), engine_core=None, input_processor=SimpleNamespace())
    assert prompt_limit.around_llm_engine_get_supported_tasks(lambda engine: "tasks", llm_engine) == "tasks"
    assert vars(llm_engine.input_processor) == {}


def test_activation_hooks_the_front_ends() -> None:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.llm_engine import LLMEngine

    seams.activate()
    for owner, name in (
        (AsyncLLM, "generate"),
        (AsyncLLM, "get_supported_tasks"),
        (LLMEngine, "get_supported_tasks"),
        (InputProcessor, "process_inputs"),
    ):
        assert is_hooked(owner, name), name


# 19 usable blocks of 16 tokens: 304 computed tokens.
LLM_PROGRAM = """
import json, sys
import vllm_kvplug
vllm_kvplug.install()
from vllm import LLM, SamplingParams
from tests.glue.support import ENGINE_ARGS
args = ENGINE_ARGS | {"num_gpu_blocks_override": 20, "max_model_len": 512, "disable_log_stats": False}
llm = LLM(sys.argv[1], kv_cache_manager="kvplug", **args)
def generate(lengths, outputs, n=1):
    prompts = [{"prompt_token_ids": [2 + (7 * i + length) % 500 for i in range(length)]} for length in lengths]
    params = [SamplingParams(max_tokens=m, n=n, seed=1, ignore_eos=True, detokenize=False) for m in outputs]
    answers = llm.generate(prompts, params, use_tqdm=False)
    return [[(o.finish_reason, len(o.token_ids), o.stop_reason) for o in answer.outputs] for answer in answers]
try:
    refused = generate([40, 305, 20], [4, 4, 4])
except ValueError as error:
    refused = str(error)
print("ANSWER " + json.dumps({
    "refused": refused,
    "left": llm.llm_engine.get_num_unfinished_requests(),
    "just_fits": generate([304, 300], [1, 5]),
    "outgrown": generate([10, 33, 20, 47], [400, 30, 30, 30]),
    "after": generate([40], [8]),
    "several": generate([10], [400], n=2),
}), flush=True)
"""


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("multiprocessing", ["0", "1"])
def test_llm(tiny_model: str, multiprocessing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("VLLM_ENABLE_V1_MULTIPROCESSING", multiprocessing),
        ("VLLM_CPU_KVCACHE_SPACE", "1"),
        ("OMP_NUM_THREADS", "1"),
    ):
        monkeypatch.setenv(name, value)
    process = run_python("-c", LLM_PROGRAM, tiny_model, timeout_s=200)
    assert process.returncode == 0, (process.stdout + process.stderr)[-6000:]
    (line,) = [line for line in process.stdout.splitlines() if line.startswith("ANSWER ")]
    found = json.loads(line.removeprefix("ANSWER "))
    assert "The prompt of 305 tokens needs 20 KV cache blocks, and the engine has 19" in found["refused"]
    assert found["left"] == 0
    assert found["just_fits"] == [[["length", 1, None]], [["length", 5, None]]]
    outgrown, *others = found["outgrown"]
    assert outgrown[0][:2] == ["error", 304 - 10 + 1]
    assert "with 305 tokens it needs 20 KV cache blocks at one time, and the engine has 19" in outgrown[0][2]
    assert others == [[["length", 30, None]]] * 3
    assert found["after"] == [[["length", 8, None]]]
    assert [[reason, num_tokens] for reason, num_tokens, _ in found["several"][0]] == [["error", 295]] * 2
    log = process.stdout + process.stderr
    assert log.count("max_model_len 512 does not fit the KV cache: it needs 32 blocks, and there are 19") == 1
    assert log.count("ended with an error: with 305 tokens") == 3
