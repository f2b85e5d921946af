import hashlib

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from headrace.policy.demo import ALPHABET, build_demo


def checksum(directory):
    return hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    logging.disable_progress_bar()
    directory = tmp_path_factory.mktemp("models") / "new" / "demo"
    build_demo(directory, seed=0)
    return directory


def test_model_loads_back(demo):
    model = AutoModelForCausalLM.from_pretrained(demo)
    tokenizer = AutoTokenizer.from_pretrained(demo)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.dtype == torch.float32
    assert 3e5 < sum(parameter.numel() for parameter in model.parameters()) < 1e6
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, None}) == 4
    logits = model(torch.tensor([tokenizer("47+85=")["input_ids"]])).logits
    assert torch.isfinite(logits).all()


def test_tokenizer_is_exact(demo):
    tokenizer = AutoTokenizer.from_pretrained(demo)
    for text in (ALPHABET, "7+5=12,4+8+1=13;132", "  two  spaces , and .  ", "don 't\n\n"):
        token_ids = tokenizer(text)["input_ids"]
        assert len(token_ids) == len(text)
        assert tokenizer.decode(token_ids) == text
        assert tokenizer.decode([*token_ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    assert tokenizer("ä")["input_ids"] == [tokenizer.unk_token_id]
    assert tokenizer.chat_template is None


def test_weights_follow_from_the_seed_alone(demo, tmp_path):
    torch.manual_seed(123)
    before = torch.random.get_rng_state()
    build_demo(tmp_path / "same", seed=0)
    assert torch.equal(before, torch.random.get_rng_state())
    build_demo(tmp_path / "other", seed=1)
    assert checksum(tmp_path / "same") == checksum(demo) != checksum(tmp_path / "other")
