"""Managers for a replay: constructed as a trace's header says, without a model or a server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm.v1 import kv_cache_interface
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

from vllm_kvplug.errors import TraceError
from vllm_kvplug.trace.format import Header
from vllm_kvplug.vllm_glue import registry


def kv_cache_config_of(header: Header, num_blocks: int | None = None) -> KVCacheConfig:
    """vLLM's configuration of the trace, with as many blocks, the null block included, as recorded or as given.

    Raises:
        TraceError: it has a spec that this vLLM does not know.
    """
    plain = header.kv_cache_config
    try:
        groups = [
            KVCacheGroupSpec([f"group{i}.layer{j}" for j in range(group["num_layers"])], _spec_of(group))
            for i, group in enumerate(plain["groups"])
        ]
        return KVCacheConfig(
            num_blocks=plain["num_blocks"] if num_blocks is None else num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=groups,
        )
    except (KeyError, TypeError) as error:
        raise TraceError(
            f"trace: expected a header whose kv_cache_config this vLLM can build, found {type(error).__name__}: {error}"
        ) from None


def _spec_of(group: Mapping[str, Any]) -> KVCacheSpec:
    name = group["spec"]
    spec_cls = getattr(kv_cache_interface, name, None)
    if not (isinstance(spec_cls, type) and issubclass(spec_cls, KVCacheSpec)):
        raise TraceError(f"trace: expected KV cache groups of vLLM's specs, found one of {name}")
    return spec_cls(**{key: _value_of(value) for key, value in group["fields"].items()})


def _value_of(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_value_of(item) for item in value)
    if isinstance(value, str) and value.startswith("torch."):
        return getattr(torch, value.removeprefix("torch."), value)
    return value


def build(name: str, config: Mapping[str, Any], header: Header, num_blocks: int | None = None) -> Any:
    """A fresh manager like the recorded one, of another name.

    Raises:
        SettingsError, ContractError, UnsupportedError: it cannot be constructed so.
        TraceError: see `kv_cache_config_of`.
    """
    registry.validate(name, config)
    keywords = {
        "enable_caching": True,
        "use_eagle": False,
        "log_stats": False,
        "enable_kv_cache_events": False,
        "dcp_world_size": 1,
        "pcp_world_size": 1,
        **header.constructor,
    }
    missing = [key for key in ("max_model_len", "hash_block_size") if key not in keywords]
    if missing:
        raise TraceError(f"trace: expected {missing[0]} in the header's constructor, found none")
    return registry.factory(name, config)(
        kv_cache_config=kv_cache_config_of(header, num_blocks), metrics_collector=None, **keywords
    )


def is_alike(name: str, config: Mapping[str, Any], header: Header) -> bool:
    """Whether this choice answers as the recorded manager did: it has its policy, or is its class with its settings.

    Raises:
        SettingsError: an unknown name, or wrong settings.
    """
    recorded = header.manager.get("likeness")
    if recorded is None:
        try:
            recorded = registry.likeness_of(header.manager["name"], header.manager.get("config", {}), header.trace_id)
        except Exception:  # another package's, which is not installed here
            return False
    return registry.likeness_of(name, config, header.trace_id) == recorded
