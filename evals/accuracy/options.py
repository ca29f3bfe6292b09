"""What `kvplug ab eval` is asked to do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from vllm_kvplug.evals.errors import EvalUsageError
from vllm_kvplug.evals.sides import SideChoice, choices, max_model_len_of, with_defaults
from vllm_kvplug.evals.tasks.suite import DEFAULT_SEED, SUITE

# The bundled suite's prompts have 60 to 360 tokens. 24 requests at once then want more blocks than this pool has:
# prefixes are evicted between their uses, and running requests are preempted.
DEFAULT_NUM_CONCURRENT = 24
DEFAULT_MAX_MODEL_LEN = 1024
_NUM_SPARE_BLOCKS = 32
_TOKENS_A_BLOCK = 16


@dataclass(frozen=True)
class AccuracyOptions:
    """One comparison.

    Args:
        model: path of the model, or a hub name.
        folder: where logs, samples and the generated tasks go.
        tasks: names of lm-eval tasks, groups or tags, patterns of names, or paths of YAML files.
        limit: the first so many samples of each task; None: all.
        server_args: arguments of both servers, before the defaults below.
        include_paths: folders with further YAML task files.
        chat: ask through chat completions, with the model's chat template.
        num_concurrent: requests at once.
        lm_eval_model_args: further arguments of lm-eval's model class, such as add_bos_token.
        seed: of the bundled tasks' items.
        model_name: what reports call the model; None: as `model` says.
        server_command: what to run in place of `vllm` (tests).
    """

    model: str
    folder: Path
    tasks: Sequence[str] = (SUITE,)
    limit: int | None = None
    server_args: Sequence[str] = ()
    include_paths: Sequence[Path] = ()
    chat: bool = False
    num_concurrent: int = DEFAULT_NUM_CONCURRENT
    choices: tuple[SideChoice, SideChoice] = field(default_factory=choices)
    num_fewshot: int | None = None
    lm_eval_model_args: dict[str, str] = field(default_factory=dict)
    seed: int = DEFAULT_SEED
    model_name: str | None = None
    server_command: Sequence[str] | None = None

    def check(self) -> None:
        """Raise EvalUsageError for what can be seen to be wrong without lm-eval."""
        if not self.tasks:
            raise EvalUsageError("--tasks: expected names of lm-eval tasks, found none")
        for option, value in (("--limit", self.limit), ("--num-concurrent", self.num_concurrent)):
            if value is not None and value < 1:
                raise EvalUsageError(f"{option}: expected 1 or more, found {value}")
        for path in self.include_paths:
            if not path.is_dir():
                raise EvalUsageError(f"--include-path: expected a folder with YAML task files, found {str(path)!r}")

    def placed(self, model_path: str, folder: Path) -> AccuracyOptions:
        """The same with the model's path and the run's folder."""
        return replace(self, model=model_path, model_name=self.model, folder=folder)

    def full_server_args(self) -> list[str]:
        """`server_args` and the defaults for what they do not say: a pool that is too small for all at once."""
        args = with_defaults(self.server_args, [("--max-model-len", str(DEFAULT_MAX_MODEL_LEN))])
        max_model_len = max_model_len_of(args) or DEFAULT_MAX_MODEL_LEN
        num_blocks = math.ceil(max_model_len / _TOKENS_A_BLOCK) + _NUM_SPARE_BLOCKS
        defaults = [
            ("--num-gpu-blocks-override", str(num_blocks)),
            ("--max-num-seqs", str(max(self.num_concurrent, 1))),
        ]
        return with_defaults(args, defaults)


def parse_model_args(text: str | None) -> dict[str, str]:
    """`name=value,name=value` as a mapping.

    Raises:
        EvalUsageError: a part without a name or a value.
    """
    parsed = {}
    for part in filter(None, (text or "").split(",")):
        name, equals, value = part.partition("=")
        if not (name.strip() and equals):
            raise EvalUsageError(f"--lm-eval-args: expected name=value,name=value, found {part!r}")
        parsed[name.strip()] = value.strip()
    return parsed
