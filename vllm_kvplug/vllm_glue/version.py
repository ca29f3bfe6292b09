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


def release_of(version: str) -> str | None:
    """The release that a build is made from, by its number: 0.17.1 of 0.17.1.post1, and of 0.17.2.dev3, as a checkout
    of 0.17.1 with three commits of a fork calls itself. None: a candidate, or something else."""
    found = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)(?:\.post\d+)?(\.dev\d+)?", version)
    if found is None:
        return None
    major, minor, patch = map(int, found.groups()[:3])
    if found[4] is not None and ".post" not in version:
        patch -= 1
    return f"{major}.{minor}.{patch}" if patch >= 0 else None


def is_known() -> bool:
    """Whether this vLLM is a supported release, or a fork that carries our patch and is built from one.

    A fork's commits give it a number of its own; on a vLLM without the patch such a number is anybody's.
    """
    from vllm_kvplug.vllm_glue import patched_tree

    version = vllm_version()
    if version in SUPPORTED_VLLM_VERSIONS:
        return True
    return patched_tree.is_there() and release_of(version) in SUPPORTED_VLLM_VERSIONS


def is_supported() -> bool:
    """Whether kvplug's managers can be put into this vLLM: one that is known, and as we know it."""
    from vllm_kvplug.vllm_glue import drift

    return is_known() and not drift.find()


def require_supported_version(name: str) -> None:
    """Raise an UnsupportedError unless this vLLM `is_supported`. The line names what is missing, or differs, in it."""
    import vllm_kvplug
    from vllm_kvplug.vllm_glue import drift

    if is_supported():
        return
    version, drifts = vllm_version(), "; ".join(drift.find())
    this = f"kv_cache_manager: {name!r} with vllm_kvplug {vllm_kvplug.__version__}"
    if is_known():
        release = release_of(version) or version
        raise UnsupportedError(f"{this} expects vLLM {release} as it was released, found that it differs: {drifts}")
    differs = f"which differs: {drifts}" if drifts else "with which kvplug was not tried"
    raise UnsupportedError(
        f"{this} expects vLLM {', '.join(SUPPORTED_VLLM_VERSIONS)}, found {version}, {differs}; "
        f"install vllm=={SUPPORTED_VLLM_VERSIONS[-1]}, or leave the option out"
    )
