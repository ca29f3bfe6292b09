"""`kvplug replay`: traces of real serving, of a scheduler and of every attention type replay equal, and faults show."""

from __future__ import annotations

import gc
import gzip
import json
import logging
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.kv_cache_manager import KVCacheManager as UpstreamManager

from tests.lockstep import compare as lockstep_compare
from tests.lockstep.driver import Driver
from tests.lockstep.trace import draw_trace
from tests.lockstep.twins import prepare_hashing
from tests.scheduler.cases import Case
from tests.scheduler.loops import Side, run_one
from tests.scheduler.traffic import random_scripts
from vllm_kvplug.cli.main import _run
from vllm_kvplug.trace.operations import Answer
from vllm_kvplug.trace.reader import TraceReader
from vllm_kvplug.trace.recorder import Recorder
from vllm_kvplug.trace.replay import Replay, ReplayedManager
from vllm_kvplug.trace.writer import TraceWriter
from vllm_kvplug.vllm_glue import recording
from vllm_kvplug.vllm_glue import replay as glue
from vllm_kvplug.vllm_glue.version import is_since

GOLDEN = Path(__file__).parent / "golden"
GOLDEN_GROUPS = {
    "full": ["FullAttentionSpec"],
    "hybrid": ["FullAttentionSpec", "SlidingWindowSpec", "SlidingWindowSpec"],
    "window": ["SlidingWindowSpec"],
}
GOLDEN_PATHS = [GOLDEN / f"{name}.jsonl.gz" for name in GOLDEN_GROUPS]
ASYNC = {"is_async": True, "num_in_flight": 2}
CASES = [
    Case("full", num_blocks=44),
    Case("without prefix caching", num_blocks=44, enable_caching=False),
    Case("full and window, n-gram drafts", ("full", "window:17"), num_blocks=90, drafts="ngram"),
    Case("full, window and Mamba align", ("full", "window:17", "mamba:align"), num_blocks=100),
    Case("chunked local", ("chunk:40",), num_blocks=30),
    Case("asynchronous, eagle", drafts="eagle", num_blocks=60, **ASYNC),
    # In a small pool block ids differ after a failed load (F15).
    Case("loads that fail", loads="any", loads_fail=True, num_blocks=400, failure_policy="fail"),
    Case("loads", loads="any", num_blocks=66),
]


@pytest.fixture(autouse=True, scope="module")
def hashing() -> None:
    prepare_hashing()


def replay(path: Path, names: list[str], num_blocks: int | None = None) -> Replay:
    """Replay without the command; nothing is known of policies, so everything is compared in the recorded pool."""
    reader = TraceReader(path)
    managers = [
        ReplayedManager(
            name,
            glue.build(name, {}, reader.header, num_blocks),
            is_compared=num_blocks is None,
            same_class=reader.header.manager["name"] == name,
        )
        for name in names
    ]
    done = Replay(managers, [type(manager.driver.manager) for manager in managers])
    done.run(reader)
    return done


@pytest.mark.parametrize("path", GOLDEN_PATHS, ids=lambda path: path.name)
def test_golden_traces(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert path.stat().st_size < 150_000
    results_path = tmp_path / "results.json"
    status = _run(["replay", str(path), "--manager", "upstream,kvplug", "--json", str(results_path)])
    out = capsys.readouterr().out
    print(out)
    assert status == 0
    assert "upstream: every answer equal" in out
    assert "kvplug: every answer equal" in out
    results = json.loads(results_path.read_text())
    assert results["equal"] is True
    # It has what a trace must have to prove anything.
    header = TraceReader(path).header
    assert sorted(group["spec"] for group in header.kv_cache_config["groups"]) == GOLDEN_GROUPS[path.name.split(".")[0]]
    for name in ("upstream", "kvplug"):
        result = results["managers"][name]
        assert result["compared"] is True
        assert result["counts"]["hit_tokens"] > 200
        assert result["counts"]["preemptions"] > 2
        assert result["counts"]["skipped"] == 0
        assert result["methods"]["allocate_slots"]["calls"] > 300
        assert set(result["excused"]) <= {"F10", "F13", "F14"}


@pytest.mark.parametrize("path", GOLDEN_PATHS, ids=lambda path: path.name)
def test_golden_traces_tell_nothing_of_texts(path: Path) -> None:
    text = gzip.decompress(path.read_bytes())
    assert b"turn-1" not in text
    assert b"token_ids" not in text.replace(b'"has_token_ids":false', b"")


@pytest.mark.parametrize("path", GOLDEN_PATHS, ids=lambda path: path.name)
def test_another_pool_is_not_compared_and_serves_on(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    num_blocks = TraceReader(path).header.kv_cache_config["num_blocks"]
    for other in (num_blocks * 9 // 10, num_blocks * 4):
        assert _run(["replay", str(path), "--num-blocks", str(other)]) == 0
        out = capsys.readouterr().out
        assert f"recorded with {num_blocks} blocks, replayed with {other}: answers are not compared" in out
        assert "upstream: not compared with the recorded answers" in out
        assert "kvplug beside upstream: every answer equal" in out


def test_more_blocks_hit_more_and_fewer_refuse() -> None:
    path = GOLDEN_PATHS[0]
    num_blocks = TraceReader(path).header.kv_cache_config["num_blocks"]
    counts = {
        other: replay(path, ["kvplug"], other).managers[0].driver.counts
        for other in (num_blocks * 4 // 5, num_blocks, num_blocks * 4)
    }
    fewer, same, more = counts.values()
    assert fewer["refusals"] > same["refusals"] == more["refusals"] == 0
    assert fewer["hit_tokens"] < same["hit_tokens"] < more["hit_tokens"]
    assert more["withdrawals"] > 0


@pytest.mark.parametrize("manager", ["upstream", "kvplug"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_scheduler_traffic(make_config: Any, tmp_path: Path, case: Case, manager: str) -> None:
    path = tmp_path / "trace.gz"
    scripts = random_scripts(case, 3)
    config = {"trace": str(path)}
    side = Side(case, make_config(), manager, scripts, checks_content=not case.loads_fail, manager_config=config)
    counts = run_one(side, scripts)
    del side.scheduler
    del side
    gc.collect()
    done = replay(path, ["upstream", "kvplug"])
    for replayed in done.managers:
        assert replayed.is_equal, (replayed.name, replayed.first_difference, replayed.error)
        # Requests that wait for tokens from outside are freed without having run, too.
        assert replayed.driver.counts["preemptions"] >= counts.preemptions
    assert not done.num_apart
    assert done.num_operations > 500


class _Recordable(Driver):
    """Asks about one unknown request only: a trace knows one, since vLLM's scheduler never asks about any."""

    def common_prefix_unknown(self, which: int) -> None:
        self.pair.call("get_num_common_prefix_blocks", "ghost")


class Recorded:
    """The lockstep's managers, ours recorded."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        self.recorder: Recorder | None = None
        original = lockstep_compare.build_managers

        def build(setup: Any) -> Any:
            managers = original(setup)
            constructor = {
                name: getattr(managers.ours, name)
                for name in (
                    "kv_cache_config",
                    "max_model_len",
                    "hash_block_size",
                    "enable_caching",
                    "use_eagle",
                    "log_stats",
                    "enable_kv_cache_events",
                )
            } | {"dcp_world_size": setup.mix.dcp, "pcp_world_size": setup.mix.pcp}
            header = recording.header_of(type(managers.ours), "kvplug", {}, constructor)
            writer = TraceWriter(path, header, max_bytes=1 << 24)
            self.recorder = Recorder(managers.ours, writer)
            return managers

        monkeypatch.setattr(lockstep_compare, "build_managers", build)

    def run(self, seed: int, num_ops: int) -> TraceReader:
        setup, ops = draw_trace(seed, num_ops)
        driver = _Recordable(setup, Counter())
        for op in ops:
            driver.apply(op)
        assert self.recorder is not None
        self.recorder.close()
        return TraceReader(self.path)


def test_random_traffic_of_every_attention_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours on everything that lockstep draws: misuse, failed loads, sessions, events, drafts, all groups."""
    recorded = Recorded(tmp_path / "trace.gz", monkeypatch)
    methods: Counter[str] = Counter()
    specs: Counter[str] = Counter()
    for seed in range(700, 725):
        reader = recorded.run(seed, 150)
        done = replay(reader.path, ["kvplug"])
        (replayed,) = done.managers
        assert replayed.is_equal, (seed, replayed.first_difference, replayed.error)
        assert not replayed.excused
        methods.update({name: len(times.durations_ns) for name, times in replayed.times.items()})
        specs.update(group["spec"] for group in reader.header.kv_cache_config["groups"])
    print(methods, specs)
    # take_new_block_ids and can_fit_full_sequence are not in every version.
    assert len(methods) == 13 + is_since("0.17.1") + is_since("0.19.0")
    assert len(specs) == 7


class Forgetful(UpstreamManager):
    """A deliberate fault: from its tenth lookup with a hit on, the hit is a block short."""

    num_hits = 0

    def get_computed_blocks(self, request: Any) -> Any:
        blocks, num_hit_tokens = super().get_computed_blocks(request)
        self.num_hits += num_hit_tokens > 0
        if self.num_hits < 10 or not num_hit_tokens:
            return blocks, num_hit_tokens
        (row,) = blocks.blocks
        return self.create_kv_cache_blocks((list(row[:-1]),)), num_hit_tokens - 16


class Raising(UpstreamManager):
    """A manager that breaks down at its first `free`."""

    def free(self, request: Any) -> None:
        raise RuntimeError("out of order")


FORGETFUL, RAISING = f"{__name__}:Forgetful", f"{__name__}:Raising"


def test_a_deliberate_fault_is_found_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, results_path = GOLDEN_PATHS[0], tmp_path / "results.json"
    command = ["replay", str(path), "--manager", f"upstream,{FORGETFUL}", "--exact", "--json", str(results_path)]
    assert _run(command) == 1
    captured = capsys.readouterr()
    assert "upstream: every answer equal" in captured.out
    result = json.loads(results_path.read_text())["managers"][FORGETFUL]
    first = result["first_difference"]
    assert f"{FORGETFUL}: DIFFERENT: {first}" in captured.out
    number = int(first.split()[1].rstrip(","))
    lookups = [operation for operation in TraceReader(path) if operation.method == "get_computed_blocks"]
    hits = [operation for operation in lookups if operation.answer.num_hit_tokens]
    assert number == hits[9].number
    num_tokens = hits[9].answer.num_hit_tokens
    assert num_tokens is not None
    assert f"get_computed_blocks(request {hits[9].request_number}): expected {num_tokens} hit tokens" in first
    assert f"found {num_tokens - 16}" in first
    assert result["differences"]["get_computed_blocks"] >= 1
    assert captured.err == ""


def test_another_policy_is_not_compared_unless_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["replay", str(GOLDEN_PATHS[0]), "--manager", FORGETFUL]) == 0
    out = capsys.readouterr().out
    assert f"{FORGETFUL} has another policy than the recorded upstream: its answers are not compared" in out
    assert f"{FORGETFUL}: not compared" in out


@pytest.mark.parametrize(
    ("arguments", "status", "found"),
    [
        (["--manager", "upstream,kvplug"], 0, ""),
        (["--manager", f"kvplug,{FORGETFUL}"], 3, f"none compared for {FORGETFUL}; the notes say why"),
        (["--manager", f"kvplug,{FORGETFUL}", "--exact"], 1, ""),
        (["--manager", "kvplug", "--num-blocks", "400"], 3, "none compared for kvplug; the notes say why"),
    ],
)
def test_compared_answers_can_be_required(
    arguments: list[str], status: int, found: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(["replay", str(GOLDEN_PATHS[0]), "--require-compared", *arguments]) == status
    expected = "kvplug: error: --require-compared: expected recorded answers to be compared, found "
    assert capsys.readouterr().err == (f"{expected}{found}\n" if found else "")


def test_the_log_is_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("vllm")
    before = log.level, log.isEnabledFor(logging.INFO), os.environ.get("VLLM_LOGGING_LEVEL")
    assert _run(["replay", str(GOLDEN_PATHS[0]), "--manager", "kvplug"]) == 0
    assert _run(["replay", str(GOLDEN_PATHS[0]), "--manager", "nobody"]) == 2
    assert (log.level, log.isEnabledFor(logging.INFO), os.environ.get("VLLM_LOGGING_LEVEL")) == before


def test_a_manager_that_raises_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["replay", str(GOLDEN_PATHS[0]), "--manager", f"kvplug,{RAISING}"]) == 1
    out = capsys.readouterr().out
    assert "kvplug: every answer equal" in out
    assert "RAISED: operation " in out
    assert "raised RuntimeError: out of order" in out


def test_a_changed_answer_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = gzip.decompress(GOLDEN_PATHS[0].read_bytes()).splitlines()
    rng = random.Random(7)
    candidates = [i for i, line in enumerate(lines) if b'"allocate_slots"' in line and b'"blocks":[[' in line]
    index = rng.choice([i for i in candidates if json.loads(lines[i])["answer"]["blocks"] != [[]]])
    changed = json.loads(lines[index])
    changed["answer"]["blocks"][0][0] += 1
    lines[index] = json.dumps(changed).encode()
    path = tmp_path / "changed.gz"
    path.write_bytes(gzip.compress(b"\n".join(lines) + b"\n"))
    assert _run(["replay", str(path), "--manager", "kvplug"]) == 1
    out = capsys.readouterr().out
    assert f"DIFFERENT: operation {index - 1}, allocate_slots(" in out
    assert "in all 1 answers differ" in out


def test_a_cut_trace_is_replayed_up_to_the_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cut.gz"
    path.write_bytes(GOLDEN_PATHS[0].read_bytes()[:-10])
    assert _run(["replay", str(path), "--manager", "kvplug"]) == 0
    assert "the trace's end is cut off, as after a crash: read up to operation" in capsys.readouterr().out


def test_the_trace_of_the_server_before_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reader = TraceReader(GOLDEN_PATHS[0])
    path = tmp_path / "t.gz"
    path.write_bytes(GOLDEN_PATHS[0].read_bytes())
    TraceWriter(path, reader.header, max_bytes=1 << 20).close()  # a server that was started again
    assert _run(["replay", f"{path}.previous", "--manager", "kvplug"]) == 0
    assert "kvplug: every answer equal" in capsys.readouterr().out
    assert _run(["replay", str(path), "--manager", "kvplug", "--require-compared"]) == 3
    assert "found a trace without an operation" in capsys.readouterr().err


def test_a_trace_whose_beginning_is_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reader = TraceReader(GOLDEN_PATHS[0])
    operations = list(reader)
    header = reader.header
    header.part, header.first_operation = 2, 500
    path = tmp_path / "t.gz"
    writer = TraceWriter(path, header, max_bytes=1 << 20)
    for operation in operations[500:]:
        operation.answer = Answer() if operation.answer is None else operation.answer
        writer.append(operation)
    writer.close()
    assert not path.exists()  # as after the first parts were dropped
    assert _run(["replay", str(path), "--manager", "kvplug", "--require-compared"]) == 3
    capsys.readouterr()
    assert _run(["replay", str(path), "--manager", "upstream,kvplug"]) == 0
    out = capsys.readouterr().out
    assert "the trace begins with operation 500, what came before is gone: answers are not compared" in out
    assert "kvplug beside upstream: every answer equal" in out


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["nowhere.gz"], 2, "nowhere.gz: expected a trace, found no file"),
        ([__file__], 2, "test_replay.py: expected gzip members"),
        ([str(GOLDEN_PATHS[0]), "--manager", "nobody"], 2, "unknown manager 'nobody'"),
        (
            [str(GOLDEN_PATHS[0]), "--manager", "kvplug,kvplug"],
            2,
            "--manager: expected one or several names, each once",
        ),
        ([str(GOLDEN_PATHS[0]), "--manager", ""], 2, "--manager: expected one or several names"),
        ([str(GOLDEN_PATHS[0]), "--manager-config", "kvplug={"], 2, "--manager-config: expected NAME=JSON"),
        ([str(GOLDEN_PATHS[0]), "--manager-config", "other={}"], 2, "once for each of upstream, kvplug"),
        (
            [str(GOLDEN_PATHS[0]), "--manager-config", 'kvplug={"evict": 1}'],
            2,
            "unknown setting 'evict'; known settings: ",
        ),
        ([str(GOLDEN_PATHS[0]), "--num-blocks", "1"], 2, "num-blocks"),
        (
            [str(GOLDEN_PATHS[0]), "--manager", "kvplug", "--json", "/no/such/folder/x.json"],
            2,
            "--json /no/such/folder/x.json: expected a file that can be written",
        ),
        ([], 2, "Missing argument"),
    ],
)
def test_usage_errors(arguments: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["replay", *arguments]) == status
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("kvplug: error: ")
    assert len(error.splitlines()) == 1


def test_settings_of_one_manager_reach_it(capsys: pytest.CaptureFixture[str]) -> None:
    config = 'kvplug={"check_invariants": "stop", "check_invariants_every": 50}'
    assert _run(["replay", str(GOLDEN_PATHS[0]), "--manager-config", config]) == 0
    assert "kvplug: every answer equal" in capsys.readouterr().out
