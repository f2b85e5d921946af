"""A tiny llama written as a GGUF file, the way llama.cpp's converter writes one, and read back."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from rank_work import on_ranks
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from headrace.config import ModelSection
from headrace.errors import ModelError
from headrace.policy.gguf_file import gguf_tokenizer
from headrace.policy.policy import Policy, load_policy

REAL = Path("models/SmolLM2-135M-Instruct.gguf")  # `make smollm2` fetches it
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
TENSORS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(name):
    if not name.startswith("model.layers."):
        return {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{TENSORS[rest.removesuffix('.weight')]}.weight"


def interleaved(weight, num_heads):
    """Rotary pairs side by side, as llama.cpp has them."""
    return weight.reshape(num_heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write(path, model, rule="smollm", leave_out=""):
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    tokens = [*SPECIAL, *bytes_to_unicode().values(), "12", "ĠĠ"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3))
    writer.add_token_merges(["1 2", "Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in model.model.state_dict(prefix="model.").items():
        data = tensor.numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        data = interleaved(data, heads) if heads else data
        # Rows of 32 can be quantised, and the embedding has them; its weights were rounded so that nothing is lost.
        kind = GGMLQuantizationType.Q8_0 if "embed" in name else GGMLQuantizationType.F32
        if name != leave_out:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(data, kind), raw_dtype=kind)
    for part in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        part()
    writer.close()
    return path


@pytest.fixture
def model():
    config = LlamaConfig(
        vocab_size=len(SPECIAL) + 258,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1)
        embedding, kind = model.model.embed_tokens.weight, GGMLQuantizationType.Q8_0
        rounded = gguf.quants.dequantize(gguf.quants.quantize(embedding.numpy(), kind), kind)
        embedding.copy_(torch.from_numpy(rounded))
    return model


def load(path):
    return load_policy(ModelSection(path=str(path), device="cpu"))


def logits(policy):
    policy.model.set_attn_implementation("eager")
    with torch.inference_mode():
        return policy.model(torch.arange(200).view(2, 100)).logits


def test_same_model_as_its_safetensors_and_back(model, tmp_path):
    from_gguf = load(write(tmp_path / "tiny.gguf", model))
    Policy(model, from_gguf.tokenizer).save(tmp_path / "original")
    from_gguf.save(tmp_path / "saved")
    saved = load(tmp_path / "saved")
    expected = logits(load(tmp_path / "original"))
    assert torch.equal(logits(from_gguf), expected)
    assert torch.equal(logits(saved), expected)
    assert from_gguf.model.lm_head.weight is from_gguf.model.model.embed_tokens.weight
    assert from_gguf.dtype == torch.float32
    assert from_gguf.eos_ids == saved.eos_ids == {2}
    assert "quantization_config" not in (tmp_path / "saved" / "config.json").read_text()
    for policy in (from_gguf, saved):
        ids = policy.tokenizer.apply_chat_template([{"role": "user", "content": "7"}], return_dict=False)
        assert policy.tokenizer.convert_ids_to_tokens(ids) == ["<|im_start|>", "7", "<|im_end|>"]


def of_a_rank(sharding, path):
    policy = load_policy(ModelSection(path=str(path), device="cpu"), mesh=sharding.mesh)
    return {name: weight.full_tensor() for name, weight in policy.model.named_parameters()}, policy.eos_ids


def test_ranks_share_the_weights_of_a_file(model, tmp_path):
    path = write(tmp_path / "tiny.gguf", model)
    expected = load(path)
    for weights, eos_ids in on_ranks(2, of_a_rank, path):
        assert all(torch.equal(weights[name], weight) for name, weight in expected.model.named_parameters())
        assert eos_ids == expected.eos_ids


@pytest.mark.parametrize(
    ("rule", "pieces"), [("smollm", ["a", "ĠĠ", "1", "2"]), ("gpt-2", ["a", "Ġ", "Ġ", "12"]), ("qwen2", None)]
)
def test_text_is_cut_by_the_rule_the_file_names(model, tmp_path, rule, pieces):
    path = write(tmp_path / "tiny.gguf", model, rule)
    tokenizer = gguf_tokenizer(path)
    ids = tokenizer("a  12")["input_ids"]
    assert tokenizer.decode(ids) == "a  12"
    assert pieces is None or tokenizer.convert_ids_to_tokens(ids) == pieces


def test_unknown_rule_is_refused(model, tmp_path):
    with pytest.raises(ModelError, match=r"rule 'other'.*model\.tokenizer"):
        gguf_tokenizer(write(tmp_path / "tiny.gguf", model, "other"))


def test_missing_weights_are_refused(model, tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(ModelError, match=f"lacks 1 of the weights of LlamaForCausalLM, such as {name}"):
        load(write(tmp_path / "tiny.gguf", model, leave_out=name))


def test_not_a_gguf_file(tmp_path):
    (tmp_path / "tiny.gguf").write_bytes(np.zeros(64, np.uint8).tobytes())
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(tmp_path / "tiny.gguf")


@pytest.mark.skipif(not REAL.exists(), reason=f"{REAL} is not there")
def test_tokenizer_of_smollm2():
    tokenizer = gguf_tokenizer(REAL)
    chat = [{"role": "user", "content": "Sum:\n\n12  34"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    assert tokenizer.decode(ids) == f"{system}<|im_start|>user\nSum:\n\n12  34<|im_end|>\n<|im_start|>assistant\n"
    pieces = ["Sum", ":", "ĊĊ", "1", "2", "ĠĠ", "3", "4", "<|im_end|>", "Ċ", "<|im_start|>", "ass", "istant", "Ċ"]
    assert tokenizer.convert_ids_to_tokens(ids)[-len(pieces) :] == pieces
    assert tokenizer.eos_token == "<|im_end|>"
