"""The sentences around the tables: how the run ended, how to read the numbers, what they do not show."""

from __future__ import annotations

from vllm_kvplug.evals.results import UNTESTED_STATUS, Report

COUNTED_NOTE = (
    "* vllm:prefix_cache_queries and vllm:prefix_cache_hits as the server counts them. Upstream counts a refused "
    "attempt again each time it is tried, so these two rows are not comparable between managers; hit tokens above are."
)


def is_equal_sides(report: Report) -> bool:
    """Whether a manager was compared with itself."""
    first, second = report.sides
    return first.manager == second.manager and first.settings == second.settings


def ending(report: Report) -> str:
    """How the run ended, by its exit status."""
    if report.exit_status == 0:
        return "Completed"
    if report.exit_status == UNTESTED_STATUS:
        return f"Completed, but does not test what it should (exit status {UNTESTED_STATUS})"
    return f"Ended with exit status {report.exit_status}"


def notes(report: Report) -> list[str]:
    """What a reader must know before the numbers."""
    found = []
    if is_equal_sides(report):
        found.append(
            "Both sides are the same manager with the same settings. A difference shown here is noise, or a fault of "
            "the measurement."
        )
    for name, values in (
        ("prefix hits", [use.num_hit_tokens for use in report.cache]),
        ("preemptions", [use.num_preemptions for use in report.cache]),
    ):
        without = [side.label for side, value in zip(report.sides, values, strict=True) if value == 0]
        if without:
            found.append(f"No {name} on {' and '.join(without)}: this run says nothing about them.")
    return found


def how_to_read(report: Report) -> list[str]:
    """A paragraph each."""
    first, second = (side.label for side in report.sides)
    paragraphs = [
        f"Both servers ran with equal flags but for the manager. The first side, {first}, is the baseline. Differences "
        f"are {second} - {first}, ratios {second} / {first}.",
        "Hit tokens are prompt tokens of finished requests that came from the prefix cache: the same definition on "
        "both sides. The server's own prefix counters also count attempts that were refused and tried again.",
        "Usage is the part of the usable cache blocks that requests hold, looked at from time to time: a short peak "
        "between two looks is not seen.",
    ]
    if report.accuracy is not None:
        paragraphs += [
            "The error beside a score says how far another draw of samples would move it. Both sides got the same "
            "samples, so the difference is more certain than the two errors suggest: the number of differing samples "
            "and p tell more. With many tasks, about one in twenty has p below 0.05 by chance alone.",
            "Answers may differ with no fault in a cache: requests that run together are computed in batches of other "
            "sizes, which changes the last bits of the logits, and a near tie then falls the other way. With one "
            "request at a time and the eviction policy lru, answers are expected to be equal to the byte.",
        ]
    if report.throughput is not None:
        paragraphs += [
            "Each pair loads both sides with the same requests, one after the other, and the order turns around from "
            "pair to pair, so a slow drift of the machine cancels. “No difference shown” means that the interval of "
            "the ratio holds 1: a difference smaller than the interval's width may still be there.",
            "Of many metrics some fall outside by chance: at 95 %, about one in twenty. Metrics of one run also move "
            "together, so two of them are not two proofs.",
        ]
    return [*paragraphs, _limits(report)]


def _limits(report: Report) -> str:
    gpu = f", {report.machine.gpu}" if report.machine.gpu else ""
    return (
        f"What the numbers do not show: they hold for this model, this load and this machine "
        f"({report.machine.cpu_model}{gpu}). They say nothing about other pool sizes, features that were off, or "
        "requests that were not asked."
    )
