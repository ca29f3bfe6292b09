"""Users' own scheduler classes, as `--scheduler-cls tests.glue.schedulers.NAME`."""

from __future__ import annotations

from typing import Any

from vllm.v1.core import kv_cache_manager as upstream
from vllm.v1.core.sched.scheduler import Scheduler


class Inherited(Scheduler):
    """Leaves the construction of the manager to vLLM's scheduler."""


class Ignoring(Scheduler):
    """Puts vLLM's own manager back, behind the back of whoever chose another."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kv_cache_manager = upstream.KVCacheManager(
            kv_cache_config=self.kv_cache_config,
            max_model_len=self.max_model_len,
            hash_block_size=self.block_size,
            enable_caching=True,
        )


class Failing(Scheduler):
    """Its construction fails after the manager's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        raise RuntimeError("no scheduler today")
