"""The learner: micro-batches in, one optimizer step out.

A step is `accumulate` for each micro-batch of an `Intake`, and `finish`. Gradients are summed
unnormalised and divided once, at the end, by the number of tokens or sequences of the whole step.
So the result does not depend on how the step was cut into micro-batches or among processes
(`Sharding`), and work can begin before the step's last group exists; not so with a critic, or with
several updates per step (`learner.epochs`, `learner.minibatches`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from headrace.config import LearnerSection, ModelSection, WarmstartSection
from headrace.errors import ModelError
from headrace.kernels import AVAILABLE, adamw
from headrace.learner.batch import Batch, balanced, pack
from headrace.learner.mismatch import NUM_SUMS, mismatch_of, mismatch_sums
from headrace.learner.objective import STD_FLOOR, balance, gae, normaliser, objective
from headrace.measured import Mismatch, StepStats
from headrace.policy.attention import PackedPlan
from headrace.policy.policy import Policy, load_policy
from headrace.types import Example, FloatArray, Group, Item, Order, Prompt, Sampling, Span, Trajectory

Named = Iterable[tuple[str, nn.Parameter]]


class Learner:
    """Trains `policy` in place; with a `sharding`, over which it is cut, together with the other ranks."""

    def __init__(
        self,
        policy: Policy,
        section: LearnerSection,
        *,
        temperatures: Sequence[float],
        max_new_tokens: int,
        total_steps: int,
        sharding: Sharding | None = None,
    ) -> None:
        self.policy, self.section, self.sharding = policy, section, sharding
        self.step_index, self._constant_length, self._total_steps = 0, max_new_tokens, total_steps
        self._heats = temperatures[0] if section.loss == "tba" else temperatures  # it compares answers
        # over the update: sequences; loss, log-probs, clipped tokens, KL, critic's loss; those of the mismatch
        self._sums = torch.zeros(6 + NUM_SUMS, dtype=torch.float64)
        self._waiting: list[Item] = []  # of the step, if its updates need all of it
        has_reference = section.kl_coef and ":" not in section.teacher  # else a function is asked
        self._reference = reference_of(policy, section, sharding) if has_reference else None
        if section.checkpoint_activations:
            policy.checkpoint_activations()
        self._optimizer = Optimizer(policy.held(), section, sharding)
        self._critic = Critic(policy, section, sharding) if section.advantage == "gae" else None
        self._limit_s = 0.0  # see `StepStats`

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint stores: master weights and moments, as DTensors with a sharding."""
        found, shards = self._optimizer.tensors(), self.policy.shards
        if shards is not None:
            found = {name: shards.as_part(name.split(".", 1)[1], part) for name, part in found.items()}
        values = {} if self._critic is None else self._critic.optimizer.tensors()
        return found | {f"value.{name}": tensor for name, tensor in values.items()}

    def weights(self, dtype: torch.dtype, *, trained_only: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Names and whole weights as `dtype`, one at a time to save memory.

        With a sharding this is a collective: every rank must iterate to the end.
        """
        shards = self.policy.shards
        for name, parameter in self.policy.model.named_parameters() if shards is None else shards.weights.items():
            if parameter.requires_grad or not trained_only:
                part = parameter.detach().to(dtype)  # rounded before it is sent
                yield name, part.full_tensor() if isinstance(part, DTensor) else part

    def reference_tensors(self) -> dict[str, Tensor]:
        """The weights of the reference policy, if there is one. They never change."""
        return {} if self._reference is None else dict(self._reference.model.named_parameters())

    def loaded(self, step: int) -> None:
        """The tensors were written to from outside: they are those after `step` steps."""
        self._optimizer.loaded()
        if self._critic is not None:
            self._critic.optimizer.loaded()
        self.step_index = step

    @torch.no_grad()
    def reference_logprobs(self, group: Group) -> list[FloatArray]:
        """Log-probs of the group's sampled tokens under the start weights.

        The reference routes tokens to its own choice of experts, not to those of the sampling. With
        kl_in="loss" the KL compares whole distributions; with kl_in="reward", where only the
        log-probs of the sampling are known, it compares distributions cut to the sampling support.
        """
        reference = self._reference
        assert reference is not None

        def compute(b: Batch) -> Tensor:
            support = b.support if self.section.kl_in == "reward" else None
            return reference.logprobs(b.token_ids, b.plan, b.at, b.temperature, support)[0].float()

        return self._of_each(reference, [Item(trajectory=t, advantage=0.0) for t in group.trajectories], compute)

    def _of_each(self, policy: Policy, items: Sequence[Item], compute: Callable[[Batch], Tensor]) -> list[FloatArray]:
        """For each item what `compute` says of its sampled tokens `[.., N]`."""
        known: dict[str, FloatArray] = {}
        for part, batch in self._batches(policy, items):
            counts = [item.trajectory.num_sampled_tokens for item in part]
            for item, own in zip(part, compute(batch).cpu().split(counts, dim=-1), strict=True):
                known[item.trajectory.id] = own.numpy()
        return [known[item.trajectory.id] for item in items]

    @torch.no_grad()
    def mismatch(self, trajectories: Sequence[Trajectory]) -> Mismatch:
        """With a sharding: of this rank's part of the `trajectories`, summed over all ranks."""
        items = [Item(trajectory=t, advantage=np.zeros(t.num_sampled_tokens, np.float32)) for t in trajectories]
        return self._from_start(items)[1]

    def accumulate(self, items: Sequence[Item]) -> None:
        if self.section.in_whole_steps:
            self._waiting += items
        else:
            self._add(items)

    def _add(self, items: Sequence[Item]) -> None:
        for part, batch in self._batches(self.policy, items, backward=True):
            # one transfer, and last: any earlier wait for the GPU would leave it idle
            self._sums[1:] += self._backward(batch).cpu()
            self._sums[0] += len(part)

    def _batches(
        self, policy: Policy, items: Sequence[Item], *, backward: bool = False
    ) -> Iterator[tuple[Sequence[Item], Batch]]:
        """Micro-batches, equally many on all ranks: in one that is empty here, this rank only takes part."""
        alone = self.sharding is None or self.sharding.num_ranks == 1
        cut_before = backward and alone and not self.section.in_whole_steps
        routers = policy.routers if policy is self.policy else None  # the reference chooses its own experts
        passes = [items] if cut_before else [*balanced(items, self.section.micro_batch_tokens)]
        if self.sharding is not None:
            most = int(self.sharding.reduced(torch.tensor(len(passes)), dist.ReduceOp.MAX))
            passes += [[]] * (most - len(passes))
        for part in passes:
            if part:
                yield part, pack(part, policy.device, routers, self._heats)
            else:
                take_part(policy, backward=backward)

    def _backward(self, batch: Batch) -> Tensor:
        """Add the micro-batch's gradients. Returns, on the device, what `_sums[1:]` adds up."""
        with torch.enable_grad():
            passed, length = self._logprobs(batch), self._constant_length
            loss, clipped, divergence, critic = objective(self.section, batch, passed, constant_length=length)
            self._optimizer.make_room()
            loss.backward()
        self._limit_s += 3 * self.policy.pass_s(batch.plan)
        parts = (loss.detach(), passed[0].detach().sum(), clipped.sum(), divergence.sum(), critic.sum())
        sums = torch.stack([part.double() for part in parts])
        return torch.cat([sums, mismatch_sums(passed[0], batch.behaviour)])

    def _logprobs(self, b: Batch) -> tuple[Tensor, ...]:
        """Of the sampled tokens: over the sampling support, and over the vocabulary; the critic's values."""
        values = None if self._critic is None else self._critic.values
        return self.policy.logprobs(b.token_ids, b.plan, b.at, b.temperature, b.support, b.routes, values)

    def finish(self) -> StepStats:
        """The updates of the step, in place. Call it only between two engine steps."""
        items, self._waiting = self._waiting, []
        if not self.section.in_whole_steps:
            stats = self._update()
        else:
            items, mismatch = self._from_start(items)
            if self.section.loss == "tba":
                items = self._balanced(items)
            updates = []
            for k in [*range(self.section.minibatches)] * self.section.epochs:
                self._add([item for item in items if item.minibatch == k])
                updates.append(self._update())
            stats = mean_of(updates, mismatch)
        self.step_index += 1
        limit_s, self._limit_s = self._limit_s, 0.0
        return replace(stats, limit_s=limit_s)

    @torch.no_grad()
    def _from_start(self, items: Sequence[Item]) -> tuple[list[Item], Mismatch]:
        """Items with what is known before the first update: log-probs and, by the critic, advantages."""
        sums, section = torch.zeros(NUM_SUMS, dtype=torch.float64), self.section

        def compute(batch: Batch) -> Tensor:
            logprobs, _, *values = self._logprobs(batch)
            sums.add_(mismatch_sums(logprobs, batch.behaviour).cpu())
            return torch.stack([logprobs, *(values or [logprobs]), logprobs])

        starts = self._of_each(self.policy, items, compute)
        given: list[Any] = [item.advantage for item in items]
        if self._critic is not None:
            given = gae(given, [start[1] for start in starts], discount=section.discount, decay=section.gae_lambda)
            for start, advantage in zip(starts, given, strict=True):
                start[2] = start[1] + advantage
            given = self._whitened(given)
        mismatch = mismatch_of(sums if self.sharding is None else self.sharding.reduced(sums))
        return [replace(x, advantage=a, start=s) for x, a, s in zip(items, given, starts, strict=True)], mismatch

    def _balanced(self, items: Sequence[Item]) -> list[Item]:
        """Items with the advantages of trajectory balance; until then they are rewards."""
        moved = [x.start[0] - x.reference for x in items if x.start is not None and x.reference is not None]
        costs = [self.section.kl_coef * own.sum(dtype=np.float64) for own in moved]
        worth = {x.trajectory.id: float(x.advantage - cost) for x, cost in zip(items, costs, strict=True)}
        found = balance(worth if self.sharding is None else self.sharding.joined(worth))
        return [replace(x, advantage=found[x.trajectory.id]) for x in items]

    def _whitened(self, advantages: Sequence[np.ndarray]) -> list[FloatArray]:
        """Over all tokens of the step the mean becomes 0 and the standard deviation 1."""
        flat = np.concatenate([np.zeros(0), *advantages])
        sums = torch.tensor([len(flat), flat.sum(), np.square(flat).sum()], dtype=torch.float64)
        count, total, squares = (sums if self.sharding is None else self.sharding.reduced(sums)).tolist()
        mean = total / max(count, 1)
        std = math.sqrt(max(squares / max(count, 1) - mean * mean, 0.0))
        return [((advantage - mean) / (std + STD_FLOOR)).astype(np.float32) for advantage in advantages]

    def _update(self) -> StepStats:
        """The optimizer step with the gradients added so far."""
        sums, self._sums = self._sums, torch.zeros_like(self._sums)
        if self.sharding is not None:
            assert self.policy.shards is not None
            self.policy.shards.hand_over_gradients()
            sums = self.sharding.reduced(sums)
        num_sequences, loss, logprobs, clipped, divergence, critic = sums[:6].tolist()
        mismatch = mismatch_of(sums[6:])
        scale = 1.0 / normaliser(self.section.aggregation, mismatch.count, int(num_sequences))
        lr = learning_rate(self.section, self.step_index, self._total_steps)
        # a NaN log-prob can hide from the gradient behind a clamp, but not from the loss
        scale = scale if math.isfinite(loss) else math.nan
        norm = self._optimizer.step(lr=lr, scale=scale, clip=self.section.grad_clip)
        if not math.isfinite(norm) and (name := self._optimizer.not_finite()) is not None:
            told = f"the weights '{name}' are no longer finite numbers, so no gradient can be"
            how = "Resume the run from its last checkpoint; if this happens again, lower learner.lr"
            raise ModelError(f"step {self.step_index + 1}: {told}. {how}")
        if self._critic is not None:
            self._critic.step(scale if math.isfinite(norm) else math.nan)
        return StepStats(
            loss=loss * scale,
            grad_norm=norm,
            lr=lr,
            skipped=not math.isfinite(norm),
            entropy=-logprobs / mismatch.count,
            kl_reference=divergence / mismatch.count,
            clipped_share=clipped / mismatch.count,
            value_loss=critic / mismatch.count,
            mismatch=mismatch,
        )


def mean_of(updates: Sequence[StepStats], mismatch: Mismatch) -> StepStats:
    """Of a step with several updates. One whose gradient was not finite changed nothing."""
    done = [update for update in updates if not update.skipped] or updates
    names = [field.name for field in fields(StepStats) if field.name not in ("skipped", "mismatch")]
    means = {name: sum(getattr(update, name) for update in done) / len(done) for name in names}
    return StepStats(**means, skipped=done[0].skipped, mismatch=mismatch)


class Critic:
    """Estimates the reward to come after each token: a linear head on the policy's last hidden states.

    It begins with zeros. Its loss also changes the policy's weights, by `value_coef` of its gradient.
    """

    def __init__(self, policy: Policy, section: LearnerSection, sharding: Sharding | None) -> None:
        self._section, self._sharding = section, sharding
        dtype = torch.promote_types(policy.dtype, torch.float32)
        self.head = nn.Linear(policy.config.hidden_size, 1, device=policy.device, dtype=dtype)
        for parameter in self.head.parameters():
            nn.init.zeros_(parameter)
        self.optimizer = Optimizer(self.head.named_parameters(), section)

    def values(self, hidden_NE: Tensor) -> Tensor:
        hidden, constant = hidden_NE.to(self.head.weight.dtype), hidden_NE.detach().to(self.head.weight.dtype)
        return self.head(constant + self._section.value_coef * (hidden - constant))[:, 0]  # type: ignore[no-any-return]

    def step(self, scale: float) -> None:
        """An optimizer step, the same on all ranks."""
        if self._sharding is not None:
            for parameter in self.head.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                self._sharding.reduced(parameter.grad)
        self.optimizer.step(lr=self._section.value_lr, scale=scale, clip=self._section.grad_clip)


def reference_of(policy: Policy, section: LearnerSection, sharding: Sharding | None) -> Policy:
    """What the KL is from: the policy as it is now, or a teacher."""
    if not section.teacher:
        return policy.frozen_copy()
    kind: Any = {"dtype": str(policy.dtype).removeprefix("torch."), "device": str(policy.device), "exact": False}
    teacher = load_policy(ModelSection(path=section.teacher, **kind), mesh=sharding.mesh if sharding else None)
    if teacher.tokenizer.get_vocab() != policy.tokenizer.get_vocab():
        raise ModelError(f"learner.teacher = '{section.teacher}' has another vocabulary than the model that it teaches")
    return teacher


def take_part(policy: Policy, *, backward: bool = False) -> None:
    """Zero-loss pass over two dummy tokens: FSDP's collectives need every rank."""
    device = policy.device
    tokens, second = torch.zeros(2, dtype=torch.int64, device=device), torch.tensor([1], device=device)
    with torch.set_grad_enabled(backward):
        logprobs, _ = policy.logprobs(tokens, PackedPlan([2], device), second, 1.0)
        if backward:
            logprobs.backward(torch.zeros_like(logprobs))


class WarmStart:
    """Supervised fine-tuning (SFT) before RL; of a worked example only the solution is learned."""

    def __init__(self, policy: Policy, section: WarmstartSection, sharding: Sharding | None = None) -> None:
        self._policy, self._section, self._sharding = policy, section, sharding
        self._optimizer = Optimizer(policy.held(), LearnerSection(lr=section.lr, betas=(0.9, 0.98)), sharding)
        self._done = 0

    def step(self, examples: Sequence[Example]) -> float:
        """One optimizer step. Returns the loss before it."""
        policy, steps, sharding = self._policy, self._section.steps, self._sharding
        mine = examples if sharding is None else examples[sharding.rank :: sharding.num_ranks]
        loss = torch.zeros(())
        if mine:
            batch = pack(list(map(_worked, mine)), policy.device)
            logprobs = policy.logprobs(batch.token_ids, batch.plan, batch.at, 1.0)[0]
            loss = -logprobs.sum() / sum(int(learned.sum()) for _, learned in examples)
            loss.backward()
        else:
            take_part(policy, backward=True)
        if policy.shards is not None and sharding is not None:
            policy.shards.hand_over_gradients()
            loss = sharding.reduced(loss.detach().cpu())
        # up over the first tenth, down over the last quarter: RL should not start from the noise of
        # the last batches
        rise, fall = (self._done + 1) / max(1, steps // 10), (steps - self._done) / max(1, steps // 4)
        self._optimizer.step(lr=self._section.lr * min(1.0, rise, fall), scale=1.0, clip=1.0)
        self._done += 1
        return float(loss.detach())


def _worked(example: Example) -> Item:
    """As an answer whose learned tokens were sampled."""
    ids, learned = example
    edges = np.flatnonzero(np.diff(learned, prepend=False, append=False)).reshape(-1, 2)
    spans = tuple(Span(version=0, start=start, end=end) for start, end in edges.tolist())
    prompt = Prompt(id="worked", text="", token_ids=ids)
    unanswered = Order.group(0, prompt, [Sampling(max_new_tokens=0)]).nothing_sampled(0, now_s=0.0)
    return Item(trajectory=replace(unanswered, sampled=learned, spans=spans), advantage=0.0)


def learning_rate(section: LearnerSection, step: int, total_steps: int) -> float:
    """The rate of 0-based `step`: warm-up to `lr`, then constant or down to 0 at `total_steps`.

    The last step of a run still learns; a run continued past `total_steps` on a falling schedule
    does not.
    """
    if step < section.warmup_steps:
        return section.lr * (step + 1) / section.warmup_steps
    progress = min((step - section.warmup_steps) / max(total_steps - section.warmup_steps, 1), 1.0)
    shares = {"constant": 1.0, "linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}
    return section.lr * shares[section.schedule]


class Optimizer:
    """One optimizer step, in place, on the weights that the engine decodes with.

    A bfloat16 weight cannot hold an RL-sized update (less than 1/256 of it), so masters are kept in
    float32. With a `sharding`, gradients are clipped by the norm of all ranks' parts.
    """

    def __init__(self, named: Named, section: LearnerSection, sharding: Sharding | None = None) -> None:
        trained = {name: p for name, p in named if p.requires_grad}
        self._names, self.parameters = list(trained), list(trained.values())
        dtypes, precise = {p.dtype for p in self.parameters}, (torch.float32, torch.float64)
        self.masters = [p if p.dtype in precise else p.detach().to(torch.float32, copy=True) for p in self.parameters]
        one_dtype = len(dtypes) == 1 and torch.float64 not in dtypes  # what `FusedAdamW` can update
        self._on_gpu = AVAILABLE and self.parameters[0].is_cuda and one_dtype
        self._add_up = None if sharding is None else sharding.reduced
        kind = adamw.FusedAdamW if self._on_gpu else torch.optim.AdamW
        betas, decay = section.betas, section.weight_decay
        self.adamw = kind(self.masters, lr=section.lr, betas=betas, weight_decay=decay, fused=True)
        steps = torch.zeros((), device=self.parameters[0].device)
        for master in self.masters:  # `FusedAdamW` counts its steps once, torch's AdamW for each weight
            moments = {"exp_avg": torch.zeros_like(master), "exp_avg_sq": torch.zeros_like(master)}
            self.adamw.state[master] = moments | {"step": steps if self._on_gpu else steps.clone()}

    def tensors(self) -> dict[str, Tensor]:
        """Masters and moments, by name. Call `loaded` after writing to them."""
        found: dict[str, Tensor] = {}
        for name, master in zip(self._names, self.masters, strict=True):
            state = self.adamw.state[master]
            found |= {f"master.{name}": master, f"mean.{name}": state["exp_avg"]}
            found |= {f"square.{name}": state["exp_avg_sq"], f"count.{name}": state["step"]}
        return found

    @torch.no_grad()
    def loaded(self) -> None:
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master is not parameter:
                parameter.copy_(master)

    def make_room(self) -> None:
        """Call before each backward pass: adds earlier gradients to those of the masters."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master is not parameter and parameter.grad is not None:
                more = parameter.grad.to(master.dtype)
                master.grad = more if master.grad is None else master.grad.add_(more)
                parameter.grad = None

    def step(self, *, lr: float, scale: float, clip: float) -> float:
        """Scale the gradients, clip their norm to `clip`, update. Returns the norm before clipping.

        A norm that is not finite leaves weights and moments unchanged.
        """
        for group in self.adamw.param_groups:
            group["lr"] = lr
        norm = self._step_on_gpu(scale, clip) if self._on_gpu else self._step(scale, clip)
        for parameter in (*self.parameters, *self.masters):
            parameter.grad = None
        return norm

    def not_finite(self) -> str | None:
        named = zip(self._names, self.masters, strict=True)
        return next((name for name, master in named if not torch.isfinite(master).all()), None)

    def _step_on_gpu(self, scale: float, clip: float) -> float:
        assert isinstance(self.adamw, adamw.FusedAdamW)
        gradients = [p.grad for p in self.parameters]  # of a single pass
        if any(m.grad is not None for m in self.masters):  # or of several
            self.make_room()
            gradients = [m.grad for m in self.masters]
        return float(self.adamw.step_fused(self.parameters, gradients, scale, clip, self._add_up))

    def _step(self, scale: float, clip: float) -> float:
        self.make_room()
        gradients = [m.grad for m in self.masters if m.grad is not None]
        total = torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float64)).norm()
        if self._add_up is not None:
            total = self._add_up(total.square()).sqrt()
        if not math.isfinite(norm := scale * float(total)):
            return norm
        torch._foreach_mul_(gradients, scale)
        if clip and norm > clip:
            torch._foreach_mul_(gradients, clip / norm)
        self.adamw.step()
        self.loaded()
        return norm


class Sharding:
    """This process as one rank of a learner, by FSDP2: each has a part of weights and batch.

    Gathering a layer's weights is a collective of all ranks. So every rank must be called equally
    often, with an empty list if there is nothing for it. The caller divides the work (`Ranks`). The
    constructor waits for the others at rank 0's `store`, and sets the default process group.
    """

    def __init__(
        self, *, rank: int, num_ranks: int, store: TCPStore, device: torch.device, timeout_s: float = 600.0
    ) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        backend = "gloo"
        if device.type == "cuda":
            backend = "cpu:gloo,cuda:nccl"  # small sums without a GPU sync
            torch.cuda.set_device(device.index or 0)
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=timeout)
        self.mesh = init_device_mesh(device.type, (num_ranks,))
        # a checkpoint is written while training goes on, so it needs a process group of its own
        self.writers = dist.new_group(backend="gloo", timeout=timeout)

    def reduced(self, values: Tensor, operation: Any = dist.ReduceOp.SUM) -> Tensor:
        """The `values`, in place, over all ranks."""
        dist.all_reduce(values, operation)
        return values

    def joined(self, found: Mapping[str, float]) -> dict[str, float]:
        """What all ranks have found."""
        known: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(known, dict(found))
        return {key: value for one in known for key, value in one.items()}
