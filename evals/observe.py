"""What a server does while it is measured: its counters before and after, and samples between.

Hits are the prompt tokens of finished requests less those that they computed, by the same two histograms on either
side. vLLM's own prefix counters are kept beside them: upstream's count a refused request again at each attempt.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from vllm_kvplug.cli.console import say
from vllm_kvplug.cli.server_metrics import MetricsError, read_samples, total
from vllm_kvplug.evals.errors import EvalError
from vllm_kvplug.evals.results import CacheUse, UsageSample

SAMPLE_PERIOD_S = 1.0
# Reports stay small: a longer stretch keeps every second, fourth, ... sample.
MAX_SAMPLES = 1000

# Field of Counters -> vLLM's name of it, summed over engines and labels.
_COUNTS = {
    "num_finished_requests": "request_success_total",
    "num_prompt_tokens": "request_prompt_tokens_sum",
    "num_computed_prompt_tokens": "request_prefill_kv_computed_tokens_sum",
    "num_output_tokens": "request_generation_tokens_sum",
    "num_preemptions": "num_preemptions_total",
    "num_counted_lookup_tokens": "prefix_cache_queries_total",
    "num_counted_lookup_hit_tokens": "prefix_cache_hits_total",
    "num_running": "num_requests_running",
    "num_waiting": "num_requests_waiting",
}
_USAGE = "kv_cache_usage_perc"


@dataclass(frozen=True)
class Counters:
    """A server's counts since it started, and what it holds now."""

    num_finished_requests: int
    num_prompt_tokens: int
    num_computed_prompt_tokens: int
    num_output_tokens: int
    num_preemptions: int
    num_counted_lookup_tokens: int
    num_counted_lookup_hit_tokens: int
    usage: float
    num_running: int
    num_waiting: int

    @classmethod
    def read(cls, url: str) -> Counters:
        """As the server tells them now."""
        return cls.of_samples(read_samples(url, names=[f"vllm:{name}" for name in (*_COUNTS.values(), _USAGE)]))

    @classmethod
    def of_samples(cls, samples: list[Any]) -> Counters:
        """From a scraped page; several engines are summed, and the fullest one's usage counts."""
        counts = {field: int(total(samples, f"vllm:{name}")) for field, name in _COUNTS.items()}
        usages = (sample.value for sample in samples if sample.name == f"vllm:{_USAGE}")
        return cls(usage=max(usages, default=0.0), **counts)

    @property
    def num_hit_tokens(self) -> int:
        """Prompt tokens of finished requests that came from the cache."""
        return self.num_prompt_tokens - self.num_computed_prompt_tokens


class Observation:
    """A context in which a server is measured; `cache_use()` afterwards says what it did.

    Args:
        url: the server's.
        engine_pids: processes whose CPU seconds are counted; none: not counted.
        label: whom errors are about.

    Raises:
        MetricsError: on entry or exit, the counters could not be read.
        EvalError: likewise, a process of `engine_pids` is gone.
    """

    def __init__(
        self,
        url: str,
        engine_pids: Sequence[int] = (),
        sample_period_s: float = SAMPLE_PERIOD_S,
        label: str = "the server",
    ) -> None:
        self._url = url
        self._label = label
        self._num_missed_samples = 0
        self._engine_pids = list(engine_pids)
        self._sample_period_s = sample_period_s
        self._samples: list[UsageSample] = []
        self._peak_usage = 0.0
        self._ended = threading.Event()
        self._num_finished_requests = 0
        self._thread = threading.Thread(target=self._sample_until_ended, name="kvplug-observation", daemon=True)

    def __enter__(self) -> Observation:
        self._before = self._after = Counters.read(self._url)
        self._cpu_before_s = self._cpu_after_s = self._cpu_s()
        self._started = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        if self._num_missed_samples:
            say(f"note       {self._label}: /metrics could not be read {self._num_missed_samples} times meanwhile")
        if kind is None:
            self._cpu_after_s = self._cpu_s()
            self._after = self._read_settled()
            self._add(self._after)

    def _read_settled(self) -> Counters:
        """The last counts: a client has its answer a moment before the server has counted the request."""
        deadline = time.monotonic() + 5.0
        counters = Counters.read(self._url)
        while (counters.num_running or counters.num_waiting) and time.monotonic() < deadline:
            time.sleep(0.1)
            counters = Counters.read(self._url)
        return counters

    def _sample_until_ended(self) -> None:
        period_s = self._sample_period_s
        while not self._ended.wait(period_s):
            try:
                self._add(Counters.read(self._url))
            except MetricsError:  # busy for a moment; if it is gone, who measures will say so
                self._num_missed_samples += 1
            if len(self._samples) >= MAX_SAMPLES:
                self._samples = self._samples[::2]
                period_s *= 2

    @property
    def num_finished_requests(self) -> int:
        """Since entry, as the last sample has it."""
        return self._num_finished_requests

    def _add(self, now: Counters) -> None:
        before = self._before
        self._num_finished_requests = now.num_finished_requests - before.num_finished_requests
        self._peak_usage = max(self._peak_usage, now.usage)
        self._samples.append(
            UsageSample(
                elapsed_s=round(time.monotonic() - self._started, 2),
                usage=round(now.usage, 4),
                num_running=now.num_running,
                num_waiting=now.num_waiting,
                num_hit_tokens=now.num_hit_tokens - before.num_hit_tokens,
                num_prompt_tokens=now.num_prompt_tokens - before.num_prompt_tokens,
                num_preemptions=now.num_preemptions - before.num_preemptions,
            )
        )

    def _cpu_s(self) -> float | None:
        if not self._engine_pids:
            return None
        import psutil

        try:
            times = [psutil.Process(pid).cpu_times() for pid in self._engine_pids]
        except psutil.Error as error:
            raise EvalError(f"{self._label}: expected its engine processes, found {error}") from None
        return sum(t.user + t.system for t in times)

    def cache_use(self) -> CacheUse:
        """What the server did between entry and exit."""
        before, after = self._before, self._after
        cpu_s = None
        if self._cpu_before_s is not None and self._cpu_after_s is not None:
            cpu_s = round(self._cpu_after_s - self._cpu_before_s, 3)
        return CacheUse(
            num_finished_requests=self._num_finished_requests,
            num_prompt_tokens=after.num_prompt_tokens - before.num_prompt_tokens,
            num_hit_tokens=after.num_hit_tokens - before.num_hit_tokens,
            num_output_tokens=after.num_output_tokens - before.num_output_tokens,
            num_preemptions=after.num_preemptions - before.num_preemptions,
            peak_usage=round(self._peak_usage, 4),
            num_missed_samples=self._num_missed_samples,
            engine_cpu_s=cpu_s,
            num_counted_lookup_tokens=after.num_counted_lookup_tokens - before.num_counted_lookup_tokens,
            num_counted_lookup_hit_tokens=after.num_counted_lookup_hit_tokens - before.num_counted_lookup_hit_tokens,
            samples=list(self._samples),
        )
