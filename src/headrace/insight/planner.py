"""From a workload and a number of devices to a layout, before anything is paid for.

Layouts that do not fit into memory are left out. Of those that fit, the most promising by a bound on their speed are
played by the simulator, with the real buffer and lag policy: `plan` and `simulate` cannot disagree. The one with the
most goodput comes first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from headrace.errors import ConfigError
from headrace.insight.equation import BOTTLENECK_OF_STAGE, Bottleneck, Placement, dollars_per_million_tokens
from headrace.insight.hardware import Accelerator, ModelShape
from headrace.insight.roofline import (
    USABLE_SHARE,
    MemoryBill,
    SyncTimes,
    Transfer,
    WireFormat,
    actor_bill,
    forward_s,
    learner_bill,
    reference_bill,
    sync_times,
    train_s,
)
from headrace.insight.scenario import full_transfer, speeds, verdict_s, with_speeds
from headrace.insight.simulator import Simulated, simulate
from headrace.insight.workload import LogNormal, Machine, Workload
from headrace.types import StageTimes

SPLITS = 24  # ways to share devices out that are looked at
PLAYED = 8  # layouts that are simulated
PLAYED_ANSWERS = 512  # of a larger step that may lag a part is simulated
MOST_STEPS = 24  # simulated
MICRO_BATCH_TOKENS = 8192
LAG_TO_WATCH = 4.0  # others saw training suffer from four to eight versions on
FULL, LITTLE = 0.85, 0.1  # of a device's memory
SYNC_TO_MIND = 0.1  # of a step: from there on it pays to send less
LEARNER_BUSY = 0.9  # of a step: from there on the learner's side is what the others wait for
GRADIENT_BYTES = 4  # of a weight: each rank of this system's learner holds all gradients


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
    max_lag: int = 4  # the most that is allowed
    reference: bool = False  # a frozen policy for a KL penalty
    adapter: bool = False  # train low-rank adapters only
    useful: float = 1.0  # share of the tokens that is not dropped

    def __post_init__(self) -> None:
        for name in ("num_devices", "num_prompts", "num_samples"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; at least 1 is needed")
        if not self.lengths.mean > 0:
            raise ConfigError("answers of 0 tokens on average: there is nothing to train on")

    @property
    def num_answers(self) -> int:
        """Answers of a step."""
        return self.num_prompts * self.num_samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Who gets how many devices. Colocated: both get all."""

    placement: Placement
    rollout_devices: int
    learner_devices: int
    tensor_parallel: int  # devices of one engine

    @property
    def num_engines(self) -> int:
        return self.rollout_devices // self.tensor_parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutPlan:
    """A layout and what it comes to."""

    layout: Split
    max_lag: int
    times: StageTimes  # seconds that each stage is busy in a step
    step_s: float
    bottleneck: Bottleneck
    goodput: float  # trained tokens per second
    dollars_per_million: float  # trained tokens
    lag: float  # mean, in versions
    rollout_bill: MemoryBill  # of one device
    learner_bill: MemoryBill
    num_running: int  # sequences at a time, per engine
    recomputes: bool  # whether activations are computed again to save memory
    transfer: Transfer | None  # None: both use the same weights
    sync: SyncTimes | None
    risks: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fitting:
    """A layout that fits into memory, as the simulator wants it."""

    split: Split
    machine: Machine
    learner: MemoryBill
    recomputes: bool
    transfer: Transfer | None
    sync: SyncTimes | None
    least_s: float  # a step takes at least this long


def plan(question: Question) -> list[LayoutPlan]:
    """The layouts that promise most, the one with the most goodput first."""
    fitting = [found for split in _splits(question) if (found := _fitting(question, split)) is not None]
    if not any(_engine_sizes(question)):
        raise ConfigError(
            f"{question.model.name} cannot generate on {question.num_devices} x {question.device.name}: its weights "
            f"and the cache of one answer of {_longest_tokens(question):,.0f} tokens, the longest of "
            f"{question.num_answers:,}, do not fit; take more or larger devices, or shorter answers"
        )
    if not fitting:
        state_gb = 16 * question.model.num_params / 1e9
        raise ConfigError(
            f"{question.model.name} cannot be trained on {question.num_devices} x {question.device.name}: its training "
            f"state alone is {state_gb:,.0f} GB, and there are {question.num_devices} x "
            f"{question.device.memory_bytes / 1e9:.0f} GB; take more devices, or train an adapter"
        )
    fitting.sort(key=lambda found: found.least_s)
    return sorted((_played(question, found) for found in fitting[:PLAYED]), key=lambda made: -made.goodput)


def search(question: Question, target_goodput: float) -> tuple[Question, list[LayoutPlan]]:
    """The smallest device count, up to the given number, that reaches `target_goodput`."""
    counts = list(_device_counts(question.num_devices))
    found: tuple[Question, list[LayoutPlan]] | None = None
    low, high, reached = 0, len(counts), 0.0
    while low < high:  # more devices are never slower
        middle = (low + high) // 2
        smaller = replace(question, num_devices=counts[middle])
        try:
            plans = plan(smaller)
        except ConfigError:  # too few to train on at all
            plans = []
        if plans and plans[0].goodput >= target_goodput:
            found, high = (smaller, plans), middle
        else:
            reached, low = max(reached, plans[0].goodput if plans else 0.0), middle + 1
    if found is None:
        raise ConfigError(
            f"{target_goodput:,.0f} trained tokens a second are out of reach: {question.num_devices} x "
            f"{question.device.name} come to {reached:,.0f}"
        )
    return found


def _device_counts(most: int) -> Iterator[int]:
    """One, two, four, then whole nodes of eight, and at last all."""
    num_devices = 1
    while num_devices < most:
        yield num_devices
        num_devices = num_devices * 2 if num_devices < 8 else num_devices + 8
    yield most


def _splits(question: Question) -> Iterator[Split]:
    """All devices together, and ways to part them."""
    total = question.num_devices
    apart = {0: Placement.STREAMED, 1: Placement.OVERLAPPED}.get(question.max_lag, Placement.ASYNCHRONOUS)
    for tensor_parallel in _engine_sizes(question):
        num_engines = total // tensor_parallel
        yield Split(
            placement=Placement.COLOCATED,
            rollout_devices=num_engines * tensor_parallel,
            learner_devices=total,
            tensor_parallel=tensor_parallel,
        )
        for engines in range(1, num_engines + 1, max(1, num_engines // SPLITS)):
            if (learner := total - engines * tensor_parallel) >= 1:
                yield Split(
                    placement=apart,
                    rollout_devices=engines * tensor_parallel,
                    learner_devices=learner,
                    tensor_parallel=tensor_parallel,
                )


def _engine_sizes(question: Question) -> Iterator[int]:
    """Devices of an engine: powers of two within a node that hold the weights and the longest answer."""
    size = 1
    while size <= min(question.device.num_per_node, question.num_devices):
        bill = actor_bill(
            question.model,
            question.device,
            num_running=1,
            context_tokens=question.prompt_tokens + _longest_tokens(question),
            tensor_parallel=size,
        )
        if bill.fits(question.device):
            yield size
        size *= 2


def _longest_tokens(question: Question) -> float:
    return question.lengths.expected_max(question.num_answers)


def _fitting(question: Question, split: Split) -> _Fitting | None:
    trained = _learner_bill(question, split)
    colocated = split.placement is Placement.COLOCATED
    if trained is None:
        return None
    learner, recomputes = trained
    num_running = _num_running(question, split, learner if colocated else MemoryBill())
    if num_running < 1:
        return None
    transfer = None if colocated else _transfer(question, split)
    sync = sync_times(question.model, question.device, transfer) if transfer else None
    machine = _machine(question, split, num_running, recomputes, sync)
    return _Fitting(
        split=split,
        machine=machine,
        learner=learner,
        recomputes=recomputes,
        transfer=transfer,
        sync=sync,
        least_s=_least_s(question, machine, may_lag=not colocated and question.max_lag > 0),
    )


def _learner_bill(question: Question, split: Split) -> tuple[MemoryBill, bool] | None:
    """One device's bill, and whether activations have to be recomputed for it to fit."""
    for recomputes in (False, True):
        bill = learner_bill(
            question.model,
            question.device,
            micro_batch_tokens=MICRO_BATCH_TOKENS,
            num_shards=split.learner_devices,
            checkpoint_activations=recomputes,
        )
        if question.adapter:  # frozen weights, and next to nothing to train
            frozen = question.model.weight_bytes(question.device.number_bytes) / split.learner_devices
            bill = replace(bill, weight_bytes=frozen, training_bytes=0.0)
        if question.reference:
            bill = bill + reference_bill(question.model, question.device, num_shards=split.learner_devices)
        if bill.fits(question.device):
            return bill, recomputes
    return None


def _in_turns(actor: MemoryBill, learner: MemoryBill) -> MemoryBill:
    """On the same device: the cache is given back before activations are made."""
    smaller = "kv_bytes" if actor.kv_bytes < learner.activation_bytes else "activation_bytes"
    return replace(actor + learner, **{smaller: 0.0})


def _num_running(question: Question, split: Split, resident: MemoryBill) -> int:
    """Sequences that an engine has room for, beside what stays in memory, and never more than there are."""
    device, model = question.device, question.model
    weights = model.weight_bytes(device.number_bytes) / split.tensor_parallel
    held = resident.training_bytes + resident.weight_bytes  # activations come and go with the cache
    free = (USABLE_SHARE * device.memory_bytes - weights - held) * split.tensor_parallel
    context = question.prompt_tokens + question.lengths.cut_mean
    room = int(free / (context * model.kv_bytes_per_token(device.number_bytes)))
    ahead = 1 if split.placement in (Placement.COLOCATED, Placement.STREAMED) else question.max_lag + 1
    return min(room, -(-question.num_answers * ahead // split.num_engines))


def _transfer(question: Question, split: Split) -> Transfer:
    """Everything, or only what changed, where everything would take a large part of the learner's step."""
    full = full_transfer(
        question.device,
        num_gpus=question.num_devices,
        num_engines=split.num_engines,
        num_learners=split.learner_devices,
        tensor_parallel=split.tensor_parallel,
    )
    if question.adapter:
        return replace(full, encoding=WireFormat.ADAPTER)
    sequence_tokens = question.prompt_tokens + question.lengths.cut_mean
    training_s = train_s(
        question.model,
        question.device,
        num_tokens=question.num_answers * sequence_tokens,
        sequence_tokens=sequence_tokens,
        num_devices=split.learner_devices,
    )
    taken_s = sync_times(question.model, question.device, full).total_s
    return replace(full, encoding=WireFormat.DELTA) if taken_s > SYNC_TO_MIND * training_s else full


def _machine(question: Question, split: Split, num_running: int, recomputes: bool, sync: SyncTimes | None) -> Machine:
    model, device, learners = question.model, question.device, split.learner_devices
    mean_tokens = question.lengths.cut_mean
    known = speeds(
        model,
        device,
        rows=num_running,
        prompt_tokens=question.prompt_tokens,
        mean_tokens=mean_tokens,
        gpus_per_worker=split.tensor_parallel,
    )
    blank = Machine(rollout_workers=split.num_engines, rows_per_worker=num_running, decode_s=1.0)
    one = with_speeds(blank, known)
    reference_s = forward_s(model, device, num_tokens=1, sequence_tokens=question.prompt_tokens + mean_tokens)
    return replace(
        one,
        train_token_s=one.train_token_s / learners * (4 / 3 if recomputes else 1.0),  # the forward pass once more
        reference_token_s=reference_s / learners if question.reference else 0.0,
        publish_s=sync.total_s if sync else 0.0,
        colocated=split.placement is Placement.COLOCATED,
    )


def _least_s(question: Question, machine: Machine, *, may_lag: bool) -> float:
    """A step takes at least what generation or the learner alone takes; without lag, both."""
    prompt_tokens = question.num_prompts * question.prompt_tokens
    tokens = question.num_answers * question.lengths.cut_mean
    rollout_s = (
        tokens * _full_step_s(question, machine) / machine.rows_per_worker + prompt_tokens * machine.prefill_token_s
    ) / machine.rollout_workers
    learner_s = (tokens + question.num_samples * prompt_tokens) * (machine.train_token_s + machine.reference_token_s)
    learner_s += machine.publish_s
    if may_lag:
        return max(rollout_s, learner_s)
    return max(rollout_s, _longest_tokens(question) * machine.decode_s) + learner_s


def _full_step_s(question: Question, machine: Machine) -> float:
    """Seconds of a decode step with every row, half-way through its answer."""
    row_s = machine.decode_row_s + machine.context_s * (question.prompt_tokens + question.lengths.cut_mean / 2)
    return machine.decode_s + row_s * machine.rows_per_worker


def _played(question: Question, found: _Fitting) -> LayoutPlan:
    split, machine = found.split, found.machine
    colocated = split.placement is Placement.COLOCATED
    max_lag = 0 if colocated else question.max_lag
    run, parts = _simulated(question, machine, max_lag)
    goodput = run.goodput * parts * question.useful
    actor = actor_bill(
        question.model,
        question.device,
        num_running=machine.rows_per_worker,
        context_tokens=question.prompt_tokens + question.lengths.cut_mean,
        tensor_parallel=split.tensor_parallel,
    )
    made = LayoutPlan(
        layout=split,
        max_lag=max_lag,
        times=run.stage_s,
        step_s=run.step_s,
        bottleneck=_bottleneck(question, machine, run),
        goodput=goodput,
        dollars_per_million=dollars_per_million_tokens(
            goodput, question.device.dollars_per_hour * question.num_devices
        ),
        lag=run.lag_mean,
        rollout_bill=_in_turns(actor, found.learner) if colocated else actor,
        learner_bill=_in_turns(actor, found.learner) if colocated else found.learner,
        num_running=machine.rows_per_worker,
        recomputes=found.recomputes,
        transfer=found.transfer,
        sync=found.sync,
        risks=(),
    )
    return replace(made, risks=tuple(_risks(question, made)))


def _simulated(question: Question, machine: Machine, max_lag: int) -> tuple[Simulated, float]:
    """A few steps; and if they are too large to be played at once, into how many parts each was cut.

    A part has its share of the groups and of every engine's rows, at its share of the speed, so a step takes as long.
    Without lag nothing is cut: everybody waits for the longest answer of all.
    """
    groups, rows, parts = question.num_prompts, machine.rows_per_worker, 1.0
    if max_lag and question.num_answers > PLAYED_ANSWERS and rows > question.num_samples:
        cut = min(question.num_answers / PLAYED_ANSWERS, rows / question.num_samples)
        groups = max(1, round(question.num_prompts / cut))
        parts = question.num_prompts / groups
        rows = max(question.num_samples, round(machine.rows_per_worker / parts))
        machine = replace(
            machine,
            rows_per_worker=rows,
            decode_row_s=machine.decode_row_s * machine.rows_per_worker / rows,
            context_s=machine.context_s * machine.rows_per_worker / rows,
            prefill_token_s=machine.prefill_token_s * parts,
            train_token_s=machine.train_token_s * parts,
            reference_token_s=machine.reference_token_s * parts,
        )
    work = Workload(
        groups_per_step=groups,
        samples=question.num_samples,
        tokens=question.lengths,
        reward_s=verdict_s(0.0, question.reward_s),
        prompt_tokens=question.prompt_tokens,
    )
    steps = min(2 * max_lag + 4, MOST_STEPS) if max_lag else 3
    return simulate(work, machine, max_lag=max_lag, steps=steps), parts


def _bottleneck(question: Question, machine: Machine, run: Simulated) -> Bottleneck:
    """Without lag the longest stage; with lag the side that never waits."""
    times = run.stage_s
    if run.max_lag == 0:
        return BOTTLENECK_OF_STAGE[times.wall]
    training_s = times.train + times.reference
    if training_s + times.publish >= LEARNER_BUSY * run.step_s:
        return Bottleneck.LEARNER if training_s >= times.publish else Bottleneck.SYNC
    answer_s = question.lengths.cut_mean * _full_step_s(question, machine)
    return Bottleneck.REWARD if question.reward_s > answer_s else Bottleneck.GENERATION


def _risks(question: Question, made: LayoutPlan) -> Iterator[str]:
    memory, trained = question.device.memory_bytes, made.learner_bill.total_bytes
    if trained > FULL * memory:
        yield f"a learner's device is nearly full: {trained / 1e9:.0f} of {memory / 1e9:.0f} GB"
    if made.rollout_bill.kv_bytes < LITTLE * memory:
        yield f"an engine has little room for its cache: {made.num_running} sequences at a time"
    if made.lag >= LAG_TO_WATCH:
        yield f"data is {made.lag:.1f} versions old on average: watch ratio_outside, and the score at equal tokens"
    tail = question.lengths.tail(question.num_samples)
    if made.max_lag == 0 and tail > 2.5:
        yield f"the longest of {question.num_samples} answers is {tail:.1f} times the mean, and everybody waits for it"
    if question.reward_s > 0.2 * made.step_s:
        yield f"verdicts of {question.reward_s:g} s are a large part of a step of {made.step_s:.1f} s"
    if made.transfer is not None and made.transfer.encoding is WireFormat.DELTA:
        yield "publishing counts on few weights changing in bfloat16, as they do at small learning rates"
    if made.recomputes:
        yield "activations are recomputed to fit into memory: a third more work for the learner"
    if made.layout.tensor_parallel > 1:
        yield f"Headrace's own engine runs on one device: an engine of {made.layout.tensor_parallel} is not built yet"
    gradient_bytes = GRADIENT_BYTES * question.model.num_params
    if made.layout.learner_devices > 1 and not question.adapter and gradient_bytes + trained > USABLE_SHARE * memory:
        yield (
            f"each rank of Headrace's learner holds all gradients: {gradient_bytes / 1e9:.0f} GB more than this bill "
            "says, and they do not fit"
        )
