"""A small hub on loopback, in memory: those endpoints of the Hugging Face Hub that its client uses to push and to load.

The client is huggingface_hub itself, in a process of its own with ``HF_ENDPOINT`` set.
"""

import base64
import hashlib
import json
import os
import re
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import parse_qs, unquote, urlsplit

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


class RefusalError(Exception):
    def __init__(self, status, code=None, **headers):
        self.status, self.headers = status, headers
        if code:
            self.headers["X-Error-Code"] = code


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self):
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        self.query = parse_qs(url.query)
        self.server.hub.requests.append(f"{self.command} {unquote(url.path)}")
        try:
            for method, pattern, action in ROUTES:
                if method == self.command and (match := re.fullmatch(pattern, url.path)):
                    return action(self, *map(unquote, match.groups()))
            raise RefusalError(404)
        except RefusalError as refusal:
            self.send(refusal.status, b'{"error": "refused"}', **refusal.headers)

    do_GET = do_HEAD = do_POST = answer  # noqa: N815

    def send(self, status, content=b"", **headers):
        self.send_response(status)
        for name, value in {"Content-Length": len(content), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def send_json(self, value, status=200):
        self.send(status, json.dumps(value).encode(), Content_Type="application/json")

    def log_message(self, *args):
        pass

    @property
    def is_owner(self):
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def repo(self, repo_id, revision="main", *, write=False):
        repo = self.server.hub.repos.get(repo_id)
        if repo is None or (repo.private and not self.is_owner):
            raise RefusalError(404 if self.is_owner else 401, "RepoNotFound")
        if repo.gated and not self.is_owner:
            raise RefusalError(403, "GatedRepo")
        if write and not self.is_owner:
            raise RefusalError(403, **{"X-Error-Message": "You have no right to write here"})
        if (commit := repo.resolve(revision)) is None:
            raise RefusalError(404, "RevisionNotFound")
        return repo, commit

    def create(self):
        asked = json.loads(self.body)
        if not self.is_owner:
            raise RefusalError(401, **{"X-Error-Message": "Invalid username or password."})
        repo_id = f"{asked.get('organization') or OWNER}/{asked['name']}"
        known = repo_id in self.server.hub.repos
        private = bool(asked.get("private") or asked.get("visibility") == "private")
        self.server.hub.repos.setdefault(repo_id, Repo(private=private))
        self.send_json({"url": f"{self.server.hub.endpoint}/{repo_id}"}, 409 if known else 200)

    def branch(self, repo_id, name):
        repo, commit = self.repo(repo_id, write=True)
        known = name in repo.branches
        repo.branches.setdefault(name, commit)
        self.send_json({}, 409 if known else 200)

    def info(self, repo_id, revision):
        _, commit = self.repo(repo_id, revision)
        self.send_json({"id": repo_id, "sha": commit, "xetEnabled": False})

    def preupload(self, repo_id, revision):
        self.repo(repo_id, revision, write=True)
        kept = {"uploadMode": "regular", "shouldIgnore": False}
        self.send_json({"files": [{"path": file["path"], **kept} for file in json.loads(self.body)["files"]]})

    def commit(self, repo_id, revision):
        repo, _ = self.repo(repo_id, revision, write=True)
        lines = [(line["key"], line["value"]) for line in map(json.loads, self.body.splitlines())]
        (message,) = [value["summary"] for key, value in lines if key == "header"]
        files = {value["path"]: base64.b64decode(value["content"]) for key, value in lines if key == "file"}
        branch, endpoint, pull_request = revision, self.server.hub.endpoint, None
        if self.query.get("create_pr") == ["1"]:
            number = 1 + sum(name.startswith("refs/pr/") for name in repo.branches)
            branch, pull_request = f"refs/pr/{number}", f"{endpoint}/{repo_id}/discussions/{number}"
            repo.branches[branch] = repo.resolve(revision)
        oid = repo.commit(branch, files, message)
        url = f"{endpoint}/{repo_id}/commit/{oid}"
        self.send_json({"success": True, "commitOid": oid, "commitUrl": url, "pullRequestUrl": pull_request})

    def resolve(self, repo_id, revision, path):
        repo, commit = self.repo(repo_id, revision)
        if path not in repo.commits[commit]:
            raise RefusalError(404, "EntryNotFound", **{"X-Repo-Commit": commit})
        content = repo.commits[commit][path]
        etag = hashlib.sha256(content).hexdigest()
        self.send(200, content, X_Repo_Commit=commit, ETag=f'"{etag}"')


NAME, PART = r"([\w.-]+/[\w.-]+)", r"([^/]+)"
ROUTES = [
    ("POST", "/api/repos/create", Handler.create),
    ("POST", "/api/validate-yaml", lambda handler: handler.send_json({"errors": [], "warnings": []})),
    ("POST", f"/api/models/{NAME}/branch/{PART}", Handler.branch),
    ("GET", f"/api/models/{NAME}/revision/{PART}", Handler.info),  # a client before 1.0 asks so
    ("POST", f"/api/models/{NAME}/preupload/{PART}", Handler.preupload),
    ("POST", f"/api/models/{NAME}/commit/{PART}", Handler.commit),
    ("HEAD", f"/{NAME}/resolve/{PART}/(.+)", Handler.resolve),
    ("GET", f"/{NAME}/resolve/{PART}/(.+)", Handler.resolve),
]


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
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.hub = SimpleNamespace(endpoint=f"http://127.0.0.1:{server.server_port}", repos={}, requests=[])
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
