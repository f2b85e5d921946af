"""The place that the settings name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from headrace.config import Config
from headrace.errors import MissingExtraError
from headrace.ledger.files import START
from headrace.place.local import LocalPlace
from headrace.place.remote import RemotePlace, uses_gpus
from headrace.publish.collective import CollectiveReceiver, CollectiveSender
from headrace.publish.disk import DiskReceiver, DiskSender
from headrace.publish.transport import ReceivingEnd, SendingEnd

PUBLISHED = "published"  # directory of a run in which weights travel


def open_place(config: Config, run_dir: Path, *, resumed: bool = False) -> LocalPlace | RemotePlace:
    """Build the stages where they belong."""
    if config.place.cluster == "local":
        return LocalPlace(config, run_dir, resumed=resumed)
    cluster = _ray("headrace.place.cluster_ray").RayCluster(config.place.address)
    try:
        ends = _ends(config, run_dir, "cuda" if uses_gpus(config, cluster) else "cpu")
        return RemotePlace(config, run_dir, cluster, ends, resumed=resumed)
    except BaseException:
        cluster.close()
        raise


def _ends(config: Config, run_dir: Path, device: str) -> tuple[Callable[[], SendingEnd], Callable[[], ReceivingEnd]]:
    """Both ends of the transport, each to be made where it belongs."""
    match config.publish.transport:
        case "disk":
            path = run_dir / START if config.model.path == "demo" else Path(config.model.path)
            model_dir = None if path.suffix == ".gguf" else path.absolute()
            return partial(DiskSender, (run_dir / PUBLISHED).absolute(), model_dir=model_dir), DiskReceiver
        case "collective":
            if config.place.layout == "colocated":  # a GPU takes one part in a chain, and here it has both ends
                device = "cpu"
            return partial(CollectiveSender, device=device), partial(CollectiveReceiver, device=device)
        case "object_store":
            store = _ray("headrace.publish.object_store_ray")
            return store.ObjectStoreSender, store.ObjectStoreReceiver


def _ray(module: str) -> Any:
    """A file that imports Ray, loaded only when Ray is asked for."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "ray":
            raise MissingExtraError("Ray (place.cluster = 'ray')", "ray") from error
        raise
