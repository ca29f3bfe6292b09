"""One engine in this process with adapters and salts, one request at a time: JSON of what each hit and answered.

Run as a program, once for each manager: `python -m tests.serving.keys_run MANAGER MODEL OUTPUT`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

RANK = 8
# 48 tokens in three full blocks, and the last one, which is always computed. The second conversation has other tokens.
PROMPTS = {name: list(range(first, first + 49)) for name, first in (("adapters", 1000), ("salts", 2000))}


def write_adapter(folder: Path, model: str, seed: int) -> str:
    """A random adapter of the query and value projections, strong enough to change what a random model says."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((Path(model) / "config.json").read_text())
    hidden_size = config["hidden_size"]
    head_size = config.get("head_dim") or hidden_size // config["num_attention_heads"]
    num_outputs = {
        "q_proj": config["num_attention_heads"] * head_size,
        "v_proj": config["num_key_value_heads"] * head_size,
    }
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for module, num_rows in num_outputs.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{name}.lora_A.weight"] = torch.randn(RANK, hidden_size, generator=generator)
            weights[f"{name}.lora_B.weight"] = torch.randn(num_rows, RANK, generator=generator)
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(num_outputs), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return str(folder)


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
        max_lora_rank=RANK,
    )
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    adapters = {
        number: LoRARequest("S", number, write_adapter(folder / f"{number}", model, number)) for number in (1, 2)
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
