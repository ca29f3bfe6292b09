"""A model hub's cache folder for the models that upstream's tests name, made without a hub.

Configurations are in hub_models.py; the default model's tokenizer stands in for every model's own; only the end-to-end
tests need weights, and get tiny random ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tests.conformance import hub_models
from tests.conformance.hub_models import HUB_MODELS, HubModel
from tests.conformance.sdist import cache_folder

_REVISION = "0" * 40


def hub_folder(with_weights: bool) -> Path:
    """The value for HF_HOME. Built once for each version of this file and of hub_models.py."""
    sources = Path(__file__).read_bytes() + Path(hub_models.__file__).read_bytes()
    layout = hashlib.sha256(sources).hexdigest()[:12]
    folder = cache_folder() / f"hub-{'weights' if with_weights else 'configs'}-{layout}"
    if not folder.exists():
        from vllm_kvplug.cli.model import ensure_model

        tokenizer = Path(ensure_model("default"))
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=folder.parent))
        try:
            for name, model in HUB_MODELS.items():
                _add_model(scratch, name, model, tokenizer, with_weights)
            # A second run may have been quicker: its folder is as good.
            with contextlib.suppress(OSError):
                scratch.rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _add_model(hub: Path, name: str, model: HubModel, tokenizer: Path, with_weights: bool) -> None:
    root = hub / "hub" / f"models--{name.replace('/', '--')}"
    folder = root / "snapshots" / _REVISION
    folder.mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(_REVISION)

    weights = with_weights and model.tiny is not None
    config = model.config | (model.tiny or {}) if weights else model.config
    _write(folder / "config.json", config)
    _write(
        folder / "generation_config.json",
        {key: config[key] for key in ("bos_token_id", "eos_token_id") if key in config},
    )
    for file_name, content in model.files.items():
        _write(folder / file_name, content)
    _add_tokenizer(folder, model, tokenizer)
    if weights:
        _add_random_weights(folder)


def _add_tokenizer(folder: Path, model: HubModel, tokenizer: Path) -> None:
    for name in ("special_tokens_map.json", "chat_template.jinja"):
        if (tokenizer / name).exists():
            shutil.copy(tokenizer / name, folder)
    definition = json.loads((tokenizer / "tokenizer.json").read_text())
    settings = json.loads((tokenizer / "tokenizer_config.json").read_text())
    for token_id, token in model.tokens.items():
        _put_special_token(definition, token_id, token)
    if "<image>" in model.tokens.values():
        settings["image_token"] = "<image>"
    if model.tokenizer_class is not None:
        settings["tokenizer_class"] = model.tokenizer_class
        # This class reads the two files instead of tokenizer.json.
        _write(folder / "vocab.json", definition["model"]["vocab"])
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in definition["model"]["merges"]]
        (folder / "merges.txt").write_text("".join(f"{merge}\n" for merge in merges))
    _write(folder / "tokenizer.json", definition)
    _write(folder / "tokenizer_config.json", settings)


def _put_special_token(definition: dict[str, Any], token_id: int, token: str) -> None:
    """Give `token` exactly this id: it is what the model's configuration says."""
    vocab = definition["model"]["vocab"]
    displaced = next((word for word, word_id in vocab.items() if word_id == token_id), None)
    if displaced is not None:
        del vocab[displaced]
        pairs = (
            (merge, merge.split(" ") if isinstance(merge, str) else merge) for merge in definition["model"]["merges"]
        )
        definition["model"]["merges"] = [
            merge for merge, pair in pairs if displaced not in pair and displaced != "".join(pair)
        ]
    # An added token keeps its id only where the vocabulary has it too.
    vocab[token] = token_id
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    definition["added_tokens"].append({"id": token_id, "content": token, "special": True, **flags})


def _add_random_weights(folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder)
    dtype = torch.float16 if config.model_type == "opt" else torch.bfloat16
    weights = folder / "weights"
    AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(weights)
    for path in weights.glob("*.safetensors*"):
        path.rename(folder / path.name)
    shutil.rmtree(weights)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1))
