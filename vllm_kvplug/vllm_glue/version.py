"""Which vLLM runs, and whether a manager can be put into it."""

from __future__ import annotations

from vllm_kvplug.errors import UnsupportedError

SUPPORTED_VLLM_VERSIONS = ("0.17.1",)


def vllm_version() -> str:
    """The version that runs, without the build's local part (0.17.1+cpu)."""
    import vllm

    return vllm.__version__.partition("+")[0]


def require_supported_version(name: str) -> None:
    """Raise an UnsupportedError unless this vLLM is one that the chosen manager can be put into."""
    import vllm_kvplug

    if (version := vllm_version()) not in SUPPORTED_VLLM_VERSIONS:
        expected = " or ".join(SUPPORTED_VLLM_VERSIONS)
        raise UnsupportedError(
            f"kv_cache_manager: {name!r} with vllm_kvplug {vllm_kvplug.__version__} expects vLLM {expected}, "
            f"found {version}; install vllm=={SUPPORTED_VLLM_VERSIONS[-1]}, or leave the option out"
        )
