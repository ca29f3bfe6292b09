"""Makes the golden traces: `python -m tests.glue.golden.record NAME`, one engine in this process and its own traffic.

A trace is made once, and again only where its format or vLLM's version changes; README.md lists them. Real serving: a
model that computes, vLLM's engine, requests that come while others run, conversations that go on, clients that go away.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
SEED = 20
# A decoder whose layers all have a window; weights are random.
WINDOW_MODEL = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "hidden_size": 128,
    "head_dim": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 512,
    "sliding_window": 40,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Recording:
    """One golden trace.

    Attributes:
        model: a name of `kvplug model build`, or `window`.
        manager: the one that serves, and is recorded.
        engine: arguments of LLM.
        num_requests: first turns of conversations.
        has_events: KV events are on. With a configuration of them, even one that turns them off, vLLM gives a model of
            several attention types one group.
    """

    model: str
    manager: str
    engine: dict[str, Any] = field(default_factory=dict)
    num_requests: int = 40
    has_events: bool = True

    def model_args(self) -> dict[str, Any]:
        """What tells LLM of the model."""
        if self.model == "window":
            folder = Path(tempfile.mkdtemp())
            (folder / "config.json").write_text(json.dumps(WINDOW_MODEL))
            return {"model": str(folder), "load_format": "dummy"}
        from vllm_kvplug.cli.models.store import ensure_model

        return {"model": str(ensure_model(self.model))}


RECORDINGS = {
    "full": Recording("default", "upstream", {"num_gpu_blocks_override": 48}, num_requests=16),
    "hybrid": Recording("tiny-hybrid", "kvplug", {"num_gpu_blocks_override": 80}, has_events=False),
    "window": Recording("window", "upstream", {"num_gpu_blocks_override": 32}),
}


def record(name: str, path: Path) -> None:
    """Serve, and record to `path`."""
    recording = RECORDINGS[name]
    import vllm_kvplug

    vllm_kvplug.install()
    from vllm import LLM
    from vllm.config import KVEventsConfig

    events: dict[str, Any] = {}
    if recording.has_events:
        events["kv_events_config"] = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    llm = LLM(
        **recording.model_args(),
        skip_tokenizer_init=True,
        enforce_eager=True,
        block_size=16,
        max_model_len=512,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        enable_prefix_caching=True,
        disable_log_stats=False,
        seed=SEED,
        **events,
        kv_cache_manager=recording.manager,
        kv_cache_manager_config={"trace": str(path)},
        **recording.engine,
    )
    _serve(llm.llm_engine, recording.num_requests)


def _serve(engine: Any, num_requests: int) -> None:
    """Requests with shared prefixes, added while others run; some are aborted; each second one has a next turn."""
    from vllm import SamplingParams

    rng = random.Random(SEED)
    shared = [[rng.randrange(10, 500) for _ in range(num_tokens)] for num_tokens in (48, 100, 160)]
    prompts = [
        [*shared[rng.randrange(3)], *(rng.randrange(10, 500) for _ in range(rng.randint(1, 60)))]
        for _ in range(num_requests)
    ]
    waiting = [(f"turn-1-{number}", prompt) for number, prompt in enumerate(prompts)]
    aborted = [f"turn-1-{number}" for number in range(5, num_requests, 6)]
    num_steps = 0
    while waiting or engine.has_unfinished_requests():
        if waiting and num_steps % 3 == 0:
            for request_id, prompt in waiting[:2]:
                params = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False)
                params.max_tokens = rng.randint(8, 40)
                engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
            del waiting[:2]
        for output in engine.step():
            if output.finished and output.request_id.startswith("turn-1") and rng.random() < 0.5:
                answer = list(output.outputs[0].token_ids)
                turn = [*output.prompt_token_ids, *answer, *(rng.randrange(10, 500) for _ in range(12))]
                waiting.append((output.request_id.replace("turn-1", "turn-2"), turn))
        num_steps += 1
        if num_steps % 30 == 0 and aborted:
            engine.abort_request([aborted.pop(0)])
    engine.reset_prefix_cache()
    print(f"{num_steps} steps")


if __name__ == "__main__":
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    record(sys.argv[1], Path(sys.argv[2]) if len(sys.argv) > 2 else FOLDER / f"{sys.argv[1]}.jsonl.gz")
