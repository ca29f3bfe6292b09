"""A running server's /metrics, read by the commands that start one."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import httpx

from vllm_kvplug.errors import KVPlugError

INFO = "kvplug_info"
_TIMEOUT_S = 30.0


class MetricsError(KVPlugError, RuntimeError):
    """/metrics could not be read, or does not say what was expected."""


def read_samples(url: str, timeout_s: float = _TIMEOUT_S, *, names: Collection[str] | None = None) -> list[Any]:
    """The samples of `url`/metrics: each has `name`, `labels`, `value`.

    Args:
        names: only samples whose names begin so. Parsing all lines takes a tenth of a second, which a server that is
            measured on the same cores does not have.

    Raises:
        MetricsError: no answer, or none that can be read.
    """
    # vLLM brings this parser; the package itself does not need it.
    from prometheus_client.parser import text_string_to_metric_families

    try:
        response = httpx.get(f"{url}/metrics", timeout=timeout_s, trust_env=False)
        response.raise_for_status()
        text = response.text
        if names is not None:
            beginnings = tuple(names)
            text = "".join(line for line in text.splitlines(keepends=True) if line.startswith(beginnings))
        return [s for family in text_string_to_metric_families(text) for s in family.samples]
    except (httpx.HTTPError, ValueError) as error:
        raise MetricsError(f"{url}/metrics: expected metrics, found {str(error) or type(error).__name__}") from None


def total(samples: Iterable[Any], name: str) -> float:
    """The sum of all series of this name (several engines, several reasons); 0 where there is none."""
    return sum(sample.value for sample in samples if sample.name == name)


def manager_in_force(samples: Iterable[Any]) -> dict[str, str]:
    """The labels of the server's `kvplug_info`; empty where vLLM's own manager serves untouched.

    Raises:
        MetricsError: its engines differ.
    """
    found = [dict(sample.labels) for sample in samples if sample.name == INFO and sample.value == 1]
    names = sorted({labels.get("manager", "?") for labels in found})
    if len(names) > 1:
        raise MetricsError(f"expected one KV cache manager in force, found {', '.join(names)}")
    return found[0] if found else {}
