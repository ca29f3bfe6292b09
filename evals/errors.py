"""Errors of the A/B tools."""

from __future__ import annotations

from vllm_kvplug.errors import KVPlugError, UsageError


class EvalError(KVPlugError, RuntimeError):
    """A comparison could not be made."""


class EvalUsageError(UsageError):
    """What was asked for cannot be compared: names the option, the expected and the found value."""
