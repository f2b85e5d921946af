"""Workers of a Ray cluster on a CUDA device: each thinks that it has one, and they share this machine's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import Workshop, weights

from headrace.errors import ConfigError
from headrace.runs.audit import audit

ray_runs = pytest.importorskip("ray_runs", reason="needs Ray", exc_type=ImportError)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ON_CUDA = ("model.device=cuda", "model.dtype=bfloat16", "model.exact=true", "loop.max_lag=0", "rollout.kv_tokens=20000")
NEEDS_SEVERAL = pytest.mark.skipif(
    torch.cuda.device_count() < 4 and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1",
    reason="needs four CUDA devices, or an NCCL that shares one",
)
SHAPE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "vocab_size": 104}


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("ray_cuda"), *ON_CUDA, **SHAPE)


@pytest.fixture(scope="module")
def local_run(workshop: Workshop) -> Path:
    return ray_runs.train(workshop, "local").run_dir


@pytest.fixture(scope="module", autouse=True)
def four_of_one() -> Iterator[None]:
    """A cluster that believes in four GPUs, and lets every worker see all there are."""
    with ray_runs.local_ray(num_gpus=4, RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES="1", CUBLASLT_WORKSPACE_SIZE="1"):
        yield


@pytest.mark.parametrize(
    "settings",
    [
        ("place.layout=disaggregated", "publish.encoding=full", "publish.transport=object_store"),
        pytest.param(
            ("place.layout=disaggregated", "publish.encoding=delta", "publish.transport=collective"),
            marks=NEEDS_SEVERAL,
        ),
        ("place.layout=colocated", "publish.encoding=delta", "publish.transport=disk"),
    ],
)
def test_engine_and_learner_agree_to_the_bit_in_processes_of_their_own(
    workshop: Workshop, local_run: Path, settings: tuple[str, ...]
) -> None:
    run = ray_runs.train(workshop, "-".join(s.split("=")[1] for s in settings), "place.cluster=ray", *settings)
    assert audit(run.run_dir) == []
    assert not run.notes
    assert len(run.rows) == 3
    assert all(row.mismatch_mean == 0.0 for row in run.rows), "what was published is what the learner has"
    here, there = (ray_runs.trained_tokens(run_dir) for run_dir in (local_run, run.run_dir))
    first_step = {id for id in here if int(id.split(":")[0]) < 4}  # later ones hang on how the GPU adds up gradients
    assert len(first_step) == 16
    assert all(there[id] == here[id] for id in first_step)
    start, end = load_file(workshop.model / "model.safetensors"), weights(run.run_dir)
    assert not all(torch.equal(start[name].to(end[name].dtype), end[name]) for name in end)


def test_too_little_memory_is_refused_with_the_numbers(workshop: Workshop) -> None:
    settings = ("place.cluster=ray", "place.layout=colocated", "rollout.kv_tokens=1000000000")
    with pytest.raises(ConfigError, match=r"the key/value cache \(\d+.*GiB in all\).*GiB are free.*rollout.kv_tokens"):
        ray_runs.train(workshop, "full", *settings)


@NEEDS_SEVERAL
def test_several_ranks_and_engines(workshop: Workshop, local_run: Path) -> None:
    settings = ("learner.ranks=2", "rollout.workers=2", "publish.encoding=delta", "publish.transport=collective")
    run = ray_runs.train(workshop, "ranks", "place.cluster=ray", "model.exact=false", *settings)
    assert audit(run.run_dir) == []
    assert not run.notes
    assert len(run.rows) == 3
    assert all(row.mismatch_mean < 0.05 for row in run.rows)
    here, there = (ray_runs.trained_tokens(run_dir) for run_dir in (local_run, run.run_dir))
    assert here.keys() == there.keys()
    start, local, end = load_file(workshop.model / "model.safetensors"), weights(local_run), weights(run.run_dir)
    moved = sum(float((local[name].float() - start[name].float()).abs().sum()) for name in local)
    apart = sum(float((local[name].float() - end[name].float()).abs().sum()) for name in local)
    assert apart < moved, "it went the same way"
