"""An engine with a KV connector in this process, three times the same prompts: saved, loaded, and loaded with failures.

Run as a program: `python -m tests.serving.connector_run MANAGER MODEL OUTPUT POLICY FOLDER`; FOLDER keeps what was
saved.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.serving.engine_run import DTYPE, ENVIRONMENT, TOPICS

SUBJECTS = (
    "bread",
    "rain",
    "a violin",
    "Rome",
    "whales",
    "glass",
    "the moon",
    "tea",
    "a clock",
    "snow",
    "salt",
    "bees",
)
NUM_PROMPTS = len(SUBJECTS)


def run(manager: str, model: str, policy: str, folder: str) -> dict[str, Any]:
    """Each round begins with an empty prefix cache; answers what each gave and what the connector did for it."""
    from vllm import LLM
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    import vllm_kvplug

    vllm_kvplug.install()
    llm = LLM(
        model,
        kv_cache_manager=manager,
        dtype=DTYPE,
        enforce_eager=True,
        block_size=16,
        num_gpu_blocks_override=400,
        max_model_len=512,
        # A prompt that is computed in parts would be saved in its first part only.
        max_num_batched_tokens=4096,
        disable_log_stats=False,
        kv_transfer_config=KVTransferConfig(
            kv_connector="CpuConnector",
            kv_connector_module_path="tests.serving.cpu_connector",
            kv_role="kv_both",
            kv_connector_extra_config={"shared_storage_path": folder},
            kv_load_failure_policy=policy,
        ),
    )
    connector = get_kv_transfer_group()
    kv_manager = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
    report: dict[str, Any] = {"manager_class": f"{type(kv_manager).__module__}.{type(kv_manager).__name__}"}
    for name, fails_every in (("saved", 0), ("loaded", 0), ("failing", 3)):
        connector.fails_every, connector.num_saves, connector.num_loads = fails_every, 0, 0
        report[name] = one_round(llm) | {"num_saves": connector.num_saves, "num_loads": connector.num_loads}
        if manager == "kvplug":
            from vllm_kvplug.invariants import check_invariants

            check_invariants(kv_manager)
        assert kv_manager.usage == 0
        assert llm.reset_prefix_cache()
    return report


def prompts() -> list[str]:
    """Prompts of about 130 tokens that share about 50: those are in the prefix cache when the second one loads."""
    return [
        f"Remember these facts about {TOPICS[n % len(TOPICS)]}. " * 6 + f"Please tell me a fact about {subject}. " * 9
        for n, subject in enumerate(SUBJECTS)
    ]


def one_round(llm: Any) -> dict[str, Any]:
    """All prompts at once, greedily."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    before = external_hits(llm)
    outputs = llm.generate(prompts(), params, use_tqdm=False)
    return {
        "requests": [
            {
                "text": output.outputs[0].text,
                "finish_reason": output.outputs[0].finish_reason,
                "num_cached_tokens": output.num_cached_tokens,
            }
            for output in outputs
        ],
        "num_external_tokens": external_hits(llm) - before,
    }


def external_hits(llm: Any) -> int:
    """Tokens that came from the connector since the engine started."""
    return sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:external_prefix_cache_hits")


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    manager, model, output, policy, folder = sys.argv[1:]
    Path(output).write_text(json.dumps(run(manager, model, policy, folder)))
