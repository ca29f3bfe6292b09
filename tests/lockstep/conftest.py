"""Options of the lockstep tests; vLLM's hashing and logging set for them. vLLM is not imported before it is needed."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.lockstep.options import add_options


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)


@pytest.fixture(scope="package", autouse=True)
def quiet_vllm() -> Iterator[None]:
    """A fixed first hash; and no log lines, since a run resets caches thousands of times."""
    from tests.lockstep.twins import prepare_hashing

    prepare_hashing()
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    yield
    logging.disable(before)
