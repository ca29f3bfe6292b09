"""Two processes with engines side by side: how many CPUs there are, and an environment in which they do not collide."""

from __future__ import annotations

import os

# vLLM binds the engines of every process to the same cores unless it is told not to.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def num_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
