"""Options of the lockstep tests: of pytest, where this folder is named on the command line; else their defaults."""

from __future__ import annotations

import pytest

# Name -> (default, help). On the command line `--lockstep-NAME`.
OPTIONS = {
    "seeds": (2000, "how many seeds to run"),
    "steps": (150, "operations for each seed"),
    "first-seed": (0, "the first seed"),
    "mistake-seeds": (300, "seeds to try for each deliberate mistake until one finds it"),
}


def add_options(parser: pytest.Parser) -> None:
    """Tell pytest of them."""
    group = parser.getgroup("lockstep")
    for name, (default, help_text) in OPTIONS.items():
        group.addoption(f"--lockstep-{name}", type=int, default=default, help=f"{help_text} (default: {default})")


def option(config: pytest.Config, name: str) -> int:
    """The value of an option."""
    default, _ = OPTIONS[name]
    return config.getoption(f"--lockstep-{name}", default)
