"""Small parts that several test files need: configurations without weights, and one-line checks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_kvplug.vllm_glue import patched_tree, patching
from vllm_kvplug.vllm_glue.choice import ManagerChoice

ROOT = Path(__file__).parents[2]
# Whether these tests run on a vLLM with our fork patch: `python -m tests.patches.tree` makes one.
IS_PATCHED = patched_tree.is_there()
patched_only = pytest.mark.skipif(not IS_PATCHED, reason="of a patched vLLM's registry and fields")
seams_only = pytest.mark.skipif(IS_PATCHED, reason="of the seams, which are not bound in a patched vLLM")

QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 128,
    "head_dim": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
    "eos_token_id": 1,
    "tie_word_embeddings": True,
}
# Engines of these tests: random weights from the configuration alone, no tokenizer, a pool that is ready at once.
ENGINE_ARGS: dict[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "block_size": 16,
    "max_model_len": 256,
    "num_gpu_blocks_override": 64,
}

# Lines that importing torch and vLLM write themselves: the machine's CUDA, and docstrings with stray backslashes. Below
# the latter stands the line of source, indented.
_IMPORT_NOISE = re.compile(r"[WI]\d{4} .*|(?P<warning>.*: SyntaxWarning: .*)")


def model_folder(folder: Path, **changes: Any) -> str:
    """A model as far as its configuration goes: tiny Qwen2 with `changes`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(QWEN2 | changes))
    return str(folder)


def with_choice(name: str | None, config: dict[str, Any] | None = None) -> Any:
    """As much of a VllmConfig as carries a choice; None: vLLM's own manager."""
    extra = {} if name is None else {"kv_cache_manager": ManagerChoice(name=name, config=config or {})}
    return SimpleNamespace(additional_config=extra)


def fake_engine_core(vllm_config: Any, manager: Any, kv_cache_config: Any) -> Any:
    """As much of an EngineCore as is asked which manager is in force."""
    scheduler = SimpleNamespace(kv_cache_manager=manager, kv_cache_config=kv_cache_config)
    return SimpleNamespace(vllm_config=vllm_config, scheduler=scheduler)


def run_python(
    *args: str, timeout_s: float = 300, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run this interpreter in the repository's root."""
    return subprocess.run(
        [sys.executable, *args], cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def own_lines(stderr: str) -> list[str]:
    """The lines of a process's stderr that its imports did not write."""
    lines: list[str] = []
    source_follows = False
    for line in stderr.splitlines():
        noise = _IMPORT_NOISE.fullmatch(line)
        if noise is None and not (source_follows and line.startswith("  ")):
            lines.append(line)
        source_follows = noise is not None and noise["warning"] is not None
    return lines


def activated_hook() -> tuple[type, str]:
    """A hook that is in place in a process where a manager was chosen, and in no other."""
    from vllm.config.scheduler import SchedulerConfig
    from vllm.v1.core.sched.scheduler import Scheduler

    return (Scheduler, "__init__") if IS_PATCHED else (SchedulerConfig, "get_scheduler_cls")


def is_hooked(owner: type, name: str) -> bool:
    """Whether `wrap_method` has been here (also below another plugin's wrapper made with functools.wraps)."""
    return getattr(getattr(owner, name), patching.HOOK_MARK, False)
