"""What a driver knows of a request that is alive."""

from __future__ import annotations

from typing import Any

from vllm_kvplug.trace.operations import RequestState
from vllm_kvplug.trace.stand_in import StandIn


class Seat:
    """A request, as the driven manager has it.

    Attributes:
        number: the request's.
        lookup: (blocks, hit tokens) of its own last lookup, until it is admitted.
        is_held: the driven manager has admitted it.
        is_left_out: the recorded manager has it, the driven one has not.
        is_known: the driven manager was called with it.
        num_ahead_tokens: its own total where that is more than the recorded one; else 0.
    """

    __slots__ = (
        "is_held",
        "is_known",
        "is_left_out",
        "lookup",
        "num_ahead_tokens",
        "num_own_preemptions",
        "number",
        "stand_in",
    )

    def __init__(self, state: RequestState) -> None:
        self.number = state.number
        self.stand_in = StandIn(state.number, state.num_tokens)
        self.lookup: tuple[Any, int] | None = None
        self.is_held = False
        self.is_known = False
        # A trace may begin in the middle of a request's life.
        self.is_left_out = state.num_computed_tokens > 0
        self.num_ahead_tokens = 0
        self.num_own_preemptions = 0
