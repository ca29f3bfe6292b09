"""The glue's logger, below vLLM's: its level, format and prefix are the user's. Imported when it logs."""

from vllm.logger import init_logger

logger = init_logger("vllm.kvplug")
