"""What is checked when a policy is made. Each check is shown to fail when what it looks for is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from headrace.errors import ModelError
from headrace.policy import probe
from headrace.policy.attention import PackedPlan
from headrace.policy.demo import character_tokenizer
from headrace.policy.family import FamilyBody
from headrace.policy.policy import Policy

MakePolicy = Callable[..., Policy]
NO_CAPS = {"query_pre_attn_scalar": 8, "attn_logit_softcapping": None, "final_logit_softcapping": None}
WINDOW = 20  # more than the tokens of a short sequence
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def windows_become(monkeypatch: pytest.MonkeyPatch, window: Callable[[int], int]) -> None:
    stock = PackedPlan.attend

    def attend(self: PackedPlan, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, given: int) -> Tensor:
        return stock(self, layer, q, k, v, scale, window(given))

    monkeypatch.setattr(PackedPlan, "attend", attend)


@pytest.mark.parametrize(("architecture", "more"), [("Mistral", {}), ("Gemma2", NO_CAPS)], ids=["our path", "theirs"])
@pytest.mark.parametrize("wrong", [lambda window: 0, lambda window: window and window + 1], ids=["none", "one more"])
def test_a_wrong_window_is_noticed_though_it_is_longer_than_a_short_sequence(
    make_policy: MakePolicy, monkeypatch: pytest.MonkeyPatch, architecture: str, more: dict[str, Any], wrong: Any
):
    assert make_policy(architecture, sliding_window=WINDOW, **more).unchecked == ""
    windows_become(monkeypatch, wrong)
    with pytest.raises(ModelError, match=f"differ by .* after {WINDOW + 8} tokens, beyond its sliding window"):
        make_policy(architecture, sliding_window=WINDOW, **more)


def test_a_window_that_no_sequence_fills_is_not_looked_for(make_policy: MakePolicy, monkeypatch: pytest.MonkeyPatch):
    windows_become(monkeypatch, lambda window: 0)
    assert make_policy("Mistral", sliding_window=512, max_position_embeddings=512).unchecked == ""


@pytest.mark.parametrize("limit", ["MOST_FLOP", "MOST_SCORE_BYTES"])
def test_a_window_too_long_to_check_is_named(make_policy: MakePolicy, monkeypatch: pytest.MonkeyPatch, limit: str):
    monkeypatch.setattr(probe, limit, {"cpu": 1e6} if limit == "MOST_FLOP" else 1e3)
    windows_become(monkeypatch, lambda window: 0)
    unchecked = make_policy("Mistral", sliding_window=WINDOW).unchecked
    assert unchecked.startswith(f"MistralForCausalLM has a sliding window of {WINDOW} tokens")


@pytest.mark.parametrize("architecture", ["Llama", "Olmo2"])
def test_wrong_positions_beyond_the_original_context_are_noticed(
    make_policy: MakePolicy, monkeypatch: pytest.MonkeyPatch, architecture: str
):
    make_policy(architecture, rope_parameters=LLAMA3)
    stock = Policy.hidden

    def bounded(self: Policy, ids: Tensor, positions_1T: Tensor, *rest: Any) -> Tensor:
        return stock(self, ids, positions_1T.clamp(max=66), *rest)

    monkeypatch.setattr(Policy, "hidden", bounded)
    make_policy(architecture)  # nothing to see at the positions of a short sequence
    with pytest.raises(ModelError, match=r"differ by .* on a probe"):
        make_policy(architecture, rope_parameters=LLAMA3)


@pytest.mark.parametrize("num_wrong", [1, 5])
def test_in_half_precision_single_tokens_may_be_far_off(
    make_policy: MakePolicy, monkeypatch: pytest.MonkeyPatch, num_wrong: int
):
    stock = Policy.logits

    def off(self: Policy, hidden: Tensor) -> Tensor:
        logits = stock(self, hidden)
        return torch.cat([logits[:-num_wrong], -logits[-num_wrong:]])

    monkeypatch.setattr(Policy, "logits", off)
    with pytest.raises(ModelError, match=r"differ by .* on a probe"):
        make_policy("Qwen2")
    if num_wrong == 1:
        assert make_policy("Qwen2", dtype=torch.bfloat16).in_family
    else:  # most of the second sequence
        with pytest.raises(ModelError, match=r"differ by .* on a probe"):
            make_policy("Qwen2", dtype=torch.bfloat16)


def test_decoding_without_a_past_is_noticed(make_policy: MakePolicy, monkeypatch: pytest.MonkeyPatch):
    assert not make_policy("Olmo2").in_family
    stock = probe._StepPlan.attend

    def forgetful(self: Any, layer: int, *rest: Any) -> Tensor:
        self.kept[layer] = tuple(x[:0] for x in self.kept[layer])
        return stock(self, layer, *rest)

    monkeypatch.setattr(probe._StepPlan, "attend", forgetful)
    with pytest.raises(ModelError, match=r"differ by .* on a token decoded after a cache"):
        make_policy("Olmo2")


# ---- what is refused by its kind

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "vocab_size": 99,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
STATES = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0, "eos_token_id": 1}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "Mamba": (STATES | {"state_size": 8}, "recurrent model"),
    "Mamba2": (STATES | {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1}, "recurrent model"),
    "FalconMamba": (STATES | {"state_size": 8}, "recurrent model"),
    "Rwkv": (STATES | {"attention_hidden_size": 32}, "recurrent model"),
    "xLSTM": (STATES | {"num_heads": 4}, "recurrent model"),
    "RecurrentGemma": (SMALL | {"lru_width": 32}, "recurrent model"),
    "Lfm2": (SMALL | {"layer_types": ["conv", "full_attention"]}, "recurrent model"),
    "MiniCPM3": (SMALL | LATENT, "num_attention_heads = 4 and num_key_value_heads = 2; the two must be equal"),
    "Glm4MoeLite": (SMALL | LATENT | EXPERTS, "latent attention, .* the two must be equal"),
    "Youtu": (SMALL | LATENT, "latent attention, .* the two must be equal"),
    "DiffLlama": (SMALL, "asks for attention 2 times in one layer"),
    "GPTNeoXJapanese": (SMALL | {"intermediate_multiple_size": 2}, "does not take its attention from outside"),
    "Laguna": (
        SMALL | {"num_attention_heads_per_layer": [4, 8], "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2},
        r"have different numbers of attention heads \(4, 8\)",
    ),
    "Qwen3": (SMALL | {"num_hidden_layers": 0}, "has no layers"),
}


@pytest.mark.parametrize("architecture", REFUSED)
def test_refuses_what_it_cannot_run(architecture: str):
    shape, message = REFUSED[architecture]
    model = getattr(transformers, f"{architecture}ForCausalLM")(getattr(transformers, f"{architecture}Config")(**shape))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
    with pytest.raises(ModelError, match=f"{architecture}ForCausalLM .*{message}"):
        Policy(model.eval(), character_tokenizer())


def test_what_transformers_cannot_run_is_not_our_failure(policy: Policy, monkeypatch: pytest.MonkeyPatch):
    def broken(self: Any, *_: Any, **__: Any) -> Any:
        raise RuntimeError("The size of tensor a (4) must match")

    monkeypatch.setattr(type(policy.model), "forward", broken)
    with pytest.raises(ModelError, match=r"Qwen3ForCausalLM cannot be run by transformers itself: The size of tensor"):
        Policy(policy.model, policy.tokenizer)


def test_angles_are_looked_up_as_they_are_computed(make_policy: MakePolicy, monkeypatch: pytest.MonkeyPatch):
    stock = FamilyBody._angles

    def cut(self: FamilyBody, x: Tensor, positions_1T: Tensor) -> tuple[Tensor, Tensor]:
        return stock(self, x, positions_1T % 64)

    monkeypatch.setattr(FamilyBody, "_angles", cut)
    make_policy("Llama")
    with pytest.raises(ModelError, match="computes something"):
        make_policy("Llama", rope_parameters=LLAMA3)
