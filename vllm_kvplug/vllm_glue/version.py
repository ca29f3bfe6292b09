"""Which vLLM runs, and whether a manager can be put into it."""

from __future__ import annotations

import functools
import re

from vllm_kvplug.errors import UnsupportedError

# In their order. docs/versions.md says what was run with each.
SUPPORTED_VLLM_VERSIONS = ("0.17.0", "0.17.1", "0.18.0", "0.18.1", "0.19.0", "0.19.1")
# The one that everything is tested with in each run of the tests.
BASELINE = "0.17.1"


def vllm_version() -> str:
    """The version that runs, without the build's local part (0.17.1+cpu)."""
    import vllm

    return vllm.__version__.partition("+")[0]


@functools.cache
def is_since(version: str) -> bool:
    """Whether the vLLM that runs is this version or a later one: what the glue asks where versions differ."""
    return _numbers(vllm_version()) >= _numbers(version)


def _numbers(version: str) -> tuple[int, ...]:
    """(0, 17, 1) of 0.17.1, of its candidates and of builds after it."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def require_supported_version(name: str) -> None:
    """Raise an UnsupportedError unless this vLLM is one that the chosen manager can be put into, and is as we know it.

    The line names what is missing, or differs, in this vLLM.
    """
    import vllm_kvplug
    from vllm_kvplug.vllm_glue import drift

    version = vllm_version()
    is_known = version in SUPPORTED_VLLM_VERSIONS
    drifts = drift.find()
    if is_known and not drifts:
        return
    this = f"kv_cache_manager: {name!r} with vllm_kvplug {vllm_kvplug.__version__}"
    differs = "; ".join(drifts) or "nothing that kvplug sees, but nobody has tried"
    if is_known:
        raise UnsupportedError(f"{this} expects vLLM {version} as it was released, found that it differs: {differs}")
    expected = ", ".join(SUPPORTED_VLLM_VERSIONS)
    raise UnsupportedError(
        f"{this} expects vLLM {expected}, found {version}, which differs: {differs}; "
        f"install vllm=={SUPPORTED_VLLM_VERSIONS[-1]}, or leave the option out"
    )
