"""A model that is named: found here, or fetched from a hub, a small HTTP server, only when that is allowed."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from click.testing import Result
from huggingface_hub import constants
from tiny_runs import Workshop
from typer.testing import CliRunner

from headrace import api
from headrace.cli import app
from headrace.config import ModelSection
from headrace.config_file import DEMO, load_config
from headrace.errors import ModelError
from headrace.policy.hub import located, model_card
from headrace.policy.policy import Policy, load_policy

SHA = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = "someone/tiny"


class FakeHub(BaseHTTPRequestHandler):
    """Serves the files of one directory as the repository `someone/tiny`, and notes what it is asked."""

    directory: Path
    asked: list[str]
    created: list[dict[str, Any]]
    pushed: dict[str, bytes]
    refuses = False  # to be written to

    def do_GET(self) -> None:
        """The list of files, or one of them."""
        self.asked.append(self.path)
        path = self.path.partition("?")[0]
        files = [file for file in sorted(self.directory.iterdir()) if file.is_file()]
        if path.startswith(f"/api/models/{REPOSITORY}/revision/"):
            names = [{"rfilename": file.name} for file in files]
            self._answer(json.dumps({"id": REPOSITORY, "sha": SHA, "siblings": names}).encode())
        elif path.startswith(f"/api/models/{REPOSITORY}/tree/"):
            sizes = [(file.name, file.stat().st_size) for file in files]
            listed = [{"type": "file", "path": name, "size": size, "oid": etag(name)} for name, size in sizes]
            self._answer(json.dumps(listed).encode())
        elif path.startswith(f"/{REPOSITORY}/resolve/"):
            name = path.rpartition("/")[2]
            headers = {"ETag": f'"{etag(name)}"', "X-Repo-Commit": SHA}
            self._answer((self.directory / name).read_bytes(), **headers)
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """A new repository, or a commit to it: every file comes inside the commit."""
        self.asked.append(self.path)
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if self.refuses:
            self.send_response(401)
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif self.path == "/api/repos/create":
            self.created.append(json.loads(content))
            self._answer(json.dumps({"url": f"/{REPOSITORY}", "name": REPOSITORY, "id": REPOSITORY}).encode())
        elif self.path.endswith("/preupload/main"):
            plain = {"uploadMode": "regular", "shouldIgnore": False}
            files = [{"path": file["path"], **plain} for file in json.loads(content)["files"]]
            self._answer(json.dumps({"files": files}).encode())
        elif self.path.endswith("/commit/main"):
            url = f"http://{self.headers['Host']}/{REPOSITORY}/commit/{SHA}"
            for line in map(json.loads, content.splitlines()):
                if line["key"] == "file":
                    self.pushed[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self._answer(json.dumps({"commitUrl": url, "commitOid": SHA, "success": True}).encode())
        else:
            self._answer(b"{}")

    def _answer(self, content: bytes, **headers: str) -> None:
        self.send_response(200)
        for name, value in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Nothing on the terminal."""


def etag(name: str) -> str:
    return hashlib.sha1(name.encode()).hexdigest()


@pytest.fixture
def hub(tmp_path: Path, make_policy: Callable[..., Policy], monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    make_policy().save(tmp_path / "served")
    (tmp_path / "served" / "own.py").write_text("raise SystemExit('it ran')\n")
    kept = {"asked": [], "created": [], "pushed": {}}
    kind = type("Hub", (FakeHub,), {"directory": tmp_path / "served", **kept})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    use_hub(monkeypatch, f"http://127.0.0.1:{server.server_port}", tmp_path / "cache")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    yield kind  # type: ignore[misc]
    server.shutdown()
    server.server_close()


def use_hub(monkeypatch: pytest.MonkeyPatch, endpoint: str, cache: Path) -> None:
    """As HF_ENDPOINT and HF_HOME do, which are read when the library is imported."""
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", endpoint)


def test_a_model_of_the_hub_is_fetched_when_that_is_allowed(hub: FakeHub, policy: Policy):
    section = ModelSection(path=REPOSITORY, allow_download=True, device="cpu")
    loaded = load_policy(section)
    assert torch.equal(loaded.head_weight, policy.head_weight)
    found = Path(located(section).path)
    assert found.name == SHA
    assert not (found / "own.py").exists()  # no code
    num_asked = len([path for path in hub.asked if "/resolve/" in path])
    load_policy(section)
    assert len([path for path in hub.asked if "/resolve/" in path]) == num_asked  # kept


def test_a_run_begins_with_a_model_of_the_hub(hub: FakeHub, tmp_path: Path):
    words = [f"run.dir={tmp_path / 'run'}", f"model.path={REPOSITORY}", "model.allow_download=true"]
    words += ["model.device=cpu", "loop.steps=0", "prompts.count=40", "prompts.eval_count=2"]
    words += [f"prompts.source={DEMO.parent}/arithmetic.py:tasks"]
    assert api.train(load_config(None, words))["finished"]
    assert load_config(tmp_path / "run" / "config.toml").model.path == REPOSITORY


@pytest.mark.parametrize("name", ["path", "tokenizer"])
def test_without_permission_no_network_is_asked(hub: FakeHub, policy: Policy, tmp_path: Path, name: str):
    here = {"path": str(tmp_path / "served")}
    with pytest.raises(ModelError, match=rf"^model\.{name} = '{REPOSITORY}': no .* set model\.allow_download=true$"):
        load_policy(ModelSection(**here | {name: REPOSITORY}, device="cpu"))
    load_policy(ModelSection(**here, device="cpu"))
    assert hub.asked == []


def test_what_cannot_be_an_id_of_the_hub_is_never_asked_for(hub: FakeHub, tmp_path: Path):
    (tmp_path / "work" / "qwen3").mkdir()
    (tmp_path / "work" / "notes.txt").touch()
    for path, message in {
        "qwen": r"no such directory or file; did you mean 'qwen3'\?",
        f"{tmp_path}/wrok/qwen": rf"no such directory or file; did you mean '{tmp_path}/work/qwen3'\?",
        "a/b/c": "no such directory or file$",
        "notes.txt": r"is a file, but not a \.gguf file",
        "qwen3": r"has no config\.json",
    }.items():
        with pytest.raises(ModelError, match=message):
            load_policy(ModelSection(path=path, allow_download=True, device="cpu"))
    assert hub.asked == []


def test_a_model_that_the_hub_does_not_have(hub: FakeHub):
    with pytest.raises(ModelError, match=r"^model.path = 'no/such' cannot be fetched from .*: there is no such model"):
        load_policy(ModelSection(path="no/such", allow_download=True, device="cpu"))


def test_a_hub_that_cannot_be_reached_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    use_hub(monkeypatch, "http://127.0.0.1:1", tmp_path)
    with pytest.raises(ModelError) as caught:
        load_policy(ModelSection(path=REPOSITORY, allow_download=True, device="cpu"))
    told = str(caught.value)
    assert told.startswith(f"model.path = '{REPOSITORY}' cannot be fetched from http://127.0.0.1:1: ")
    assert "Connection refused" in told
    assert "\n" not in told


# ---- pushing


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of one step."""
    workshop = Workshop(tmp_path_factory.mktemp("pushed"))
    api.train(workshop.config("run", "loop.steps=1", reward="dense"))
    return workshop.directory / "run"


def headrace(*words: str | Path) -> Result:
    return CliRunner(env={"COLUMNS": "100", "TERM": "dumb"}).invoke(app, [str(word) for word in words])


def test_a_model_is_pushed_with_its_card(run: Path, hub: FakeHub, tmp_path: Path):
    result = headrace("export", run, "--push", REPOSITORY)
    assert result.output == f"wrote {REPOSITORY}\n", hub.asked
    assert hub.created[0].get("private") or hub.created[0]["visibility"] == "private"  # by the version of the library
    weights = (run / "model" / "model.safetensors").read_bytes()
    assert hub.pushed["model.safetensors"] == weights
    assert hub.pushed.keys() == {file.name for file in (run / "model").iterdir()} | {"README.md"}
    result = headrace("export", run, tmp_path / "out", "--push", REPOSITORY)
    assert result.output.split() == f"wrote {tmp_path / 'out'}, and pushed it to {REPOSITORY}".split()
    assert (tmp_path / "out" / "README.md").read_bytes() == hub.pushed["README.md"]


def test_a_model_card_says_what_was_trained_how_and_with_what_result(run: Path, tmp_path: Path):
    api.export(run, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    summary = json.loads((run / "summary.json").read_text())
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "# tiny, trained by reinforcement learning" in card
    assert f"| before | {summary['score_before']:.4f} |\n| after | {summary['score_after']:.4f} |" in card
    assert "    learner.lr=0.001\n" in card
    assert '    reward.function="rewards.py:dense"\n' in card
    assert str(run.parent) not in card  # directories of this machine are nobody's business
    secret = ["rollout.engine=vllm", "rollout.command=http://:KEY1@a:8000,http://:KEY2@b:8000"]
    told = model_card(load_config(None, [*secret, "learner.teacher=/home/me/teacher", "learner.kl_coef=1"]), {})
    assert '    rollout.command="http://a:8000,http://b:8000"\n' in told
    assert '    learner.teacher="teacher"\n' in told
    of_hub = load_config(None, [f"model.path={REPOSITORY}", "model.allow_download=true"])
    assert model_card(of_hub, {}).startswith(f"---\nbase_model: {REPOSITORY}\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "where to? Give a directory OUT, or --push owner/name"),
        (["--push", "tiny"], "'tiny' is no name of a repository of the hub: write owner/name"),
        (["--push", REPOSITORY], f"cannot be pushed to {REPOSITORY} at http://127.0.0.1:1"),
    ],
)
def test_a_push_that_fails_is_one_sentence(
    run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[str], message: str
):
    use_hub(monkeypatch, "http://127.0.0.1:1", tmp_path)
    result = headrace("export", run, *words)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_push_without_permission_names_the_token(run: Path, hub: FakeHub):
    hub.refuses = True
    result = headrace("export", run, "--push", REPOSITORY)
    assert result.exit_code == 2
    assert result.stderr.endswith("; set HF_TOKEN to a token that may write there\n")
