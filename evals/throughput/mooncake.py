"""Replay of a request trace in Mooncake's JSON lines, one request a line.

`{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}`: one id for each block of 512
prompt tokens (the last may be partial). An id stands for a block and all before it, so requests share a prefix exactly
as far as their ids are equal. Here each id becomes a block of random words that depends on the seed and the id alone.

The first requests of a trace are hardly ever a conversation's second turn, so a short replay of them finds little in
the cache. A sample of the conversations keeps the whole trace's reuse; with the times scaled by the same factor (sample
0.02, time scale 0.02) the load is the trace's own, and an hour passes in a minute.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from vllm_kvplug.evals.errors import EvalUsageError
from vllm_kvplug.evals.throughput.loads import Session, SessionLoad, Turn
from vllm_kvplug.evals.throughput.vocabulary import Vocabulary

TRACE_BLOCK_TOKENS = 512
# Ids in more than this part of all requests are a system prompt's and tell no conversation.
_COMMON_PART = 0.01
# Of a block at length scale 1: the trace's longest prompts then have about 4000 tokens in place of 128,000.
BLOCK_TOKENS = 16
_MS_PER_S = 1000.0


@dataclass(frozen=True)
class TraceRequest:
    """One line of the trace, in its own units."""

    timestamp_ms: float
    num_input_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...]


@lru_cache(maxsize=4)
def read_trace(path: Path, num_requests: int, sample: float = 1.0, seed: int = 0) -> tuple[TraceRequest, ...]:
    """The first `num_requests` lines, or of those whose conversation is in a random sample.

    Args:
        sample: the part of the conversations that is kept; which, the seed decides.

    Raises:
        EvalUsageError: the file cannot be read, has fewer requests, or a line is none; names the line.
    """
    requests = _all_requests(path)
    if sample < 1:
        requests = _sampled(requests, sample, seed)
    if len(requests) < num_requests:
        raise EvalUsageError(
            f"--trace {path}: expected {num_requests} requests (--num-requests), found {len(requests)}"
        )
    return tuple(requests[:num_requests])


def _all_requests(path: Path) -> list[TraceRequest]:
    try:
        with path.open(encoding="utf-8") as lines:
            requests = [_request(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise EvalUsageError(f"--trace {path}: cannot be read ({error})") from None
    times = [request.timestamp_ms for request in requests]
    if times != sorted(times):
        raise EvalUsageError(f"--trace {path}: expected timestamps that do not decrease")
    return requests


def _sampled(requests: list[TraceRequest], sample: float, seed: int) -> list[TraceRequest]:
    """Those of whole conversations: requests with the same first id that is not a common system prompt's."""
    counts = Counter(hash_id for request in requests for hash_id in set(request.hash_ids))
    common = {hash_id for hash_id, count in counts.items() if count > max(1, _COMMON_PART * len(requests))}

    def is_kept(request: TraceRequest) -> bool:
        conversation = next((hash_id for hash_id in request.hash_ids if hash_id not in common), request.hash_ids[-1])
        return random.Random(f"conversation {seed} {conversation}").random() < sample

    return [request for request in requests if is_kept(request)]


def _request(path: Path, number: int, line: str) -> TraceRequest:
    try:
        data = json.loads(line)
        request = TraceRequest(
            timestamp_ms=float(data["timestamp"]),
            num_input_tokens=int(data["input_length"]),
            num_output_tokens=int(data["output_length"]),
            hash_ids=tuple(int(hash_id) for hash_id in data["hash_ids"]),
        )
    except (ValueError, KeyError, TypeError):
        raise EvalUsageError(
            f"--trace {path}, line {number}: expected timestamp, input_length, output_length and hash_ids as JSON, "
            f"found {line.strip()[:80]!r}"
        ) from None
    needed = -(-request.num_input_tokens // TRACE_BLOCK_TOKENS)
    if request.num_input_tokens < 1 or request.num_output_tokens < 0 or len(request.hash_ids) < needed:
        raise EvalUsageError(
            f"--trace {path}, line {number}: expected an id for each {TRACE_BLOCK_TOKENS} tokens of input, found "
            f"{len(request.hash_ids)} ids for {request.num_input_tokens} tokens"
        )
    return request


def block_tokens(length_scale: float) -> int:
    """Tokens that a block of the trace becomes."""
    return max(1, round(BLOCK_TOKENS * length_scale))


def replay(
    requests: Sequence[TraceRequest],
    vocabulary: Vocabulary,
    seed: int,
    *,
    num_block_tokens: int,
    time_scale: float,
    max_model_len: int | None,
    max_concurrency: int | None = None,
) -> SessionLoad:
    """The trace's requests with their times from the first one on, times `time_scale`.

    Lengths are scaled as blocks are: by `num_block_tokens` / 512. What is longer than `max_model_len` loses the end of
    its prompt, at worst to half of the limit, and then of its answer; `notes` counts such requests.
    """
    blocks: dict[int, tuple[int, ...]] = {}

    def block(hash_id: int) -> tuple[int, ...]:
        if hash_id not in blocks:
            rng = random.Random(f"mooncake {seed} {hash_id}")
            blocks[hash_id] = tuple(vocabulary.draw(rng, num_block_tokens))
        return blocks[hash_id]

    factor = num_block_tokens / TRACE_BLOCK_TOKENS
    sessions: list[Session] = []
    num_cut = 0
    for request in requests:
        num_input = max(1, round(request.num_input_tokens * factor))
        num_output = max(1, round(request.num_output_tokens * factor))
        if max_model_len is not None and num_input + num_output > max_model_len:
            num_output = min(num_output, max(1, max_model_len // 2))
            num_input = min(num_input, max_model_len - num_output)
            num_cut += 1
        token_ids = tuple(token for hash_id in request.hash_ids for token in block(hash_id))[:num_input]
        start_s = (request.timestamp_ms - requests[0].timestamp_ms) / _MS_PER_S * time_scale
        sessions.append(Session((Turn(token_ids, num_output),), start_s))
    return SessionLoad(tuple(sessions), max_concurrency, {"num_requests_cut_to_max_model_len": num_cut})
