"""The real recipes: the weights are the ones that were meant, and the tokenizer speaks as the original does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_kvplug.cli.models import smollm2
from vllm_kvplug.cli.models.store import ensure_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def default_model() -> Path:
    return Path(ensure_model("default"))


def test_the_qwen2_gives_the_logits_of_the_llama_bit_for_bit() -> None:
    torch = pytest.importorskip("torch")
    llama = smollm2.read_llama(smollm2.gguf_path())
    qwen2 = smollm2.llama_as_qwen2(llama)
    assert type(qwen2).__name__ == "Qwen2ForCausalLM"
    token_ids = torch.randint(0, llama.config.vocab_size, (2, 48), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        difference = (llama.eval()(token_ids).logits - qwen2(token_ids).logits).abs().max().item()
    assert difference == 0.0


def test_the_checkpoint_is_a_qwen2_that_ends_its_turns(default_model: Path) -> None:
    config = json.loads((default_model / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert json.loads((default_model / "generation_config.json").read_text())["eos_token_id"] == 2
    assert not (default_model / "tokenizer.model").exists()


def test_the_tokenizer_returns_every_text_and_adds_nothing(default_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(default_model)
    for text in ("Hello, World! it's\n\n  tabs\t", "naïve café 日本語 😀", " In 1984: 12,345", "a<|im_end|>b"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_token == "<|im_end|>"
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("name", ["tiny-qwen2", "tiny-hybrid"])
def test_the_tiny_models_build_to_their_checksums_and_answer(name: str, tmp_path: Path) -> None:
    """Built afresh in a folder of its own: building compares the parameters with the catalogue's checksum."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = ensure_model(name, cache=tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = [tokenizer(f"Tell me about {thing}", return_tensors="pt").input_ids for thing in ("sand", "water")]
    answers = [model.generate(prompt, max_new_tokens=8, do_sample=False)[0, -8:].tolist() for prompt in prompts]
    assert answers[0] != answers[1], "the text must depend on the prompt, or no test on texts would notice wrong blocks"
