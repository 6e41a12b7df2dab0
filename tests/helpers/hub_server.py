"""A small hub on loopback, in memory: those endpoints of the Hugging Face Hub that its client uses to push and to load.

The client is huggingface_hub itself, in a process of its own with ``HF_ENDPOINT`` set.
"""

import base64
import hashlib
import json
import os
import socket
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response

OWNER, TOKEN = "owner", "hf_write"


@dataclass
class Repo:
    private: bool = False
    gated: bool = False
    commits: dict = field(default_factory=dict)  # id -> {path: bytes}
    branches: dict = field(default_factory=dict)  # name -> commit id
    messages: list = field(default_factory=list)

    def __post_init__(self):
        self.commit("main", {}, "initial commit")

    def commit(self, branch, files, message):
        tree = {**self.files(branch), **files}
        oid = hashlib.sha1(f"{len(self.commits)}{sorted(tree)}{message}".encode()).hexdigest()
        self.commits[oid], self.branches[branch] = tree, oid
        self.messages.append(message)
        return oid

    def resolve(self, revision):
        return self.branches.get(revision, revision if revision in self.commits else None)

    def files(self, revision="main"):
        return self.commits.get(self.resolve(revision), {})


def refusal(status, **headers):
    return HTTPException(status, headers={f"X-{name.replace('_', '-')}": value for name, value in headers.items()})


def application(hub):
    app = FastAPI()

    async def noted(scope, receive, send):
        hub.requests.append(f"{scope['method']} {scope['path']}")
        await app({**scope, "path": scope["raw_path"].decode()}, receive, send)  # a quoted revision may have slashes

    def find(request, repo_id, revision="main", *, write=False):
        repo, is_owner = hub.repos.get(repo_id), request.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repo is None or (repo.private and not is_owner):
            raise refusal(404 if is_owner else 401, Error_Code="RepoNotFound")
        if repo.gated and not is_owner:
            raise refusal(403, Error_Code="GatedRepo")
        if write and not is_owner:
            raise refusal(403, Error_Message="You have no right to write here")
        if (commit := repo.resolve(unquote(revision))) is None:
            raise refusal(404, Error_Code="RevisionNotFound")
        return repo, commit

    @app.post("/api/repos/create")
    def create(asked: dict, request: Request, response: Response):
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise refusal(401, Error_Message="Invalid username or password.")
        repo_id = f"{asked.get('organization') or OWNER}/{asked['name']}"
        response.status_code = 409 if repo_id in hub.repos else 200
        private = bool(asked.get("private") or asked.get("visibility") == "private")
        hub.repos.setdefault(repo_id, Repo(private=private))
        return {"url": f"{hub.endpoint}/{repo_id}"}

    @app.post("/api/validate-yaml")
    def validate():
        return {"errors": [], "warnings": []}

    @app.post("/api/models/{repo_id:path}/branch/{name}")
    def branch(repo_id, name, request: Request, response: Response):
        repo, commit = find(request, repo_id, write=True)
        response.status_code = 409 if unquote(name) in repo.branches else 200
        repo.branches.setdefault(unquote(name), commit)
        return {}

    @app.get("/api/models/{repo_id:path}/revision/{revision}")  # a client before 1.0 asks so
    def info(repo_id, revision, request: Request):
        return {"id": repo_id, "sha": find(request, repo_id, revision)[1], "xetEnabled": False}

    @app.post("/api/models/{repo_id:path}/preupload/{revision}")
    def preupload(repo_id, revision, asked: dict, request: Request):
        find(request, repo_id, revision, write=True)
        kept = {"uploadMode": "regular", "shouldIgnore": False}
        return {"files": [{"path": file["path"], **kept} for file in asked["files"]]}

    @app.post("/api/models/{repo_id:path}/commit/{revision}")
    async def commit(repo_id, revision, request: Request, create_pr: bool = False):
        repo, head = find(request, repo_id, revision, write=True)
        lines = [(line["key"], line["value"]) for line in map(json.loads, (await request.body()).splitlines())]
        (message,) = [value["summary"] for key, value in lines if key == "header"]
        files = {value["path"]: base64.b64decode(value["content"]) for key, value in lines if key == "file"}
        branch, pull_request = unquote(revision), None
        if create_pr:
            number = 1 + sum(name.startswith("refs/pr/") for name in repo.branches)
            branch, pull_request = f"refs/pr/{number}", f"{hub.endpoint}/{repo_id}/discussions/{number}"
            repo.branches[branch] = head
        oid = repo.commit(branch, files, message)
        url = f"{hub.endpoint}/{repo_id}/commit/{oid}"
        return {"success": True, "commitOid": oid, "commitUrl": url, "pullRequestUrl": pull_request}

    @app.api_route("/{repo_id:path}/resolve/{revision}/{path:path}", methods=["GET", "HEAD"])
    def resolve(repo_id, revision, path, request: Request):
        repo, commit = find(request, repo_id, revision)
        if (content := repo.commits[commit].get(unquote(path))) is None:
            raise refusal(404, Error_Code="EntryNotFound", Repo_Commit=commit)
        return Response(content, headers={"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'})

    return noted


def client_environment(hub, home, token=TOKEN):
    inherited = {name: value for name, value in os.environ.items() if "_proxy" not in name.lower()}
    return {
        **inherited, "HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": token,
        "HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }  # fmt: skip


@contextmanager
def hub_server():
    """A hub that serves for the length of a ``with`` block: its address, its repositories by id, what was asked."""
    listening = socket.create_server(("127.0.0.1", 0))  # requests wait here until the server is up
    hub = SimpleNamespace(endpoint="http://{}:{}".format(*listening.getsockname()), repos={}, requests=[])
    server = uvicorn.Server(uvicorn.Config(application(hub), lifespan="off", log_level="warning"))
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.should_exit = True
        thread.join()
