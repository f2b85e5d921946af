"""From a workload and a number of devices to a layout, before anything is paid for.

Four readings set the five stage times: the size of the model (training, publishing), the length of the answers and its
tail (generation), what a verdict takes (reward), and how much lag is allowed (what overlaps). Every layout that fits
into memory is worked out with the equation, and the one with the most goodput comes first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from headrace.buffer.lag import LagPolicy
from headrace.errors import ConfigError
from headrace.insight.equation import (
    Placement,
    binding_stage,
    dollars_per_million_tokens,
    goodput,
    hidden_share_of,
    step_s,
)
from headrace.insight.hardware import Device
from headrace.insight.memory_bill import USABLE_SHARE, MemoryBill, actor_bill, learner_bill, reference_bill
from headrace.insight.model_shape import ModelShape
from headrace.insight.rollout_time import RolloutWork, answer_finish_s
from headrace.insight.roofline import decode_step_s, forward_s, train_s
from headrace.insight.staleness import admitted_lag
from headrace.insight.sync import Encoding, SyncTimes, Transfer, sync_times
from headrace.insight.tails import LogNormal
from headrace.insight.walls import WALL_OF_STAGE, Wall
from headrace.types import StageTimes

BUCKET_BYTES = 512e6
SPLITS = 24  # ways to share devices out that are tried
MICRO_BATCH_TOKENS = 8192
SENDERS = 8  # of the learner's devices, at most
LAG_TO_WATCH = 4.0  # others saw training suffer from four to eight versions on
FULL, LITTLE = 0.85, 0.1  # of a device's memory
SYNC_TO_MIND = 0.1  # of a step: from there on it pays to send less


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A workload and what there is to run it on.

    Example:
        Question(model=model_shape("70B"), device=find_device("H100"), num_devices=64, num_prompts=64, num_samples=16,
            lengths=LogNormal(mean=8000, cv=1.0), reward_s=4.0, max_lag=4)
    """

    model: ModelShape
    device: Device
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

    @property
    def num_answers(self) -> int:
        """Of a step."""
        return self.num_prompts * self.num_samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Who gets how many devices. Colocated: both get all.

    Example:
        Layout(placement=Placement.OVERLAPPED, rollout_devices=48, learner_devices=16, tensor_parallel=4)
    """

    placement: Placement
    rollout_devices: int
    learner_devices: int
    tensor_parallel: int  # devices of one engine

    @property
    def num_engines(self) -> int:
        """Copies of the model that generate."""
        return self.rollout_devices // self.tensor_parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A layout and what it comes to.

    Example:
        Plan(layout=Layout(...), times=StageTimes(...), step_s=41.0, wall=Wall.GENERATION, goodput=190_000.0,
            dollars_per_million=0.3, lag=1.4, rollout_bill=MemoryBill(...), learner_bill=MemoryBill(...),
            num_running=96, recomputes=True, transfer=Transfer(...), sync=SyncTimes(...), risks=("...",))
    """

    layout: Layout
    max_lag: int
    times: StageTimes
    step_s: float
    wall: Wall
    goodput: float  # trained tokens per second
    dollars_per_million: float  # trained tokens
    lag: float  # expected
    rollout_bill: MemoryBill  # of one device
    learner_bill: MemoryBill
    num_running: int  # sequences at a time, per engine
    recomputes: bool  # whether activations are computed again to save memory
    transfer: Transfer | None  # None: both use the same weights
    sync: SyncTimes | None
    risks: tuple[str, ...]


def plan(question: Question) -> list[Plan]:
    """Every layout that fits, the one with the most goodput first."""
    found = [made for layout in _layouts(question) if (made := _plan(question, layout)) is not None]
    if not any(_engine_sizes(question)):
        raise ConfigError(
            f"{question.model.name} cannot generate on {question.num_devices} x {question.device.name}: its weights "
            f"and the cache of one answer of {_longest_tokens(question):,.0f} tokens, the longest of "
            f"{question.num_answers:,}, do not fit; take more or larger devices, or shorter answers"
        )
    if not found:
        state_gb = 16 * question.model.num_params / 1e9
        raise ConfigError(
            f"{question.model.name} cannot be trained on {question.num_devices} x {question.device.name}: its training "
            f"state alone is {state_gb:,.0f} GB, and there are {question.num_devices} x "
            f"{question.device.memory_bytes / 1e9:.0f} GB; take more devices, or train an adapter"
        )
    return sorted(found, key=lambda made: -made.goodput)


def search(question: Question, target_goodput: float) -> tuple[Question, list[Plan]]:
    """With the fewest devices that reach so many trained tokens per second, of those there are."""
    reached = 0.0
    for num_devices in _device_counts(question.num_devices):
        smaller = replace(question, num_devices=num_devices)
        try:
            found = plan(smaller)
        except ConfigError:  # too few to train on at all
            continue
        if found[0].goodput >= target_goodput:
            return smaller, found
        reached = max(reached, found[0].goodput)
    raise ConfigError(
        f"{target_goodput:,.0f} trained tokens a second are out of reach: {question.num_devices} x "
        f"{question.device.name} come to {reached:,.0f}"
    )


def _device_counts(most: int) -> Iterator[int]:
    """One, two, four, then whole nodes of eight, and at last all."""
    num_devices = 1
    while num_devices < most:
        yield num_devices
        num_devices = num_devices * 2 if num_devices < 8 else num_devices + 8
    yield most


def _layouts(question: Question) -> Iterator[Layout]:
    """All devices together, and ways to part them."""
    total = question.num_devices
    for tensor_parallel in _engine_sizes(question):
        yield Layout(
            placement=Placement.COLOCATED,
            rollout_devices=total - total % tensor_parallel,
            learner_devices=total,
            tensor_parallel=tensor_parallel,
        )
        num_engines = total // tensor_parallel
        steps = max(1, num_engines // SPLITS)
        for engines in range(1, num_engines + 1, steps):
            learner = total - engines * tensor_parallel
            if learner >= 1:
                yield Layout(
                    placement=_apart(question.max_lag),
                    rollout_devices=engines * tensor_parallel,
                    learner_devices=learner,
                    tensor_parallel=tensor_parallel,
                )


def _apart(max_lag: int) -> Placement:
    if max_lag == 0:
        return Placement.STREAMED
    return Placement.OVERLAPPED if max_lag == 1 else Placement.ASYNCHRONOUS


def _engine_sizes(question: Question) -> Iterator[int]:
    """Devices of an engine: powers of two within a node, so many that weights and some sequences fit."""
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


def _plan(question: Question, layout: Layout) -> Plan | None:
    """None where it does not fit."""
    trained = _learner_bill(question, layout)
    if trained is None:
        return None
    learner, recomputes = trained
    colocated = layout.placement is Placement.COLOCATED
    num_running = _num_running(question, layout, learner if colocated else MemoryBill())
    if num_running < 1:
        return None
    max_lag = 0 if colocated else question.max_lag
    transfer = None if colocated else _transfer(question, layout)
    sync = sync_times(question.model, question.device, transfer) if transfer else None
    times, hidden = _stage_times(question, layout, num_running, recomputes, sync)
    seconds = step_s(times, layout.placement, hidden_share=hidden)
    tokens_per_s = goodput(
        num_prompts=question.num_prompts,
        num_samples=question.num_samples,
        mean_tokens=question.lengths.cut_mean,
        step_s=seconds,
        useful=question.useful,
    )
    context = question.prompt_tokens + question.lengths.cut_mean
    actor = actor_bill(
        question.model,
        question.device,
        num_running=num_running,
        context_tokens=context,
        tensor_parallel=layout.tensor_parallel,
    )
    made = Plan(
        layout=layout,
        max_lag=max_lag,
        times=times,
        step_s=seconds,
        wall=WALL_OF_STAGE[binding_stage(times, layout.placement, hidden_share=hidden)],
        goodput=tokens_per_s,
        dollars_per_million=dollars_per_million_tokens(
            tokens_per_s, question.device.dollars_per_hour * question.num_devices
        ),
        lag=_lag(question, layout, num_running, max_lag, times, seconds),
        rollout_bill=_in_turns(actor, learner) if colocated else actor,
        learner_bill=_in_turns(actor, learner) if colocated else learner,
        num_running=num_running,
        recomputes=recomputes,
        transfer=transfer,
        sync=sync,
        risks=(),
    )
    return replace(made, risks=tuple(_risks(question, made)))


def _learner_bill(question: Question, layout: Layout) -> tuple[MemoryBill, bool] | None:
    """One device's bill, and whether activations have to be recomputed for it to fit."""
    for recomputes in (False, True):
        bill = learner_bill(
            question.model,
            question.device,
            micro_batch_tokens=MICRO_BATCH_TOKENS,
            num_shards=layout.learner_devices,
            checkpoint_activations=recomputes,
        )
        if question.adapter:  # frozen weights, and next to nothing to train
            frozen = question.model.weight_bytes(question.device.number_bytes) / layout.learner_devices
            bill = replace(bill, weight_bytes=frozen, training_bytes=0.0)
        if question.reference:
            bill = bill + reference_bill(question.model, question.device, num_shards=layout.learner_devices)
        if bill.fits(question.device):
            return bill, recomputes
    return None


def _in_turns(actor: MemoryBill, learner: MemoryBill) -> MemoryBill:
    """On the same device: the cache is given back before activations are made."""
    smaller = "kv_bytes" if actor.kv_bytes < learner.activation_bytes else "activation_bytes"
    return replace(actor + learner, **{smaller: 0.0})


def _num_running(question: Question, layout: Layout, resident: MemoryBill) -> int:
    """Sequences that an engine has room for, beside what stays in memory, and never more than there are."""
    device, model = question.device, question.model
    weights = model.weight_bytes(device.number_bytes) / layout.tensor_parallel
    held = resident.training_bytes + resident.weight_bytes  # activations come and go with the cache
    free = (USABLE_SHARE * device.memory_bytes - weights - held) * layout.tensor_parallel
    context = question.prompt_tokens + question.lengths.cut_mean
    room = int(free / (context * model.kv_bytes_per_token(device.number_bytes)))
    ahead = 1 if layout.placement in (Placement.COLOCATED, Placement.STREAMED) else question.max_lag + 1
    return min(room, -(-question.num_answers * ahead // layout.num_engines))


def _transfer(question: Question, layout: Layout) -> Transfer:
    """Buckets and relays always; what changed only, where everything would take a large part of generating."""
    full = Transfer(
        num_copies=layout.num_engines,
        num_learners=layout.learner_devices,
        num_senders=min(SENDERS, layout.learner_devices),
        tensor_parallel=layout.tensor_parallel,
        encoding=Encoding.ADAPTER if question.adapter else Encoding.FULL,
        bucket_bytes=BUCKET_BYTES,
        relay=layout.num_engines > 1,
        same_node=question.num_devices <= question.device.num_per_node,
    )
    if question.adapter:
        return full
    taken_s = sync_times(question.model, question.device, full).total_s
    training_s = _train_s(question, layout.learner_devices, False)
    return replace(full, encoding=Encoding.DELTA) if taken_s > SYNC_TO_MIND * training_s else full


def _stage_times(
    question: Question, layout: Layout, num_running: int, recomputes: bool, sync: SyncTimes | None
) -> tuple[StageTimes, float]:
    """The five, and what streaming hides of the shorter side."""
    training_s = _train_s(question, layout.learner_devices, recomputes)
    hidden = 0.0
    if layout.placement in (Placement.COLOCATED, Placement.STREAMED):
        ends_s = _finish_s(_work(question, layout, num_running))
        rollout_s = max(ends_s)
        groups = [max(ends_s[i : i + question.num_samples]) for i in range(0, len(ends_s), question.num_samples)]
        if layout.placement is Placement.STREAMED:
            hidden = min(0.99, hidden_share_of(groups, training_s))
    else:
        rollout_s = _steady_s(question, layout, num_running)
    times = StageTimes(
        rollout=rollout_s,
        reward=question.reward_s,
        reference=_forward_s(question, layout.learner_devices) if question.reference else 0.0,
        train=training_s,
        publish=sync.exposed_s if sync else 0.0,
    )
    return times, hidden


def _work(question: Question, layout: Layout, num_running: int) -> RolloutWork:
    return RolloutWork(
        model=question.model,
        device=question.device,
        lengths=question.lengths,
        num_answers=question.num_answers,
        num_samples=question.num_samples,
        prompt_tokens=question.prompt_tokens,
        num_engines=layout.num_engines,
        tensor_parallel=layout.tensor_parallel,
        max_running=num_running,
    )


@lru_cache(maxsize=512)
def _finish_s(work: RolloutWork) -> list[float]:
    return [float(end_s) for end_s in answer_finish_s(work)]


def _steady_s(question: Question, layout: Layout, num_running: int) -> float:
    """With lag nobody waits for the longest answer: free places are filled, and only the rate counts."""
    mean = question.lengths.cut_mean
    decode_s = decode_step_s(
        question.model,
        question.device,
        batch=num_running,
        context_tokens=question.prompt_tokens + mean / 2,
        tensor_parallel=layout.tensor_parallel,
    )
    rate = layout.num_engines * num_running / decode_s
    prefill_s = forward_s(
        question.model,
        question.device,
        num_tokens=question.num_prompts * question.prompt_tokens,
        sequence_tokens=question.prompt_tokens,
        num_devices=layout.rollout_devices,
    )
    return question.num_answers * mean / rate + prefill_s


def _train_s(question: Question, num_devices: int, recomputes: bool) -> float:
    tokens = question.num_answers * (question.prompt_tokens + question.lengths.cut_mean)
    sequence = question.prompt_tokens + question.lengths.cut_mean
    seconds = train_s(
        question.model, question.device, num_tokens=tokens, sequence_tokens=sequence, num_devices=num_devices
    )
    return seconds * (4 / 3 if recomputes else 1.0)  # the forward pass once more


def _forward_s(question: Question, num_devices: int) -> float:
    sequence = question.prompt_tokens + question.lengths.cut_mean
    return forward_s(
        question.model,
        question.device,
        num_tokens=question.num_answers * sequence,
        sequence_tokens=sequence,
        num_devices=num_devices,
    )


def _lag(question: Question, layout: Layout, num_running: int, max_lag: int, times: StageTimes, step_s: float) -> float:
    policy = LagPolicy(max_lag=max_lag, groups_per_step=question.num_prompts)
    return admitted_lag(
        policy,
        concurrency=max(1.0, layout.num_engines * num_running / question.num_samples),
        group_tail=question.lengths.tail(question.num_samples),
        rho=times.train / times.rollout if times.rollout else 1.0,
        verdict_steps=question.reward_s / step_s,
    )


def _risks(question: Question, made: Plan) -> Iterator[str]:
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
    if made.transfer is not None and made.transfer.encoding is Encoding.DELTA:
        yield "publishing counts on few weights changing in bfloat16, as they do at small learning rates"
    if made.recomputes:
        yield "activations are recomputed to fit into memory: a third more work for the learner"
