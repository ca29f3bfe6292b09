"""The helpers that other tests trust."""

from __future__ import annotations

from tests.glue.support import own_lines

NOISE = (
    "W1130 06:47:22.265000 32112 torch/utils/cpp_extension.py:118] No CUDA runtime is found\n"
    "/site-packages/vllm/protocol.py:176: SyntaxWarning: invalid escape sequence\n"
    "  \"(e.g. 'abcdabcdabcd...' or emoji).\n"
)


def test_own_lines_leave_out_what_imports_write() -> None:
    assert own_lines(NOISE + "error: one\n") == ["error: one"]


def test_own_lines_keep_indented_output() -> None:
    assert own_lines(NOISE + "error: one\n  and more\n") == ["error: one", "  and more"]
    assert own_lines(NOISE + "  and more\n") == ["  and more"]
