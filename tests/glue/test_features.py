"""What kvplug refuses by name before weights load, and what it must not refuse."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.glue.support import ENGINE_ARGS, model_folder
from vllm_kvplug.errors import UnsupportedError
from vllm_kvplug.vllm_glue import features
from vllm_kvplug.vllm_glue.choice import CommandLineChoice

WINDOW = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 32}
MIXED = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "sliding_window": 32,
    "layer_types": ["sliding_attention", "full_attention"],
}


def config(**changes: Any) -> Any:
    """A VllmConfig that kvplug serves, as far as the check reads it, with changes by dotted name."""
    model = SimpleNamespace(
        model="some/model",
        architecture="Qwen2ForCausalLM",
        is_encoder_decoder=False,
        is_hybrid=False,
        is_attention_free=False,
        attn_type="decoder",
        attention_chunk_size=None,
        hf_text_config=SimpleNamespace(layer_types=None),
    )
    model.hf_text_config.get_text_config = lambda: model.hf_text_config
    made = SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(kv_offloading_size=None, sliding_window=None),
        kv_transfer_config=None,
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        observability_config=SimpleNamespace(kv_cache_metrics=False),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
    )
    for path, value in changes.items():
        *owners, name = path.split("__")
        owner: Any = made
        for attribute in owners:
            owner = getattr(owner, attribute)
        assert hasattr(owner, name)
        setattr(owner, name, value)
    return made


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"cache_config__kv_offloading_size": 1.0, "kv_transfer_config": object()},
            "KV offloading yet (--kv-offloading-size)",
        ),
        ({"kv_transfer_config": object()}, "KV connectors yet (--kv-transfer-config)"),
        (
            {"parallel_config__decode_context_parallel_size": 2},
            "decode context parallelism yet (--decode-context-parallel-size 2)",
        ),
        (
            {"parallel_config__prefill_context_parallel_size": 2},
            "prefill context parallelism yet (--prefill-context-parallel-size 2)",
        ),
        ({"observability_config__kv_cache_metrics": True}, "KV cache residency metrics yet (--kv-cache-metrics)"),
        (
            {"model_config__is_encoder_decoder": True},
            "encoder-decoder models yet (model some/model, architecture Qwen2ForCausalLM)",
        ),
        ({"model_config__is_hybrid": True}, "hybrid (Mamba or linear attention) models yet"),
        ({"model_config__is_attention_free": True}, "attention-free models yet"),
        ({"model_config__attn_type": "encoder_only"}, "encoder-only models"),
        ({"model_config__attention_chunk_size": 64}, "chunked local attention yet"),
        ({"cache_config__sliding_window": 64}, "sliding window attention yet"),
        (
            {"model_config__hf_text_config__layer_types": ["sliding_attention", "full_attention"]},
            "layers of several attention types yet",
        ),
    ],
)
def test_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError) as refusal:
        features.refuse_unsupported(config(**changes))
    text = str(refusal.value)
    assert text.startswith("kvplug does not support " + message)
    assert "; works instead: " in text
    assert "--kv-cache-manager upstream" in text
    assert "\n" not in text


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model_config": None},
        {
            "scheduler_config__disable_hybrid_kv_cache_manager": True,
            "model_config__hf_text_config__layer_types": ["sliding_attention", "full_attention"],
        },
        {"scheduler_config__disable_hybrid_kv_cache_manager": True, "model_config__attention_chunk_size": 64},
    ],
)
def test_not_refused(changes: dict[str, Any]) -> None:
    features.refuse_unsupported(config(**changes))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"kv_cache_metrics": True}, "--kv-cache-metrics"),
        ({"kv_offloading_size": 1.0}, "--kv-offloading-size"),
        ({"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}}, "--kv-transfer-config"),
    ],
)
def test_real_flags(make_config: Any, flags: dict[str, Any], message: str) -> None:
    if isinstance(transfer := flags.get("kv_transfer_config"), dict):
        from vllm.config import KVTransferConfig

        flags = {"kv_transfer_config": KVTransferConfig(**transfer)}
    with pytest.raises(UnsupportedError, match=message):
        make_config(kv_cache_manager="kvplug", **flags)


def test_a_third_partys_manager_is_not_ours_to_refuse(make_config: Any) -> None:
    make_config(kv_cache_manager="tests.glue.managers:Plain", kv_cache_metrics=True)


@pytest.mark.slow
def test_real_models(make_config: Any, tmp_path: Path) -> None:
    window, mixed = model_folder(tmp_path / "window", **WINDOW), model_folder(tmp_path / "mixed", **MIXED)
    with pytest.raises(
        UnsupportedError, match=r"sliding window attention yet .*sliding_window 32.*--disable-sliding-window"
    ):
        make_config(window, kv_cache_manager="kvplug", max_model_len=32)
    make_config(window, kv_cache_manager="kvplug", disable_sliding_window=True, max_model_len=32)
    with pytest.raises(UnsupportedError, match=r"several attention types yet .*--disable-hybrid-kv-cache-manager"):
        make_config(mixed, kv_cache_manager="kvplug")
    make_config(mixed, kv_cache_manager="kvplug", disable_hybrid_kv_cache_manager=True)


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
