"""Words of a model's tokenizer that stay one token each, whatever stands beside them.

A text made of them has exactly as many tokens as words, and texts that begin with the same words begin with the same
tokens: so a workload that is sent as text (which is what vLLM's own client does) shares exactly the blocks it means to.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from vllm_kvplug.evals.errors import EvalUsageError

# A space, as byte-level and as SentencePiece vocabularies write it, and at least three letters.
_WORD = re.compile("[Ġ▁][a-z]{3,}")
MIN_WORDS = 64
_NUM_CHECKED = 200


class Tokenizer(Protocol):
    """What is used of one."""

    def decode(self, ids: Sequence[int]) -> str: ...

    def encode(self, text: str) -> list[int]: ...

    def vocabulary(self) -> dict[str, int]: ...


class _RustTokenizer:
    """A tokenizer.json, read without importing transformers (which takes tens of seconds)."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as Loaded

        self._loaded = Loaded.from_file(str(path))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._loaded.decode(list(ids)))

    def encode(self, text: str) -> list[int]:
        return list(self._loaded.encode(text, add_special_tokens=False).ids)

    def vocabulary(self) -> dict[str, int]:
        return dict(self._loaded.get_vocab(with_added_tokens=False))


class _OtherTokenizer:
    """Whatever transformers finds for a path or a hub name."""

    def __init__(self, model: str) -> None:
        from transformers import AutoTokenizer

        self._loaded = AutoTokenizer.from_pretrained(model)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._loaded.decode(list(ids)))

    def encode(self, text: str) -> list[int]:
        return list(self._loaded.encode(text, add_special_tokens=False))

    def vocabulary(self) -> dict[str, int]:
        return dict(self._loaded.get_vocab())


class Vocabulary:
    """The words, and texts and token ids made of them."""

    def __init__(self, tokenizer: Tokenizer, model: str = "the model") -> None:
        self._tokenizer = tokenizer
        ids = sorted(id for token, id in tokenizer.vocabulary().items() if _WORD.fullmatch(token))
        sample = random.Random(0).choices(ids, k=_NUM_CHECKED) if ids else []
        if len(ids) < MIN_WORDS or tokenizer.encode(tokenizer.decode(sample)) != sample:
            raise EvalUsageError(
                f"--model {model}: expected a tokenizer with {MIN_WORDS} or more words that stay one token each, found "
                f"{len(ids)}; the workloads random and shared-prefixes need none"
            )
        self.word_ids: tuple[int, ...] = tuple(ids)

    @classmethod
    def of_model(cls, model_path: str) -> Vocabulary:
        """Of a checkpoint's folder, or of a hub name where a hub can be reached.

        Raises:
            EvalUsageError: there is no usable tokenizer.
        """
        file = Path(model_path) / "tokenizer.json"
        try:
            return cls(_RustTokenizer(file) if file.is_file() else _OtherTokenizer(model_path), model_path)
        except EvalUsageError:
            raise
        except Exception as error:  # whatever the libraries raise for a file that is none
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise EvalUsageError(f"--model {model_path}: its tokenizer cannot be read ({reason})") from None

    def draw(self, rng: random.Random, num_tokens: int) -> list[int]:
        """`num_tokens` ids of words."""
        return rng.choices(self.word_ids, k=num_tokens)

    def text(self, token_ids: Iterable[int]) -> str:
        """The text that the server reads as exactly these tokens (behind those that it puts first itself)."""
        return self._tokenizer.decode(list(token_ids))

    def ids(self, text: str) -> list[int]:
        """The tokens of any text."""
        return self._tokenizer.encode(text)
