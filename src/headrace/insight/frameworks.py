"""Which system of the field fits a workload, if not this one: each of them bets on one bottleneck."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.insight.equation import Bottleneck

SMALL, LARGE = 7e9, 70e9  # weights: what one GPU trains comfortably, and what needs many


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """One system and the workload it was made for."""

    name: str
    bottlenecks: tuple[Bottleneck, ...]  # that it attacks, the first most of all
    fits: str
    mind: str
    min_params: float = 0.0
    max_params: float = float("inf")
    needs_lag: bool = False  # gains nothing for strictly on-policy training


FRAMEWORKS = (
    Framework(
        name="TRL",
        bottlenecks=(),
        fits="one machine, small models, trying out an objective inside the Hugging Face libraries",
        mind="generation and training take turns; it is not made for large asynchronous rollouts",
        max_params=SMALL,
    ),
    Framework(
        name="OpenRLHF",
        bottlenecks=(Bottleneck.GENERATION, Bottleneck.TAIL),
        fits="7B to 70B with vLLM engines and DeepSpeed, under Ray",
        mind="versions of its engine and of the weight update have to match",
        min_params=1e9,
        max_params=LARGE,
    ),
    Framework(
        name="verl",
        bottlenecks=(Bottleneck.SYNC, Bottleneck.LEARNER, Bottleneck.GENERATION),
        fits="large dense and mixture models, FSDP or Megatron, resharded in place between generating and training",
        mind="many settings: have a placement and a backend in mind before you start",
        min_params=SMALL,
    ),
    Framework(
        name="slime",
        bottlenecks=(Bottleneck.GENERATION, Bottleneck.SYNC),
        fits="teams that run SGLang and Megatron already and publish often",
        mind="a thin layer: you debug the two engines yourself",
        min_params=SMALL,
    ),
    Framework(
        name="NeMo-RL",
        bottlenecks=(Bottleneck.LEARNER, Bottleneck.GENERATION),
        fits="NVIDIA clusters, Megatron parallelism, models with images, speculative rollouts",
        mind="at its best close to NVIDIA's own stack",
        min_params=SMALL,
    ),
    Framework(
        name="AReaL",
        bottlenecks=(Bottleneck.TAIL,),
        fits="long reasoning, where the longest answer would hold everybody up",
        mind="fully asynchronous: compare rewards at equal compute, not at equal steps",
        min_params=1e9,
        needs_lag=True,
    ),
    Framework(
        name="PipelineRL",
        bottlenecks=(Bottleneck.TAIL, Bottleneck.GENERATION),
        fits="long answers that should stay near on-policy: weights change while they are decoded",
        mind="an answer holds tokens of several versions",
        min_params=1e9,
        needs_lag=True,
    ),
    Framework(
        name="Laminar",
        bottlenecks=(Bottleneck.TAIL, Bottleneck.SYNC),
        fits="very long tails on many engines: trajectories are asynchronous one by one, relays hold the weights",
        mind="more parts whose versions and failures have to be kept track of",
        min_params=SMALL,
        needs_lag=True,
    ),
    Framework(
        name="LlamaRL",
        bottlenecks=(Bottleneck.SYNC,),
        fits="hundreds of billions of weights, moved by direct memory access",
        mind="tied to its hardware; not published as a whole",
        min_params=LARGE,
        needs_lag=True,
    ),
    Framework(
        name="AsyncFlow",
        bottlenecks=(Bottleneck.REWARD,),
        fits="stages as services around a streaming queue, each with an engine of its own",
        mind="the queue's policy decides what is trained on",
        needs_lag=True,
    ),
    Framework(
        name="Relax",
        bottlenecks=(Bottleneck.REWARD, Bottleneck.SYNC),
        fits="agents and models with images as separate services, with a dial for staleness",
        mind="more services to run",
        needs_lag=True,
    ),
    Framework(
        name="Agent Lightning",
        bottlenecks=(Bottleneck.OBSERVABILITY, Bottleneck.REWARD),
        fits="an agent that exists already and is too costly to rewrite",
        mind="credit for single turns, and tokens recorded as they were sampled, take care",
    ),
)


def others_that_fit(bottleneck: Bottleneck, *, num_params: float, may_lag: bool) -> list[Framework]:
    """Those that were made for this bottleneck and size, the closest first."""
    fitting = [
        framework
        for framework in FRAMEWORKS
        if framework.min_params <= num_params <= framework.max_params
        and (may_lag or not framework.needs_lag)
        and (bottleneck in framework.bottlenecks or not framework.bottlenecks)
    ]
    return sorted(fitting, key=lambda f: f.bottlenecks.index(bottleneck) if f.bottlenecks else len(Bottleneck))
