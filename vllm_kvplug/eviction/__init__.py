"""Eviction policies: which free block is reused first."""

from __future__ import annotations

from vllm_kvplug.eviction.base import EvictionPolicy
from vllm_kvplug.eviction.registry import create, names

__all__ = ["EvictionPolicy", "create", "names"]
