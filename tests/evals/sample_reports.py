"""Reports as a run of `kvplug ab` makes them, with made-up numbers: for tests, and for looking at a rendered report.

`python -m tests.evals.sample_reports FOLDER` writes each of them to a folder of its own.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

from vllm_kvplug.evals.results import (
    Accuracy,
    CacheUse,
    DifferingAnswer,
    Machine,
    MetricPairs,
    Report,
    Side,
    TaskAgreement,
    TaskScore,
    Throughput,
    UsageSample,
)

SERVER_ARGS = "--enforce-eager --block-size 16 --max-model-len 2048 --num-gpu-blocks-override 180"


def machine() -> Machine:
    return Machine(
        cpu_model="AMD EPYC 9R14",
        num_cores=16,
        memory_gib=124.3,
        system="Linux 6.8.0 x86_64, glibc 2.39",
        python="CPython 3.12.11",
    )


def sides(manager_a: str = "upstream", manager_b: str = "kvplug") -> tuple[Side, Side]:
    """Labels differ also where the managers do not."""
    names = (manager_a, manager_b) if manager_a != manager_b else (f"{manager_a} (1)", f"{manager_b} (2)")
    made = []
    for label, manager, start_s in zip(names, (manager_a, manager_b), (61.4, 63.0), strict=True):
        plain = manager == "upstream"
        chosen = "" if plain else f' --kv-cache-manager {manager} --kv-cache-manager-config \'{{"eviction": "lru"}}\''
        made.append(
            Side(
                label=label,
                manager=manager,
                settings={} if plain else {"eviction": "lru"},
                command=f"vllm serve ~/.cache/kvplug/models/default {SERVER_ARGS} --port 38211{chosen}",
                in_force={} if plain else {"manager": manager, "version": "0.1.0", "eviction": "lru"},
                start_s=start_s,
            )
        )
    return made[0], made[1]


def cache_use(seed: int, *, preemptions: bool = True, num_samples: int = 90, duration_s: float = 180.0) -> CacheUse:
    """A stretch of even load: hits start low, usage swings, preemptions come in bursts."""
    generator = random.Random(seed)
    samples: list[UsageSample] = []
    num_prompt_tokens = num_hit_tokens = num_preemptions = 0
    usage = 0.1
    for index in range(num_samples):
        usage = min(1.0, max(0.05, usage + generator.uniform(-0.12, 0.17)))
        num_new_tokens = generator.randrange(800, 4000)
        num_prompt_tokens += num_new_tokens
        num_hit_tokens += int(num_new_tokens * min(0.82, 0.1 + index / 40) * generator.uniform(0.9, 1.0)) // 16 * 16
        if preemptions and usage > 0.97:
            num_preemptions += generator.randrange(3)
        samples.append(
            UsageSample(
                elapsed_s=round(duration_s * index / max(1, num_samples - 1), 2),
                usage=round(usage, 4),
                num_running=generator.randrange(4, 9),
                num_waiting=generator.randrange(6),
                num_hit_tokens=num_hit_tokens,
                num_prompt_tokens=num_prompt_tokens,
                num_preemptions=num_preemptions,
            )
        )
    return CacheUse(
        num_finished_requests=1200,
        num_prompt_tokens=num_prompt_tokens,
        num_hit_tokens=num_hit_tokens,
        num_output_tokens=14_380,
        num_preemptions=num_preemptions,
        peak_usage=max((sample.usage for sample in samples), default=0.0),
        engine_cpu_s=round(generator.uniform(300, 330), 2),
        num_counted_lookup_tokens=num_prompt_tokens * 3 // 2,
        num_counted_lookup_hit_tokens=num_hit_tokens * 3 // 2,
        samples=samples,
    )


def accuracy_report(
    *,
    manager_a: str = "upstream",
    manager_b: str = "kvplug",
    num_tasks: int | None = None,
    num_differing: int = 5,
    preemptions: bool = True,
    num_samples: int = 90,
) -> Report:
    """Four bundled tasks, or `num_tasks` numbered ones; the first has `num_differing` samples with another answer."""
    tasks = ["kvplug_rows", "kvplug_capitals", "kvplug_copy_words", "kvplug_sums"]
    if num_tasks is not None:
        tasks = [f"task_{number:03d}" for number in range(num_tasks)]
    generator = random.Random(4)
    scores, agreement = [], []
    for index, task in enumerate(tasks):
        base = (1.0, 0.9333, 0.37, 0.3733)[index] if num_tasks is None else round(generator.uniform(0.2, 0.95), 4)
        found = round(base - (0.0067 if index == 0 and num_differing else 0.0), 4)
        errors = [round((value * (1 - value) / 300) ** 0.5, 4) for value in (base, found)]
        scores.append(
            TaskScore(
                task=task,
                metric="exact_match",
                higher_is_better=True,
                num_samples=300,
                values=(base, found),
                standard_errors=(errors[0], errors[1]),
                difference=round(found - base, 4),
            )
        )
        differing = num_differing if index == 0 else 0
        agreement.append(
            TaskAgreement(task=task, num_samples=300, num_differing=differing, p_value=0.5 if differing else None)
        )
    both_sides = sides(manager_a, manager_b)
    return Report(
        kind="accuracy",
        created="2025-11-30T17:05:12+00:00",
        duration_s=412.6,
        command=f"kvplug ab eval --model default --tasks {','.join(tasks[:4])} --server-args '{SERVER_ARGS}'",
        model="default",
        machine=machine(),
        versions={"vllm": "0.17.1", "vllm_kvplug": "0.1.0", "torch": "2.10.0+cpu", "commit": "32944b9e1c55"},
        sides=both_sides,
        cache=(
            cache_use(1, preemptions=preemptions, num_samples=num_samples),
            cache_use(2, preemptions=preemptions, num_samples=num_samples),
        ),
        accuracy=Accuracy(
            tasks=tasks,
            limit=None,
            num_concurrent=8,
            scores=scores,
            agreement=agreement,
            differing=[_differing(tasks[0], number) for number in range(num_differing)],
        ),
        verdict=[
            f"No loss of accuracy shown: {both_sides[1].label} differs from {both_sides[0].label} by at most 0.0067 "
            f"on {len(tasks)} tasks, within the error.",
            f"{num_differing} of {300 * len(tasks)} samples have another answer.",
        ],
        exit_status=0,
    )


def _differing(task: str, number: int) -> DifferingAnswer:
    start = 11 * number + 3
    right = ", ".join(str(value) for value in range(start, start + 8))
    return DifferingAnswer(
        task=task,
        sample_id=str(17 * number + 4),
        prompt_end=f"\nRow {start - 8}: {', '.join(str(value) for value in range(start - 8, start))}\nRow {start}:",
        target=" " + right,
        answers=(" " + right + "\n", " " + right.replace(f", {start + 5}", f", {start + 55}") + "\n"),
        scores=(1.0, 0.0),
    )


# name, unit, lower is better, baseline's value, true ratio, noise
_METRICS = (
    ("request throughput", "requests/s", False, 3.82, 1.03, 0.012),
    ("output token throughput", "tokens/s", False, 181.2, 1.03, 0.012),
    ("total token throughput", "tokens/s", False, 2210.0, 1.03, 0.012),
    ("TTFT median", "ms", True, 412.0, 0.91, 0.03),
    ("TTFT p99", "ms", True, 2380.0, 0.97, 0.12),
    ("inter-token latency median", "ms", True, 31.4, 1.001, 0.008),
    ("inter-token latency p99", "ms", True, 88.0, 1.04, 0.03),
    ("end-to-end latency median", "ms", True, 1890.0, 0.98, 0.02),
    ("end-to-end latency p99", "ms", True, 5210.0, 0.99, 0.06),
    ("hit tokens", "tokens", False, 98_304.0, 1.0, 0.001),
    ("preemptions", "preemptions", True, 14.0, 0.86, 0.2),
    ("engine CPU per 1000 output tokens", "s", True, 1.46, 0.985, 0.01),
)


def throughput_report(
    *,
    manager_a: str = "upstream",
    manager_b: str = "kvplug",
    num_pairs: int = 6,
    preemptions: bool = True,
) -> Report:
    """All metrics of a bench over `num_pairs` pairs; with equal managers no ratio is off 1 but for noise."""
    generator = random.Random(9)
    equal = manager_a == manager_b
    metrics = [
        _metric(generator, num_pairs, spec, equal) for spec in _METRICS if preemptions or spec[0] != "preemptions"
    ]
    runs = [
        (
            cache_use(10 + pair, preemptions=preemptions, num_samples=20, duration_s=40),
            cache_use(90 + pair, preemptions=preemptions, num_samples=20, duration_s=40),
        )
        for pair in range(num_pairs)
    ]
    latencies: dict[str, tuple[list[float], list[float]]] = {}
    for kind, centre, spread in (("ttft", 6.0, 0.8), ("itl", 3.4, 0.35), ("e2el", 7.5, 0.5)):
        shift = 0.0 if equal or kind == "itl" else -0.09
        drawn = [[round(generator.lognormvariate(centre + move, spread), 3) for _ in range(700)] for move in (0, shift)]
        latencies[kind] = (drawn[0], drawn[1])
    both_sides = sides(manager_a, manager_b)
    better = (
        "No difference shown in any metric."
        if equal
        else "kvplug: request throughput 3 % higher, TTFT median 11 % lower."
    )
    return Report(
        kind="throughput",
        created="2025-11-30T18:40:00+00:00",
        duration_s=640.0,
        command=f"kvplug ab bench --model default --workload shared-prefix --pairs {num_pairs}",
        model="default",
        machine=machine(),
        versions={"vllm": "0.17.1", "vllm_kvplug": "0.1.0", "torch": "2.10.0+cpu", "commit": "32944b9e1c55"},
        sides=both_sides,
        cache=(
            cache_use(5, preemptions=preemptions, num_samples=260, duration_s=600),
            cache_use(6, preemptions=preemptions, num_samples=260, duration_s=600),
        ),
        throughput=Throughput(
            workload="shared-prefix",
            parameters={"num_requests": 120, "num_prefixes": 8, "prefix_tokens": 512, "suffix_tokens": 64, "rate": 4.0},
            seed=0,
            num_pairs=num_pairs,
            order=[side for pair in range(num_pairs) for side in ((0, 1) if pair % 2 == 0 else (1, 0))],
            both_up=True,
            metrics=metrics,
            latencies_ms=latencies,
            runs=runs,
        ),
        verdict=[better, f"{num_pairs} pairs of runs, both servers up all the time, loaded in turn."],
        exit_status=0,
    )


def _metric(
    generator: random.Random, num_pairs: int, spec: tuple[str, str, bool, float, float, float], equal: bool
) -> MetricPairs:
    name, unit, lower_is_better, base, true_ratio, noise = spec
    true_ratio = 1.0 if equal else true_ratio
    first = [base * generator.gauss(1, noise) for _ in range(num_pairs)]
    second = [base * true_ratio * generator.gauss(1, noise) for _ in range(num_pairs)]
    ratios = [b / a for a, b in zip(first, second, strict=True)]
    ratio = median(ratios)
    half = noise * (4.5 if equal else 2.2) / num_pairs**0.5
    interval = (ratio - half, ratio + half)
    if interval[0] <= 1 <= interval[1]:
        verdict = "no difference shown"
    else:
        verdict = "better" if (ratio < 1) == lower_is_better else "worse"
    return MetricPairs(
        name=name,
        unit=unit,
        lower_is_better=lower_is_better,
        values=(first, second),
        ratios=ratios,
        ratio=ratio,
        interval=interval if num_pairs > 2 else None,
        verdict=verdict if num_pairs > 2 else "too few pairs",
    )


SAMPLES: dict[str, Callable[[], Report]] = {
    "accuracy": accuracy_report,
    "accuracy-equal": lambda: accuracy_report(manager_a="upstream", manager_b="upstream", num_differing=0),
    "accuracy-many": lambda: accuracy_report(num_tasks=500, num_differing=60, preemptions=False),
    "throughput": throughput_report,
    "throughput-equal": lambda: throughput_report(manager_a="upstream", manager_b="upstream", preemptions=False),
}


def main(folder: Path) -> None:
    from vllm_kvplug.evals.report import write_report

    for name, make in SAMPLES.items():
        write_report(make(), folder / name)
        print(folder / name / "report.html")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
