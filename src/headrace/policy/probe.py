"""What is checked when a policy is made: can we run the model, and do we compute what it computes?

Random tokens, the *probe*, go through `transformers` with its eager attention, and through ours:

- two short packed sequences, the second across the original context length of scaled RoPE;
- one sequence longer than the model's sliding windows, if it has any and the pass is affordable;
- if the model runs through `transformers`' modules, one token decoded after a KV cache.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from headrace.errors import HeadraceError, ModelError
from headrace.policy.attention import PackedPlan
from headrace.policy.exact import not_exact
from headrace.policy.family import attend_rectangle
from headrace.policy.routes import Routes

if TYPE_CHECKING:
    from headrace.policy.policy import Policy

# float64 is no finer than float32 here: `transformers`' eager softmax is in float32
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}
SHORT = 9  # tokens of a short sequence
BEYOND = 8  # tokens past a sliding window, whose log-probs are compared
MOST_FLOP = {"cpu": 2e11, "cuda": 2e14}  # of the long sequence's pass: a few seconds
MOST_SCORE_BYTES = 2**32  # of eager attention's scores and their softmax, in one layer
WINDOWS = ("sliding_window", "sliding_window_size", "attention_window", "window_size")  # in configs
RECURRENT = {"linear_attention", "conv", "hybrid", "hybrid_sliding", "recurrent", "mamba"}  # layers


def refuse_unsupported(model: Any) -> None:
    """Refuse a model without layers, or with layers that keep more than keys and values."""
    name, config = type(model).__name__, model.config.get_text_config()
    if not getattr(config, "num_hidden_layers", 0):
        raise ModelError(f"{name} has no layers (num_hidden_layers in its config.json): there is nothing to train")
    kinds = RECURRENT.intersection(getattr(config, "layer_types", None) or ())
    if model._is_stateful or kinds or not getattr(config, "num_attention_heads", 0):
        told = "Headrace runs models whose layers are all attention; choose another (model.path)"
        raise ModelError(f"{name} is a recurrent model (state-space, linear attention or convolution). {told}")
    heads, kv_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    if getattr(config, "kv_lora_rank", None) and kv_heads not in (None, heads):
        makes = "has latent attention, which makes keys and values for every attention head"
        told = f"has num_attention_heads = {heads} and num_key_value_heads = {kv_heads}; the two must be equal"
        raise ModelError(f"{name} {makes}, but its config.json {told}")


def check_weights(policy: Policy) -> None:
    """Refuse weights that cannot be trained, and parts that need more than a token's own past."""
    if packed := {str(p.dtype) for p in policy.model.parameters() if p.dtype not in TOLERANCE}:
        raise ModelError(f"the model has weights of type {', '.join(sorted(packed))}, which cannot be trained")
    if len(policy.tokenizer) > (vocab := policy.head_weight.shape[0]):
        told = f"{vocab}: they do not belong together; name the model's own with model.tokenizer"
        raise ModelError(f"the tokenizer has {len(policy.tokenizer)} tokens, the model only {told}")
    if getattr(policy.head, "bias", None) is not None:
        raise ModelError(f"{policy.name} has a bias on its output head, which is not supported")
    if getattr(policy.config, "final_logit_softcapping", None):
        raise ModelError(f"{policy.name} caps its logits (final_logit_softcapping), which Headrace does not compute")
    changing = [kind for rope in _ropes(policy) if (kind := rope.get("rope_type")) in ("dynamic", "longrope")]
    if changing or getattr(policy.config, "attention_chunk_size", None):
        what = f"'{changing[0]}' position embeddings" if changing else "chunked attention"
        told = "what a token attends to would depend on the length of others in its batch"
        raise ModelError(f"{policy.name} uses {what}: {told}")


@torch.no_grad()
def check_same(policy: Policy) -> tuple[int, int, int, str]:
    """Refuse a model that we compute otherwise than `transformers`.

    Returns key/value heads, key size and value size, and what could not be checked.
    """
    name, ids = policy.name, random_ids(policy, 2, SHORT)
    # from 0, and across the original context length of scaled RoPE
    known = [rope.get("original_max_position_embeddings") or 0 for rope in _ropes(policy)]
    start = max([0, *(int(n) - SHORT // 2 for n in known if SHORT <= n <= policy.max_context - SHORT)])
    positions = (torch.arange(SHORT) + torch.tensor([[0], [start]])).to(policy.device)
    placed = {"position_ids": positions} if start else {}  # not all models take it
    with policy.stock_attention(), refusing(f"{name} cannot be run by transformers itself"):
        expected = policy.model(input_ids=ids, use_cache=False, **placed).logits.float().log_softmax(-1)
    plan, routes = _ProbePlan([SHORT] * 2, policy.device), Routes()
    with refusing(f"{name} does not take its attention from outside, which Headrace needs"):
        hidden = policy.hidden(ids.flatten(), positions.view(1, -1), plan, routes)
    _compare(policy, policy.logits(hidden).view_as(expected), expected, "on a probe")
    policy.routers.check(routes)
    shape = _cache_shape(policy, plan)
    if not policy.in_family:
        with refusing(f"{name} cannot be decoded token by token"):
            past = {i: (k[: SHORT - 1], v[: SHORT - 1]) for i, ((k, v),) in plan.kept.items()}
            hidden = policy.hidden(ids[0, -1:], positions[:1, -1:], _StepPlan(past))
        _compare(policy, policy.logits(hidden), expected[0, -1:], "on a token decoded after a cache")
    return *shape, _check_windows(policy)


@torch.no_grad()
def check_same_bits(policy: Policy) -> None:
    """Refuse a machine that is not batch-invariant: the probe as one batch and one by one."""
    ids = random_ids(policy, 2, SHORT)
    together = packed_logits(policy, ids)
    apart = torch.cat([packed_logits(policy, one) for one in ids.split(1)])
    if not torch.equal(together, apart):
        gap = f"{(together - apart).abs().max().item():.2g} with what is computed beside them"
        raise not_exact(f": on this machine the logits of {policy.name} differ by {gap}")


def _check_windows(policy: Policy) -> str:
    """Compare beyond the largest affordable sliding window; returns what is too long for that."""
    name, windows = policy.name, {getattr(policy.config, key, None) for key in WINDOWS}
    most = policy.max_context - BEYOND
    lengths = sorted(w + BEYOND for w in windows if isinstance(w, int) and 0 < w <= most)
    weights = sum(p.numel() for p in policy.model.parameters())

    def is_affordable(length: int) -> bool:
        flop = (2 * weights + 4 * policy.num_layers * policy.config.hidden_size * length) * length
        score_bytes = 10 * policy.num_heads * length**2  # in the model's precision and in float32
        return flop <= MOST_FLOP[policy.device.type] and score_bytes <= MOST_SCORE_BYTES

    if affordable := list(filter(is_affordable, lengths)):
        ids = random_ids(policy, 1, affordable[-1])
        with policy.stock_attention(), refusing(f"{name} cannot be run by transformers itself"):
            stock = policy.body(input_ids=ids, use_cache=False).last_hidden_state[0, -BEYOND:]
        expected = policy.logits(stock * policy.logit_scale).float().log_softmax(-1)
        ours = packed_logits(policy, ids, BEYOND)
        _compare(policy, ours, expected, f"after {ids.shape[1]} tokens, beyond its sliding window")
    if affordable == lengths:
        return ""
    has = f"{name} has a sliding window of {lengths[-1] - BEYOND} tokens"
    why = "was not checked: a sequence of that length costs too much here"
    return f"{has}. Whether Headrace computes it as transformers does {why}"


def _ropes(policy: Policy) -> list[dict[str, Any]]:
    """The parameters of RoPE: one set, or one for each kind of layer."""
    rope = getattr(policy.config, "rope_parameters", None) or {}
    return [rope, *(value for value in rope.values() if isinstance(value, dict))]


def random_ids(policy: Policy, num_sequences: int, length: int) -> Tensor:
    vocab, generator = policy.head_weight.shape[0], torch.Generator().manual_seed(0)
    return torch.randint(vocab, (num_sequences, length), generator=generator).to(policy.device)


def packed_logits(policy: Policy, ids: Tensor, last: int = 0) -> Tensor:
    plan = PackedPlan([ids.shape[1]] * ids.shape[0], policy.device)
    return policy.logits(policy.hidden(ids.flatten(), plan.positions, plan)[-last:])


def _compare(policy: Policy, logits: Tensor, expected: Tensor, where: str) -> None:
    ours = logits.float().log_softmax(-1)
    gap = (ours - expected).abs().max()
    if policy.dtype in (torch.bfloat16, torch.float16):
        # Log-probs of unlikely tokens are mostly noise: weigh by probability. Where biases are
        # large (Qwen2), eager attention is far off on single tokens, so take a sequence's median.
        gap = (expected.exp() * (expected - ours)).sum(-1).median(-1).values.max()
    if not torch.isfinite(expected).all():
        named = policy.model.named_parameters()  # whole, so that all ranks say the same
        whole = ((name, w.full_tensor() if isinstance(w, DTensor) else w) for name, w in named)
        broken = [name for name, weight in whole if not torch.isfinite(weight).all()]
        why = f"the log-probs of {policy.name} are not finite numbers in {str(policy.dtype).removeprefix('torch.')}; "
        if broken:
            why = f"{len(broken)} of the weights of {policy.name} hold NaN or infinity, such as {broken[0]}: "
        raise ModelError(why + ("the checkpoint is broken" if broken else "try another model.dtype"))
    if not gap.item() < TOLERANCE[policy.dtype]:
        told = f"does not: its log-probs differ by {gap.item():.2g} from ours {where}"
        raise ModelError(f"{policy.name} computes something that Headrace's attention {told}")


def _cache_shape(policy: Policy, plan: _ProbePlan) -> tuple[int, int, int]:
    """Key/value heads, key and value size. Not always the config's: DeepSeek's keys are larger."""
    name, often = policy.name, max(map(len, plan.kept.values()), default=0)
    if not often:
        raise ModelError(f"{name} does not take its attention from outside, which Headrace needs")
    if often > 1:
        raise ModelError(f"{name} asks for attention {often} times in one layer; the cache is made for one")
    if len(shapes := {(*k.shape[1:], v.shape[2]) for ((k, v),) in plan.kept.values()}) > 1:
        told = f"(heads, key size, value size): {', '.join(map(str, sorted(shapes)))}; the cache has one shape for all"
        raise ModelError(f"the layers of {name} have keys and values of different shapes {told}")
    if len(plan.num_heads) > 1:
        told = f"different numbers of attention heads ({', '.join(map(str, sorted(plan.num_heads)))})"
        raise ModelError(f"the layers of {name} have {told}; Headrace needs one")
    return shapes.pop()


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """What a library raises over a model, which is of almost any type, as a ModelError."""
    try:
        yield
    except (HeadraceError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        told = " ".join(str(error).split())
        if "trust_remote_code" in told:  # advice of `transformers` that cannot be followed here
            told = "it comes with Python code of its own, and Headrace does not run code that comes with a model"
            told += "; take a model of an architecture that transformers has"
        raise ModelError(f"{what}: {told}") from error


class _ProbePlan(PackedPlan):
    """Notes what a cache has to hold."""

    def __init__(self, lengths: list[int], device: torch.device) -> None:
        super().__init__(lengths, device)
        self.kept: defaultdict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)  # by layer
        self.num_heads: set[int] = set()

    def attend(self, layer: int, q_THD: Tensor, k_TJD: Tensor, v_TJD: Tensor, *how: Any) -> Tensor:
        self.num_heads.add(q_THD.shape[1])
        key_size, value_size = k_TJD.shape[2], v_TJD.shape[2]
        if k_TJD.is_cuda and key_size != value_size:
            told = f"{value_size}: on a GPU both must be of one size; set model.device = 'cpu'"
            raise ModelError(f"the model's keys have size {key_size}, its values {told}")
        self.kept[layer].append((k_TJD, v_TJD))
        return super().attend(layer, q_THD, k_TJD, v_TJD, *how)


@dataclass
class _StepPlan:
    """One token that attends to kept keys and values: a KV cache in its simplest form."""

    kept: dict[int, tuple[Tensor, Tensor]]

    def attend(self, layer: int, q_THD: Tensor, k_TJD: Tensor, v_TJD: Tensor, scale: float, window: int) -> Tensor:
        k, v = map(torch.cat, zip(self.kept[layer], (k_TJD, v_TJD), strict=True))
        return attend_rectangle(q_THD, k, v, (1, 1), scale, window)
