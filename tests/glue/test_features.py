"""What kvplug refuses by name before weights load, and what it must not refuse: vLLM's own configurations.

The models are a configuration each, without weights.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.glue.support import ENGINE_ARGS, model_folder, own_lines, run_python
from vllm_kvplug.errors import UnsupportedError
from vllm_kvplug.vllm_glue.choice import CommandLineChoice
from vllm_kvplug.vllm_glue.features import refuse_unsupported

WINDOW = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 32}
MIXED = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "sliding_window": 32,
    "layer_types": ["sliding_attention", "full_attention"],
}
CHUNKED = {"architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text", "attention_chunk_size": 64}
ENCODER_DECODER = {"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper"}
BAMBA = {
    "architectures": ["BambaForCausalLM"],
    "model_type": "bamba",
    "attn_layer_indices": [1],
    "mamba_n_heads": 4,
    "mamba_d_head": 64,
}
MAMBA = {"architectures": ["MambaForCausalLM"], "model_type": "mamba", "state_size": 16}
BERT = {"architectures": ["BertModel"], "model_type": "bert"}
# vLLM shards one KV head over ranks only with tensor parallelism of that size.
DECODE_RANKS = {"decode_context_parallel_size": 2, "tensor_parallel_size": 2}
CONNECTOR = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}


def refusal_of(make_config: Any, *args: Any, **kwargs: Any) -> str:
    """The one line; what vLLM itself refuses is no refusal of ours."""
    with pytest.raises(UnsupportedError) as refusal:
        make_config(*args, kv_cache_manager="kvplug", **kwargs)
    text = str(refusal.value)
    assert text.startswith("kvplug does not support prefix caching with ")
    assert "; works instead: --" in text
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    "flags",
    [
        DECODE_RANKS,
        {"prefill_context_parallel_size": 2},
        {"kv_cache_metrics": True},
        {"kv_transfer_config": CONNECTOR},
    ],
)
def test_flags_that_are_served(make_config: Any, flags: dict[str, Any]) -> None:
    if "kv_transfer_config" in flags:
        from vllm.config import KVTransferConfig

        flags = {"kv_transfer_config": KVTransferConfig(**CONNECTOR)}
    make_config(kv_cache_manager="kvplug", **flags)


# vLLM inspects a model's class in a process of its own, 13 s the first time on a machine.
@pytest.mark.slow
@pytest.mark.parametrize("model", [WINDOW, MIXED, CHUNKED, BAMBA, MAMBA, BERT], ids=lambda model: model["model_type"])
def test_models_that_are_served(make_config: Any, model: dict[str, Any], tmp_path: Path) -> None:
    make_config(model_folder(tmp_path / "model", **model), kv_cache_manager="kvplug")


@pytest.mark.slow
def test_an_encoder_decoder_model(make_config: Any, tmp_path: Path) -> None:
    path = model_folder(tmp_path / "model", **ENCODER_DECODER)
    text = refusal_of(make_config, path, enable_prefix_caching=True)
    assert text == (
        "kvplug does not support prefix caching with cross-attention "
        f"(model {path}, architecture WhisperForConditionalGeneration); works instead: --no-enable-prefix-caching"
    )
    # vLLM's default for such a model.
    make_config(path, kv_cache_manager="kvplug")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layers", "flags"),
    [
        (WINDOW, "sliding window attention", {}),
        (MIXED, "sliding window attention", {}),
        (BAMBA, "Mamba or linear attention layers", {"enable_prefix_caching": True}),
    ],
    ids=["window", "mixed", "hybrid"],
)
def test_context_parallelism(
    make_config: Any, model: dict[str, Any], layers: str, flags: dict[str, Any], tmp_path: Path
) -> None:
    path = model_folder(tmp_path / "model", **model)
    text = refusal_of(make_config, path, **DECODE_RANKS, **flags)
    assert f"decode context parallelism over {layers} " in text
    assert text.endswith("--decode-context-parallel-size 2); works instead: --decode-context-parallel-size 1")
    text = refusal_of(make_config, path, prefill_context_parallel_size=2, **flags)
    assert f"prefill context parallelism over {layers} " in text
    make_config(path, kv_cache_manager="kvplug", **DECODE_RANKS, enable_prefix_caching=False)


@pytest.mark.slow
def test_context_parallelism_over_layers_that_are_kept_as_one_group(make_config: Any, tmp_path: Path) -> None:
    path = model_folder(tmp_path / "model", **MIXED)
    make_config(path, kv_cache_manager="kvplug", **DECODE_RANKS, disable_hybrid_kv_cache_manager=True)


def refused_model(folder: Path) -> str:
    return model_folder(folder / "model", **MIXED)


@pytest.mark.slow
def test_a_third_partys_manager_is_not_ours_to_refuse(make_config: Any, tmp_path: Path) -> None:
    make_config(refused_model(tmp_path), kv_cache_manager="tests.glue.managers:Plain", **DECODE_RANKS)


@pytest.mark.slow
def test_on_the_command_line_it_is_one_line_and_status_1(tmp_path: Path) -> None:
    from vllm.engine.arg_utils import EngineArgs

    choice = CommandLineChoice(name="kvplug", config={})
    engine_args = EngineArgs(
        model=refused_model(tmp_path), additional_config={"kv_cache_manager": choice}, **DECODE_RANKS, **ENGINE_ARGS
    )
    with pytest.raises(SystemExit) as ended:
        engine_args.create_engine_config()
    # A string as the code: Python prints it on stderr and ends with status 1.
    assert isinstance(ended.value.code, str)
    assert ended.value.code.startswith("error: kvplug does not support prefix caching with decode context parallelism")
    assert "\n" not in ended.value.code


@pytest.mark.slow
def test_a_server_that_is_refused_ends_before_it_loads_weights(tmp_path: Path) -> None:
    options = ["--kv-cache-manager", "kvplug", "--enforce-eager", "--block-size", "16", "--skip-tokenizer-init"]
    ranks = ["--decode-context-parallel-size", "2", "--tensor-parallel-size", "2"]
    process = run_python("-m", "vllm.entrypoints.cli.main", "serve", refused_model(tmp_path), *options, *ranks)
    assert process.returncode == 1
    (line,) = own_lines(process.stderr)
    # vLLM puts the process's name in front.
    assert "error: kvplug does not support prefix caching with decode context parallelism over sliding window" in line
    for unwanted in ("Traceback", "Initializing a V1 LLM engine", "Starting to load model"):
        assert unwanted not in process.stdout


@pytest.mark.parametrize("is_one_of_several", [False, True])
def test_a_connector_that_works_on_vllms_own_pool_is_refused(is_one_of_several: bool) -> None:
    """vLLM has it from 0.19 on; with prefix caching or without."""
    name = "SimpleCPUOffloadConnector"
    transfer = SimpleNamespace(kv_connector=name, kv_connector_extra_config={})
    if is_one_of_several:
        extra = {"connectors": [{"kv_connector": "ExampleConnector"}, {"kv_connector": name}]}
        transfer = SimpleNamespace(kv_connector="MultiConnector", kv_connector_extra_config=extra)
    config = SimpleNamespace(kv_transfer_config=transfer, model_config=None)
    with pytest.raises(
        UnsupportedError, match=rf"not support {name} \(--kv-transfer-config\), .*works instead: OffloadingConnector"
    ):
        refuse_unsupported(config)
    config.cache_config = SimpleNamespace(kv_offloading_size=1.0)
    with pytest.raises(UnsupportedError, match=rf"not support {name} \(VLLM_USE_SIMPLE_KV_OFFLOAD\), "):
        refuse_unsupported(config)
