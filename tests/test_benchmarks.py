"""The GPU benchmarks run, on a CPU with a tiny model: a machine that is rented by the second must not find a typo."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import forked
import pytest
import torch

Main = Callable[[list[str]], dict[str, Any]]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """`benchmark("engine")`: the script as a module."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    monkeypatch.setenv("HEADRACE_COMMIT", "abc")
    before, threads = set(sys.modules), torch.get_num_threads()
    yield import_module
    torch.set_num_threads(threads)
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "").parent.name == "benchmarks":
            del sys.modules[name]


def run(main: Main, tmp_path: Path, *parts: str) -> dict[str, Any]:
    """The parts' results, from the JSON."""
    out = tmp_path / "out.json"
    only = [option for part in parts for option in ("--only", part)]
    main(["--tiny", "--device", "cpu", "--repeats", "1", "--json", str(out), *only])
    results = json.loads(out.read_text())
    assert results["commit"] == "abc"
    assert results["device"] == "cpu"
    assert not [found["error"] for found in results["parts"].values() if "error" in found]
    return results["parts"]


def test_the_engine_benchmark_measures_engine_and_peers(benchmark: Callable[[str], Any], tmp_path: Path) -> None:
    found = run(benchmark("engine").main, tmp_path, "decode-0.6b/headrace", "job-tail-0.6b/headrace", "6b/generate")
    assert len(found) == 4
    assert found["decode-0.6b/headrace"]["context"] == pytest.approx(32, abs=4)
    for part in found.values():
        assert part["tokens_per_s"]["median"] > 0
    job = found["job-tail-0.6b/headrace"]
    assert 0 < job["floor_s"] < job["seconds"]["median"]
    assert job["longest"] > job["tokens"] / job["prompts"]


def test_the_learner_benchmark_counts_the_work_of_a_step(benchmark: Callable[[str], Any], tmp_path: Path) -> None:
    found = run(benchmark("learner").main, tmp_path, "0.6b-640")
    assert len(found) == 3
    shape = benchmark("gpu_model").SHAPES["tiny"]
    weights = shape.body_weights + shape.head_weights
    for part in found.values():
        assert part["tokens_per_s"]["median"] > 0
        assert 6 * weights * 500 < part["flops"] < 2 * 6 * weights * 500


def test_the_trees_benchmark_computes_a_prefix_once(
    benchmark: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    trees = benchmark("trees")
    monkeypatch.setattr(trees.tree, "LEAST_SHARED", trees.tree.LEAST_SHARED)  # which the benchmark sets
    found = trees.main(["--tiny", "--repeats", "1", "--threads", "1"])
    tokens = {name: (one["separate"], one["shared"]) for name, one in found.items()}
    assert tokens["tiny/8 answers of 8 to a prompt of 64"] == (8 * 72, 64 + 8 * 8)
    assert tokens["tiny/8 turns, history rewritten"] == (8 * 40 + 2 * 28, 32 + 8 * 8 + 2 * 7)
    assert all(ratio > 0 for one in found.values() for ratio in one["ratios"])


def test_the_turns_benchmark_plays_every_turn(benchmark: Callable[[str], Any]) -> None:
    turns = benchmark("turns")
    found = turns.main(["--tiny", "--repeats", "1", "--threads", "1"])["tiny"]
    assert 4 * 3 * turns.LEAST <= found["tokens"] <= 4 * 3 * turns.MOST
    assert found["ms"] > 0
    assert all(ratio > 0 for ratio in found["ratios"])


def test_the_grpo_benchmark_trains_on_equal_and_on_long_tailed_answers(
    benchmark: Callable[[str], Any], tmp_path: Path
) -> None:
    found = run(benchmark("grpo").main, tmp_path, "headrace")
    assert found["equal/headrace"]["tokens"] == [8 * 8] * 2
    assert all(0 < tokens < 8 * 24 for tokens in found["tail/headrace"]["tokens"])


def test_the_sync_benchmark_publishes_real_steps_and_counts_what_the_sender_sent(
    benchmark: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    monkeypatch.setattr("multiprocessing.get_context", lambda method: forked.context)  # receivers that start at once
    found = run(benchmark("sync").main, tmp_path, "1m/plain", "1m/disk/delta", "fan-out/collective/2")
    assert len(found["1m/plain"]["delta_shares"]) == 4
    assert found["1m/disk/delta"]["of_full"] == found["1m/plain"]["delta_shares"][-1] < 0.05
    fan_out = found["fan-out/collective/2"]
    assert fan_out["bytes"] == fan_out["full_bytes"]
    assert fan_out["bytes"] <= fan_out["sender_sent_bytes"]["median"] < 1.05 * fan_out["bytes"]


def test_the_staircase_model_ends_its_answers_at_the_lengths_asked_for(
    benchmark: Callable[[str], Any], tmp_path: Path
) -> None:
    models = benchmark("gpu_model")
    lengths = models.Lengths(mean=8, cv=1.0, cap=64)
    models.write_stairs(tmp_path, models.SHAPES["tiny"], torch.device("cpu"), stairs=64, lengths=lengths)
    loaded = import_module("transformers").AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        probs = loaded(torch.arange(40)[:, None]).logits[:, 0].softmax(-1)  # a word of each step
    eos = loaded.config.eos_token_id
    wanted = torch.tensor(lengths.end_chances()[1:41])
    torch.testing.assert_close(probs[5:, eos], wanted[5:], rtol=0.35, atol=0.002)
    following = (torch.arange(40) + 1)[:, None] + 64 * torch.arange(598 // 64)
    assert (probs.gather(1, following).sum(1) + probs[:, eos]).min() > 0.98


def test_drawn_lengths_have_the_mean_and_spread_asked_for(benchmark: Callable[[str], Any]) -> None:
    lengths = benchmark("gpu_model").Lengths(mean=512, cv=1.0, cap=4096)
    drawn = torch.tensor(lengths.draw(4096, seed=0), dtype=torch.float64)
    assert drawn.max() <= 4096
    assert float(drawn.mean()) == pytest.approx(505, rel=0.05)  # the cap takes a little off
    assert float(drawn.std() / drawn.mean()) == pytest.approx(0.93, abs=0.08)


def test_the_demo_needs_little_arithmetic(benchmark: Callable[[str], Any], capsys: pytest.CaptureFixture[str]) -> None:
    """TFLOP of every recorded run of the demo as it is now: per token counted here, times the tokens of the record."""
    demo = benchmark("demo")
    recorded = json.loads((Path(__file__).parent.parent / demo.OUT).read_text())
    settings = tomllib.loads(demo.DEMO.read_text())
    assert recorded["settings"] == settings, "the demo has changed: run benchmarks/demo.py again"
    flops, runs = demo.count_flops(), recorded["runs"]
    tera = [flops.tera(run, settings) for run in runs]
    with capsys.disabled():
        print(f"\nthe demo: {min(tera):.2f} to {max(tera):.2f} TFLOP in {len(tera)} recorded runs")
    assert {(run["seed"], run["max_lag"]) for run in runs} == {(seed, lag) for seed in range(5) for lag in (0, 4)}
    assert max(tera) <= demo.MAX_TFLOP
    assert max(run["score_before"] for run in runs) < demo.BELOW
    assert min(run["score_after"] for run in runs) > demo.ABOVE
    assert max(run["first_step_share"] for run in runs) <= demo.FIRST_STEP


def test_the_endpoint_benchmark_loses_nothing(benchmark: Callable[[str], Any]) -> None:
    found = benchmark("serve").main(["--tiny", "--threads", "1"])
    assert found["whole"] == found["sessions"] == 50
    assert found["lost"] == 0
    assert found["ratios"]


def test_the_benchmark_of_cold_starts_times_the_parts_of_a_checkpoint(benchmark: Callable[[str], Any]) -> None:
    cold = benchmark("cold")
    parts = cold.checkpoint(0.2, cold.torch.device("cpu"))
    assert [name for name, *_ in parts] == ["copy to the host", "write"]
    assert all(float(seconds) > 0 for _, *both in parts for seconds in both)


@pytest.mark.slow
def test_the_table_of_architectures_is_what_is_found(benchmark: Callable[[str], Any]) -> None:
    found = benchmark("architectures").main(["--only", "Qwen3", "Cohere2", "DeepseekV3", "Gemma2"])
    page = Path(__file__).parent.parent / "docs" / "results" / "architectures.md"
    known = page.read_text().splitlines()
    assert len(found) == 4
    assert not [row for row in found if f"| {' | '.join(row)} |" not in known]


@pytest.mark.slow
def test_the_benchmark_of_ranks_measures_what_they_hold(benchmark: Callable[[str], Any]) -> None:
    found = benchmark("ranks").main(["--tiny", "--ranks", "2"])
    assert 0 < found["ranks"][2]["load"] <= found["ranks"][2]["peak"]
    assert found["ranks"][2]["norm"] > 0
