"""Engines on a patched vLLM, one after another in this process: `python -m tests.patches.engine_run MODEL JSON`.

JSON is a list of lists of options, as on a command line; for each a line `ANSWER {...}` says what was in force and what
came out. A fork's own code would register the manager `toy`, docs/examples' small one, and `made`, which makes it.
"""

from __future__ import annotations

import functools
import gc
import json
import sys
from typing import Any

ENGINE_OPTIONS = ["--load-format=dummy", "--skip-tokenizer-init", "--enforce-eager", "--block-size=16"]
ENGINE_OPTIONS += ["--max-model-len=256", "--num-gpu-blocks-override=64"]
PROMPT = list(range(2, 60))


def serve(model: str, options: list[str]) -> dict[str, Any]:
    """The same prompts twice, so that the second time they are hits."""
    from vllm import LLM, EngineArgs, SamplingParams
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    namespace = parser.parse_args([f"--model={model}", *ENGINE_OPTIONS, *options])
    try:
        llm = LLM(**vars(EngineArgs.from_cli_args(namespace)))
    except ValueError as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, detokenize=False)
    for _ in range(2):
        outputs = llm.generate([{"prompt_token_ids": PROMPT}] * 2, params, use_tqdm=False)
    core: Any = llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
    manager_cls = type(core.scheduler.kv_cache_manager)
    vllm_config = llm.llm_engine.vllm_config
    return {
        "manager": f"{manager_cls.__module__}:{manager_cls.__qualname__}",
        "hasher": core.request_block_hasher.__module__,
        "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
        "num_cached_tokens": [output.num_cached_tokens for output in outputs],
        "fields": [vllm_config.cache_config.kv_cache_manager, vllm_config.cache_config.kv_cache_manager_config],
        "metrics_info": sorted(vllm_config.cache_config.metrics_info()),
        "additional_config": vllm_config.additional_config,
        "compile_hash": vllm_config.cache_config.compute_hash(),
        "get_scheduler_cls": type(vllm_config.scheduler_config.get_scheduler_cls()).__name__,
    }


def run(model: str, runs: list[list[str]]) -> None:
    from small_manager import SmallManager  # found by PYTHONPATH
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.v1.core.kv_cache_manager_factory import KVCacheManagerFactory

    KVCacheManagerFactory.register("toy", "small_manager:SmallManager")
    KVCacheManagerFactory.register("made", functools.partial(SmallManager))
    for options in runs:
        print("ANSWER " + json.dumps(serve(model, options)), flush=True)
        gc.collect()
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    run(sys.argv[1], json.loads(sys.argv[2]))
