"""The setting `trace`: a recorder on the manager that a scheduler has just constructed."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Mapping
from typing import Any

import vllm_kvplug
from vllm_kvplug.redaction import redacted
from vllm_kvplug.settings import TraceSettings
from vllm_kvplug.trace.format import Header
from vllm_kvplug.trace.recorder import Recorder
from vllm_kvplug.trace.writer import TraceWriter
from vllm_kvplug.vllm_glue import contract, registry
from vllm_kvplug.vllm_glue.log import logger
from vllm_kvplug.vllm_glue.version import vllm_version

_MIB = 1 << 20


def start(
    manager: Any,
    name: str,
    config: Mapping[str, Any],
    settings: TraceSettings,
    constructor: Mapping[str, Any],
    *,
    engine_index: int = 0,
) -> Recorder:
    """Record the manager from now on.

    Args:
        manager: just constructed; nothing was asked of it.
        name, config: of the choice, the config without the trace's settings.
        settings: of the trace, with a path.
        constructor: the keywords that the manager was constructed with.
        engine_index: which of several engines (data parallel); all but the first have a file of their own.

    Raises:
        TraceError: the file cannot be written, or the manager cannot be watched.
    """
    assert settings.trace is not None
    path = os.path.abspath(settings.trace) + (f".engine{engine_index}" if engine_index else "")
    header = header_of(type(manager), name, config, constructor, has_token_ids=settings.trace_tokens)
    writer = TraceWriter(path, header, max_bytes=settings.trace_max_mib * _MIB)
    try:
        recorder = Recorder(manager, writer, reads_tokens=settings.trace_tokens)
    except BaseException:
        writer.close()
        raise
    logger.info("KV cache trace: every call of kv_cache_manager %s is recorded to %s", name, path)
    return recorder


def header_of(
    manager_cls: type,
    name: str,
    config: Mapping[str, Any],
    constructor: Mapping[str, Any],
    *,
    has_token_ids: bool = False,
) -> Header:
    """The header of a trace of this manager: all that is needed to construct another one like it."""
    plain = {
        keyword: constructor[keyword]
        for keyword in contract.CONSTRUCTOR_KEYWORDS
        if isinstance(constructor.get(keyword), (bool, int, float, str))
    }
    trace_id = os.urandom(8).hex()
    return Header(
        trace_id=trace_id,
        versions={
            "vllm_kvplug": vllm_kvplug.__version__,
            "vllm": str(vllm_version()),
            "python": platform.python_version(),
        },
        manager={
            "name": name,
            "class": f"{manager_cls.__module__}:{manager_cls.__qualname__}",
            "config": redacted(config),
            # Of the settings as they are: what is left out of them must not decide whether answers are compared.
            "likeness": registry.likeness_of(name, config, trace_id),
        },
        constructor=plain,
        kv_cache_config=plain_kv_cache_config(constructor["kv_cache_config"]),
        has_token_ids=has_token_ids,
    )


def plain_kv_cache_config(kv_cache_config: Any) -> dict[str, Any]:
    """vLLM's KVCacheConfig in plain values, without layers' names and tensors, which no manager reads."""
    return {
        "num_blocks": kv_cache_config.num_blocks,
        "groups": [
            {
                "spec": type(group.kv_cache_spec).__name__,
                "fields": {
                    one.name: _plain(getattr(group.kv_cache_spec, one.name))
                    for one in dataclasses.fields(group.kv_cache_spec)
                },
                "num_layers": len(group.layer_names),
            }
            for group in kv_cache_config.kv_cache_groups
        ],
    }


def _plain(value: Any) -> Any:
    """Tuples become lists; what JSON has not (torch's types) becomes its text."""
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
