"""Loading, refusing and saving a policy."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.config import ModelSection
from headrace.errors import ModelError
from headrace.policy.attention import PackedPlan
from headrace.policy.policy import Policy, load_policy, resolve_device

IDS = torch.tensor([5, 17, 40, 9, 88, 3, 3, 61, 20, 14, 7, 70])


@pytest.fixture
def directory(make_policy: Callable[..., Policy], tmp_path: Path) -> Path:
    """A saved model that a test may damage."""
    make_policy().save(tmp_path / "model")
    return tmp_path / "model"


def our_logits(policy: Policy) -> torch.Tensor:
    plan = PackedPlan([len(IDS)], policy.device)
    with torch.no_grad():
        return policy.logits(policy.hidden(IDS, plan.positions, plan))


def edit_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def drop_tensor(directory: Path, name: str) -> None:
    tensors = load_file(directory / "model.safetensors")
    del tensors[name]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


# ---- what is refused


def test_refuses_a_tokenizer_larger_than_the_vocabulary(policy: Policy):
    policy.tokenizer.add_tokens(["one more"])
    with pytest.raises(ModelError, match="tokenizer has 100 tokens, the model only 99"):
        Policy(policy.model, policy.tokenizer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("architecture", "how", "told"),
    [
        ("Gemma2", {"query_pre_attn_scalar": 8, "final_logit_softcapping": None}, "caps its attention scores"),
        ("Gemma2", {"query_pre_attn_scalar": 8, "attn_logit_softcapping": None}, "caps its logits"),
        ("GptOss", {"num_local_experts": 4}, "has attention sinks"),
    ],
    ids=["capped scores", "capped logits", "sinks"],
)
def test_refuses_what_it_does_not_compute(
    make_policy: Callable[..., Policy], architecture: str, how: dict[str, Any], told: str, dtype: torch.dtype
):
    """Also in bfloat16, where the log-probs of a small model hardly differ."""
    with pytest.raises(ModelError, match=told):
        make_policy(architecture, dtype=dtype, **how)


def test_takes_the_same_model_without_soft_capping(make_policy: Callable[..., Policy]):
    policy = make_policy(
        "Gemma2",
        query_pre_attn_scalar=8,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        sliding_window=4,
    )
    with torch.no_grad(), policy.stock_attention():
        expected = policy.model(input_ids=IDS[None], use_cache=False).logits[0]
    torch.testing.assert_close(our_logits(policy), expected, rtol=0, atol=1e-4)


def test_refuses_a_head_with_a_bias(policy: Policy):
    policy.model.lm_head = torch.nn.Linear(32, 99, bias=True)
    with pytest.raises(ModelError, match="bias on its output head"):
        Policy(policy.model, policy.tokenizer)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_refuses_positions_that_depend_on_the_company(policy: Policy, kind: str):
    policy.config.rope_parameters["rope_type"] = kind
    with pytest.raises(ModelError, match=f"Qwen3ForCausalLM uses '{kind}' position embeddings"):
        Policy(policy.model, policy.tokenizer)


def test_refuses_positions_that_depend_on_the_company_in_some_layers(policy: Policy):
    policy.config.rope_parameters = {"full_attention": {"rope_type": "dynamic"}, "sliding_attention": {}}
    with pytest.raises(ModelError, match="'dynamic' position embeddings"):
        Policy(policy.model, policy.tokenizer)


def test_refuses_chunked_attention(policy: Policy):
    policy.config.attention_chunk_size = 8
    with pytest.raises(ModelError, match="chunked attention"):
        Policy(policy.model, policy.tokenizer)


def test_refuses_a_model_that_brings_its_own_attention(policy: Policy, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headrace.policy.policy.in_family", lambda body: False)
    stock = type(policy.body).forward

    def without_plan(self: Any, **arguments: Any) -> Any:
        if "plan" in arguments:
            raise TypeError("forward() got an unexpected keyword argument 'plan'")
        return stock(self, **arguments)

    monkeypatch.setattr(type(policy.body), "forward", without_plan)
    with pytest.raises(ModelError, match="does not take its attention from outside"):
        Policy(policy.model, policy.tokenizer)


# ---- the path between the matrices


FAMILY = {
    "Qwen3": {},
    "Qwen2": {},
    "Llama": {"attention_bias": True, "mlp_bias": True},
    "Mistral": {"sliding_window": 5},
}


@pytest.mark.parametrize("architecture", FAMILY)
def test_our_path_and_that_of_transformers_agree(make_policy: Callable[..., Policy], architecture: str):
    policy = make_policy(architecture, seed=3, **FAMILY[architecture])
    assert policy._family is not None
    ours = our_logits(policy)
    policy._family = None
    theirs = our_logits(policy)
    assert not torch.equal(ours, theirs)  # the other path was taken
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("architecture", "changes"), [("Olmo2", {}), ("Llama", {"hidden_act": "gelu"})])
def test_other_models_keep_their_own_path(
    make_policy: Callable[..., Policy], architecture: str, changes: dict[str, str]
):
    assert make_policy(architecture, **changes)._family is None


def test_a_path_that_computes_something_else_is_noticed(policy: Policy, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headrace.policy.family.FamilyBody._gated", lambda self, gate, up: gate * up)
    with pytest.raises(ModelError, match="Qwen3ForCausalLM computes something that Headrace"):
        Policy(policy.model, policy.tokenizer)


# ---- broken files


def test_refuses_weights_that_are_not_finite(policy: Policy):
    with torch.no_grad():
        policy.model.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(
        ModelError, match=r"1 of the weights .* hold NaN or infinity, such as .*layers\.1\.mlp\.down_proj"
    ):
        Policy(policy.model, policy.tokenizer)


def test_a_precision_that_overflows_is_not_a_broken_checkpoint(policy: Policy):
    with torch.no_grad():
        policy.model.model.norm.weight.fill_(3e38)
    with pytest.raises(ModelError, match=r"are not finite numbers in float32; try another model\.dtype"):
        Policy(policy.model, policy.tokenizer)


def test_dropout_does_not_disturb_the_check(make_policy: Callable[..., Policy]):
    policy = make_policy(attention_dropout=0.9)
    policy.model.train()
    Policy(policy.model, policy.tokenizer)


def test_checking_leaves_the_training_mode_alone(policy: Policy):
    for mode in (True, False):
        policy.model.train(mode)
        Policy(policy.model, policy.tokenizer)
        assert policy.model.training is mode


def test_refuses_a_missing_path(tmp_path: Path):
    with pytest.raises(ModelError, match="no such directory"):
        load_policy(ModelSection(path=str(tmp_path / "nowhere")))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty directory": lambda d: [file.unlink() for file in d.iterdir()],
    "no config": lambda d: (d / "config.json").unlink(),
    "broken config": lambda d: (d / "config.json").write_text("{"),
    "mistyped config": lambda d: edit_config(d, hidden_size="wide"),
    "unknown architecture": lambda d: edit_config(d, model_type="nonesuch"),
    "no weights": lambda d: (d / "model.safetensors").unlink(),
    "empty weights": lambda d: (d / "model.safetensors").write_bytes(b""),
    "cut weights": lambda d: (d / "model.safetensors").write_bytes((d / "model.safetensors").read_bytes()[:20_000]),
    "weights of another shape": lambda d: edit_config(d, intermediate_size=64),
    "a tensor missing": lambda d: drop_tensor(d, "model.layers.1.mlp.up_proj.weight"),
    "a layer missing": lambda d: edit_config(d, num_hidden_layers=3, layer_types=None),
    "broken tokenizer": lambda d: (d / "tokenizer.json").write_text("{"),
    "hollow tokenizer": lambda d: (d / "tokenizer.json").write_text('{"added_tokens": []}'),
    "no tokenizer": lambda d: [(d / name).unlink() for name in ("tokenizer.json", "tokenizer_config.json")],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_refuses_a_damaged_directory(directory: Path, damage: Callable[[Path], object]):
    assert load_policy(ModelSection(path=str(directory), device="cpu")).max_context == 512
    damage(directory)
    with pytest.raises(ModelError, match=re.escape(str(directory))):
        load_policy(ModelSection(path=str(directory), device="cpu"))


def test_refuses_a_device_that_is_none(directory: Path):
    with pytest.raises(ModelError, match="is not supported; use auto"):
        resolve_device("abacus")
    with pytest.raises(ModelError, match="is not supported; use auto"):
        load_policy(ModelSection(path=str(directory), device="abacus"))


# ---- what is loaded


def test_loads_a_directory(directory: Path, policy: Policy):
    loaded = load_policy(ModelSection(path=str(directory), device="cpu"))
    assert loaded.dtype == torch.float32
    assert loaded.device == torch.device("cpu")
    assert loaded.model.training is False
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("12+9=21")) == "12+9=21"
    assert torch.equal(our_logits(loaded), our_logits(policy))


def test_loads_in_the_precision_asked_for(directory: Path, policy: Policy):
    loaded = load_policy(ModelSection(path=str(directory), device="cpu", dtype="bfloat16"))
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}
    assert loaded.dtype == torch.bfloat16
    logits = our_logits(loaded)
    assert logits.dtype == torch.bfloat16
    assert 0 < (logits - our_logits(policy)).abs().max() < 0.5


def test_takes_the_tokenizer_from_elsewhere(directory: Path, tmp_path: Path, policy: Policy):
    policy.tokenizer.chat_template = "{{ messages[0]['content'] }}"
    policy.tokenizer.save_pretrained(tmp_path / "tokenizer")
    loaded = load_policy(ModelSection(path=str(directory), tokenizer=str(tmp_path / "tokenizer"), device="cpu"))
    assert loaded.tokenizer.chat_template == policy.tokenizer.chat_template
    with pytest.raises(ModelError):
        load_policy(ModelSection(path=str(directory), tokenizer=str(tmp_path / "nowhere"), device="cpu"))


def test_eos_is_what_any_of_the_three_says(policy: Policy):
    model, tokenizer = policy.model, policy.tokenizer
    assert policy.eos_ids == {1}
    model.config.eos_token_id = [7, 9]
    assert Policy(model, tokenizer).eos_ids == {1, 7, 9}
    model.generation_config = transformers.GenerationConfig(eos_token_id=11)
    assert Policy(model, tokenizer).eos_ids == {1, 7, 9, 11}
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    assert Policy(model, tokenizer).eos_ids == {1}
    tokenizer.eos_token = None
    assert Policy(model, tokenizer).eos_ids == frozenset()


# ---- what is saved


@pytest.mark.parametrize("architecture", ["Qwen3", "Mistral", "Qwen3Moe"])
def test_saves_what_transformers_loads(make_policy: Callable[..., Policy], tmp_path: Path, architecture: str):
    policy = make_policy(architecture, seed=4, **({"sliding_window": 5} if architecture == "Mistral" else {}))
    before = our_logits(policy)
    policy.save(tmp_path)
    assert "headrace" not in (tmp_path / "config.json").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    for (name, ours), weight in zip(policy.model.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(ours, weight), name
    with torch.no_grad():
        theirs = loaded(input_ids=IDS[None], use_cache=False).logits[0]
    torch.testing.assert_close(theirs, before, rtol=0, atol=1e-4)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation in {"sdpa", "eager"}
    assert AutoTokenizer.from_pretrained(tmp_path).get_vocab() == policy.tokenizer.get_vocab()


def test_saving_does_not_disturb_the_policy(policy: Policy, tmp_path: Path):
    before = our_logits(policy)
    policy.save(tmp_path / "one")
    assert policy.model.config._attn_implementation == "headrace"
    assert torch.equal(our_logits(policy), before)
    with torch.no_grad():
        policy.model.model.norm.weight.mul_(1.5)
    policy.save(tmp_path / "two")
    shutil.rmtree(tmp_path / "one")
    assert torch.equal(our_logits(load_policy(ModelSection(path=str(tmp_path / "two")))), our_logits(policy))


def test_code_that_comes_with_a_model_is_not_run(directory: Path):
    (directory / "own.py").write_text("raise SystemExit('it ran')\n")
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    edit_config(directory, model_type="own", architectures=["OwnModel"], auto_map=own)
    with pytest.raises(
        ModelError, match=r"cannot be loaded: .* Headrace does not run code that comes with a model"
    ) as caught:
        load_policy(ModelSection(path=str(directory), device="cpu"))
    assert "trust_remote_code" not in str(caught.value)


def test_code_that_comes_with_a_tokenizer_is_not_run(directory: Path, tmp_path: Path):
    own = tmp_path / "own"
    own.mkdir()
    (own / "own.py").write_text("raise SystemExit('it ran')\n")
    settings = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
    (own / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=r"^the tokenizer of model\.tokenizer = .* cannot be loaded") as caught:
        load_policy(ModelSection(path=str(directory), tokenizer=str(own), device="cpu"))
    assert "trust_remote_code" not in str(caught.value)


TOKENIZERS: dict[str, Callable[[Path], object]] = {
    "nothing there": lambda path: None,
    "a file": lambda path: path.write_text("x"),
    "an empty directory": lambda path: path.mkdir(),
    "a directory with something else": lambda path: (path.mkdir(), (path / "config.json").write_text("{}")),
    "a broken one": lambda path: (path.mkdir(), (path / "tokenizer.json").write_text("{")),
}


@pytest.mark.parametrize("make", TOKENIZERS.values(), ids=TOKENIZERS.keys())
def test_a_bad_tokenizer_is_not_the_models_fault(directory: Path, tmp_path: Path, make: Callable[[Path], object]):
    make(tmp_path / "words")
    with pytest.raises(ModelError, match=rf"model\.tokenizer = '{tmp_path}/words'") as caught:
        load_policy(ModelSection(path=str(directory), tokenizer=str(tmp_path / "words"), device="cpu"))
    assert "model.path" not in str(caught.value)
    assert "\n" not in str(caught.value)
