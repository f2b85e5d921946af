"""Models of the Hugging Face hub: fetched if that is allowed, and pushed, with a model card, when asked for.

Nothing else in Headrace asks the network for a model.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import constants, create_repo, snapshot_download, upload_folder
from huggingface_hub.errors import RepositoryNotFoundError

from headrace import __version__
from headrace.config import DEMOS, Config, ModelSection
from headrace.config_file import NAME_FILES, changed, did_you_mean
from headrace.errors import ModelError

ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")  # owner/name
CARD, TEMPLATE = "README.md", Path(__file__).with_name("model_card.md")
PATHS = tuple(f"{key}=" for key in NAME_FILES)
DIRECTORY = r'[^"\s]*/'
FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]  # of a model: no code, no other formats


def located(section: ModelSection) -> ModelSection:
    """`section` with paths that exist. What is only on the hub is fetched, if that is allowed."""
    path = section.path if section.path in DEMOS else _find(section.path, "model.path", section)
    tokenizer = section.tokenizer and _find(section.tokenizer, "model.tokenizer", section)
    return section.model_copy(update={"path": path, "tokenizer": tokenizer})


def _find(name: str, setting: str, section: ModelSection) -> str:
    if os.path.isdir(name) or (os.path.isfile(name) and name.endswith(".gguf")):
        return name
    told, may_be_id = f"{setting} = '{name}'", ID.fullmatch(name) is not None
    if os.path.exists(name):
        raise ModelError(f"{told} is a file, but not a .gguf file; name the directory of a model")
    if not (may_be_id and section.allow_download):
        hint = ". If it is a model of the Hugging Face hub, set model.allow_download=true" if may_be_id else ""
        raise ModelError(f"{told}: no such directory or file{did_you_mean(name)}{hint}")
    try:
        return str(snapshot_download(name, allow_patterns=FILES))
    except Exception as error:  # of many types: no network, no permission, a full disk
        why = " ".join(str(error.__cause__ or error).split())
        if isinstance(error, RepositoryNotFoundError):  # or its conditions are not accepted
            why = "there is no such model, or it is not for everybody; HF_TOKEN says who you are"
        raise ModelError(f"{told} cannot be fetched from {constants.ENDPOINT}: {why}") from error


def push(directory: Path, repository: str) -> None:
    """Upload a model directory. A repository that does not exist yet is made, as a private one."""
    if ID.fullmatch(repository) is None:
        raise ModelError(f"'{repository}' is no name of a repository of the hub: write owner/name")
    try:
        create_repo(repository, private=True, exist_ok=True)
        upload_folder(repo_id=repository, folder_path=directory, commit_message=f"Trained with Headrace {__version__}")
    except Exception as error:  # of many types: no network, no permission
        why = " ".join(str(error.__cause__ or error).split())
        if getattr(getattr(error, "response", None), "status_code", 0) in (401, 403):
            why += "; set HF_TOKEN to a token that may write there"
        raise ModelError(f"the model cannot be pushed to {repository} at {constants.ENDPOINT}: {why}") from error


def model_card(config: Config, summary: Mapping[str, Any]) -> str:
    """What a model was trained from, how, and what came of it; without local directories."""
    path, of_hub = config.model.path, config.model.allow_download and ID.fullmatch(config.model.path)
    base = path if of_hub else Path(path).name
    known = [summary.get(f"score_{when}") for when in ("before", "after")]
    before, after = ("not measured" if score is None else f"{score:.4f}" for score in known)
    settings = [text for text in changed(config) if not text.startswith(("run.", "model.path="))]
    listed = (re.sub(DIRECTORY, "", text) if text.startswith(PATHS) else text for text in settings)
    return TEMPLATE.read_text(encoding="utf-8").format(
        base_model=f"base_model: {base}\n" if of_hub else "",
        **{"base": base, "before": before, "after": after, "version": __version__},
        steps=summary.get("steps", 0),
        settings="\n".join(f"    {text}" for text in listed),
    )
