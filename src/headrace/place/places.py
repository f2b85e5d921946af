"""The place that the settings name: this process, or a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from headrace.config import DEMOS, Config
from headrace.ledger.files import START
from headrace.place.inline import InlineCluster
from headrace.place.place import Ends, Place, uses_gpus
from headrace.policy.hub import located
from headrace.publish.collective import CollectiveReceiver, CollectiveSender
from headrace.publish.disk import DiskReceiver, DiskSender
from headrace.roles import Cluster
from headrace.user_code import load_optional

PUBLISHED = "published"  # directory of a run in which weights travel


def open_place(
    config: Config,
    run_dir: Path,
    *,
    resumed: bool = False,
    on_note: Callable[[str], None] = lambda text: None,
    reward: Callable[[Any], Any] | None = None,
) -> Place:
    config = config.model_copy(update={"model": located(config.model)})  # fetched once, before there are workers
    cluster: Cluster
    if config.place.cluster == "local":
        cluster, ends = InlineCluster(), None
    else:
        ray = load_optional("headrace.place.cluster_ray", "ray", "ray")
        cluster = ray.RayCluster(config.place.address)
        ends = _ends(config, run_dir, "cuda" if uses_gpus(config, cluster) else "cpu")
    try:
        return Place(config, run_dir, cluster, ends, resumed=resumed, on_note=on_note, reward=reward)
    except BaseException:
        cluster.close()
        raise


def _ends(config: Config, run_dir: Path, device: str) -> Ends:
    """Constructors of the transport's two ends."""
    match config.publish.transport:
        case "disk":
            path = run_dir / START if config.model.path in DEMOS else Path(config.model.path)
            model_dir = None if path.suffix == ".gguf" else path.absolute()
            return partial(DiskSender, (run_dir / PUBLISHED).absolute(), model_dir=model_dir), DiskReceiver
        case "collective":
            if config.place.layout == "colocated":  # a GPU cannot be two members of one NCCL group
                device = "cpu"
            return partial(CollectiveSender, device=device), partial(CollectiveReceiver, device=device)
        case "object_store":
            store = load_optional("headrace.publish.object_store_ray", "ray", "ray")
            return store.ObjectStoreSender, store.ObjectStoreReceiver
