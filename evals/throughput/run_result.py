"""One loaded run as its client saw it: the requests' latencies, and the metrics that come of them.

The shape is that of `vllm bench serve --save-detailed`, and so are the definitions: TTFT is from sending a request to
its first streamed chunk, an inter-token latency is between two chunks that follow each other, and the end-to-end
latency is up to the last chunk, so their sum. Throughput is over the whole run.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_kvplug.evals.errors import EvalError

_MS_PER_S = 1000.0
KINDS = ("ttft", "itl", "e2el")


@dataclass(frozen=True)
class RunResult:
    """What a client measured. Lists are by request, in the order of the workload."""

    duration_s: float
    input_lens: list[int]
    output_lens: list[int]
    ttfts_s: list[float]
    itls_s: list[list[float]]
    start_times_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> RunResult:
        """From a file of `vllm bench serve --save-result --save-detailed`, or of `write`.

        Raises:
            EvalError: it is not such a file.
        """
        try:
            data = json.loads(path.read_text())
            return cls(
                duration_s=data["duration"],
                input_lens=data["input_lens"],
                output_lens=data["output_lens"],
                ttfts_s=data["ttfts"],
                itls_s=data["itls"],
                start_times_s=data["start_times"],
                errors=data["errors"],
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise EvalError(f"{path}: expected a detailed result of vllm bench serve, found {error!r}") from None

    def write(self, path: Path) -> None:
        """Write what `read` reads."""
        path.write_text(json.dumps(self.to_json()) + "\n")

    def to_json(self) -> dict[str, Any]:
        """With the keys of vLLM's client."""
        return {
            "duration": self.duration_s,
            "completed": self.num_completed,
            "failed": self.num_failed,
            "input_lens": self.input_lens,
            "output_lens": self.output_lens,
            "ttfts": self.ttfts_s,
            "itls": self.itls_s,
            "start_times": self.start_times_s,
            "errors": self.errors,
        }

    @property
    def num_failed(self) -> int:
        return sum(bool(error) for error in self.errors)

    @property
    def num_completed(self) -> int:
        return len(self.ttfts_s) - self.num_failed

    def raise_if_failed(self, label: str) -> None:
        """Runs with failed requests are not comparable.

        Raises:
            EvalError: a request failed, or none was sent.
        """
        if self.num_failed:
            first = next(error for error in self.errors if error)
            # vLLM's client records a whole traceback; its last line says what happened.
            lines = [line.strip() for line in first.splitlines() if line.strip()]
            raise EvalError(
                f"{label}: {self.num_failed} of {len(self.errors)} requests failed; the first: {lines[-1][:300]}"
            )
        if not self.ttfts_s:
            raise EvalError(f"{label}: the client sent no request")

    def latencies_ms(self) -> dict[str, list[float]]:
        """By kind, of all requests of the run (inter-token latencies: of all tokens)."""
        pairs = list(zip(self.ttfts_s, self.itls_s, strict=True))
        return {
            "ttft": [ttft * _MS_PER_S for ttft, _ in pairs],
            "itl": [itl * _MS_PER_S for _, itls in pairs for itl in itls],
            "e2el": [(ttft + sum(itls)) * _MS_PER_S for ttft, itls in pairs],
        }

    def throughput(self) -> dict[str, float]:
        """Requests, output tokens and all tokens per second."""
        num_output_tokens = sum(self.output_lens)
        return {
            "request throughput": self.num_completed / self.duration_s,
            "output token throughput": num_output_tokens / self.duration_s,
            "total token throughput": (sum(self.input_lens) + num_output_tokens) / self.duration_s,
        }
