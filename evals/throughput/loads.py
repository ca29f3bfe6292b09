"""What a client sends in one run, and which client that is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

VLLM_CLIENT = "vllm bench serve"
OWN_CLIENT = "kvplug's own streaming client"


@dataclass(frozen=True)
class Prompt:
    """A line of a `custom` data set of `vllm bench serve`."""

    text: str
    num_input_tokens: int
    num_output_tokens: int


@dataclass(frozen=True)
class BenchLoad:
    """A list of requests that `vllm bench serve` makes or reads, and sends itself.

    Args:
        data_set_args: its arguments that choose and shape the data set.
        prompts: what its `custom` data set reads, in the order of sending; empty for the others.
        max_tokens: tokens of the longest request with its answer.
    """

    data_set_args: tuple[str, ...]
    num_requests: int
    max_tokens: int
    prompts: tuple[Prompt, ...] = ()

    client = VLLM_CLIENT


@dataclass(frozen=True)
class Turn:
    """One request of a session: it begins with all that was said before, answers included.

    Args:
        token_ids: what is new in it.
        wait_s: from the previous answer (or the session's start) to sending it.
    """

    token_ids: tuple[int, ...]
    num_output_tokens: int
    wait_s: float = 0.0


@dataclass(frozen=True)
class Session:
    """Turns that follow each other; the first is not sent before `start_s` of the run."""

    turns: tuple[Turn, ...]
    start_s: float = 0.0

    @property
    def max_tokens(self) -> int:
        """Tokens of the last request with its answer."""
        return sum(len(turn.token_ids) + turn.num_output_tokens for turn in self.turns)


@dataclass(frozen=True)
class SessionLoad:
    """Sessions for our own client: given start times, think times, answers that come back in the next request.

    Args:
        max_sessions: how many may be open at once; None: as many as have started.
        notes: what was changed to make the sessions servable, name -> value.
    """

    sessions: tuple[Session, ...]
    max_sessions: int | None = None
    notes: dict[str, int] = field(default_factory=dict)

    client = OWN_CLIENT

    @property
    def num_requests(self) -> int:
        return sum(len(session.turns) for session in self.sessions)

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest request with its answer."""
        return max(session.max_tokens for session in self.sessions)

    def turns(self) -> Iterator[Turn]:
        """Of all sessions."""
        return (turn for session in self.sessions for turn in session.turns)


Load = BenchLoad | SessionLoad
