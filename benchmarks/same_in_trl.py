"""A recipe of Headrace's, trained by TRL: the same model, prompts, reward and step. See benchmarks/README.md.

    python benchmarks/same_in_trl.py recipes/gsm8k.toml --steps 20 --out runs/trl
    headrace train recipes/gsm8k.toml model.path=runs/trl/model loop.steps=0      # its held-out score

Prompts come in the order in which a Headrace run of the same `run.seed` draws them, and as the same tokens. A step has
as many answers, one optimizer step, GRPO's advantages, a mean over the step's tokens, the recipe's optimizer and clips.
On a GPU the weights are float32 under bfloat16 autocast. Answers come from transformers' `generate`. A line of JSON per
step goes to `rows.jsonl`: seconds since the first step began, sampled tokens, mean reward.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from script import positive
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl_settings import SAME_STEP

from headrace.config import Config
from headrace.config_file import load_config
from headrace.errors import RewardError
from headrace.prompts.stream import PromptStream
from headrace.types import Completion
from headrace.user_code import load_function


class Rows(TrainerCallback):
    """Writes one per step, and keeps the sums."""

    def __init__(self, path: Path, tokens: int, seconds: int) -> None:
        self._file, self._most = path.open("w"), (tokens, seconds)
        self.sampled, self.rewards = 0, [0.0]
        self._begun_s = 0.0

    def on_train_begin(self, *unused: Any, **also_unused: Any) -> None:
        self._begun_s = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        row = {"step": state.global_step, "seconds": time.perf_counter() - self._begun_s, "tokens": self.sampled}
        row["reward"] = sum(self.rewards) / len(self.rewards)
        print(json.dumps(row), file=self._file, flush=True)
        control.should_training_stop = row["tokens"] >= self._most[0] or row["seconds"] >= self._most[1]


def main() -> None:
    arguments = _arguments()
    config = load_config(arguments.recipe, arguments.settings)
    device = torch.device("cuda" if torch.cuda.is_available() and config.model.device != "cpu" else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    groups, samples = config.loop.groups_per_step, config.rollout.samples
    stream = PromptStream(config.prompts, tokenizer, config.run.seed)
    prompts = [stream.next()[1] for _ in range(arguments.steps * groups)]
    texts = [tokenizer.decode(prompt.token_ids) for prompt in prompts]
    for text, prompt in zip(texts, prompts, strict=True):
        assert tokenizer(text)["input_ids"] == list(prompt.token_ids), "TRL would train on other tokens"
    score = load_function(config.reward.function, "reward.function", RewardError)
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows = Rows(arguments.out / "rows.jsonl", arguments.tokens, arguments.seconds)

    def reward(completions: list[str], completion_ids: list[list[int]], at: list[int], **_: Any) -> list[float]:
        rows.rewards = []
        for number, answer, ids in zip(at, completions, completion_ids, strict=True):
            asked = {"prompt": prompts[number].text, "fields": prompts[number].fields}
            rows.rewards.append(float(score(Completion(**asked, text=answer, num_tokens=len(ids), finish="stop"))))
        rows.sampled += sum(map(len, completion_ids))
        return rows.rewards

    at_once = min(arguments.at_once, groups * samples)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32),
        processing_class=tokenizer,
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=str(arguments.out),
            num_generations=samples,
            per_device_train_batch_size=at_once,
            gradient_accumulation_steps=groups * samples // at_once,
            steps_per_generation=groups * samples // at_once,
            max_steps=arguments.steps,
            bf16=device.type == "cuda",
            use_cpu=device.type == "cpu",
            seed=config.run.seed,
            shuffle_dataset=False,
            **(SAME_STEP | settings(config)),
        ),
        train_dataset=Dataset.from_dict({"prompt": texts, "at": range(len(texts))}),
        callbacks=[rows],
    )
    trainer.train()
    trainer.model.to(torch.bfloat16 if device.type == "cuda" else torch.float32)
    trainer.save_model(str(arguments.out / "model"))


def settings(config: Config) -> dict[str, Any]:
    """What the recipe says of sampling and of the optimizer."""
    learner, rollout = config.learner, config.rollout
    return {
        "max_completion_length": rollout.max_new_tokens,
        "temperature": rollout.temperature[0],
        "top_p": rollout.top_p,
        "learning_rate": learner.lr,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": learner.warmup_steps,
        "adam_beta1": learner.betas[0],
        "adam_beta2": learner.betas[1],
        "weight_decay": learner.weight_decay,
        "max_grad_norm": learner.grad_clip,
        "epsilon": learner.clip[0],
        "epsilon_high": learner.clip[1],
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("settings", nargs="*", help="as for headrace train, such as run.seed=1")
    parser.add_argument("--steps", type=positive, default=20, help="at most")
    parser.add_argument("--tokens", type=positive, default=2**62, help="end after the step that has sampled so many")
    parser.add_argument("--seconds", type=positive, default=2**62, help="end after the step that is over so late")
    parser.add_argument("--at-once", type=positive, default=32)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
