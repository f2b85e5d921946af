from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ModelError
from headrace.insight.hardware import ModelShape, from_config, model_shape

QWEN3_06B = {
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
}
QWEN3_30B = {
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151_936,
}
DEEPSEEK_V3 = {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "intermediate_size": 18_432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "vocab_size": 129_280,
}


@pytest.mark.parametrize(
    ("text", "num_params", "num_active", "kv_bytes"),
    [
        # layers x 2 x key/value heads x head size x 2 bytes
        ("0.6B", 0.6e9, 0.6e9, 28 * 2 * 8 * 128 * 2),  # 112 KiB
        ("7B", 7e9, 7e9, 28 * 2 * 4 * 128 * 2),  # 56 KiB
        ("70B", 70e9, 70e9, 80 * 2 * 8 * 128 * 2),  # 320 KiB
        ("235b-a22b", 235e9, 22e9, 94 * 2 * 4 * 128 * 2),
        ("671B-A37B", 671e9, 37e9, 61 * 576 * 2),  # compressed
    ],
)
def test_sizes_by_name(text: str, num_params: float, num_active: float, kv_bytes: float):
    shape = model_shape(text)
    assert (shape.num_params, shape.num_active_params) == (num_params, num_active)
    assert 2 * shape.num_layers * shape.kv_size == kv_bytes


def test_a_size_between_two_known_ones_is_stretched():
    # 14.8B is the nearest: (20 / 14.8)^(1/3) = 1.106 makes 40 layers 44 and a width of 5,120 some 5,660
    shape = model_shape("20B")
    assert (shape.num_layers, shape.hidden_size) == (44, round(5120 * (20 / 14.8) ** (1 / 3)))
    assert model_shape("500M").num_params == 0.5e9


@pytest.mark.parametrize(
    ("config", "num_params", "num_active"),
    [
        # attention 1024 * (2048 + 1024 + 1024) + 2048 * 1024 = 6,291,456; feed-forward 3 * 1024 * 3072 = 9,437,184;
        # 28 layers of 15,728,640, and 151,936 * 1024 embeddings that are used twice
        (QWEN3_06B, 440_401_920 + 155_582_464, 440_401_920 + 155_582_464),
        # attention 2048 * (4096 + 512 + 512) + 4096 * 2048 = 18,874,368, router 2048 * 128 = 262,144, an expert
        # 3 * 2048 * 768 = 4,718,592; 48 layers with 128 of them or 8, and 2 * 151,936 * 2048 = 622,329,856 embeddings
        (QWEN3_30B, 48 * (18_874_368 + 262_144 + 128 * 4_718_592) + 622_329_856, 3_352_821_760),
        # attention 11,010,048 + 37,748,736 + 4,128,768 + 16,777,216 + 117,440,512 = 187,105,280 in 61 layers, of which
        # 3 are dense, 396,361,728, and 58 have a router of 1,835,008 and 257 experts (or 9) of 44,040,192; embeddings
        # 1,853,358,080
        (DEEPSEEK_V3, 671_025_397_760, 37_551_276_032),
    ],
)
def test_weights_are_counted(config: dict[str, Any], num_params: int, num_active: int):
    shape = from_config(config, name="a model")
    assert shape.num_params == num_params
    assert shape.num_active_params == num_active


def test_a_batch_reads_the_experts_that_its_tokens_pick():
    # (10 - 6) / (4 - 2) = 2 weights an expert, 2 outside of them
    shape = ModelShape(
        name="tiny",
        num_params=10,
        num_active_params=6,
        num_layers=1,
        hidden_size=1,
        attention_size=1,
        kv_size=2,
        num_experts=4,
        experts_per_token=2,
    )
    assert shape.params_read(1) == 6
    assert shape.params_read(2) == 2 + 2 * 3  # each of 4 experts is missed by both with probability 1/4
    assert shape.params_read(1000) == pytest.approx(10)


def test_a_directory_is_read(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"text_config": QWEN3_06B}))
    assert model_shape(str(tmp_path)).num_params == 595_984_384
    assert model_shape(str(tmp_path / "config.json")).kv_size == 2 * 8 * 128


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot read .*config.json"),
        ("[1]", "is not a model's configuration"),
        ('{"hidden_size": 8}', "config.json does not say num_hidden_layers; name a size instead"),
        ('{"hidden_size": "wide"}', "config.json has a number that cannot be .*wide"),
        ('{"text_config": 7}', "config.json has a number that cannot be"),
    ],
)
def test_a_bad_config_is_explained(tmp_path: Path, content: str, message: str):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=message):
        model_shape(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seven", "'seven' is neither a size, such as 7B or 235B-A22B, nor a model's directory"),
        ("0B", "'0B' is a model without weights"),
        ("7B-A22B", r"2.2e\+10 of 7e\+09 weights are active"),
    ],
)
def test_a_bad_name_is_explained(text: str, message: str):
    with pytest.raises(ModelError, match=message):
        model_shape(text)


def test_a_directory_without_a_config_is_explained(tmp_path: Path):
    with pytest.raises(ModelError, match=r"there is no config.json in"):
        model_shape(str(tmp_path))
