"""The requests of a trace, in pairs: they are created here, and found by index."""

from __future__ import annotations

from collections import Counter

from tests.lockstep.compare import Both, Pair
from tests.lockstep.structures import count_structures
from tests.lockstep.trace import FRESH_EMPTY, SHARED_EMPTY, Setup
from tests.lockstep.twins import Phase, Twin, text

_MAX_ALIVE = 12


class Population:
    """Both managers and the requests that are alive.

    Attributes:
        pair: both managers.
        counts: what happened, by name, for the summary.
    """

    def __init__(self, setup: Setup, counts: Counter[str], *, stops_at_invariants: bool = True) -> None:
        self.setup = setup
        self.counts = counts
        self.pair = Pair(setup, counts, stops_at_invariants=stops_at_invariants)
        count_structures(self.pair.managers.ours, counts)
        self._alive: list[Twin] = []
        self._finished: list[Twin] = []
        self._num_created = 0
        self._count_setup()

    def _count_setup(self) -> None:
        setup = self.setup
        specs = set(setup.groups)
        happened = {
            f"{len(setup.groups)} groups": True,
            "mixed block sizes": len(set(setup.block_tokens)) > 1,
            "hashes finer than all blocks": min(setup.block_tokens, default=0) > setup.mix.hash_block_size,
            "context parallel": setup.num_ranks > 1,
            "prefix caching off": not setup.enable_caching,
            "equal groups among others": 1 < len(specs) < len(setup.groups),
            "eagle, several groups": setup.use_eagle and setup.enable_caching and len(specs) > 1,
            "connector, several groups": setup.has_connector and len(setup.groups) > 1,
            "speculative blocks": any(group.num_speculative_blocks for group in setup.groups),
            **{f"group: {group.name}": True for group in setup.groups},
        }
        self.counts.update({f"setups: {name}": int(does) for name, does in happened.items()})

    def new(
        self,
        family: int,
        num_shared_tokens: int,
        num_own_tokens: int,
        own_seed: int,
        salt: int,
        lora: int,
        image: int,
        skips_reading: int,
        num_encoder_tokens: int,
    ) -> None:
        end = max(num_shared_tokens + num_own_tokens, 1)
        prompt = text(family, 0, 0, num_shared_tokens) + text(family, own_seed, num_shared_tokens, end)
        options = {"salt": salt, "lora": lora, "image": image, "skips_reading": skips_reading}
        self._create(family, prompt, num_encoder_tokens, options)

    def copy(self, which: int) -> None:
        """A new request that asks the same as another, whatever has become of that."""
        twins = [*self._alive, *self._finished]
        if twins:
            twin = twins[which % len(twins)]
            self._create(twin.family, twin.prompt, twin.num_encoder_tokens, twin.options)

    def _create(self, family: int, prompt: list[int], num_encoder_tokens: int, options: dict[str, int]) -> Twin | None:
        if len(self._alive) >= _MAX_ALIVE:
            return None
        name, num_tokens_per_hash = f"r{self._num_created}", self.setup.mix.hash_block_size
        self._alive.append(Twin(name, family, prompt, num_tokens_per_hash, num_encoder_tokens, options))
        self._num_created += 1
        self.counts["salted requests"] += bool(options["salt"])
        self.counts["LoRA requests"] += bool(options["lora"])
        self.counts["image requests"] += bool(options["image"])
        self.counts["requests that skip reading"] += bool(options["skips_reading"])
        return self._alive[-1]

    # For the operations

    def _no_hits(self, no_hits_as: int) -> Both | None:
        """The argument new_computed_blocks of a call without hits."""
        empty = self._shared_empty()
        if no_hits_as == FRESH_EMPTY:
            return Both(empty.upstream.new_empty(), empty.ours.new_empty())
        return empty if no_hits_as == SHARED_EMPTY else None

    def _shared_empty(self) -> Both:
        managers = self.pair.managers
        return Both(managers.upstream.empty_kv_cache_blocks, managers.ours.empty_kv_cache_blocks)

    def _in_phase(self, *phases: Phase) -> list[Twin]:
        return [twin for twin in self._alive if twin.phase in phases]

    def _pick(self, which: int, *phases: Phase) -> Twin | None:
        candidates = self._in_phase(*phases)
        return candidates[which % len(candidates)] if candidates else None
