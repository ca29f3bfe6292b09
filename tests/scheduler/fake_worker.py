"""A worker without a model: its memory holds, for each slot, which text up to which token was written there.

It follows the scheduler's outputs as vLLM's model runner does, computes nothing, and looks at every slot that the
layers of a step would read: a block that was given away, cached too early or never filled shows as wrong content. The
states of recurrent layers are left out where there are drafts, for which each layer has rules of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput

from tests.scheduler.cases import Case
from tests.scheduler.fake_connector import Load, Orders
from tests.scheduler.traffic import Script

NULL_BLOCK_ID = 0


class WrongContent(AssertionError):
    """A layer would read something else than what its request's text left there."""


@dataclass
class _State:
    """A request as the worker knows it."""

    prompt_length: int
    token_ids: list[int]
    block_ids: list[list[int]]
    drafts: list[int]


@dataclass(frozen=True)
class _Work:
    """What a step does for one request: tokens `first` .. `end` - 1, whose texts are `contents[:end]`."""

    request_id: str
    state: _State
    first: int
    end: int
    drafts: list[int]
    contents: list[int]


class FakeWorker:
    """Executes steps in the order in which they are scheduled.

    Args:
        checks_content: whether a wrong slot raises.
    """

    def __init__(self, case: Case, scripts: Mapping[str, Script], *, checks_content: bool = True) -> None:
        self.case = case
        self.scripts = scripts
        self.checks_content = checks_content
        self.num_slots_checked = 0
        self.num_loads = self.num_failed_loads = 0
        self._groups = [word.partition(":")[::2] for word in case.groups]
        # memory[block_id][offset] = (group, text)
        self._memory: list[dict[int, tuple[int, int]]] = [{} for _ in range(case.num_blocks)]
        self._states: dict[str, _State] = {}
        self._loading: list[tuple[int, Load]] = []
        self._sending: dict[str, int] = {}
        self._step = 0

    def execute(self, output: SchedulerOutput) -> tuple[ModelRunnerOutput, DraftTokenIds]:
        """One step: what it samples, and the drafts for the next one."""
        self._step += 1
        self._follow(output)
        connector_output = self._transfer(output.kv_connector_metadata)
        works = [
            self._work(request_id, num_tokens, output) for request_id, num_tokens in output.num_scheduled_tokens.items()
        ]
        self._compute(works, connector_output.invalid_block_ids)
        sampled = [self._sample(work) for work in works]
        ids = [work.request_id for work in works]
        model_output = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
            kv_connector_output=connector_output if self.case.loads is not None else None,
        )
        return model_output, DraftTokenIds(ids, [list(work.state.drafts) for work in works])

    def _follow(self, output: SchedulerOutput) -> None:
        """Take over the scheduler's news of requests and blocks."""
        for request_id in output.finished_req_ids:
            self._states.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            prompt = list(new.prompt_token_ids or ())
            self._states[new.req_id] = _State(len(prompt), prompt, [list(ids) for ids in new.block_ids], [])
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            state = self._states[request_id]
            new_block_ids = cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                assert new_block_ids is not None
                state.token_ids = list(cached.all_token_ids[request_id])
                state.block_ids = [list(ids) for ids in new_block_ids]
            else:
                # Tokens that the scheduler dropped, because what they were made from failed to load.
                del state.token_ids[state.prompt_length + cached.num_output_tokens[index] :]
                for ids, new_ids in zip(state.block_ids, new_block_ids or (), strict=False):
                    ids.extend(new_ids)
        for block_id in getattr(output, "new_block_ids_to_zero", None) or ():  # 0.17.0 zeroes nothing
            self._memory[block_id].clear()

    def _work(self, request_id: str, num_tokens: int, output: SchedulerOutput) -> _Work:
        state = self._states[request_id]
        # With asynchronous scheduling the scheduler counts drafts as computed that were rejected since.
        first = min(self._num_computed_tokens(request_id, output), len(state.token_ids) - 1)
        drafts = list(output.scheduled_spec_decode_tokens.get(request_id, ()))
        if self.case.is_async:
            drafts = (state.drafts + [-7] * len(drafts))[: len(drafts)]
        texts, text = [], 0
        for token_id in state.token_ids + drafts:
            text = hash((text, token_id))
            texts.append(text)
        end = first + num_tokens
        assert end <= len(texts), f"{request_id}: step ends at token {end}, its text has {len(texts)}"
        return _Work(request_id, state, first, end, drafts, texts)

    @staticmethod
    def _num_computed_tokens(request_id: str, output: SchedulerOutput) -> int:
        cached = output.scheduled_cached_reqs
        if request_id in cached.req_ids:
            return cached.num_computed_tokens[cached.req_ids.index(request_id)]
        return next(new.num_computed_tokens for new in output.scheduled_new_reqs if new.req_id == request_id)

    def _compute(self, works: list[_Work], invalid_block_ids: set[int]) -> None:
        """Read recurrent states, write every token, read what attention reads. Layers see a whole step's writes."""
        checked = [work for work in works if not self._touches(work, invalid_block_ids)]
        self._check(checked, recurrent=True)
        for work in works:
            self._write(work)
        self._check(checked, recurrent=False)

    def _touches(self, work: _Work, block_ids: set[int]) -> bool:
        return any(not block_ids.isdisjoint(ids) for ids in work.state.block_ids)

    def _check(self, works: list[_Work], *, recurrent: bool) -> None:
        if not self.checks_content or (recurrent and self.case.drafts is not None):
            return
        for work in works:
            for group_id, (kind, argument) in enumerate(self._groups):
                if (kind == "mamba") is recurrent:
                    for position in self._read_positions(kind, argument, work):
                        self._check_slot(work, group_id, position)

    @staticmethod
    def _read_positions(kind: str, argument: str, work: _Work) -> Iterator[int]:
        """Positions whose slots the first token of the step sees, and the step's own."""
        if kind == "mamba":
            yield from range(max(work.first - 1, 0), work.first)
            return
        first_seen = 0
        if kind == "window":
            first_seen = max(0, work.first - int(argument) + 1)
        elif kind == "chunk":
            first_seen = work.first // int(argument) * int(argument)
        yield from range(first_seen, work.end)

    def _check_slot(self, work: _Work, group_id: int, position: int) -> None:
        block_id, offset = self._slot(work.state.block_ids[group_id], group_id, position)
        found = self._memory[block_id].get(offset)
        self.num_slots_checked += 1
        if block_id == NULL_BLOCK_ID or found != (group_id, work.contents[position]):
            raise WrongContent(
                f"step {self._step}, request {work.request_id}, tokens {work.first}..{work.end - 1}: token {position} "
                f"of group {group_id} ({self.case.groups[group_id]}) in block {block_id}: found {found}, "
                f"table {work.state.block_ids[group_id]}"
            )

    def _slot(self, block_ids: list[int], group_id: int, position: int) -> tuple[int, int]:
        """(block, offset) of a position; a recurrent state is the whole block."""
        kind, argument = self._groups[group_id]
        if kind == "mamba":
            return block_ids[0 if argument == "none" else position // self.case.num_tokens_per_block], 0
        return block_ids[position // self.case.num_tokens_per_block], position % self.case.num_tokens_per_block

    def _write(self, work: _Work) -> None:
        for group_id, (kind, argument) in enumerate(self._groups):
            for position in self._written_positions(kind, argument, work):
                block_id, offset = self._slot(work.state.block_ids[group_id], group_id, position)
                self._memory[block_id][offset] = (group_id, work.contents[position])

    def _written_positions(self, kind: str, argument: str, work: _Work) -> list[int]:
        last = work.end - 1
        if kind != "mamba":
            return list(range(work.first, work.end))
        if argument != "all":
            return [last]
        size = self.case.num_tokens_per_block
        return [position for position in range(work.first, work.end) if (position + 1) % size == 0 or position == last]

    def _sample(self, work: _Work) -> list[int]:
        """The next tokens: the drafts that are right, and one more; none where the text is not all computed."""
        state, script = work.state, self.scripts[work.request_id]
        if work.end < len(state.token_ids) + len(work.drafts):
            state.drafts = []
            return []
        position = len(state.token_ids)
        num_right = 0
        while num_right < len(work.drafts) and work.drafts[num_right] == script.token(position + num_right):
            num_right += 1
        sampled = [script.token(position + n) for n in range(num_right + 1)]
        state.token_ids.extend(sampled)
        state.drafts = self._propose(script, len(state.token_ids))
        return list(sampled)

    def _propose(self, script: Script, position: int) -> list[int]:
        if self.case.drafts is None:
            return []
        drafts = script.drafts(position, self.case.num_drafts)
        # An n-gram proposer often finds nothing or little.
        return drafts if self.case.drafts == "eagle" else drafts[: position % (self.case.num_drafts + 1)]

    def _transfer(self, orders: Any) -> KVConnectorOutput:
        """Loads and sends of this step."""
        if not isinstance(orders, Orders):
            return KVConnectorOutput()
        invalid_block_ids: set[int] = set()
        finished_loads, finished_sends = set(), set()
        for load in orders.loads:
            if load.num_steps:
                self._loading.append((self._step + load.num_steps, load))
            else:
                invalid_block_ids |= self._load(load)
        for ready_at, load in list(self._loading):
            if ready_at == self._step:
                self._loading.remove((ready_at, load))
                invalid_block_ids |= self._load(load)
                finished_loads.add(load.request_id)
        for request_id, num_steps in orders.sends.items():
            self._sending[request_id] = self._step + num_steps
        for request_id, ready_at in list(self._sending.items()):
            if ready_at == self._step:
                del self._sending[request_id]
                finished_sends.add(request_id)
        return KVConnectorOutput(
            finished_sending=finished_sends, finished_recving=finished_loads, invalid_block_ids=invalid_block_ids
        )

    def _load(self, load: Load) -> set[int]:
        """Write a load's tokens; the block at which it fails keeps what it had and is named."""
        self.num_loads += 1
        size = self.case.num_tokens_per_block
        first_block, end_block = load.first_token // size, -(-load.end_token // size)
        failed_block = None
        if load.fails_at is not None:
            failed_block = first_block + int(load.fails_at * (end_block - first_block))
        text = 0
        for position, token_id in enumerate(load.token_ids):
            text = hash((text, token_id))
            if position < load.first_token:
                continue
            for group_id, ids in enumerate(load.block_ids):
                block_id, offset = self._slot(ids, group_id, position)
                if block_id != NULL_BLOCK_ID:
                    wrong = failed_block is not None and position // size >= failed_block
                    self._memory[block_id][offset] = (group_id, 0 if wrong else text)
        if failed_block is None:
            return set()
        self.num_failed_loads += 1
        return {ids[failed_block] for ids in load.block_ids} - {NULL_BLOCK_ID}
