"""The `kvplug` command: quick to start, one line and exit status 2 for what was typed wrong."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vllm_kvplug import __version__
from vllm_kvplug.cli.main import main


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """(exit status, standard output, standard error) of `kvplug ARGUMENTS`."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"kvplug {__version__}\n", "")


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"], ["model", "build", "--help"]])
def test_help(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    status, out, err = run(capsys, *arguments)
    assert (status, err) == (0, "")
    assert "Usage: " in out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "Missing command"),
        (["bogus"], "bogus"),
        (["--foo"], "--foo"),
        (["model", "build", "nope"], "known models: default, smollm2-135m-qwen2, tiny-qwen2, tiny-hybrid"),
        (["model", "build", "tiny-qwen2", "more"], "more"),
        (["demo", "--port", "many"], "--port"),
        (["demo", "--port", "99999"], "--port"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("kvplug: error: ")
    assert expected in err
    assert err.count("\n") == 1


def test_the_command_imports_neither_torch_nor_vllm() -> None:
    script = (
        "import sys, vllm_kvplug.cli.main; "
        "print([m for m in ('torch', 'vllm', 'transformers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
