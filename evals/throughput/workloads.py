"""The workloads of `kvplug ab bench`, each built from a seed alone, so that both sides of a pair get the same.

At length scale 1 every request fits a maximum length of 2048 tokens, and a run of the default model takes some ten
seconds on two cores.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from vllm_kvplug.evals.errors import EvalUsageError
from vllm_kvplug.evals.throughput.loads import BenchLoad, Load, Prompt, Session, SessionLoad, Turn
from vllm_kvplug.evals.throughput.mooncake import block_tokens, read_trace, replay
from vllm_kvplug.evals.throughput.options import ThroughputOptions
from vllm_kvplug.evals.throughput.vocabulary import Vocabulary

NUM_PREFIXES = 4
NUM_TURNS = 4
NUM_SYSTEM_PROMPTS = 3
# One request in so many asks a long document.
DOCUMENT_EVERY = 4


@dataclass(frozen=True)
class Recipe:
    """What a run of a workload is made from.

    Args:
        vocabulary: None for the data sets that vLLM's client makes itself.
        max_model_len: of the servers, where it is known.
    """

    options: ThroughputOptions
    vocabulary: Vocabulary | None
    max_model_len: int | None = None

    def load(self, run_index: int, num_requests: int | None = None) -> Load:
        """Of pair `run_index` (-1: warm-up).

        Raises:
            EvalUsageError: a request would be longer than the servers take, or the workload cannot have so many.
        """
        seed = self.options.seed_of_run(run_index)
        load = _BUILDERS[self.options.workload](self, seed, num_requests or self.options.requests)
        if self.max_model_len is not None and load.max_tokens > self.max_model_len:
            raise EvalUsageError(
                f"--workload {self.options.workload}: expected requests of at most {self.max_model_len} tokens with "
                f"their answer (the servers' --max-model-len), found one of {load.max_tokens}: lower --length-scale"
            )
        return load

    def warm_up(self) -> Load:
        """A quarter of a run, of another seed."""
        num_requests = -(-self.options.requests // 4)
        step = request_step(self.options.workload)
        return self.load(-1, -(-num_requests // step) * step)

    def scaled(self, num_tokens: int) -> int:
        """`num_tokens` by the length scale."""
        return max(1, round(num_tokens * self.options.length_scale))

    @property
    def words(self) -> Vocabulary:
        assert self.vocabulary is not None, f"workload {self.options.workload} was given no vocabulary"
        return self.vocabulary


def needs_vocabulary(workload: str) -> bool:
    """Whether its prompts are made here."""
    return workload not in ("random", "shared-prefixes")


def request_step(workload: str) -> int:
    """The number of requests must be a multiple of this."""
    return {"shared-prefixes": NUM_PREFIXES, "multi-turn": NUM_TURNS}.get(workload, 1)


def _check_step(recipe: Recipe, num_requests: int, what: str) -> None:
    workload = recipe.options.workload
    step = request_step(workload)
    if num_requests % step:
        raise EvalUsageError(
            f"--num-requests: {workload} has {what}: expected a multiple of {step}, found {num_requests}"
        )


def _random(recipe: Recipe, seed: int, num_requests: int) -> Load:
    """Unrelated prompts of 128 to 384 tokens and 16 to 48 tokens of answer."""
    num_input, num_output, spread = recipe.scaled(256), recipe.scaled(32), 0.5
    args = ["--dataset-name", "random", "--random-input-len", str(num_input), "--random-output-len", str(num_output)]
    args += ["--random-range-ratio", str(spread)]
    return BenchLoad(tuple(args), num_requests, int((num_input + num_output) * (1 + spread)) + 2)


def _shared_prefixes(recipe: Recipe, seed: int, num_requests: int) -> Load:
    """Four prefixes of 384 tokens, each with different ends of 64 tokens, in random order."""
    _check_step(recipe, num_requests, f"{NUM_PREFIXES} prefixes")
    num_prefix, num_suffix, num_output = recipe.scaled(384), recipe.scaled(64), recipe.scaled(32)
    args = ["--dataset-name", "prefix_repetition", "--prefix-repetition-num-prefixes", str(NUM_PREFIXES)]
    args += ["--prefix-repetition-prefix-len", str(num_prefix), "--prefix-repetition-suffix-len", str(num_suffix)]
    args += ["--prefix-repetition-output-len", str(num_output)]
    return BenchLoad(tuple(args), num_requests, num_prefix + num_suffix + num_output)


def _multi_turn(recipe: Recipe, seed: int, num_requests: int) -> Load:
    """Conversations of four turns behind one system prompt of 128 tokens; 64 tokens a question, 32 an answer."""
    _check_step(recipe, num_requests, f"conversations of {NUM_TURNS} turns")
    rng = random.Random(f"multi-turn {seed}")
    options = recipe.options
    system_prompt = recipe.words.draw(rng, recipe.scaled(128))
    start_s = 0.0
    sessions = []
    for _ in range(num_requests // NUM_TURNS):
        turns = []
        for number in range(NUM_TURNS):
            question = recipe.words.draw(rng, recipe.scaled(64))
            wait_s = rng.expovariate(1 / options.think_time_s) if number and options.think_time_s else 0.0
            token_ids = tuple(question if number else system_prompt + question)
            turns.append(Turn(token_ids, recipe.scaled(32), wait_s))
        sessions.append(Session(tuple(turns), start_s))
        if options.request_rate is not None:
            start_s += rng.expovariate(options.request_rate)
    return SessionLoad(tuple(sessions), options.concurrency)


def _long_documents(recipe: Recipe, seed: int, num_requests: int) -> Load:
    """One request in four asks a document of 1200 tokens that comes once, the others one of three system prompts."""
    rng = random.Random(f"long-documents {seed}")
    draw = recipe.words.draw
    system_prompts = [draw(rng, recipe.scaled(384)) for _ in range(NUM_SYSTEM_PROMPTS)]
    prompts = []
    for number in range(num_requests):
        is_document = number % DOCUMENT_EVERY == DOCUMENT_EVERY - 1
        head = draw(rng, recipe.scaled(1200)) if is_document else rng.choice(system_prompts)
        token_ids = head + draw(rng, recipe.scaled(32))
        prompts.append(Prompt(recipe.words.text(token_ids), len(token_ids), recipe.scaled(32)))
    args = ("--dataset-name", "custom", "--custom-output-len", "-1", "--skip-chat-template", "--disable-shuffle")
    max_tokens = max(prompt.num_input_tokens + prompt.num_output_tokens for prompt in prompts)
    return BenchLoad(args, num_requests, max_tokens, tuple(prompts))


def _mooncake(recipe: Recipe, seed: int, num_requests: int) -> Load:
    """A trace's first requests, or those of a sample of its conversations, at its times."""
    options = recipe.options
    assert options.trace is not None
    return replay(
        read_trace(options.trace, num_requests, options.trace_sample, options.seed),
        recipe.words,
        seed,
        num_block_tokens=block_tokens(options.length_scale),
        time_scale=options.time_scale,
        max_model_len=recipe.max_model_len,
        max_concurrency=options.max_concurrency,
    )


_BUILDERS: dict[str, Callable[[Recipe, int, int], Load]] = {
    "random": _random,
    "shared-prefixes": _shared_prefixes,
    "multi-turn": _multi_turn,
    "long-documents": _long_documents,
    "mooncake": _mooncake,
}


def describe(workload: str) -> str:
    """What it sends, in a sentence."""
    return (_BUILDERS[workload].__doc__ or "").strip()
