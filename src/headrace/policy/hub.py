"""Where a model is: a path of this machine, or a repository of the Hugging Face hub, if downloads are allowed."""

from __future__ import annotations

import os
import re

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from headrace.config import ModelSection
from headrace.config_file import did_you_mean
from headrace.errors import ModelError

ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")  # owner/name
FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]  # of a model: no code, no other formats


def located(section: ModelSection) -> ModelSection:
    """`section` with paths that exist. What is only on the hub is fetched, if that is allowed."""
    path = section.path if section.path == "demo" else _find(section.path, "model.path", section)
    tokenizer = section.tokenizer and _find(section.tokenizer, "model.tokenizer", section)
    return section.model_copy(update={"path": path, "tokenizer": tokenizer})


def _find(name: str, setting: str, section: ModelSection) -> str:
    if os.path.isdir(name) or (os.path.isfile(name) and name.endswith(".gguf")):
        return name
    told = f"{setting} = '{name}'"
    if os.path.exists(name):
        raise ModelError(f"{told} is a file, but not a .gguf file; name the directory of a model")
    if ID.fullmatch(name) is None:
        raise ModelError(f"{told}: no such directory or file{did_you_mean(name)}")
    if not section.allow_download:
        hint = "If it is a model of the Hugging Face hub, set model.allow_download=true"
        raise ModelError(f"{told}: no such directory or file{did_you_mean(name)}. {hint}")
    return _fetched(name, told)


def _fetched(name: str, told: str) -> str:
    try:
        return str(snapshot_download(name, allow_patterns=FILES))
    except GatedRepoError as error:
        why: str | BaseException = "its owner wants you to accept conditions first, and HF_TOKEN to be yours"
        cause: Exception = error
    except RepositoryNotFoundError as error:
        why, cause = "there is no such model, or only for others (HF_TOKEN says who you are)", error
    except Exception as error:  # of many types: no network, a full disk
        why, cause = error.__cause__ or error, error
    raise ModelError(f"{told} cannot be fetched from {constants.ENDPOINT}: {' '.join(str(why).split())}") from cause
