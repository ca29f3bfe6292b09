"""One engine in this process, one batch of greedy requests, all added before the first step: JSON of what came out.

Run as a program, once for each manager: `python -m tests.serving.engine_run MANAGER MODEL OUTPUT`. vLLM's in-process
engine is deterministic then, so two managers that decide alike give equal texts.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

NUM_REQUESTS = 64
NUM_OUTPUT_TOKENS = 128
TOPICS = ("the history of bread", "how tides work", "the rules of chess")


def prompts() -> list[str]:
    """64 prompts of about 130 tokens with three shared prefixes."""
    shared = [f"You are an expert on {topic}. " + f"Remember these facts about {topic}. " * 15 for topic in TOPICS]
    return [f"{shared[n % len(shared)]} Question {n}: tell me fact number {n}." for n in range(NUM_REQUESTS)]


def run(manager: str, model: str) -> dict[str, Any]:
    """Serve the batch and report each request and the counters that show what the cache had to do."""
    from vllm import LLM, SamplingParams

    import vllm_kvplug

    vllm_kvplug.install()
    llm = LLM(
        model,
        kv_cache_manager=manager,
        enforce_eager=True,
        block_size=16,
        num_gpu_blocks_override=90,
        max_model_len=512,
        max_num_seqs=32,
        disable_log_stats=False,
    )
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    params = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
    outputs = llm.generate(prompts(), params, use_tqdm=False)
    counters = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    return {
        "manager_class": f"{type(scheduler.kv_cache_manager).__module__}.{type(scheduler.kv_cache_manager).__name__}",
        "requests": [
            {
                "text": output.outputs[0].text,
                "finish_reason": output.outputs[0].finish_reason,
                "num_cached_tokens": output.num_cached_tokens,
            }
            for output in outputs
        ],
        "num_preemptions": counters["vllm:num_preemptions"],
        "num_queried_tokens": counters["vllm:prefix_cache_queries"],
        "num_hit_tokens": counters["vllm:prefix_cache_hits"],
        "usage_after": scheduler.kv_cache_manager.usage,
    }


if __name__ == "__main__":
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1")
    Path(sys.argv[3]).write_text(json.dumps(run(sys.argv[1], sys.argv[2])))
