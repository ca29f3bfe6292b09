"""One engine in this process, one batch of greedy requests, all added before the first step: JSON of what came out.

Run as a program, once for each manager: `python -m tests.serving.engine_run MANAGER MODEL OUTPUT BATCH FOLDER`.
vLLM's in-process engine is deterministic then, so two managers that decide alike give equal texts. A batch is a name in
`BATCHES`; FOLDER holds what it reads.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NUM_REQUESTS = 32
TOPICS = ("the history of bread", "how tides work", "the rules of chess")
ADAPTERS = ("first", "second")
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
# The models are in bfloat16, which takes a CPU without instructions for it about four times as long.
DTYPE = "float32"


@dataclass
class Batch:
    """Requests, and the engine that serves them.

    Attributes:
        prompts: what `LLM.generate` takes.
        adapters: for each prompt its LoRARequest or None; None: no adapters at all.
        num_output_tokens: each answer's length.
        engine: arguments of LLM besides the ones that every engine here has.
    """

    prompts: list[Any]
    engine: dict[str, Any]
    num_output_tokens: int
    adapters: list[Any] | None = field(default=None)


def prompts() -> list[str]:
    """32 prompts of about 130 tokens with three shared prefixes."""
    shared = [f"You are an expert on {topic}. " + f"Remember these facts about {topic}. " * 15 for topic in TOPICS]
    return [f"{shared[n % len(shared)]} Question {n}: tell me fact number {n}." for n in range(NUM_REQUESTS)]


def default_batch(_folder: Path) -> Batch:
    """The default model in a pool that must preempt and evict."""
    return Batch(prompts(), {"num_gpu_blocks_override": 80, "max_num_seqs": 24}, num_output_tokens=64)


def hybrid_batch(_folder: Path) -> Batch:
    """Three KV cache groups, one of full attention and two of a window of 64 tokens, in a pool that must preempt."""
    return Batch(prompts(), {"num_gpu_blocks_override": 120, "max_num_seqs": 16}, num_output_tokens=64)


def keys_batch(folder: Path) -> Batch:
    """Requests in groups of six, two for each topic: with one of two adapters or none, one of two salts or none."""
    from vllm.lora.request import LoRARequest

    adapters = [None] + [LoRARequest(name, number, str(folder / name)) for number, name in enumerate(ADAPTERS, 1)]
    plain = prompts()[:24]
    chosen = [adapters[number // 6 % 3] for number in range(len(plain))]
    salts = [(None, None, "salt of one", "salt of another")[number // 6 % 4] for number in range(len(plain))]
    salted = [
        {"prompt": text} | ({"cache_salt": salt} if salt else {}) for text, salt in zip(plain, salts, strict=True)
    ]
    engine = {
        "num_gpu_blocks_override": 64,
        "max_num_seqs": 8,
        "enable_lora": True,
        "max_loras": 2,
        "max_lora_rank": 8,
    }
    return Batch(salted, engine, num_output_tokens=32, adapters=chosen)


BATCHES: dict[str, Callable[[Path], Batch]] = {"default": default_batch, "hybrid": hybrid_batch, "keys": keys_batch}


def run(manager: str, model: str, batch: Batch) -> dict[str, Any]:
    """Serve the batch and report each request and the counters that show what the cache had to do."""
    from vllm import LLM, SamplingParams

    import vllm_kvplug

    vllm_kvplug.install()
    llm = LLM(
        model,
        kv_cache_manager=manager,
        dtype=DTYPE,
        enforce_eager=True,
        block_size=16,
        max_model_len=512,
        disable_log_stats=False,
        **batch.engine,
    )
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    params = SamplingParams(temperature=0, max_tokens=batch.num_output_tokens, ignore_eos=True)
    outputs = llm.generate(batch.prompts, params, use_tqdm=False, lora_request=batch.adapters)
    counters = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    return {
        "manager_class": f"{type(scheduler.kv_cache_manager).__module__}.{type(scheduler.kv_cache_manager).__name__}",
        "num_groups": len(scheduler.kv_cache_config.kv_cache_groups),
        "requests": [
            {
                "text": output.outputs[0].text,
                "finish_reason": output.outputs[0].finish_reason,
                "num_cached_tokens": output.num_cached_tokens,
            }
            for output in outputs
        ],
        "num_preemptions": counters["vllm:num_preemptions"],
        # Not vLLM's counters of lookups: upstream counts every refused attempt again (F10).
        "num_queried_tokens": sum(len(output.prompt_token_ids) for output in outputs),
        "num_hit_tokens": sum(output.num_cached_tokens for output in outputs),
        "usage_after": scheduler.kv_cache_manager.usage,
    }


def run_both(model: str, batch: str, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The batch behind (upstream, kvplug), each in a process of its own; checks that it was they."""
    answers = []
    for manager, module in (("upstream", "vllm.v1.core.kv_cache_manager"), ("kvplug", "vllm_kvplug.vllm_glue.manager")):
        output = folder / f"{batch}-{manager}.json"
        run_program("tests.serving.engine_run", manager, model, str(output), batch, str(folder))
        answer = json.loads(output.read_text())
        assert answer.pop("manager_class") == f"{module}.KVCacheManager"
        answers.append(answer)
    return answers[0], answers[1]


def run_program(module: str, *arguments: str) -> None:
    """Run a module of ours as a program, in a process that has loaded nothing yet."""
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    manager, model, output, batch, folder = sys.argv[1:]
    report = run(manager, model, BATCHES[batch](Path(folder)))
    Path(output).write_text(json.dumps(report))
