"""A random LoRA adapter for a small model, in the format of peft: its answers differ from the model's own."""

from __future__ import annotations

import json
from pathlib import Path

RANK = 8


def write_adapter(folder: Path, model_path: str, seed: int, *, scale: float = 1.0) -> str:
    """Write an adapter of the query and value projections of every layer into a new folder; answers the folder.

    `scale` multiplies what the adapter adds.
    """
    import torch
    from safetensors.torch import save_file

    config = json.loads((Path(model_path) / "config.json").read_text())
    hidden_size = config["hidden_size"]
    head_size = config.get("head_dim") or hidden_size // config["num_attention_heads"]
    num_rows = {
        "q_proj": config["num_attention_heads"] * head_size,
        "v_proj": config["num_key_value_heads"] * head_size,
    }
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for module, num_module_rows in num_rows.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            down = torch.randn(RANK, hidden_size, generator=generator) / hidden_size**0.5
            up = torch.randn(num_module_rows, RANK, generator=generator) / RANK**0.5
            weights[f"{name}.lora_A.weight"] = down.to(torch.bfloat16)
            weights[f"{name}.lora_B.weight"] = (up * scale).to(torch.bfloat16)
    folder.mkdir(parents=True)
    save_file(weights, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(num_rows), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return str(folder)
