"""Workloads: the same for both sides, another for each pair, and shaped as they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.evals.throughput_support import VOCABULARY, WordTokenizer, options, write_trace
from vllm_kvplug.evals.errors import EvalUsageError
from vllm_kvplug.evals.throughput.bench_client import bench_arguments
from vllm_kvplug.evals.throughput.loads import BenchLoad, SessionLoad
from vllm_kvplug.evals.throughput.mooncake import read_trace, replay
from vllm_kvplug.evals.throughput.options import WORKLOAD_NAMES, ThroughputOptions
from vllm_kvplug.evals.throughput.vocabulary import Vocabulary
from vllm_kvplug.evals.throughput.workloads import Recipe, describe, needs_vocabulary, request_step

ROWS = [
    (5000.0, 1300, 400, [0, 1, 2]),
    (5000.0, 1024, 10, [0, 1]),
    (9000.0, 1536, 64, [0, 3, 4]),
    (9500.0, 512, 0, [7]),
]


def recipe(asked: ThroughputOptions, max_model_len: int | None = 2048) -> Recipe:
    return Recipe(asked, VOCABULARY if needs_vocabulary(asked.workload) else None, max_model_len)


def asked_for(workload: str, folder: Path, **changes: object) -> ThroughputOptions:
    trace = write_trace(folder / "trace.jsonl", ROWS) if workload == "mooncake" else None
    num_requests = 4 if workload == "mooncake" else 16
    return options(workload, trace=trace, num_requests=num_requests, **changes)


@pytest.mark.parametrize("workload", WORKLOAD_NAMES)
def test_a_load_is_decided_by_its_seed(workload: str, tmp_path: Path) -> None:
    asked = asked_for(workload, tmp_path)
    asked.check()
    assert recipe(asked).load(3) == recipe(asked).load(3)
    # vLLM's client draws the prompts of its own data sets from the run's seed.
    assert len({asked.seed_of_run(index) for index in range(-1, 9)}) == 10
    if needs_vocabulary(workload):
        assert recipe(asked).load(3) != recipe(asked).load(4)
        assert recipe(asked).load(3) != recipe(asked_for(workload, tmp_path, seed=1)).load(3)


@pytest.mark.parametrize("workload", WORKLOAD_NAMES)
def test_a_load_has_the_requests_asked_for_and_fits(workload: str, tmp_path: Path) -> None:
    asked = asked_for(workload, tmp_path)
    load = recipe(asked).load(0)
    assert load.num_requests == asked.requests
    assert 0 < load.max_tokens <= 2048
    assert 0 < recipe(asked).warm_up().num_requests < asked.requests
    assert recipe(asked).warm_up().num_requests % request_step(workload) == 0
    assert describe(workload)


@pytest.mark.parametrize("workload", [name for name in WORKLOAD_NAMES if name != "mooncake"])
def test_lengths_are_scaled_and_what_does_not_fit_is_refused(workload: str, tmp_path: Path) -> None:
    small = recipe(asked_for(workload, tmp_path)).load(0).max_tokens
    asked = asked_for(workload, tmp_path, length_scale=10.0)
    large = recipe(asked, None).load(0).max_tokens
    assert large == pytest.approx(10 * small, rel=0.02)
    with pytest.raises(EvalUsageError, match=rf"at most 2048 tokens .* found one of {large}: lower --length-scale"):
        recipe(asked).load(0)


def test_conversations_share_a_system_prompt_and_pause_between_turns() -> None:
    load = recipe(options("multi-turn", num_requests=12)).load(0)
    assert isinstance(load, SessionLoad)
    assert [len(session.turns) for session in load.sessions] == [4, 4, 4]
    firsts = [session.turns[0].token_ids for session in load.sessions]
    assert len({ids[:128] for ids in firsts}) == 1
    assert len({ids[128:] for ids in firsts}) == 3
    for session in load.sessions:
        assert session.turns[0].wait_s == 0
        assert all(turn.wait_s > 0 for turn in session.turns[1:])
    hasty = recipe(options("multi-turn", num_requests=12, think_time_s=0.0)).load(0)
    assert isinstance(hasty, SessionLoad)
    assert not any(turn.wait_s for turn in hasty.turns())


def test_conversations_start_at_a_rate() -> None:
    load = recipe(options("multi-turn", num_requests=400, request_rate=2.0)).load(0)
    assert isinstance(load, SessionLoad)
    starts = [session.start_s for session in load.sessions]
    assert starts == sorted(starts)
    assert 30 < starts[-1] < 75  # 99 gaps of half a second on average


def test_long_documents_come_once_and_system_prompts_again() -> None:
    load = recipe(options("long-documents", num_requests=24)).load(0)
    assert isinstance(load, BenchLoad)
    heads = [" ".join(prompt.text.split()[:384]) for prompt in load.prompts]
    documents = [head for prompt, head in zip(load.prompts, heads, strict=True) if prompt.num_input_tokens > 1000]
    assert (len(documents), len(set(documents))) == (6, 6)
    assert len(set(heads) - set(documents)) == 3
    for prompt in load.prompts:
        assert len(WordTokenizer().encode(prompt.text)) == prompt.num_input_tokens


def test_equal_ids_of_a_trace_give_equal_blocks(tmp_path: Path) -> None:
    load = recipe(asked_for("mooncake", tmp_path)).load(0)
    assert isinstance(load, SessionLoad)
    prompts = [turn.token_ids for turn in load.turns()]
    blocks = [[ids[i : i + 16] for i in range(0, len(ids), 16)] for ids in prompts]
    assert [len(ids) for ids in prompts] == [41, 32, 48, 16]  # input lengths / 32
    assert [turn.num_output_tokens for turn in load.turns()] == [12, 1, 2, 1]
    assert blocks[0][:2] == blocks[1]
    assert blocks[2][0] == blocks[0][0]
    assert len({tuple(block) for row in blocks for block in row}) == 6  # ids 0, 1, 2 (cut), 3, 4, 7


def test_times_of_a_trace_count_from_its_first_request_and_are_scaled(tmp_path: Path) -> None:
    for scale, starts in ((1.0, [0, 0, 4.0, 4.5]), (0.5, [0, 0, 2.0, 2.25])):
        load = recipe(asked_for("mooncake", tmp_path, time_scale=scale)).load(0)
        assert isinstance(load, SessionLoad)
        assert [session.start_s for session in load.sessions] == starts
        assert load.max_sessions is None


def test_requests_of_a_trace_that_are_too_long_are_cut_and_counted(tmp_path: Path) -> None:
    rows = [(0.0, 5120, 512, list(range(10))), (0.0, 512, 51200, [0]), (0.0, 512, 512, [0])]
    trace = read_trace(write_trace(tmp_path / "trace.jsonl", rows), 3)
    load = replay(trace, VOCABULARY, 0, num_block_tokens=16, time_scale=1.0, max_model_len=64)
    sizes = [(len(turn.token_ids), turn.num_output_tokens) for turn in load.turns()]
    assert sizes == [(48, 16), (16, 32), (16, 16)]
    assert load.notes == {"num_requests_cut_to_max_model_len": 2}
    assert load.max_tokens <= 64


def test_a_sample_of_a_trace_keeps_whole_conversations(tmp_path: Path) -> None:
    # Each conversation of four turns has a first id of its own behind id 0, which all share.
    rows = [
        (1000.0 * turn, 512 * (turn + 2), 1, [0, *range(10 * talk + 10, 10 * talk + 11 + turn)])
        for turn in range(4)
        for talk in range(100)
    ]
    path = write_trace(tmp_path / "trace.jsonl", rows)
    kept = read_trace(path, 60, sample=0.3, seed=5)
    talks = {request.hash_ids[1] for request in kept}
    assert 15 <= len(talks) <= 45
    whole = read_trace(path, 4 * len({r.hash_ids[1] for r in kept if r.timestamp_ms == 0}), 0.3, 5)
    assert sorted(request.hash_ids[1] for request in whole) == sorted(talk for talk in talks for _ in range(4))
    assert read_trace(path, 60, 0.3, 6) != kept
    with pytest.raises(EvalUsageError, match=r"expected 300 requests \(--num-requests\), found"):
        read_trace(path, 300, 0.3, 5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not JSON\n", "line 1: expected timestamp"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1}\n', "line 1: expected timestamp"),
        ('{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}\n', "1 ids for 513 tokens"),
        (
            '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}\n',
            "expected 2 requests .* found 1",
        ),
    ],
)
def test_a_trace_that_is_none_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(EvalUsageError, match=message):
        read_trace(path, 2)


def test_the_clients_arguments_say_seed_salt_and_load(tmp_path: Path) -> None:
    load = recipe(options("shared-prefixes")).load(0)
    assert isinstance(load, BenchLoad)
    common = {"url": "http://h:1", "served_name": "model", "model_path": "/m", "seed": 7, "salt": "s"}
    paths = {"result_path": tmp_path / "r.json", "data_set_path": tmp_path / "d.jsonl"}
    args = bench_arguments(load, **common, **paths, request_rate=None, max_concurrency=8)
    text = " ".join(args)
    assert "--dataset-name prefix_repetition --prefix-repetition-num-prefixes 4" in text
    assert "--seed 7 --temperature 0 --ignore-eos" in text
    assert '--extra-body {"cache_salt": "s"} --request-rate inf --max-concurrency 8' in text
    assert "--dataset-path" not in args


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workload": "chat"}, "--workload: expected one of random, .* found 'chat'"),
        ({"num_pairs": 0}, "--pairs: expected 1 or more, found 0"),
        ({"num_requests": -1}, "--num-requests: expected 1 or more"),
        ({"request_rate": 0.0}, "--request-rate: expected a number above 0"),
        ({"length_scale": float("nan")}, "--length-scale: expected a number above 0"),
        ({"think_time_s": -1.0}, "--think-time: expected 0 or more"),
        ({"seed": -1}, "--seed: expected 0 to"),
        ({"trace": Path("x")}, "--trace: only workload mooncake"),
        ({"time_scale": 2.0}, "--time-scale, --trace-sample: only workload mooncake"),
        ({"workload": "mooncake", "trace_sample": 0.0}, "--trace-sample: expected a part above 0 and at most 1"),
        ({"workload": "mooncake"}, "expected --trace PATH"),
        ({"workload": "mooncake", "trace": Path("/nowhere")}, "--trace: expected a file, found none at /nowhere"),
        ({"workload": "mooncake", "trace": Path("x"), "request_rate": 1.0}, "scale them with --time-scale"),
    ],
)
def test_options_that_no_run_can_have_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(EvalUsageError, match=message):
        options(**{"workload": "multi-turn", **changes}).check()


@pytest.mark.parametrize(("workload", "step"), [("shared-prefixes", 4), ("multi-turn", 4)])
def test_a_number_of_requests_that_does_not_come_out_even_is_refused(workload: str, step: int) -> None:
    with pytest.raises(EvalUsageError, match=rf"--num-requests: .* expected a multiple of {step}, found 30"):
        recipe(options(workload, num_requests=30)).load(0)


def test_a_tokenizer_whose_words_merge_is_refused() -> None:
    class Merging(WordTokenizer):
        def encode(self, text: str) -> list[int]:
            return [0]

    with pytest.raises(EvalUsageError, match="--model merging: expected a tokenizer with 64 or more words"):
        Vocabulary(Merging(), "merging")


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(EvalUsageError, match=r"its tokenizer cannot be read"):
        Vocabulary.of_model(str(tmp_path))
