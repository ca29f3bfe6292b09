"""The entry hooks: offer the option and carry the choice. They change nothing until a manager is chosen.

Everything else (`seams.activate`) is put in place by a choice, in the processes that it reaches.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import ModuleType
from typing import Any

from vllm_kvplug.errors import UnsupportedError
from vllm_kvplug.vllm_glue import patched_tree, patching
from vllm_kvplug.vllm_glue.choice import CONFIG_KEY, KEY, CommandLineChoice, settle
from vllm_kvplug.vllm_glue.version import SUPPORTED_VLLM_VERSIONS, vllm_version


def install() -> None:
    """Put the hooks in place, in each module now or when it is imported. Idempotent; imports nothing of vLLM itself."""
    patching.when_imported("vllm.utils.argparse_utils", _patch_parser)
    patching.when_imported("vllm.engine.arg_utils", _patch_engine_args)
    if patched_tree.is_there():
        patching.when_imported(patched_tree.MODULE, patched_tree.offer)


def _where_it_fits(patch: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    """A vLLM version that we do not know may lack what we hook: it serves on without the option, with a warning."""

    def patch_or_warn(module: ModuleType) -> None:
        try:
            patch(module)
        except AttributeError as error:
            if vllm_version() in SUPPORTED_VLLM_VERSIONS:
                raise
            from vllm_kvplug.vllm_glue.log import logger

            logger.warning("vllm_kvplug does not know vLLM %s and offers no option in it: %s", vllm_version(), error)

    return patch_or_warn


@_where_it_fits
def _patch_parser(module: ModuleType) -> None:
    patching.wrap_method(module.FlexibleArgumentParser, "parse_args", _around_parse_args)


@_where_it_fits
def _patch_engine_args(module: ModuleType) -> None:
    patching.wrap_method(module.EngineArgs, "create_engine_config", _around_create_engine_config)
    if patched_tree.is_there():
        return  # the two options and fields are vLLM's own
    patching.wrap_method(module.EngineArgs, "add_cli_args", _around_add_cli_args)
    patching.wrap_method(module.EngineArgs, "from_cli_args", _around_from_cli_args)
    for args_cls in (module.EngineArgs, module.AsyncEngineArgs):
        patching.wrap_method(args_cls, "__init__", _around_engine_args_init)


# The command line's part is imported by the processes that have one.
def _around_add_cli_args(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from vllm_kvplug.vllm_glue import options

    return options.around_add_cli_args(original, *args, **kwargs)


def _around_parse_args(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from vllm_kvplug.vllm_glue import options

    return options.around_parse_args(original, *args, **kwargs)


def _around_from_cli_args(original: Callable[..., Any], args_cls: type, namespace: Any, *args: Any) -> Any:
    """Settle what another parser than vLLM's `parse_args` has left in the namespace, whose two keys no field takes."""
    name, config = getattr(namespace, KEY, None), getattr(namespace, CONFIG_KEY, None)
    if name is not None or config is not None:
        namespace = copy.copy(namespace)
        namespace.additional_config, _ = settle(getattr(namespace, "additional_config", {}), name, config)
    return original(args_cls, namespace, *args)


def _around_engine_args_init(original: Callable[..., None], engine_args: Any, *args: Any, **kwargs: Any) -> None:
    """`LLM(model, kv_cache_manager=..., kv_cache_manager_config=...)`: two keywords, carried in additional_config."""
    name, config = kwargs.pop(KEY, None), kwargs.pop(CONFIG_KEY, None)
    if name is not None or config is not None:
        kwargs["additional_config"], _ = settle(kwargs.get("additional_config", {}), name, config)
    original(engine_args, *args, **kwargs)


def _around_create_engine_config(original: Callable[..., Any], engine_args: Any, *args: Any, **kwargs: Any) -> Any:
    """Where every engine's configuration is made: the choice is final here, and what it cannot serve is refused."""
    if patched_tree.is_vllms_alone(engine_args):
        return original(engine_args, *args, **kwargs)
    engine_args.additional_config, choice = settle(engine_args.additional_config, *patched_tree.stated(engine_args))
    if patched_tree.is_there():
        patched_tree.hand_over(engine_args, choice)
    vllm_config = original(engine_args, *args, **kwargs)
    if choice is None:
        return vllm_config
    from vllm_kvplug.vllm_glue import features, options, registry, seams

    if registry.involves_kvplug(choice["name"], choice["config"]):
        try:
            features.refuse_unsupported(vllm_config)
        except UnsupportedError as error:
            if isinstance(choice, CommandLineChoice):
                raise SystemExit(f"error: {options.one_line(error)}") from None
            raise
    if patched_tree.is_there():
        vllm_config.cache_config.kv_cache_manager = patched_tree.CarriedName(choice["name"])
    seams.activate()
    return vllm_config
