"""One side's `vllm serve`, started and checked."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from vllm_kvplug.cli import console, server_metrics
from vllm_kvplug.cli.server_process import ServerError, ServerProcess
from vllm_kvplug.errors import KVPlugError
from vllm_kvplug.evals.errors import EvalError
from vllm_kvplug.evals.results import Side
from vllm_kvplug.evals.setting import is_cpu_build
from vllm_kvplug.evals.sides import UPSTREAM, SideChoice, with_defaults
from vllm_kvplug.redaction import redacted, redacted_args

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

    @contextmanager
    def death_told(self, during: str) -> Iterator[None]:
        """A context in which an error of the package becomes that of the server's end, if the server has ended."""
        try:
            yield
        except KVPlugError:
            self.raise_if_dead(during)
            raise

    def engine_pids(self) -> list[int]:
        """Process ids of the engines, whose CPU time holds the scheduler's (and on the CPU build the model's).

        Raises:
            EvalError: the server is gone.
        """
        import psutil

        def is_engine(process: psutil.Process) -> bool:
            try:
                return process.name().startswith("VLLM::EngineCor")  # Linux cuts names after 15 characters
            except psutil.Error:
                return False

        try:
            children = psutil.Process(self.server.pid).children(recursive=True)
        except psutil.Error:
            raise EvalError(
                self.server.with_log_tail(f"{self.choice.label}: the server's process {self.server.pid} is gone")
            ) from None
        return [child.pid for child in children if is_engine(child)]


def max_model_len(url: str) -> int:
    """Most tokens of a request with its answer, as the server says.

    Raises:
        EvalError: it does not.
    """
    address = f"{url}/v1/models"
    try:
        response = httpx.get(address, timeout=60.0, trust_env=False)
        response.raise_for_status()
        return int(response.json()["data"][0]["max_model_len"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        found = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise EvalError(f"{address}: expected the model's max_model_len, found {found}") from None


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
    args = with_defaults(server_args, _DEFAULTS_ON_CPU if is_cpu_build() else ())
    args = ["--served-model-name", SERVED_NAME, *args, *choice.server_args()]
    log_path = log_folder / f"server-{_file_name(choice.label)}.log"
    # The caller's key would make the server refuse our clients, which have none; vLLM takes an empty one for none.
    env = {**(env or {}), "VLLM_API_KEY": ""}
    with ServerProcess(model_path, args, env, log_path, command=command) as server:
        shown_command = shlex.join(redacted_args(server.command))
        console.say(f"starting   {choice.label}: {shown_command}")
        start_s = console.wait_ready(server, timeout_s, choice.label)
        in_force = server_metrics.manager_in_force(server_metrics.read_samples(server.url))
        expected = choice.manager if choice.server_args() else UPSTREAM
        if in_force.get("manager", UPSTREAM) != expected:
            raise EvalError(f"{choice.label}: expected manager {expected} in force, found {in_force or UPSTREAM}")
        console.say(f"ready      {choice.label}: {server.url} after {start_s:.0f} s")
        side = Side(
            label=choice.label,
            manager=choice.manager,
            settings=redacted(choice.settings),
            command=shown_command,
            in_force=in_force,
            start_s=round(start_s, 1),
        )
        yield RunningSide(choice, server, side)


def _file_name(label: str) -> str:
    return "".join(char if char.isalnum() or char in "-." else "_" for char in label)
