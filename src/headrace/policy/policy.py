"""The policy: one `transformers` model that the engine decodes with and the learner trains."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from headrace.config import LearnerSection, ModelSection
from headrace.errors import ModelError
from headrace.kernels import AVAILABLE, softmax
from headrace.policy.attention import NAME, PackedPlan
from headrace.policy.exact import EVEN, ExactBody, check_rows, not_exact, use_batch_invariant_gemms
from headrace.policy.exact import linear as exact_linear
from headrace.policy.family import FAMILY, FamilyBody, in_family
from headrace.policy.hub import located
from headrace.policy.limits import limits
from headrace.policy.probe import check_same, check_same_bits, check_weights, refuse_unsupported, refusing
from headrace.policy.routes import Routers, Routes
from headrace.policy.shards import R, Shards
from headrace.policy.tensor_files import quiet_transformers, save_model
from headrace.roles import AttentionPlan
from headrace.user_code import load_optional

Linear = Callable[[Tensor, Tensor], Tensor]

CHUNK_ELEMENTS = 2**24  # of one chunk's float32 logits: 64 MiB
# no downloads, and no code that comes with a model
NOTHING_FOREIGN = {"local_files_only": True, "trust_remote_code": False}
TOKENIZER_FILE = re.compile("tok|vocab|spm|spiece|sentencepiece|tekken")  # in names of files
GGUF = "headrace.policy.gguf_file", "gguf", "gguf"
PEFT = "headrace.policy.adapters_peft", "peft", "lora"
ADAPTER_DIR = "adapter"  # directory in that of the model, with its adapters alone


class Policy:
    """A causal language model and its tokenizer: final hidden states, logits and log-probs.

    E hidden size, V vocabulary, T tokens in one row.
    """

    def __init__(self, model: Any, tokenizer: Any, *, exact: bool = False, shards: Shards | None = None) -> None:
        """With `shards` of the model every rank takes part in every pass, also in these."""
        refuse_unsupported(model)
        self.model, self.tokenizer, self.name = model, tokenizer, type(model).__name__
        self.config = model.config.get_text_config()
        self.body: nn.Module = model.get_decoder()
        self.routers = Routers(self.body)
        self.head: nn.Module = model.get_output_embeddings()
        self.num_layers: int = self.config.num_hidden_layers
        self.num_heads: int = self.config.num_attention_heads
        self.max_context = int(getattr(self.config, "max_position_embeddings", 0) or 2**31)
        parameter = next(model.parameters())
        self.device: torch.device = parameter.device
        self.dtype: torch.dtype = parameter.dtype if shards is None else shards.dtype
        self.exact, self.shards = exact, shards
        self._linear: Linear = exact_linear if exact and self.device.type == "cpu" else F.linear
        self.adapted = any(".lora_" in name for name, _ in model.named_parameters())
        self._family: FamilyBody | None = None
        self.in_family = in_family(self.body)  # then the layers run in our own forward pass
        if self.in_family:
            kind = ExactBody if exact and self.device.type != "cuda" else FamilyBody
            self._family = kind(self.body, self.routers.follow_again)
            if shards is not None:
                self._family.go_through_modules()
        check_weights(self)
        if exact:
            self._prepare_exact()
        was_training = model.training
        model.eval()  # without dropout
        with torch.no_grad():
            found = self._gathered_for(self._checked)
        model.train(was_training)
        torch.cuda.empty_cache()  # of the checks: the engine's cache is sized by what is free
        self.num_kv_heads, self.head_size, self.value_size, self.unchecked = found

    def _checked(self) -> tuple[int, int, int, str]:
        found = check_same(self)
        if self.exact:
            if self.device.type == "cuda" and self._family is not None:
                head = partial(F.linear, weight=self.head_weight), self.head_weight.shape[1]
                check_rows({"the output head": head, **self._family.products()}, self.head_weight)
            check_same_bits(self)
        return found

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """End-of-text tokens of the tokenizer, the model's config and its generation config."""
        ids = {self.tokenizer.eos_token_id}
        for config in (self.config, getattr(self.model, "generation_config", None)):
            eos = getattr(config, "eos_token_id", None)
            ids.update(eos if isinstance(eos, list) else [eos])
        return frozenset(int(i) for i in ids if i is not None)

    def hidden(
        self, token_ids_T: Tensor, positions_1T: Tensor, plan: AttentionPlan, routes: Routes | None = None
    ) -> Tensor:
        """Final hidden states `[T, E]`. `routes` records or forces the experts of a mixture."""
        with self.routers.follow(routes):
            if self._family is not None:
                return self._family(token_ids_T, positions_1T, plan)
            out = self.body(input_ids=token_ids_T[None], position_ids=positions_1T, use_cache=False, plan=plan)
        hidden: Tensor = out.last_hidden_state[0]
        return hidden if self.logit_scale == 1 else hidden * self.logit_scale

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits `[.., V]`, in the precision of the weights."""
        return self._linear(hidden, self.head_weight)

    @cached_property
    def logit_scale(self) -> float:
        """A factor of the logits (Cohere, Granite), taken into the hidden states."""
        divisor = getattr(self.config, "logits_scaling", None) or 1.0
        return float(getattr(self.config, "logit_scale", None) or 1.0 / divisor)

    @property
    def head_weight(self) -> Tensor:
        return self.head.weight  # type: ignore[return-value]

    def logprobs(
        self,
        token_ids_T: Tensor,
        plan: PackedPlan,
        at: Tensor,
        temperature: float | Tensor,
        support: Support | None = None,
        routes_TLK: Tensor | None = None,
        values: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, ...]:
        """Log-probs of the tokens at `at` (never a sequence's first): over `support`, and over all.

        Without a support the two are one. `temperature` is one for all, or one for each of `at`.
        `routes_TLK` forces the experts of each token. Third are `values` of the states before.
        """

        def compute(before: Tensor) -> tuple[Tensor, ...]:
            found = chosen_logprobs(before, self.head_weight, token_ids_T[at], temperature, support, self._linear)
            return found if values is None else (*found, values(before))

        return self.of_hidden(compute, token_ids_T, plan, at, routes_TLK)

    def of_hidden(
        self,
        compute: Callable[[Tensor], R],
        token_ids_T: Tensor,
        plan: PackedPlan,
        at: Tensor,
        routes_TLK: Tensor | None = None,
    ) -> R:
        """What `compute` makes of the final hidden states before the tokens at `at`."""
        routes = None if routes_TLK is None else Routes(routes_TLK)

        return self._gathered_for(
            lambda: compute(plan.before(self.hidden(token_ids_T, plan.positions, plan, routes), at))
        )

    def _gathered_for(self, compute: Callable[[], R]) -> R:
        return compute() if self.shards is None else self.shards.gathered_for(compute)

    def pass_s(self, plan: PackedPlan) -> float:
        """Seconds that a forward pass of the packed tokens would take at the device's limit."""
        attention = 4 * self.num_layers * self.num_heads * self.head_size * plan.num_pairs
        return (2 * self.active_weights * sum(plan.lengths) + attention) / limits(self.device)[0]

    @cached_property
    def active_weights(self) -> float:
        """Those that a token uses; of a mixture's experts, which lie in tensors of three dimensions, some."""
        share = self.routers.shape[1] / max(1, self.routers.num_experts) or 1.0
        return float(sum(p.numel() * (share if p.ndim == 3 else 1.0) for p in self.model.parameters()))

    def frozen_copy(self) -> Policy:
        shards = None if self.shards is None else self.shards.frozen_copy()
        model = copy.deepcopy(self.model).requires_grad_(False) if shards is None else shards.model
        return Policy(model, self.tokenizer, exact=self.exact, shards=shards)

    def held(self) -> Iterable[tuple[str, nn.Parameter]]:
        """What an optimizer changes: weights by name, of a sharded model the parts held here."""
        return self.model.named_parameters() if self.shards is None else self.shards.held.items()

    def held_below_head(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Without the output head, unless that is the embedding too."""
        head = {id(self.head_weight)} - {id(self.model.get_input_embeddings().weight)}
        unused = {name for name, p in self.model.named_parameters() if id(p) in head}
        return [(name, p) for name, p in self.held() if name not in unused]

    def checkpoint_activations(self) -> None:
        if self._family is not None:
            self._family.checkpoint_activations = True
            return
        # `transformers` does it in training mode only, which must not switch dropout on
        self.model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": self.routers.follow_again})
        self.model.train()
        for module in self.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0

    def save(self, directory: Path, weights: dict[str, Tensor] | None = None) -> None:
        """Write a model directory, with `weights` in place of sharded ones. Adapters are merged, and kept beside."""
        with self.stock_attention():
            if self.adapted:
                peft, weights = load_optional(*PEFT), weights or dict(self.model.named_parameters())
                peft.save_adapters(self.model, weights, directory / ADAPTER_DIR)
                weights = peft.merged_weights(self.model, weights)
            if weights is not None:
                # and what is saved besides: buffers such as the bias of DeepSeek's routers
                names = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
                weights = weights | {k: v for k, v in self.model.state_dict().items() if k not in names}
            save_model(self.model, self.tokenizer, directory, weights)

    @contextmanager
    def stock_attention(self) -> Iterator[None]:
        self.model.set_attn_implementation("eager")
        try:
            yield
        finally:
            self.model.set_attn_implementation(NAME)

    def _prepare_exact(self) -> None:
        if self._family is None:
            names = ", ".join(sorted(name.removesuffix("Model") for name in FAMILY))
            why = "has parts whose result for a token depends on the rest of its batch"
            raise not_exact(f" is for {names}; {self.name} {why}")
        on_gpu, half = self.device.type == "cuda", self.dtype in (torch.bfloat16, torch.float16)
        if half is not on_gpu:
            needed = "model.dtype = 'float32' on a CPU and 'bfloat16' or 'float16' on a GPU"
            here = f"'{str(self.dtype).removeprefix('torch.')}' on '{self.device.type}'"
            raise ModelError(f"model.exact = true needs {needed}; here it is {here}")
        if on_gpu and not self._family.fits_kernels:
            raise not_exact(f" on a GPU needs Triton, one rank, heads of 2^n numbers (here {self._family.head_size})")
        if on_gpu:
            use_batch_invariant_gemms()
        elif self.routers.num_layers:
            self.model.set_experts_implementation("eager")  # the one that goes through F.linear


def resolve_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    setting, num_gpus = f"model.device = '{name}'", torch.cuda.device_count()
    if not re.fullmatch(r"cpu(:0)?|cuda(:(0|[1-9]\d?))?", name):
        raise ModelError(f"{setting} is not supported; use auto, cpu, cuda or cuda:0")
    if (device := torch.device(name)).type == "cuda" and (device.index or 0) >= num_gpus:
        raise ModelError(f"{setting}, but torch sees {num_gpus or 'no'} GPU{'s' * (num_gpus > 1)} here")
    return device


@quiet_transformers()
def load_policy(
    section: ModelSection, learner: LearnerSection | None = None, seed: int = 0, mesh: DeviceMesh | None = None
) -> Policy:
    """Load a directory or GGUF file, with the adapters that `learner` trains (`seed` is theirs).

    With a `mesh` the weights are sharded over its ranks, all of which must call this.
    """
    device = resolve_device(section.device)
    auto = torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype = auto if section.dtype == "auto" else getattr(torch, section.dtype)
    section = located(section)
    path = Path(section.path)
    _check_architecture(path)
    tokenizer = load_tokenizer(section)
    rank, alpha = (learner.lora_rank, learner.lora_alpha) if learner is not None else (0, 0.0)

    def adapted(model: Any) -> Any:
        if rank:
            load_optional(*PEFT).add_adapters(model, rank=rank, alpha=alpha, seed=seed)
        return model.eval()

    def whole() -> Any:
        with refusing(f"model.path = '{section.path}' cannot be loaded"):
            load = load_optional(*GGUF).gguf_model if path.suffix == ".gguf" else AutoModelForCausalLM.from_pretrained
            model, info = load(path, dtype=dtype, output_loading_info=True, **NOTHING_FOREIGN)
        if missing := sorted(info["missing_keys"]):  # `transformers` makes them up
            lacks = f"{len(missing)} of the weights of {type(model).__name__}"
            raise ModelError(f"{path} lacks {lacks}, such as {missing[0]}")
        return model

    if mesh is None:
        model = adapted(whole().to(device))
        even = len(model.get_output_embeddings().weight) % EVEN == 0  # most that cannot fail here
        if section.exact != "auto" or device.type != "cuda" or not even:
            return Policy(model, tokenizer, exact=section.exact is True)
        try:
            return Policy(model, tokenizer, exact=True)
        except (ModelError, torch.OutOfMemoryError) as error:
            policy = Policy(model, tokenizer)
            policy.unchecked = policy.unchecked or f"exact mode is off: {str(error).partition(';')[0]}"
            return policy
    with refusing(f"model.path = '{section.path}' cannot be loaded"):
        shards = Shards(lambda: adapted(_empty(path, dtype)), device, dtype, mesh, frozen=False)
        is_read = not rank and shards.read(path)
    if not is_read:
        first = adapted(whole()) if mesh.get_rank() == 0 else None
        shards.fill(first and dict(first.named_parameters()) | dict(first.named_buffers()))
    return Policy(shards.model, tokenizer, exact=section.exact is True, shards=shards)


def _empty(path: Path, dtype: torch.dtype) -> Any:
    """The model at `path`, with weights that nobody trained."""
    directory, file = (path.parent, path.name) if path.suffix == ".gguf" else (path, None)
    config = AutoConfig.from_pretrained(directory, gguf_file=file, **NOTHING_FOREIGN)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    kept = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in kept:  # the biases of routers: `transformers` does not round them
            buffer.data = buffer.data.float()
    if (path / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(path)
    return model


def _check_architecture(path: Path) -> None:
    """Refuse what `transformers` has no causal LM for: its own message would list all it knows."""
    if path.is_dir() and not (path / "config.json").exists():
        raise ModelError(f"model.path = '{path}' has no config.json: it is no model's directory")
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        name = config["model_type"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return  # a GGUF file, or damaged: loading it says how
    if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or "auto_map" in config:
        return
    does = "knows, but not as a causal LM" if name in CONFIG_MAPPING else "does not know"
    release = f"transformers {transformers.__version__}"
    raise ModelError(f"model.path = '{path}' has the architecture '{name}', which {release} {does}")


@quiet_transformers()
def load_tokenizer(section: ModelSection) -> Any:
    section = located(section)
    path, key = Path(section.tokenizer or section.path), "tokenizer" if section.tokenizer else "path"
    told = f"model.{key} = '{path}'"
    if path.is_dir() and not any(map(TOKENIZER_FILE.search, os.listdir(path))):
        raise ModelError(f"{told} has no tokenizer; name a directory with one in model.tokenizer")
    with refusing(f"the tokenizer of {told} cannot be loaded"):
        load = load_optional(*GGUF).gguf_tokenizer if path.suffix == ".gguf" else AutoTokenizer.from_pretrained
        tokenizer = load(path, **NOTHING_FOREIGN)
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
        raise ModelError(f"the tokenizer of {told} has no tokens")
    return tokenizer


@dataclass(frozen=True, slots=True)
class Support:
    """The tokens that could be sampled at each of N positions: `ids[offsets[i]:offsets[i + 1]]`."""

    ids: Tensor
    offsets: Tensor  # [N + 1]

    def forbidden(self, start: int, end: int, vocab: int) -> Tensor:
        """Mask `[end - start, V]` of the tokens outside the support."""
        counts = self.offsets[start : end + 1].diff()
        rows = torch.repeat_interleave(torch.arange(end - start, device=self.ids.device), counts)
        mask = torch.ones(end - start, vocab, dtype=torch.bool, device=self.ids.device)
        mask[rows, self.ids[self.offsets[start] : self.offsets[end]].long()] = False
        mask[counts == 0] = False  # an empty support is the whole vocabulary
        return mask


def chosen_logprobs(
    hidden: Tensor,
    weight: Tensor,
    chosen: Tensor,
    temperature: float | Tensor,
    support: Any = None,
    linear: Linear = F.linear,
) -> tuple[Tensor, Tensor]:
    """Log-probs of `chosen [N]` under softmax(hidden `[N, E]` · weight `[V, E]`ᵀ / temperature).

    Over the Support `support` and over all tokens. The head is applied to a chunk of tokens at a
    time, and again in the backward pass: there is never a float32 tensor of [N, V].
    """
    apply: Any = _ChosenLogprobs.apply
    both = apply(hidden, weight, chosen, temperature, support, linear, hidden.is_cuda and AVAILABLE)
    return both[0], both[-1]


class _ChosenLogprobs(torch.autograd.Function):
    """`[2, N]`, over the support and over all tokens, or `[1, N]` without a support.

    If `fused`, in the precision of the weights and with the kernels of sampling. Logits that fit in
    one chunk are then kept for the backward pass, which makes their gradient in place.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, chosen: Tensor, *rest: Any) -> Tensor:
        temperature, support, linear, fused = rest
        precise = torch.float32 if fused else torch.promote_types(hidden.dtype, torch.float32)
        temperature = torch.as_tensor(temperature, dtype=precise, device=hidden.device)
        temperature = temperature.expand(chosen.shape).contiguous()
        found = hidden.new_empty(1 if support is None else 2, len(chosen), dtype=precise)
        log_sums, logits = torch.empty_like(found), None
        chunks = _row_chunks(hidden, weight, support)
        for rows in chunks:
            logits = linear(hidden[rows], weight)
            if fused:
                for kind, values in enumerate(_over_support_and_all(logits, support, rows)):
                    scores = softmax.token_logprobs(values, chosen[rows], temperature[rows])
                    found[kind, rows], log_sums[kind, rows] = scores
                continue
            for row, logprobs in zip(found, _chunk_logprobs(logits, temperature, support, rows), strict=True):
                row[rows] = logprobs.gather(1, chosen[rows, None]).squeeze(1)
        ctx.save_for_backward(hidden, weight, chosen, temperature, log_sums)
        ctx.support, ctx.fused, ctx.logits = support, fused, logits if fused and len(chunks) == 1 else None
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, chosen, temperature, log_sums = ctx.saved_tensors
        kept, ctx.logits = ctx.logits, None
        grad_hidden, grad_weight, chunks = torch.empty_like(hidden), None, _row_chunks(hidden, weight, ctx.support)
        for rows in chunks:
            logits = F.linear(hidden[rows], weight) if kept is None else kept
            given = logits, chosen[rows], temperature, ctx.support, rows, grad[:, rows]
            of_logits = _fused_gradient(*given, log_sums[:, rows]) if ctx.fused else _gradient(*given)
            torch.mm(of_logits, weight, out=grad_hidden[rows])
            if grad_weight is None:
                grad_weight = of_logits.t() @ hidden[rows]
                if len(chunks) > 1:  # a sum of chunks: not in half precision
                    grad_weight = grad_weight.to(torch.promote_types(weight.dtype, torch.float32))
            elif grad_weight.dtype is weight.dtype:
                grad_weight.addmm_(of_logits.t(), hidden[rows])
            else:
                grad_weight += of_logits.t() @ hidden[rows]
            del given, logits, of_logits  # else they would be there beside the next chunk's
        grad_weight = torch.zeros_like(weight) if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, *[None] * 5


def _chunk_logprobs(logits: Tensor, temperature: Tensor, support: Support | None, rows: slice) -> list[Tensor]:
    """Log-probs `[rows, V]`: over the support if there is one, and over all tokens."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).div_(temperature[rows, None])
    return [torch.log_softmax(x, dim=-1) for x in _over_support_and_all(logits, support, rows)]


def _gradient(logits: Tensor, chosen: Tensor, temperature: Tensor, support: Any, rows: slice, grad: Tensor) -> Tensor:
    """The gradient of a chunk's logits: d log p[chosen] / d logits = onehot(chosen) - softmax."""
    pulls, kinds = grad / temperature[rows], _chunk_logprobs(logits, temperature, support, rows)
    found = reduce(Tensor.add_, [x.exp_().mul_(-pull[:, None]) for x, pull in zip(kinds, pulls, strict=True)])
    found[torch.arange(len(found), device=chosen.device), chosen] += pulls.sum(0)
    return found.to(logits.dtype)


def _fused_gradient(
    logits: Tensor, chosen: Tensor, temperature: Tensor, support: Any, rows: slice, grad: Tensor, log_sums: Tensor
) -> Tensor:
    each = zip(_over_support_and_all(logits, support, rows), log_sums, grad.contiguous(), strict=True)
    found = [softmax.logits_gradient(x, chosen, y, g, temperature[rows]) for x, y, g in each]
    return reduce(Tensor.add_, found)


def _over_support_and_all(logits: Tensor, support: Support | None, rows: slice) -> list[Tensor]:
    if support is None:
        return [logits]
    forbidden = support.forbidden(rows.start, rows.start + len(logits), logits.shape[1])
    return [logits.masked_fill(forbidden, float("-inf")), logits]


def _row_chunks(hidden: Tensor, weight: Tensor, support: Support | None) -> list[slice]:
    """Rows whose logits have CHUNK_ELEMENTS; with our kernels, a share of the GPU's memory."""
    size = CHUNK_ELEMENTS // len(weight)
    if hidden.is_cuda and AVAILABLE:
        memory_bytes = torch.cuda.get_device_properties(hidden.device).total_memory
        most_bytes = memory_bytes // (16 if support is None else 64)
        size = most_bytes // (len(weight) * weight.element_size())
    size = max(1, size)
    return [slice(start, start + size) for start in range(0, len(hidden), size)]
