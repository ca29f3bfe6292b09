"""Settings and command lines without their secrets, for files and reports.

A name is split into words, at `_`, `-`, `.` and where capitals begin. It is that of a secret if one of the words is:
`api_key`, `authToken`, `AWS_SECRET_ACCESS_KEY`; not `num_tokens`, `max_num_tokens`, `tokenizer` or `keyboard`.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

LEFT_OUT = "(left out)"
_SECRET_WORDS = frozenset(
    ("key", "keys", "apikey", "apikeys", "secret", "secrets", "password", "passwords", "passwd", "passphrase", "pwd")
    + ("credential", "credentials", "auth", "authorization", "bearer", "token")
)
# A token of a text, and not one that opens a door: token_ids, token_threshold.
_AFTER_TOKENS_OF_TEXT = frozenset(("id", "ids", "threshold", "budget", "limit", "count", "length", "len", "size"))
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def is_secret(name: str) -> bool:
    """Whether a setting or an option of this name is to be left out."""
    words = [word.lower() for word in _WORD.findall(name)]
    return any(
        word in _SECRET_WORDS and not (word == "token" and following in _AFTER_TOKENS_OF_TEXT)
        for word, following in itertools.zip_longest(words, words[1:])
    )


def redacted(value: Any) -> Any:
    """A copy of plain values in which everything under a secret's name, at any depth, is `LEFT_OUT`. None and booleans
    stay: they tell whether there is one.
    """
    if isinstance(value, Mapping):
        return {
            key: LEFT_OUT
            if isinstance(key, str) and is_secret(key) and item is not None and not isinstance(item, bool)
            else redacted(item)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [redacted(item) for item in value]
    return value


def redacted_args(args: Sequence[str]) -> list[str]:
    """A copy of a command line, likewise: `--api-key X Y` up to the next option, `--api-key=X`, `HF_TOKEN=X`, and what
    is JSON in it (`--option {...}`, `--option={...}`, `NAME={...}`).
    """
    done: list[str] = []
    follows_secret = False
    for arg in args:
        is_option = arg.startswith("-") and arg != "-"
        name, equals, value = arg.partition("=")
        if is_option:
            follows_secret = not equals and is_secret(name)
        elif follows_secret:
            done.append(LEFT_OUT)
            continue
        if equals and is_secret(name) and not name.startswith(("{", "[")):
            done.append(f"{name}={LEFT_OUT}")
        elif equals and _json(value) is not None:
            done.append(f"{name}={_redacted_json(value)}")
        else:
            done.append(_redacted_json(arg))
    return done


def _json(text: str) -> Any:
    """An object or a list; None: the text is none."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        return json.loads(text)
    except ValueError:
        return None


def _redacted_json(text: str) -> str:
    """The text itself where nothing is left out."""
    value = _json(text)
    without = redacted(value)
    return text if value is None or without == value else json.dumps(without)
