"""The engine's loop around a scheduler and a fake worker, for one manager or for two side by side."""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import RequestStatus

from tests.scheduler.cases import Case, build_scheduler
from tests.scheduler.fake_worker import FakeWorker
from tests.scheduler.traffic import Script
from vllm_kvplug.invariants import check_invariants
from vllm_kvplug.manager import CacheManager

MAX_STEPS = 2_000


@dataclass
class Counts:
    """What a run has exercised. A test looks at them: a run without preemptions compares none."""

    steps: int = 0
    preemptions: int = 0
    hit_tokens: int = 0
    external_tokens: int = 0
    loads: int = 0
    failed_loads: int = 0
    accepted_drafts: int = 0
    rejected_drafts: int = 0
    failed_requests: int = 0
    evicted_blocks: int = 0
    answers: dict[str, tuple[list[int], str]] = field(default_factory=dict)

    def summary(self) -> str:
        """The numbers, without the answers."""
        return ", ".join(f"{name} {value}" for name, value in vars(self).items() if name != "answers")


class Side:
    """One scheduler with its worker and the steps that it has in flight."""

    def __init__(
        self,
        case: Case,
        base_config: Any,
        manager: str,
        scripts: Sequence[Script],
        *,
        checks_content: bool = True,
        manager_config: Mapping[str, Any] | None = None,
    ) -> None:
        self.case = case
        self.scheduler = build_scheduler(case, base_config, manager, manager_config)
        self.worker = FakeWorker(case, {script.request_id: script for script in scripts}, checks_content=checks_content)
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput, DraftTokenIds]] = deque()
        self.counts = Counts()
        self._tokens: dict[str, list[int]] = {}
        self._evict_blocks = self.manager.evict_blocks
        self.manager.evict_blocks = self._count_evict_blocks

    @property
    def manager(self) -> Any:
        """The manager under test."""
        return self.scheduler.kv_cache_manager

    @property
    def is_done(self) -> bool:
        """Nothing is left to do or to be told."""
        return not (self.scheduler.requests or self.in_flight or self.scheduler.has_requests())

    @property
    def can_schedule(self) -> bool:
        """Whether another step may be scheduled before an output is taken."""
        is_needed = bool(self.scheduler.requests) or self.scheduler.has_requests()
        return is_needed and len(self.in_flight) < self.case.num_in_flight

    def add(self, script: Script) -> None:
        self.scheduler.add_request(script.request(self.case.num_tokens_per_block))

    def abort(self, request_id: str) -> list[tuple[str, int]]:
        """As when a client goes away; no answer then."""
        return self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def schedule(self) -> SchedulerOutput:
        """One step is scheduled and begun."""
        output = self.scheduler.schedule()
        model_output, drafts = self.worker.execute(output)
        self.in_flight.append((output, model_output, drafts))
        self.counts.steps += 1
        self.counts.preemptions += len(output.preempted_req_ids or ())
        self.counts.loads, self.counts.failed_loads = self.worker.num_loads, self.worker.num_failed_loads
        return output

    def update(self) -> dict[str, Any]:
        """The oldest step's output arrives. Answers what the engine would send, without its clock."""
        output, model_output, drafts = self.in_flight.popleft()
        self._count_drafts(output, model_output)
        engine_outputs = self.scheduler.update_from_output(output, model_output)
        if self.case.drafts is not None and not self.case.is_async:
            self.scheduler.update_draft_token_ids(drafts)
        for outputs in engine_outputs.values():
            for one in outputs.outputs:
                self._collect(one)
        return {str(client): plain(outputs) for client, outputs in engine_outputs.items()}

    def story(self) -> str:
        """Who is left, for a run that does not end."""
        requests = [
            f"{request.request_id} {request.status.name}: {request.num_computed_tokens} of {request.num_tokens} tokens "
            f"in blocks {self.manager.get_block_ids(request.request_id)}"
            for request in self.scheduler.requests.values()
        ]
        return f"usage {self.manager.usage:.2f}, in flight {len(self.in_flight)}; " + "; ".join(requests)

    def check(self) -> None:
        """Our manager's structures must agree with each other at any time."""
        if isinstance(self.manager, CacheManager):
            check_invariants(self.manager)

    def _count_evict_blocks(self, block_ids: set[int]) -> None:
        self.counts.evicted_blocks += len(block_ids)
        self._evict_blocks(block_ids)

    def _collect(self, output: Any) -> None:
        tokens = self._tokens.setdefault(output.request_id, [])
        tokens.extend(output.new_token_ids)
        if output.finish_reason is not None:
            self.counts.answers[output.request_id] = (tokens, str(output.finish_reason))
            self.counts.hit_tokens += output.num_cached_tokens - output.num_external_computed_tokens
            self.counts.external_tokens += output.num_external_computed_tokens
            self.counts.failed_requests += str(output.finish_reason) == "error"

    def _count_drafts(self, output: SchedulerOutput, model_output: ModelRunnerOutput) -> None:
        for request_id, drafts in output.scheduled_spec_decode_tokens.items():
            num_accepted = len(model_output.sampled_token_ids[model_output.req_id_to_index[request_id]]) - 1
            self.counts.accepted_drafts += num_accepted
            self.counts.rejected_drafts += len(drafts) - num_accepted


def plain(outputs: Any) -> dict[str, Any]:
    """EngineCoreOutputs as a dictionary: without times, and without the statistics of lookups, which upstream counts
    again for each refused attempt (F10)."""
    answer = msgspec.structs.asdict(outputs)
    answer.pop("timestamp")
    answer["outputs"] = [msgspec.structs.asdict(one) for one in outputs.outputs]
    for one in answer["outputs"]:
        one["events"] = [event.type for event in one["events"] or ()]
    if answer["scheduler_stats"] is not None:
        stats = {
            one.name: getattr(outputs.scheduler_stats, one.name) for one in dataclasses.fields(outputs.scheduler_stats)
        }
        answer["scheduler_stats"] = {
            name: value for name, value in stats.items() if name not in ("prefix_cache_stats", "kvplug")
        }
    return answer


def run_one(side: Side, scripts: Sequence[Script]) -> Counts:
    """Serve the scripts with one side alone, checking after every call."""
    waiting = deque(scripts)
    step = 0
    while waiting or not side.is_done:
        step = _next_step(step, waiting, side)
        while waiting and waiting[0].arrives_at <= step:
            side.add(waiting.popleft())
        if side.can_schedule:
            output = side.schedule()
            side.check()
            if output.total_num_scheduled_tokens and len(side.in_flight) < side.case.num_in_flight:
                continue
        if side.in_flight:
            side.update()
            side.check()
    return side.counts


def _next_step(step: int, waiting: deque[Script], side: Side) -> int:
    assert step < MAX_STEPS, f"no end after {step} steps: {side.story()}"
    # Where nothing is left to do, the time until the next arrival passes at once.
    return max(step + 1, waiting[0].arrives_at) if side.is_done and waiting else step + 1


class Pair:
    """Both managers' schedulers, given the same; whatever they answer must be equal.

    Args:
        same_block_ids: False where a public fault's right answer reuses blocks in another order; then their numbers
            must be equal.
    """

    def __init__(self, case: Case, base_config: Any, scripts: Sequence[Script], *, same_block_ids: bool = True) -> None:
        self.scripts = scripts
        self._same_block_ids = same_block_ids
        # After a failed load vLLM's scheduler itself lets requests read what another was to compute again.
        sides = (
            Side(case, base_config, manager, scripts, checks_content=not case.loads_fail)
            for manager in ("upstream", "kvplug")
        )
        self.upstream, self.ours = sides

    def run(self, seed: int) -> Counts:
        """Serve the scripts to the end, with aborts and resets of the prefix cache between the steps."""
        rng = random.Random(seed)
        waiting = deque(self.scripts)
        step = 0
        while waiting or not self.ours.is_done:
            step = _next_step(step, waiting, self.ours)
            while waiting and waiting[0].arrives_at <= step:
                script = waiting.popleft()
                self.upstream.add(script), self.ours.add(script)
            self._disturb(step, rng)
            if self.ours.can_schedule:
                output = self._schedule(step)
                if output.total_num_scheduled_tokens and len(self.ours.in_flight) < self.ours.case.num_in_flight:
                    continue
            if self.ours.in_flight:
                self._equal(step, "engine outputs", self.upstream.update(), self.ours.update())
                self._equal_state(step)
        self._equal(step, "left to do", self.upstream.is_done, True)
        self._equal(step, "counts", self.upstream.counts, self.ours.counts)
        return self.ours.counts

    def _disturb(self, step: int, rng: random.Random) -> None:
        for script in self.scripts:
            if script.aborted_at == step:
                request_id = script.request_id
                self._equal(step, f"abort {request_id}", self.upstream.abort(request_id), self.ours.abort(request_id))
        if rng.random() < 0.01:
            resets = [side.scheduler.reset_prefix_cache() for side in (self.upstream, self.ours)]
            self._equal(step, "reset_prefix_cache", *resets)
        self._equal_state(step)

    def _schedule(self, step: int) -> SchedulerOutput:
        upstream, ours = self.upstream.schedule(), self.ours.schedule()
        for one in dataclasses.fields(SchedulerOutput):
            values = (getattr(upstream, one.name), getattr(ours, one.name))
            if not self._same_block_ids:
                values = (without_block_ids(values[0]), without_block_ids(values[1]))
            self._equal(step, f"scheduler output: {one.name}", *values)
        self._equal_state(step)
        return ours

    def _equal_state(self, step: int) -> None:
        self.ours.check()
        self._equal(step, "usage", self.upstream.manager.usage, self.ours.manager.usage)
        queues = [
            (
                [request.request_id for request in side.scheduler.running],
                len(side.scheduler.waiting),
                # From 0.18 on those that wait for something else than blocks are in a queue of their own.
                len(getattr(side.scheduler, "skipped_waiting", ())),
            )
            for side in (self.upstream, self.ours)
        ]
        self._equal(step, "running and waiting", *queues)

    @staticmethod
    def _equal(step: int, what: str, upstream: Any, ours: Any) -> None:
        assert upstream == ours, f"step {step}, {what}:\n  upstream {upstream}\n  ours     {ours}"


def without_block_ids(value: Any) -> Any:
    """A part of a scheduler's output with the number of blocks in the place of their ids."""
    if isinstance(value, list):
        return [without_block_ids(one) for one in value]
    if not dataclasses.is_dataclass(value):
        return value
    parts = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    for name in {"block_ids", "new_block_ids"} & set(parts):
        rows = parts[name] if name == "new_block_ids" else [parts[name]]
        parts[name] = [row and [len(ids) for ids in row] for row in rows]
    return {name: without_block_ids(part) for name, part in parts.items()}


def answers_of(scripts: Sequence[Script]) -> dict[str, list[int]]:
    """What each request's answer must be, whatever the scheduler does."""
    return {
        script.request_id: [script.token(script.num_prompt_tokens + n) for n in range(script.max_tokens)]
        for script in scripts
    }
