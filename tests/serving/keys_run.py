"""One engine in this process with adapters and salts, one request at a time: JSON of what each hit and answered.

Run as a program, once for each manager: `python -m tests.serving.keys_run MANAGER MODEL OUTPUT`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.serving import lora_adapter

# Strong enough to change what a random model says.
ADAPTER_SCALE = 30.0
# 48 tokens in three full blocks, and the last one, which is always computed. The second conversation has other tokens.
PROMPTS = {name: list(range(first, first + 49)) for name, first in (("adapters", 1000), ("salts", 2000))}


def run(manager: str, model: str, folder: Path) -> dict[str, Any]:
    """The requests in their order; each `alone` is asked of an empty cache, to know the right answer."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.engine import core as core_module

    import vllm_kvplug

    vllm_kvplug.install()
    llm = LLM(
        model,
        kv_cache_manager=manager,
        enforce_eager=True,
        block_size=16,
        num_gpu_blocks_override=64,
        max_model_len=256,
        max_num_seqs=4,
        enable_lora=True,
        max_loras=2,
        max_lora_rank=lora_adapter.RANK,
    )
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    adapters = {
        number: LoRARequest(
            "S", number, lora_adapter.write_adapter(folder / f"{number}", model, number, scale=ADAPTER_SCALE)
        )
        for number in (1, 2)
    }

    def ask(prompt: str, adapter: int | None = None, salt: str | None = None, *, alone: bool = False) -> dict[str, Any]:
        if alone:
            assert llm.reset_prefix_cache()
        salted = {} if salt is None else {"cache_salt": salt}
        (output,) = llm.generate(
            [{"prompt_token_ids": PROMPTS[prompt], **salted}],
            params,
            use_tqdm=False,
            lora_request=None if adapter is None else adapters[adapter],
        )
        return {"num_cached_tokens": output.num_cached_tokens, "token_ids": list(output.outputs[0].token_ids)}

    engine_core = llm.llm_engine.engine_core.engine_core
    return {
        "hasher_module": engine_core.request_block_hasher.__module__,
        "name_is_vllms": core_module.get_request_block_hasher is kv_cache_utils.get_request_block_hasher,
        "second adapter alone": ask("adapters", adapter=2, alone=True),
        "first adapter alone": ask("adapters", adapter=1, alone=True),
        "second adapter": ask("adapters", adapter=2),
        "second adapter again": ask("adapters", adapter=2),
        "first adapter again": ask("adapters", adapter=1),
        "salt alone": ask("salts", salt="S", alone=True),
        "adapter alone": ask("salts", adapter=1, alone=True),
        "salt": ask("salts", salt="S"),
        "salt again": ask("salts", salt="S"),
        "other salt": ask("salts", salt="T"),
    }


if __name__ == "__main__":
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1")
    output_file = Path(sys.argv[3])
    output_file.write_text(json.dumps(run(sys.argv[1], sys.argv[2], output_file.parent)))
