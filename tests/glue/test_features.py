"""What kvplug refuses by name before weights load, and what it must not refuse: vLLM's own configurations.

The models are a configuration each, without weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.glue.support import ENGINE_ARGS, model_folder, own_lines, run_python
from vllm_kvplug.cli.model import ensure_model
from vllm_kvplug.errors import UnsupportedError
from vllm_kvplug.vllm_glue.choice import CommandLineChoice

WINDOW = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 32}
MIXED = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "sliding_window": 32,
    "layer_types": ["sliding_attention", "full_attention"],
}
CHUNKED = {"architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text", "attention_chunk_size": 64}
MODELS = {
    "encoder-decoder models": {"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper"},
    "hybrid (Mamba or linear attention) models": {
        "architectures": ["BambaForCausalLM"],
        "model_type": "bamba",
        "attn_layer_indices": [1],
        "mamba_n_heads": 4,
        "mamba_d_head": 64,
    },
    "attention-free models": {"architectures": ["MambaForCausalLM"], "model_type": "mamba", "state_size": 16},
    "encoder-only models, which have no KV cache,": {"architectures": ["BertModel"], "model_type": "bert"},
}
# vLLM shards one KV head over ranks only with tensor parallelism of that size.
DECODE_RANKS = {"decode_context_parallel_size": 2, "tensor_parallel_size": 2}


def refusal_of(make_config: Any, *args: Any, **kwargs: Any) -> str:
    """The one line; what vLLM itself refuses is no refusal of ours."""
    with pytest.raises(UnsupportedError) as refusal:
        make_config(*args, kv_cache_manager="kvplug", **kwargs)
    text = str(refusal.value)
    assert "; works instead: " in text
    assert "--kv-cache-manager upstream" in text
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("flags", "feature"),
    [
        (DECODE_RANKS, "decode context parallelism yet (--decode-context-parallel-size 2)"),
        ({"prefill_context_parallel_size": 2}, "prefill context parallelism yet (--prefill-context-parallel-size 2)"),
        ({"kv_cache_metrics": True}, "KV cache residency metrics yet (--kv-cache-metrics)"),
        ({"kv_offloading_size": 1.0}, "KV offloading yet (--kv-offloading-size)"),
        (
            {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
            "KV connectors yet (--kv-transfer-config)",
        ),
    ],
)
def test_flags(make_config: Any, flags: dict[str, Any], feature: str) -> None:
    if isinstance(transfer := flags.get("kv_transfer_config"), dict):
        from vllm.config import KVTransferConfig

        flags = {"kv_transfer_config": KVTransferConfig(**transfer)}
    assert refusal_of(make_config, **flags).startswith(f"kvplug does not support {feature};")


# vLLM inspects a model's class in a process of its own, 13 s the first time on a machine.
@pytest.mark.slow
@pytest.mark.parametrize("feature", MODELS)
def test_models(make_config: Any, feature: str, tmp_path: Path) -> None:
    path = model_folder(tmp_path / "model", **MODELS[feature])
    expected = (
        f"kvplug does not support {feature} yet (model {path}, architecture {MODELS[feature]['architectures'][0]});"
    )
    assert refusal_of(make_config, path).startswith(expected)


@pytest.mark.slow
def test_a_window_in_every_layer(make_config: Any, tmp_path: Path) -> None:
    window = model_folder(tmp_path / "window", **WINDOW)
    text = refusal_of(make_config, window, max_model_len=32)
    assert "sliding window attention yet " in text
    assert "sliding_window 32); works instead: --disable-sliding-window (at most 32 tokens a request)" in text
    make_config(window, kv_cache_manager="kvplug", disable_sliding_window=True, max_model_len=32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "feature"),
    [
        (MIXED, "layers of several attention types yet "),
        (CHUNKED, "chunked local attention yet "),
    ],
)
def test_a_window_in_some_layers(make_config: Any, model: dict[str, Any], feature: str, tmp_path: Path) -> None:
    path = model_folder(tmp_path / "model", **model)
    text = refusal_of(make_config, path)
    assert text.startswith("kvplug does not support " + feature)
    assert "works instead: --disable-hybrid-kv-cache-manager (every layer keeps its whole KV cache)" in text
    make_config(path, kv_cache_manager="kvplug", disable_hybrid_kv_cache_manager=True)


def test_a_third_partys_manager_is_not_ours_to_refuse(make_config: Any) -> None:
    make_config(kv_cache_manager="tests.glue.managers:Plain", kv_cache_metrics=True)


def test_on_the_command_line_it_is_one_line_and_status_1(tiny_model: str) -> None:
    from vllm.engine.arg_utils import EngineArgs

    choice = CommandLineChoice(name="kvplug", config={})
    engine_args = EngineArgs(
        model=tiny_model, kv_cache_metrics=True, additional_config={"kv_cache_manager": choice}, **ENGINE_ARGS
    )
    with pytest.raises(SystemExit) as ended:
        engine_args.create_engine_config()
    # A string as the code: Python prints it on stderr and ends with status 1.
    assert isinstance(ended.value.code, str)
    assert ended.value.code.startswith(
        "error: kvplug does not support KV cache residency metrics yet (--kv-cache-metrics)"
    )
    assert "\n" not in ended.value.code


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options", "feature"),
    [
        ("tiny-qwen2", ["--kv-cache-metrics"], "KV cache residency metrics yet (--kv-cache-metrics)"),
        ("tiny-hybrid", [], "layers of several attention types yet "),
    ],
)
def test_a_server_that_is_refused_ends_before_it_loads_weights(model: str, options: list[str], feature: str) -> None:
    path = ensure_model(model)
    arguments = ["serve", path, "--kv-cache-manager", "kvplug", "--enforce-eager", "--block-size", "16", *options]
    process = run_python("-m", "vllm.entrypoints.cli.main", *arguments)
    assert process.returncode == 1
    (line,) = own_lines(process.stderr)
    # vLLM puts the process's name in front.
    assert f"error: kvplug does not support {feature}" in line
    for unwanted in ("Traceback", "Initializing a V1 LLM engine", "Starting to load model"):
        assert unwanted not in process.stdout
