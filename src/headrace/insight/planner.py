"""From a workload and a number of devices to a layout, before anything is paid for.

Layouts that do not fit into memory are left out. Of those that fit, the most promising by a bound
on their speed are played by the simulator, with the real buffer and lag policy: `plan` and
`simulate` cannot disagree. The one with the most goodput comes first.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from headrace.config import COMMANDS
from headrace.errors import ConfigError
from headrace.insight.hardware import Accelerator, ModelShape
from headrace.insight.roofline import USABLE_SHARE, MemoryBill, Roofline, Transfer
from headrace.insight.scenario import BLANK, speeds, with_speeds
from headrace.insight.simulator import Simulated, simulate
from headrace.insight.triage import BOTTLENECK_OF_STAGE, Bottleneck, Placement
from headrace.insight.workload import LogNormal, Machine, Workload

SPLITS = 24  # ways to share devices out that are looked at
PLAYED = 8  # layouts that are simulated
PLAYED_ANSWERS = 512  # of a larger step that may lag a part is simulated
LARGE_STEP = 4096  # answers: fewer such steps are simulated
MOST_STEPS = 24  # simulated
MICRO_BATCH_TOKENS = 8192
LAG_TO_WATCH = 4.0  # others saw training suffer from four to eight versions on
FULL, LITTLE = 0.85, 0.1  # of a device's memory
SYNC_TO_MIND = 0.1  # of a step: from there on it pays to send less
LEARNER_BUSY = 0.9  # of a step: from there on the learner's side is what the others wait for


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A workload and what there is to run it on."""

    model: ModelShape
    device: Accelerator
    num_devices: int
    num_prompts: int
    num_samples: int
    lengths: LogNormal
    prompt_tokens: float = 512.0
    reward_s: float = 0.0  # p95 of a verdict
    environment_s: float = 0.0  # that an episode waits for its environment, in all
    max_lag: int = 4  # the most that is allowed
    reference: bool = False  # a frozen policy for a KL penalty
    adapter: bool = False  # train low-rank adapters only
    useful: float = 1.0  # share of the tokens that is not dropped

    def __post_init__(self) -> None:
        if not self.lengths.mean > 0:
            raise ConfigError("answers of 0 tokens on average: there is nothing to train on")

    @property
    def num_answers(self) -> int:
        return self.num_prompts * self.num_samples

    @property
    def sequence_tokens(self) -> float:
        return self.prompt_tokens + self.lengths.cut_mean

    @property
    def longest_tokens(self) -> float:
        return self.lengths.expected_max(self.num_answers)


@dataclass(frozen=True, slots=True)
class Split:
    """Who gets how many devices. Colocated: both get all."""

    placement: Placement
    rollout_devices: int
    learner_devices: int
    tensor_parallel: int  # devices of one engine

    @property
    def num_engines(self) -> int:
        return self.rollout_devices // self.tensor_parallel

    @property
    def colocated(self) -> bool:
        return self.placement is Placement.COLOCATED


def plan(question: Question) -> "list[LayoutPlan]":
    """The layouts that promise most: those that can be run here first, by goodput."""
    model, device, number = question.model, question.device, question.num_devices
    if not any(_engine_sizes(question)):
        needed = f"its weights and the cache of one answer of {question.longest_tokens:,.0f} tokens"
        told = f"{needed}, the longest of {question.num_answers:,}, do not fit"
        helps = "take more or larger devices, or shorter answers"
        raise ConfigError(f"{model.name} cannot generate on {number} x {device.name}: {told}; {helps}")
    candidates = [_Candidate(question, split) for split in _splits(question)]
    fitting = sorted((one for one in candidates if one.num_running), key=lambda one: (not one.is_built, one.least_s))
    if not fitting:
        needed = f"its training state alone is {16 * model.num_params / 1e9:,.0f} GB"
        told = f"{needed}, and there are {number} x {device.memory_bytes / 1e9:.0f} GB"
        cannot = f"{model.name} cannot be trained on {number} x {device.name}"
        raise ConfigError(f"{cannot}: {told}; take more devices, or train an adapter")
    return sorted(map(LayoutPlan, fitting[:PLAYED]), key=lambda made: (not made.settings, -made.goodput))


def search(question: Question, target_goodput: float) -> "tuple[Question, list[LayoutPlan]]":
    """The smallest device count, up to the given number, that reaches `target_goodput`."""
    most, found = question.num_devices, dict[int, list[LayoutPlan]]()

    def goodput(num_devices: int) -> float:
        try:
            found[num_devices] = plan(replace(question, num_devices=num_devices))
        except ConfigError:  # too few to train on at all
            return 0.0
        return found[num_devices][0].goodput

    counts = [number for number in (1, 2, 4, *range(8, most, 8)) if number < most] + [most]
    first = bisect_left(counts, target_goodput, key=goodput)  # more devices are never slower
    if first == len(counts):
        reached = max((plans[0].goodput for plans in found.values()), default=0.0)
        told = f"{most} x {question.device.name} come to {reached:,.0f}"
        raise ConfigError(f"{target_goodput:,.0f} trained tokens a second are out of reach: {told}")
    return replace(question, num_devices=counts[first]), found[counts[first]]


def _splits(question: Question) -> Iterator[Split]:
    total, lagging = question.num_devices, {0: Placement.STREAMED, 1: Placement.OVERLAPPED}
    apart = lagging.get(question.max_lag, Placement.ASYNCHRONOUS)
    for size in _engine_sizes(question):
        num_engines = total // size
        yield Split(Placement.COLOCATED, num_engines * size, total, size)
        for engines in range(1, num_engines + 1, max(1, num_engines // SPLITS)):
            if engines * size < total:
                yield Split(apart, engines * size, total - engines * size, size)


def _engine_sizes(question: Question) -> Iterator[int]:
    """Devices of an engine: powers of two that hold the weights and the longest answer, in a node if one can."""
    device, tokens = question.device, question.prompt_tokens + question.longest_tokens
    sizes = (2**i for i in range(question.num_devices.bit_length()))
    fitting = [size for size in sizes if Roofline(question.model, device).actor_bill(1, tokens, size).fits(device)]
    yield from [size for size in fitting if size <= device.num_per_node] or fitting[:1]


class _Candidate:
    """A split of the devices: whether it fits into memory, how fast it is at best, and its plan."""

    def __init__(self, question: Question, split: Split) -> None:
        self.question, self.split = question, split
        self.device, self.roofline = question.device, Roofline(question.model, question.device)
        self.max_lag = 0 if split.colocated else question.max_lag
        self.recomputes = not self._learner_bill(recomputes=False).fits(question.device)
        self.learner = self._learner_bill(recomputes=self.recomputes)
        self.num_running = self._num_running() if self.learner.fits(question.device) else 0
        self.transfer = None if split.colocated else self._transfer()
        self.sync = self.roofline.sync_times(self.transfer) if self.transfer else None

    @property
    def is_built(self) -> bool:
        """Whether an engine does it: on several devices only servers can, of one node, no mixtures, not in turns."""
        in_a_node = self.split.tensor_parallel <= self.device.num_per_node and not self.split.colocated
        return self.split.tensor_parallel == 1 or (in_a_node and not self.question.model.num_experts)

    @property
    def settings(self) -> list[str]:
        """What runs it here, besides model, prompts and rewards; nothing if that cannot be run."""
        question, split, size = self.question, self.split, self.split.tensor_parallel
        found = [f"loop.groups_per_step={question.num_prompts}", f"rollout.samples={question.num_samples}"]
        found += [f"loop.max_lag={self.max_lag}", f"rollout.max_running={self.num_running}"]
        if question.num_devices > 1:
            found += ["place.cluster=ray", f"rollout.workers={split.num_engines}"]
            found += [f"learner.ranks={split.learner_devices}", *["place.layout=colocated"] * split.colocated]
        if size > 1:
            found += ["rollout.engine=vllm", f"rollout.command={COMMANDS['vllm']} --tensor-parallel-size {size}"]
        if question.lengths.cap < float("inf"):
            found.append(f"rollout.max_new_tokens={question.lengths.cap:.0f}")
        if question.adapter:
            found.append("learner.lora_rank=16")
        if self.transfer is not None and self.transfer.encoding != "full":
            found.append(f"publish.encoding={self.transfer.encoding}")
        found += ["learner.checkpoint_activations=true"] * self.recomputes
        return found if self.is_built else []

    def _learner_bill(self, *, recomputes: bool) -> MemoryBill:
        shards = self.split.learner_devices
        bill = self.roofline.learner_bill(MICRO_BATCH_TOKENS, shards, checkpoint_activations=recomputes)
        frozen = self.roofline.actor_bill(0, 0, shards)  # a copy that runs nothing
        if self.question.adapter:  # frozen weights, and next to nothing to train
            bill = replace(frozen, activation_bytes=bill.activation_bytes)
        return bill + frozen if self.question.reference else bill

    def _num_running(self) -> int:
        """Sequences that an engine has room for, and never more than there are."""
        question, engines, size = self.question, self.split.num_engines, self.split.tensor_parallel
        weights = self.roofline.weight_bytes / size
        shared = self.learner if self.split.colocated else MemoryBill()
        held = shared.training_bytes + shared.weight_bytes  # activations come and go with the cache
        free = (USABLE_SHARE * self.device.memory_bytes - weights - held) * size
        room = free / (question.sequence_tokens * self.roofline.kv_bytes)
        return max(0, min(int(room), -(-question.num_answers * (self.max_lag + 1) // engines)))

    def _transfer(self) -> Transfer:
        """All weights, or only what changed where all would take much of the learner's step."""
        question, split, tokens = self.question, self.split, self.question.sequence_tokens
        engines, learners = split.num_engines, split.learner_devices
        full = self.roofline.full_transfer(question.num_devices, engines, learners, split.tensor_parallel)
        if question.adapter:
            return replace(full, encoding="adapter")
        training_s = self.roofline.train_s(question.num_answers * tokens, tokens)
        too_slow = self.roofline.sync_times(full).total_s * learners > SYNC_TO_MIND * training_s
        return replace(full, encoding="delta") if too_slow else full

    @cached_property
    def machine(self) -> Machine:
        question, learners = self.question, self.split.learner_devices
        rows, engines, size = self.num_running, self.split.num_engines, self.split.tensor_parallel
        known = speeds(self.roofline, rows, question.prompt_tokens, question.lengths.cut_mean, size)
        blank = replace(BLANK.machine, rollout_workers=engines, rows_per_worker=rows)
        one = with_speeds(blank, known)
        reference_s = self.roofline.forward_s(1, question.sequence_tokens)
        return replace(
            one,
            # recomputing is the forward pass once more
            train_token_s=one.train_token_s / learners * (4 / 3 if self.recomputes else 1.0),
            reference_token_s=reference_s / learners if question.reference else 0.0,
            publish_s=self.sync.total_s if self.sync else 0.0,
            colocated=self.split.colocated,
        )

    @property
    def least_s(self) -> float:
        """A step takes at least what generation or the learner alone takes; without lag, both."""
        question, machine = self.question, self.machine
        prompt_tokens = question.num_prompts * question.prompt_tokens
        tokens = question.num_answers * question.lengths.cut_mean
        decode_s = tokens * self._full_step_s / machine.rows_per_worker
        rollout_s = (decode_s + prompt_tokens * machine.prefill_token_s) / machine.rollout_workers
        token_s = machine.train_token_s + machine.reference_token_s
        learner_s = (tokens + prompt_tokens) * token_s  # a prompt once for all its answers
        if self.max_lag:
            return max(rollout_s, learner_s, machine.publish_s)
        return max(rollout_s, question.longest_tokens * machine.decode_s) + learner_s + machine.publish_s

    @property
    def _full_step_s(self) -> float:
        """Seconds of a decode step with every row, half-way through its answer."""
        machine, question = self.machine, self.question
        half_way = question.prompt_tokens + question.lengths.cut_mean / 2
        row_s = machine.decode_row_s + machine.context_s * half_way
        return machine.decode_s + row_s * machine.rows_per_worker

    def simulated(self) -> tuple[Simulated, float]:
        """A few steps, and into how many parts each was cut if they are too large to be played.

        A part has its share of the groups and of every engine's rows, at its share of the speed, so
        a step takes as long. Without lag nothing is cut: everybody waits for the longest answer.
        """
        question, machine, running = self.question, self.machine, self.num_running
        groups, samples, parts = question.num_prompts, question.num_samples, 1.0
        if self.max_lag and question.num_answers > PLAYED_ANSWERS and running > samples:
            cut = min(question.num_answers / PLAYED_ANSWERS, running / samples)
            groups = max(1, round(question.num_prompts / cut))
            parts = question.num_prompts / groups
            rows = max(samples, round(running / parts))
            machine = replace(machine, rows_per_worker=rows)
            machine = machine.times(running / rows, "decode_row_s", "context_s")
            machine = machine.times(parts, "prefill_token_s", "train_token_s", "reference_token_s")
        work = Workload(
            groups_per_step=groups,
            samples=samples,
            tokens=question.lengths,
            reward_s=LogNormal.of_p95(0.0, question.reward_s),
            environment_s=question.environment_s,
            prompt_tokens=question.prompt_tokens,
        )
        steps = 3 if question.num_answers <= LARGE_STEP else 2
        if self.max_lag:
            steps = min(2 * self.max_lag + 4, MOST_STEPS)
        return simulate(work, machine, max_lag=self.max_lag, steps=steps), parts

    def bottleneck(self, run: Simulated) -> Bottleneck:
        """Without lag the longest stage; with lag the side that never waits."""
        times = run.stage_s
        if self.max_lag == 0:
            waits = self.question.environment_s > getattr(times, times.wall)
            return Bottleneck.ENVIRONMENT if waits else BOTTLENECK_OF_STAGE[times.wall]
        training_s = times.train + times.reference
        if max(training_s, times.publish) >= LEARNER_BUSY * run.step_s:
            return Bottleneck.LEARNER if training_s >= times.publish else Bottleneck.SYNC
        answer_s = self.question.lengths.cut_mean * self._full_step_s
        waits_s = {Bottleneck.GENERATION: answer_s, Bottleneck.REWARD: self.question.reward_s}
        waits_s[Bottleneck.ENVIRONMENT] = self.question.environment_s
        return max(waits_s, key=waits_s.__getitem__)


class LayoutPlan:
    """A layout and what it comes to."""

    def __init__(self, chosen: _Candidate) -> None:
        question, split = chosen.question, chosen.split
        run, parts = chosen.simulated()
        per_hour = question.device.dollars_per_hour * question.num_devices
        self.layout, self.max_lag, self.settings = split, chosen.max_lag, chosen.settings
        self.times, self.step_s = run.stage_s, run.step_s  # seconds of each stage in a step
        self.bottleneck = chosen.bottleneck(run)
        self.goodput = run.goodput_tokens_s * parts * question.useful  # trained tokens per second
        self.dollars_per_million = per_hour / 3600.0 / self.goodput * 1e6  # trained tokens
        self.lag = run.lag_mean  # in versions
        self.num_running = chosen.num_running  # sequences at a time, per engine
        # of one device
        tokens, learner = question.sequence_tokens, chosen.learner
        actor = chosen.roofline.actor_bill(self.num_running, tokens, split.tensor_parallel)
        self.rollout_bill, self.learner_bill = actor, learner
        if split.colocated:  # the cache is given back before activations are made
            part = "kv_bytes" if actor.kv_bytes < learner.activation_bytes else "activation_bytes"
            self.rollout_bill = self.learner_bill = replace(actor + learner, **{part: 0.0})
        self.recomputes = chosen.recomputes  # whether activations are computed again to save memory
        self.transfer, self.sync = chosen.transfer, chosen.sync  # None: both use the same weights
        self.risks = tuple(_risks(question, self))


def _risks(question: Question, made: LayoutPlan) -> Iterator[str]:
    memory, trained = question.device.memory_bytes, made.learner_bill.total_bytes
    if trained > FULL * memory:
        yield f"a learner's device is nearly full: {trained / 1e9:.0f} of {memory / 1e9:.0f} GB"
    if made.rollout_bill.kv_bytes < LITTLE * memory:
        yield f"an engine has little room for its cache: {made.num_running} sequences at a time"
    if made.lag >= LAG_TO_WATCH:
        watch = "watch ratio_outside, and the score at equal tokens"
        yield f"data is {made.lag:.1f} versions old on average: {watch}"
    samples, tail = question.num_samples, question.lengths.tail(question.num_samples)
    if made.max_lag == 0 and tail > 2.5:
        yield f"the longest of {samples} answers is {tail:.1f} times the mean, and everybody waits for it"
    if question.reward_s > 0.2 * made.step_s:
        yield f"verdicts of {question.reward_s:g} s are a large part of a step of {made.step_s:.1f} s"
    if made.transfer is not None and made.transfer.encoding == "delta":
        yield "publishing counts on few weights changing in bfloat16, as they do at small learning rates"
    if made.recomputes:
        yield "activations are recomputed to fit into memory: a third more work for the learner"
    if not made.settings:
        what = "for a mixture of experts" if question.model.num_experts else "of two nodes, or in turns with training"
        yield f"it cannot be run here: no engine spans {made.layout.tensor_parallel} devices {what}"
