"""What is typed wrong: one line, exit status 2, and nothing in the folder where it was typed."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_kvplug.cli import main


def check_refusal(
    arguments: list[str],
    message: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`kvplug ARGUMENTS`, typed in the empty `folder`, is refused with `message`."""
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as ended:
        main.main(arguments)
    error = capsys.readouterr().err.strip()
    assert (ended.value.code, len(error.splitlines())) == (2, 1), error
    assert message in error
    assert list(folder.iterdir()) == []
