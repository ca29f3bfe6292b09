"""vLLM's own `vllm bench serve`, run by our worker against a streaming server: no model runs here."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from tests.evals.throughput_support import asked_of, options, streaming
from vllm_kvplug.cli.models.store import ensure_model
from vllm_kvplug.evals.serving import RunningSide
from vllm_kvplug.evals.throughput.bench_client import VllmBench, bench_arguments, write_data_set
from vllm_kvplug.evals.throughput.loads import BenchLoad
from vllm_kvplug.evals.throughput.run_result import RunResult
from vllm_kvplug.evals.throughput.vocabulary import Vocabulary
from vllm_kvplug.evals.throughput.workloads import Recipe

NUM_REQUESTS = 8


def run(bench: VllmBench, running: RunningSide, load: BenchLoad, model: str, path: Path, seed: int) -> RunResult:
    data_set_path = path.with_suffix(".prompts.jsonl")
    if load.prompts:
        write_data_set(load, data_set_path)
    arguments = bench_arguments(
        load,
        url=running.url,
        served_name=running.served_name,
        model_path=model,
        seed=seed,
        salt=f"salt-{seed}",
        request_rate=None,
        max_concurrency=1,  # so that requests arrive in their order
        result_path=path,
        data_set_path=data_set_path,
    )
    return bench.run(arguments, path, lambda: None, "side")


@pytest.mark.slow
def test_its_workloads_are_as_described_and_equal_for_equal_seeds(tmp_path: Path) -> None:
    model = ensure_model("tiny-qwen2")
    vocabulary = Vocabulary.of_model(model)
    with VllmBench(tmp_path / "bench.log") as bench:
        for workload in ("random", "shared-prefixes", "long-documents"):
            load = Recipe(options(workload, num_requests=NUM_REQUESTS), vocabulary).load(0)
            assert isinstance(load, BenchLoad)
            with streaming(tmp_path) as running:
                path = tmp_path / f"{workload}.json"
                results = [run(bench, running, load, model, path, seed) for seed in (1, 1, 2)]
                asked = asked_of(running)
            first, again, other = (asked[index : index + NUM_REQUESTS] for index in (0, NUM_REQUESTS, 2 * NUM_REQUESTS))
            assert len(asked) == 3 * NUM_REQUESTS
            assert first == again
            assert {body["cache_salt"] for body in first} == {"salt-1"}
            assert {body["cache_salt"] for body in other} == {"salt-2"}
            assert all(body["temperature"] == 0 and body["ignore_eos"] for body in asked)
            prompts = [vocabulary.ids(body["prompt"]) for body in first]
            if load.prompts:
                assert [body["prompt"] for body in first] == [prompt.text for prompt in load.prompts]
                assert [len(ids) for ids in prompts] == [prompt.num_input_tokens for prompt in load.prompts]
            else:
                assert [body["prompt"] for body in first] != [body["prompt"] for body in other]
            assert len({tuple(ids[:128]) for ids in prompts}) == {"random": 8, "shared-prefixes": 4}.get(workload, 5)
            assert results[0].input_lens == [len(ids) for ids in prompts]
            assert results[0].output_lens == [body["max_tokens"] for body in first]
            _check_metrics(path)


def _check_metrics(path: Path) -> None:
    """What we compute of the details is what vLLM's client itself prints."""
    import json

    told = json.loads(path.read_text())
    result = RunResult.read(path)
    latencies_ms = result.latencies_ms()
    for kind in ("ttft", "itl", "e2el"):
        assert statistics.median(latencies_ms[kind]) == pytest.approx(told[f"median_{kind}_ms"], rel=0.02)
    assert result.throughput()["output token throughput"] == pytest.approx(told["output_throughput"])
    assert result.throughput()["request throughput"] == pytest.approx(told["request_throughput"])
