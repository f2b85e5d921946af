"""Every setting of the system, on one page. `headrace config --explain` prints it.

A setting is a field with its default and one line that says what it does. The constructor of a
stage takes its own section, never the whole tree, and nothing changes after loading.
`config_file.py` reads TOML files and `section.key=value` overrides.
"""

import math
import os
import re
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, model_validator

# Most numbers have an upper bound, far above what is useful: a slip of the finger is refused before
# it fills the memory, starts a million processes or overflows a column of the ledger.
MOST = 10**9
MOST_TOP_K = 256  # of an engine that is not embedded
COMMANDS = {"vllm": "python -m vllm.entrypoints.openai.api_server", "sglang": "python -m sglang.launch_server"}
MOST_PROCESSES = 1024
LEAST = 1e-6  # what single precision still divides by
MOST_S = 10**8  # three years; timers of operating systems overflow later
MOST_TRAJECTORIES = 10**6  # under way at a time: each is an object in memory

DEMOS = ("demo", "demo-chat")  # models that are made on the spot
BUILT_IN = {  # settings that take the name of a function, too
    "prompts.select": ("uniform", "in-order", "signal"),
    "learner.advantage": ("grpo", "dr-grpo", "rloo", "reinforce++", "gae"),
    "learner.loss": ("ppo", "decoupled-ppo", "cispo", "gspo", "reinforce", "tba"),
}

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
UpToOne = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(ge=0, le=MOST_S)]
Timeout = Annotated[float, Field(ge=0.01, le=MOST_S)]
Name = Annotated[str, Field(pattern=r"^[^\x00]*$")]  # of a file or a function: no zero bytes
Home = Annotated[Name, AfterValidator(os.path.expanduser)]  # of a file: ~ is the home directory
Processes = Annotated[int, Field(ge=1, le=MOST_PROCESSES)]
Heat = Annotated[float, Field(ge=LEAST, le=MOST)]
listed = BeforeValidator(lambda value: value if isinstance(value, list | tuple) and value else [value])
Heats = Annotated[tuple[Heat, ...], listed, PlainSerializer(lambda heats: heats if len(heats) > 1 else heats[0])]
Share = Annotated[float, Field(ge=LEAST, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]  # also of decays: AdamW divides by 1 - decay


def setting(default: Any, doc: str, *, most: float | None = None) -> Any:
    """A field with its `default`, its `doc`, and `most`, the largest value that is allowed."""
    if most is None and type(default) is int:
        most = MOST
    return Field(default=default, description=doc, le=most)


class SettingsSection(BaseModel):
    """Frozen and strict: an unknown key is an error, and so is a number that is not finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


class RunSection(SettingsSection):
    """Where the run lives and what makes it repeatable."""

    dir: Home = setting("", "directory for the files of the run; empty makes runs/<date-time>")
    seed: NonNegativeInt = setting(0, "all random choices follow from it", most=2**63 - 1)
    overwrite: bool = setting(False, "replace an earlier run in run.dir instead of refusing")
    dollars_per_hour: NonNegativeFloat = setting(0.0, "price of a device; 0: not known")


class ModelSection(SettingsSection):
    """The policy."""

    path: Home = setting("demo", "directory, .gguf file, or 'demo' or 'demo-chat' (small models made on the spot)")
    allow_download: bool = setting(False, "fetch a path owner/name that is not here from the Hugging Face hub")
    tokenizer: Home = setting("", "tokenizer directory, if not the model's own")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "precision of the weights; auto is float32 on a CPU and bfloat16 on a GPU"
    )
    device: str = setting("auto", "cpu, cuda or cuda:1; auto takes a GPU when there is one")
    threads: NonNegativeInt = setting(
        0, "CPU threads for torch; 0 takes as many as are measured to be fastest", most=512
    )
    exact: Literal["auto", True, False] = setting("auto", "same bits in engine and learner; auto: on a GPU that can")


class PromptsSection(SettingsSection):
    """Where prompts come from."""

    source: Home = setting(
        "",
        "a .jsonl, .json, .csv or .parquet file, a datasets directory, or file.py:function (count, seed) -> records",
    )
    count: PositiveInt = setting(20_000, "prompts made by a function", most=10**7)
    prompt_field: str = setting("prompt", "field with the prompt text or the chat messages")
    system: str = setting("", "system message put before every chat")
    chat: Literal["auto", "always", "never"] = setting(
        "auto", "apply the tokenizer's chat template; auto does if there is one"
    )
    max_tokens: PositiveInt = setting(1024, "a longer prompt is refused at start-up")
    select: Home = setting(
        "uniform",
        "which comes next: 'uniform' (a new order each epoch, from run.seed), 'in-order', 'signal' "
        "(answers likely to differ in reward), or file.py:function (known) -> scores",
    )
    eval_source: Home = setting("", "held-out prompts; empty: the end of prompts.source")
    eval_count: PositiveInt = setting(128, "how many held-out prompts", most=10**6)


class RolloutSection(SettingsSection):
    """Generation."""

    engine: Literal["embedded", "vllm", "sglang"] = setting(
        "embedded", "what samples: the engine in here, or a server of vLLM or SGLang"
    )
    command: Name = setting(
        "",
        "starts a server of it, flags are added; empty is `python -m ...`; or addresses: http://a:8000,http://b:8000",
    )
    samples: PositiveInt = setting(8, "trajectories per prompt", most=10_000)
    max_new_tokens: PositiveInt = setting(64, "an answer is cut here")
    temperature: Heats = setting(1.0, "divides the logits; a group's answers take several in turns")
    top_k: NonNegativeInt = setting(0, "keep the k likeliest tokens; 0 keeps all")
    top_p: Share = setting(1.0, "keep the likeliest tokens that hold this much probability")
    min_p: BelowOne = setting(0.0, "keep tokens at least this likely relative to the likeliest")
    stop: tuple[str, ...] = setting((), "an answer also ends after one of these strings")
    workers: Processes = setting(1, "engines, each with the weights; several need place.cluster=ray")
    max_running: PositiveInt = setting(256, "sequences decoded at a time, per engine", most=2**16)
    prefill_tokens: PositiveInt = setting(2048, "prompt tokens computed per engine step, at most")
    kv_tokens: NonNegativeInt = setting(0, "tokens in the key/value cache; 0 sizes it from memory")
    speculate: NonNegativeInt = setting(
        0, "speculative decoding: n-gram drafts of this many tokens from earlier answers; 0 is off", most=16
    )
    on_update: Literal["keep", "recompute", "drain"] = setting(
        "keep", "running requests when weights change: keep their cache, recompute, or finish first"
    )
    max_wall_s: Seconds = setting(0.0, "seconds an answer may be decoded at a stretch; 0 is off")
    on_wall: Literal["cut", "park"] = setting(
        "cut", "at max_wall_s: end the answer, or lay it aside while others wait and go on later"
    )

    @property
    def addresses(self) -> list[str]:
        """Of servers that the user operates."""
        named = self.command.split(",") if re.match("https?://", self.command) else ()
        return list(dict.fromkeys(filter(None, named)))


class RewardSection(SettingsSection):
    """Scoring."""

    function: Name = setting("", "module:function, file.py:function, or exact, regex:PATTERN, math; empty: exact")
    answer_field: str = setting("answer", "field with the expected answer (exact, regex:, math)")
    workers: NonNegativeInt = setting(
        1, "processes that score; 0 scores in this process: for functions to trust", most=MOST_PROCESSES
    )
    timeout_s: Timeout = setting(10.0, "seconds for a verdict; a slower one is a drop, not a zero")
    retries: NonNegativeInt = setting(1, "more tries after crash, timeout, disconnect", most=1000)
    sandbox: bool = setting(False, "run it and environments under bubblewrap: no network, no files but the code's")
    cache: bool = setting(True, "score the same answer to the same prompt once")
    overlong_tokens: NonNegativeInt = setting(0, "soft penalty, up to 1, this close to max_new_tokens; 0 is off")


class EpisodeSection(SettingsSection):
    """Answers of several turns: an environment, or an agent of your own."""

    environment: Name = setting("", "file.py:Class or module:Class, which replies to every turn; empty: single answers")
    agent: Name = setting(
        "",
        "an agent that asks the OpenAI-compatible endpoint for its turns: a command, file.py:function "
        "(task, base_url, api_key) -> reward, or 'remote'",
    )
    listen: str = setting("127.0.0.1:0", "host:port of the endpoint for agents; port 0: a free one")
    workers: PositiveInt = setting(
        1, "processes for environments, or for agents that are functions; 16 commands run for each", most=MOST_PROCESSES
    )
    timeout_s: Timeout = setting(
        60.0,
        "seconds for an environment's reply, or between two requests of an agent; a slower one is a drop, not a zero",
    )
    max_turns: PositiveInt = setting(32, "an episode ends after this many turns, and is scored", most=10_000)
    max_tokens: NonNegativeInt = setting(0, "an episode ends at this many tokens; 0: the model's context")
    max_s: Seconds = setting(0.0, "an episode ends after this many seconds; 0 is off")


class BufferSection(SettingsSection):
    """Which groups are trained on."""

    drop: Literal["no_signal", "overlong", "no_signal,overlong", "nothing"] = setting(
        "no_signal", "groups with equal rewards (their gradient is zero), answers cut at max_new_tokens or max_wall_s"
    )
    filters: tuple[str, ...] = setting(
        (), "module:function or file.py:function; group -> keep it? or rewards of its answers"
    )
    replay: tuple[NonNegativeInt, PositiveInt] = setting(
        (0, 4), "groups of earlier steps that each step trains on again, and how often one is trained on at most"
    )
    first: NonNegativeInt = setting(0, "train on the first N answers of a group, end the others; 0: wait for all")
    patience: PositiveInt = setting(16, "stop after dropping all groups of this many steps")


class LearnerSection(SettingsSection):
    """Advantages, loss, optimizer."""

    lr: NonNegativeFloat = setting(1e-6, "learning rate", most=MOST)
    warmup_steps: NonNegativeInt = setting(0, "steps in which the learning rate rises to lr")
    schedule: Literal["constant", "linear", "cosine"] = setting("constant", "lr after warm-up")
    betas: tuple[BelowOne, BelowOne] = setting((0.9, 0.99), "AdamW")
    weight_decay: NonNegativeFloat = setting(0.0, "AdamW", most=MOST)
    grad_clip: NonNegativeFloat = setting(1.0, "largest gradient norm; 0 is off")
    ranks: Processes | tuple[Processes, Processes] = Field(
        1, description="processes that train, each with a part of the weights ([2, 4]: two replicas); on Ray"
    )
    micro_batch_tokens: PositiveInt = setting(8192, "packed tokens per pass, of each rank")
    checkpoint_activations: bool = setting(False, "recompute activations, to save memory")
    epochs: PositiveInt = setting(1, "times that a step's groups are trained on before its version is published")
    minibatches: PositiveInt = setting(1, "updates of the weights in each epoch, each on a part of the step's groups")
    advantage: Name = setting(
        "grpo", "how rewards become advantages: grpo, dr-grpo, rloo, reinforce++, gae (a critic) or file.py:function"
    )
    gae_lambda: UpToOne = setting(1.0, "gae: 0 trusts the critic's next value, 1 the rewards alone")
    critic: Annotated[float, Field(ge=0, le=MOST)] | Home = setting(
        0.1,
        "gae: weight in the policy's gradient of a critic on its body; or the directory of another",
    )
    value_lr: NonNegativeFloat = setting(1e-4, "learning rate of the critic", most=MOST)
    credit: Literal["episode", "turn", "state", "agent"] = setting(
        "episode",
        "what turns are credited with: the episode's reward, their own return compared by turn or state, or what their "
        "agent earned (the part of the reward with its name)",
    )
    discount: UpToOne = setting(
        1.0, "of rewards of later turns in a turn's return (credit per turn or state), or of later tokens (gae)"
    )
    loss: Name = setting(
        "ppo", "ppo, decoupled-ppo, cispo, gspo, reinforce, tba, or file.py:function (LossInput) -> LossTerms"
    )
    aggregation: Literal["token", "sequence", "constant"] = setting(
        "token", "mean of the step's tokens, of its sequences' means, or sum over a constant length"
    )
    clip: tuple[NonNegativeFloat, NonNegativeFloat] = setting(
        (0.2, 0.28), "low and high: the ratio is clipped below 1 - low and above 1 + high"
    )
    correction: Literal["none", "truncated", "masked"] = setting(
        "none", "importance weight proximal/behaviour: truncate it at a limit, or mask outside two limits"
    )
    correction_limits: tuple[NonNegativeFloat, PositiveFloat] = setting(
        (0.5, 2.0), "the second is the largest weight; masked: a weight outside them drops the token"
    )
    kl_coef: NonNegativeFloat = setting(
        0.0, "weight of the KL from the reference (the weights before any step); 0 is off", most=MOST
    )
    teacher: Home = setting("", "reference to distil from: directory, .gguf file, file.py:function")
    kl_estimator: Literal["k1", "k2", "k3"] = setting("k3", "estimator of the KL")
    kl_in: Literal["loss", "reward"] = setting("loss", "add the KL to the loss, or take it off the reward")
    lora_rank: NonNegativeInt = setting(
        0, "train adapters (LoRA) of this rank beside all linear layers; 0 is off", most=2**14
    )
    lora_alpha: PositiveFloat = setting(32.0, "scale of adapters: lora_alpha / lora_rank", most=MOST)

    @property
    def mesh(self) -> tuple[int, int]:
        """Replicas, and the ranks of each."""
        return self.ranks if isinstance(self.ranks, tuple) else (1, self.ranks)

    @property
    def in_whole_steps(self) -> bool:
        """Whether a step's first update needs all of its groups."""
        return self.advantage == "gae" or self.loss == "tba" or self.epochs * self.minibatches > 1


class LoopSection(SettingsSection):
    """How much, how far ahead, how often."""

    steps: NonNegativeInt = setting(60, "optimizer steps")
    target_reward: Annotated[float, Field(gt=-math.inf, allow_inf_nan=True)] = setting(
        math.inf, "end sooner, once the mean reward of eight steps has come this far"
    )
    groups_per_step: PositiveInt = setting(16, "prompts per optimizer step", most=100_000)
    max_lag: Annotated[int | float, Field(ge=0)] = setting(
        0, "how many versions old a new token may be; 0 is strictly on-policy, 0.5 half a step ahead", most=10_000
    )
    eval_every: NonNegativeInt = setting(0, "steps between evaluations; 0: only before and after")
    keep_best: bool = setting(False, "keep the weights of the best evaluation of training in best/")
    eval_samples: PositiveInt = setting(1, "answers per held-out prompt", most=10_000)
    eval_temperature: NonNegativeFloat = setting(
        1.0, "for evaluation, over the whole vocabulary; 0 is greedy", most=MOST
    )


class WarmstartSection(SettingsSection):
    """Supervised steps on worked examples before RL."""

    steps: NonNegativeInt = setting(0, "supervised optimizer steps; 0 is off")
    source: Home = setting("", "their records, answers in `worked` or `completion`, or chats; empty: prompts.source")
    lr: PositiveFloat = setting(1e-3, "learning rate of the supervised steps", most=MOST)
    examples: PositiveInt = setting(64, "worked examples per supervised step", most=100_000)


class RecoverySection(SettingsSection):
    """What a restart finds, and what it does."""

    every_steps: PositiveInt = setting(10, "write a checkpoint every this many steps")
    keep: PositiveInt = setting(2, "checkpoints that stay on disk")
    journal_steps: NonNegativeInt = setting(
        1000, "steps whose tokens stay in the ledger, besides what a restart needs; 0 keeps all"
    )
    in_flight: Literal["requeue", "resume", "drop"] = setting(
        "requeue", "answers under way when the run died: start again, go on from the checkpoint, or leave out"
    )
    hang_s: Seconds = setting(
        600.0, "stop the run when nothing has moved for this long, plus reward.timeout_s; 0 is off"
    )


class LedgerSection(SettingsSection):
    """Export of the run's rows and of samples of its answers."""

    samples_every: NonNegativeInt = setting(
        10, "show an answer or two to a prompt, trained on or not, every so many steps; 0 is off"
    )
    sinks: tuple[Literal["jsonl", "tensorboard", "wandb"], ...] = setting((), "export rows there")


class PublishSection(SettingsSection):
    """How new weights reach engines in other processes."""

    encoding: Literal["full", "delta", "adapter"] = setting(
        "full", "all weights, those whose bits changed, or a LoRA adapter alone"
    )
    transport: Literal["object_store", "collective", "disk"] = setting(
        "object_store", "Ray's shared memory, a broadcast between processes, or files in the run directory"
    )
    timeout_s: PositiveFloat = setting(
        120.0, "an engine that does not have new weights by then is replaced", most=MOST_S
    )


class PlaceSection(SettingsSection):
    """Where the stages run."""

    cluster: Literal["local", "ray"] = setting(
        "local", "every stage in this process (rewards beside it), or on Ray (RAY_ADDRESS or new)"
    )
    layout: Literal["disaggregated", "colocated"] = setting(
        "disaggregated", "on Ray: rollout and learner on devices of their own, or in turns on the same"
    )


class Config(SettingsSection):
    """The whole tree, one field per section."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    prompts: PromptsSection = PromptsSection()
    rollout: RolloutSection = RolloutSection()
    reward: RewardSection = RewardSection()
    episode: EpisodeSection = EpisodeSection()
    buffer: BufferSection = BufferSection()
    learner: LearnerSection = LearnerSection()
    loop: LoopSection = LoopSection()
    warmstart: WarmstartSection = WarmstartSection()
    recovery: RecoverySection = RecoverySection()
    ledger: LedgerSection = LedgerSection()
    publish: PublishSection = PublishSection()
    place: PlaceSection = PlaceSection()

    def but(self, **changes: Mapping[str, Any]) -> Self:
        """With other values of some settings, by section; they are not checked again."""
        sections = {name: getattr(self, name).model_copy(update=new) for name, new in changes.items()}
        return self.model_copy(update=sections)

    @model_validator(mode="after")
    def _no_contradictions(self) -> Self:
        if problems := [*_of_learning(self), *_of_generation(self), *_of_engines(self), *_of_places(self)]:
            raise ValueError("\n".join(problems))
        return self


# ---- settings that contradict each other


def _of_learning(config: Config) -> Iterator[str]:
    learner, samples = config.learner, config.rollout.samples
    if samples < 2 and learner.advantage in ("grpo", "dr-grpo", "rloo"):
        told = "a group of one has no baseline; use at least 2 samples, 'reinforce++' or 'gae'"
        yield f"rollout.samples = 1 and learner.advantage = '{learner.advantage}': {told}"
    if samples < 2 and "no_signal" in config.buffer.drop and learner.advantage != "gae":
        yield f"rollout.samples = 1 and buffer.drop = '{config.buffer.drop}': every group would be dropped"
    played = config.episode.environment or config.episode.agent
    if (first := config.buffer.first) and (played or not 1 < first < samples):
        told = f"at least 2 and less than rollout.samples = {samples}, without an environment or an agent"
        yield f"buffer.first = {first}: it is 0 (wait for all), or {told}"
    if learner.correction == "masked" and learner.correction_limits[0] >= learner.correction_limits[1]:
        yield "learner.correction_limits: the first must be smaller than the second"
    if learner.kl_coef and learner.kl_in == "loss" and learner.kl_estimator == "k1":
        yield "learner.kl_in = 'loss' and learner.kl_estimator = 'k1': its gradient averages to zero; use k2 or k3"
    if learner.advantage != "gae" and isinstance(learner.critic, str):
        yield f"learner.critic = '{learner.critic}' needs learner.advantage = 'gae'"
    if config.publish.encoding == "adapter" and not learner.lora_rank:
        yield "publish.encoding = 'adapter' and learner.lora_rank = 0: there are no adapters; use full or delta"
    if learner.correction == "truncated" and learner.loss in ("cispo", "gspo"):
        told = "that loss bounds its weight itself; use learner.correction = 'masked' or 'none'"
        yield f"learner.correction = 'truncated' and learner.loss = '{learner.loss}': {told}"


def _of_algorithms(config: Config) -> Iterator[str]:
    learner, max_lag, replay = config.learner, config.loop.max_lag, config.buffer.replay
    for key, names in BUILT_IN.items():
        if (given := attrgetter(key)(config)) not in names and ":" not in given:
            known = ", ".join(f"'{name}'" for name in names)
            yield f"{key} = '{given}' is none of {known}, and names no 'file.py:function'"
    if learner.advantage == "gae" and learner.credit != "episode":
        yield f"learner.advantage = 'gae' and learner.credit = '{learner.credit}': the critic credits each token itself"
    if replay[0] and replay[1] < 2:
        yield f"buffer.replay = {list(replay)}: what is trained on once at most is never trained on again"
    if learner.loss == "reinforce" and (max_lag or replay[0]) and learner.correction == "none":
        old = f"loop.max_lag = {max_lag}" if max_lag else f"buffer.replay = {list(replay)}"
        told = "nothing corrects for old samples; set learner.correction = 'truncated', or take another loss"
        yield f"learner.loss = 'reinforce' and {old}: {told}"
    own = {"advantage": "grpo", "credit": "episode", "correction": "none", "kl_in": "reward"}
    if learner.loss == "tba" and (wrong := [key for key, value in own.items() if getattr(learner, key) != value]):
        told = ", ".join(f"learner.{key} = '{own[key]}'" for key in wrong)
        yield f"learner.loss = 'tba' weighs whole answers by reward and reference itself: it needs {told}"
    if learner.loss == "tba" and not learner.kl_coef:
        yield "learner.loss = 'tba' needs learner.kl_coef: it seeks the policy reference x exp(reward / kl_coef)"
    if learner.teacher and not learner.kl_coef:
        yield "learner.teacher needs learner.kl_coef, the weight of the divergence from it"
    if learner.minibatches > 1 and learner.minibatches * math.prod(learner.mesh) > config.loop.groups_per_step:
        yield "learner.minibatches x learner.ranks is more than loop.groups_per_step: each needs a group of its own"


def _of_generation(config: Config) -> Iterator[str]:
    yield from _of_algorithms(config)
    source, rollout, loop = config.prompts.source, config.rollout, config.loop
    own = source and not source.endswith("arithmetic.py:tasks")
    if own and config.model.path in DEMOS and not config.warmstart.steps:
        told = "that model is random and cannot answer your prompts; name a model of your own, model.path=DIRECTORY"
        yield f"prompts.source = '{source}' and model.path = '{config.model.path}': {told}"
    if config.reward.overlong_tokens > rollout.max_new_tokens:
        yield "reward.overlong_tokens is larger than rollout.max_new_tokens"
    if "" in rollout.stop:
        yield 'rollout.stop has an empty text "", which would end every answer at its first token'
    if 0 < loop.eval_temperature < LEAST:
        yield f"loop.eval_temperature = {loop.eval_temperature}: use 0, which is greedy, or at least {LEAST}"
    if config.warmstart.source and not config.warmstart.steps:
        yield "warmstart.source needs warmstart.steps, the number of supervised steps"
    if loop.keep_best and not loop.eval_every:
        yield "loop.keep_best needs evaluations during training: set loop.eval_every"
    if rollout.on_wall == "park" and not rollout.max_wall_s:
        yield "rollout.on_wall = 'park' needs rollout.max_wall_s, the seconds after which an answer is laid aside"
    num = int(rollout.samples * loop.groups_per_step * (loop.max_lag + 1))
    if num > MOST_TRAJECTORIES:
        of = f"rollout.samples = {rollout.samples}, loop.groups_per_step = {loop.groups_per_step}"
        told = f"{num:,} trajectories would be under way at a time, more than {MOST_TRAJECTORIES:,}"
        yield f"{of} and loop.max_lag = {loop.max_lag}: {told}; lower one of them"
    kv_needed = config.prompts.max_tokens + rollout.max_new_tokens
    if 0 < rollout.kv_tokens < kv_needed:
        told = f"prompts.max_tokens + rollout.max_new_tokens = {kv_needed}"
        yield f"rollout.kv_tokens = {rollout.kv_tokens} does not hold one sequence: {told}"


def _of_engines(config: Config) -> Iterator[str]:
    rollout, place = config.rollout, config.place
    truncates = rollout.top_k or rollout.top_p < 1 or rollout.min_p
    if ":" in config.learner.teacher and (rollout.temperature != (1.0,) or truncates):
        yield "learner.teacher is a function, which needs rollout.temperature = 1 and no top_k, top_p or min_p"
    told = f"it tells what they left only with a top_k up to {MOST_TOP_K}"
    cannot = {
        "model.exact = true: its log-probs are not the learner's to the bit": config.model.exact is True,
        "rollout.speculate or kv_tokens: put its own flags into rollout.command": rollout.speculate
        or rollout.kv_tokens,
        f"rollout.max_wall_s = {rollout.max_wall_s}: it cannot lay answers aside": rollout.max_wall_s,
        f"rollout.top_k, top_p or min_p: {told}": truncates and not 0 < rollout.top_k <= MOST_TOP_K,
        "place.layout = 'colocated': it has a device of its own": place.layout == "colocated",
        "several rollout.workers: one asks all addresses of rollout.command": rollout.workers > 1 and rollout.addresses,
        "--config or --api-key in rollout.command: it gets a key of its own": rollout.engine == "sglang"
        and re.search("--config|api-key", rollout.command),
    }
    if rollout.engine != "embedded":
        yield from (f"rollout.engine = '{rollout.engine}' and {what}" for what, is_set in cannot.items() if is_set)
    elif rollout.command:
        yield "rollout.command and rollout.engine = 'embedded', which has no server: set rollout.engine"


def _of_places(config: Config) -> Iterator[str]:
    if config.episode.environment and config.episode.agent:
        yield "episode.environment and episode.agent: an episode has one of them; leave one empty"
    place, workers, ranks = config.place, config.rollout.workers, math.prod(config.learner.mesh)
    if config.reward.sandbox and not config.reward.workers:
        yield "reward.sandbox = true and reward.workers = 0: the training process itself cannot be put into a sandbox"
    if place.cluster == "local" and (workers > 1 or ranks > 1):
        which = f"rollout.workers = {workers}" if workers > 1 else f"learner.ranks = {ranks}"
        told = "one process holds one engine and one learner; set place.cluster = 'ray'"
        yield f"{which} and place.cluster = 'local': {told}"
    if place.cluster == "ray" and place.layout == "colocated" and workers != ranks:
        told = f"rollout.workers = {workers} and learner.ranks = {ranks}: each process is both in turns"
        yield f"place.layout = 'colocated' with {told}, so there must be as many of one as of the other"
