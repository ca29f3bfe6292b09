"""What the tests of evals/throughput share: a vocabulary without a model, options, and a streaming server."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import httpx

from vllm_kvplug.evals.serving import RunningSide, running_side
from vllm_kvplug.evals.sides import SideChoice
from vllm_kvplug.evals.throughput.options import ThroughputOptions
from vllm_kvplug.evals.throughput.vocabulary import Vocabulary

FAKE_SERVER = [sys.executable, str(Path(__file__).with_name("streaming_server.py"))]


class WordTokenizer:
    """200 words of three letters, one token each."""

    words: ClassVar[list[str]] = [f" {a}{b}{c}" for a in "abcdefgh" for b in "aeiou" for c in "lmnpr"]

    def vocabulary(self) -> dict[str, int]:
        return {word.replace(" ", "Ġ"): index for index, word in enumerate(self.words)} | {"Ġx": 500, "<s>": 501}

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.words[index] for index in ids)

    def encode(self, text: str) -> list[int]:
        return [self.words.index(f" {word}") for word in text.split()]


VOCABULARY = Vocabulary(WordTokenizer())


def options(workload: str = "multi-turn", **changes: Any) -> ThroughputOptions:
    return ThroughputOptions("model", workload, **changes)


@contextlib.contextmanager
def streaming(folder: Path, *arguments: str) -> Iterator[RunningSide]:
    with running_side(
        SideChoice("side", "upstream"), "model", [], folder, command=[*FAKE_SERVER, *arguments]
    ) as running:
        yield running


def asked_of(running: RunningSide) -> list[dict[str, Any]]:
    """The bodies of the completions that were asked for, in the order of arrival."""
    found: list[dict[str, Any]] = httpx.get(f"{running.url}/requests").json()
    return found


def write_trace(path: Path, rows: Sequence[tuple[float, int, int, Sequence[int]]]) -> Path:
    """(timestamp ms, input length, output length, hash ids) as Mooncake's JSON lines."""
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    return path
