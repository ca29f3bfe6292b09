"""Signals as a terminal's processes have them."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """A process that a shell put into the background ignores SIGINT, and so would all that these tests start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
