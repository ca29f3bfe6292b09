"""On /metrics: what the engines' shadows have compared and found, summed over the engines.

Gauges, since the front end sets what the engines have counted. No name contains "vllm": vLLM unregisters such ones.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

_PREFIX = "kvplug_shadow_"
_DIVERGED = ("method", "reason", "pools")
# By name after the prefix: what it says, and its labels.
SERIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "info": ("Which manager serves, which follows, and the level of comparing.", ("serving", "follower", "level")),
    "engines": ("Engines by what is compared now: exact, decision or nothing.", ("compares",)),
    "calls": ("Calls of the managers: compared, or skipped because the follower had decided otherwise.", ("outcome",)),
    "requests": ("Requests: followed, and those of them of which a call diverged.", ("outcome",)),
    "diverged_requests": ("Requests that diverged; pools: whether all calls before were equal.", _DIVERGED),
    "diverged_calls": ("Calls of no request that diverged; pools: whether all calls before were equal.", _DIVERGED),
    "overhead_seconds": ("Time spent on the follower and on comparing.", ()),
}
# What an engine compares; each value has its series from the start.
_COMPARES = ("exact", "decision", "nothing")


@cache
def _gauge(name: str) -> Any:
    # Imported late: prometheus_client decides between one process and several when it is imported.
    from prometheus_client import Gauge

    text, labels = SERIES[name]
    return Gauge(_PREFIX + name, text, labelnames=labels, multiprocess_mode="mostrecent")


def publish(answers: Sequence[Mapping[str, str]]) -> None:
    """Set the series to what these engines answered to `kvplug_report`."""
    reports = [json.loads(answer["shadow"]) for answer in answers if "shadow" in answer]
    if not reports:
        return
    _gauge("info").labels(*(reports[0][name] for name in SERIES["info"][1])).set(1)
    _publish_engines([report["compares"] for report in reports])
    for outcome in ("compared", "skipped"):
        _gauge("calls").labels(outcome).set(sum(report[f"num_calls_{outcome}"] for report in reports))
    for outcome in ("followed", "diverged"):
        _gauge("requests").labels(outcome).set(sum(report[f"num_requests_{outcome}"] for report in reports))
    _gauge("overhead_seconds").set(sum(report["overhead_s"] for report in reports))
    for name in ("diverged_requests", "diverged_calls"):
        counts: Counter[tuple[str, ...]] = Counter()
        for report in reports:
            for *labels, count in report[name]:
                counts[tuple(labels)] += count
        for labels, count in counts.items():
            _gauge(name).labels(*labels).set(count)


def publish_unknown() -> None:
    """The engines do not answer: none is known to compare anything. What was counted stays."""
    _publish_engines([])


def _publish_engines(compared: Sequence[str]) -> None:
    for compares in _COMPARES:
        _gauge("engines").labels(compares).set(sum(one == compares for one in compared))
