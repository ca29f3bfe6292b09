"""A real VllmConfig, made once."""

from __future__ import annotations

from typing import Any

import pytest

from tests.glue.support import ENGINE_ARGS, model_folder
from tests.lockstep.twins import prepare_hashing


@pytest.fixture(scope="session")
def base_config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    prepare_hashing()
    model = model_folder(tmp_path_factory.mktemp("models") / "tiny-qwen2")
    return EngineArgs(model=model, **ENGINE_ARGS).create_engine_config()
