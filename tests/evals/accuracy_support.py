"""lm-eval's results as these tests need them, and a server that answers lm-eval without a model."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.evals.streaming_server import QuietHandler
from vllm_kvplug.evals.results import CacheUse, Side
from vllm_kvplug.evals.sides import SideChoice


def cache_use(num_hit_tokens: int = 100, num_preemptions: int = 5) -> CacheUse:
    return CacheUse(
        num_finished_requests=10,
        num_prompt_tokens=1000,
        num_hit_tokens=num_hit_tokens,
        num_output_tokens=50,
        num_preemptions=num_preemptions,
        peak_usage=0.9,
        num_counted_lookup_tokens=2000,
        num_counted_lookup_hit_tokens=500,
    )


def generated(answers: Sequence[str], targets: Sequence[str], filters: Sequence[str] = ("none",)) -> dict[str, Any]:
    """Results of one task `t` that generates, scored by exact match."""
    samples = [
        {
            "doc_id": number,
            "filter": name,
            "arguments": [[f"prompt {number}", {"until": ["\n"]}]],
            "resps": [[answer]],
            "target": target,
            "metrics": ["exact_match"],
            "exact_match": float(answer == target),
        }
        for name in filters
        for number, (answer, target) in enumerate(zip(answers, targets, strict=True))
    ]
    right = sum(sample["exact_match"] for sample in samples) / len(samples)
    scores = {f"exact_match,{name}": right for name in filters}
    errors = {f"exact_match_stderr,{name}": 0.01 for name in filters}
    return {
        "results": {"t": {"name": "t", "alias": "t", "sample_len": len(answers), **scores, **errors}},
        "higher_is_better": {"t": {"exact_match": True}},
        "samples": {"t": samples},
    }


def chosen(log_likelihoods: Sequence[Sequence[float]], gold: int = 0) -> dict[str, Any]:
    """Results of one task `t` of multiple choice, scored by accuracy."""
    samples = []
    for number, values in enumerate(log_likelihoods):
        samples.append(
            {
                "doc_id": number,
                "filter": "none",
                "arguments": [[f"prompt {number}", f" choice {choice}"] for choice in range(len(values))],
                "resps": [[[value, False]] for value in values],
                "target": gold,
                "metrics": ["acc"],
                "acc": float(max(range(len(values)), key=values.__getitem__) == gold),
            }
        )
    accuracy = sum(sample["acc"] for sample in samples) / len(samples)
    return {
        "results": {"t": {"alias": "t", "sample_len": len(samples), "acc,none": accuracy, "acc_stderr,none": "N/A"}},
        "higher_is_better": {"t": {"acc": True}},
        "samples": {"t": samples},
    }


@dataclass
class FakeSide:
    """What `measure` needs of a running side; the server is `answering`'s."""

    url: str
    choice: SideChoice
    folder: Path
    served_name: str = "model"
    returncode: int | None = None
    deaths: list[str] = field(default_factory=list)

    @property
    def server(self) -> Any:
        log_path = self.folder / f"server-{self.choice.label}.log"
        return SimpleNamespace(log_path=log_path, returncode=self.returncode)

    @property
    def side(self) -> Side:
        return Side(label=self.choice.label, manager=self.choice.manager, command="vllm serve model", start_s=1.0)

    def engine_pids(self) -> list[int]:
        return []

    def raise_if_dead(self, during: str) -> None:
        self.deaths.append(during)


@contextmanager
def answering(answer: Callable[[str], str], num_hit_tokens: int = 10, num_preemptions: int = 1) -> Iterator[str]:
    """The address of a server whose chat completions are `answer(last message)`; it counts as vLLM does.

    `num_hit_tokens` is of each request, `num_preemptions` of all.
    """

    class Handler(QuietHandler):
        num_requests = 0

        def do_GET(self) -> None:
            if self.path == "/v1/models":
                return self.answer_models(512)
            count = Handler.num_requests
            counts = {
                "request_success_total": count,
                "request_prompt_tokens_sum": 100 * count,
                "request_prefill_kv_computed_tokens_sum": (100 - num_hit_tokens) * count,
                "num_preemptions_total": num_preemptions if count else 0,
            }
            return self.answer_metrics(counts)

        def do_POST(self) -> None:
            body = self.body()
            assert self.path == "/v1/chat/completions"
            Handler.num_requests += 1
            try:
                text = answer(body["messages"][-1]["content"])
            except LookupError as error:
                return self.answer(json.dumps({"error": str(error)}), 500)
            return self.answer_chat(text)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
