"""A Hugging Face hub on the loopback interface, for uploads: repositories, LFS objects, commits.

Spoken is what huggingface_hub 2 sends: create a repository, read it, ask how each file goes
(preupload), store large files (LFS batch, PUT, verify), commit as lines of JSON.
"""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

import yaml
from aiohttp import web

from tests.loopback import Loopback


@dataclass
class Repository:
    """A model repository: who can read it, its files, and the messages of its commits."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)


class HubServer(Loopback):
    """Takes uploads of the user `someone`, who shows `token`.

    A file of `large` bytes or more goes by LFS. `fails` maps a piece of a path to the status that
    calls of such paths get.
    """

    def __init__(self, token: str) -> None:
        super().__init__("hub")
        self.token = token
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.calls: list[str] = []
        self.fails: dict[str, int] = {}
        self.large = 1_000_000

    @property
    def url(self) -> str:
        """What HF_ENDPOINT is set to."""
        return f"http://127.0.0.1:{self.port}"

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        path, body = request.path, await request.read()
        self.calls.append(f"{request.method} {path}")
        for piece, status in self.fails.items():
            if piece in path:
                return web.Response(status=status, headers={"X-Error-Message": f"no {piece} today"})
        if path.startswith("/lfs/"):  # signed addresses: they come without the token
            return self._put(path.removeprefix("/lfs/"), body)
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.json_response({"error": "Invalid username or password."}, status=401)
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            return self._validate(json.loads(body)["content"])
        segments = path.removeprefix("/api/models").strip("/").split("/")
        name, what = "/".join(segments[:2]).removesuffix(".git"), "/".join(segments[2:])
        if (repository := self.repositories.get(name)) is None:
            return web.json_response({"error": "Repository not found"}, status=404)
        if request.method == "GET" and not what:
            return web.json_response({"id": name, "private": repository.private})
        if what == "preupload/main":
            return self._modes(json.loads(body)["files"])
        if what == "info/lfs/objects/batch":
            return self._batch(json.loads(body)["objects"])
        if what == "commit/main":
            return self._commit(name, repository, [json.loads(line) for line in body.splitlines()])
        return web.json_response({"error": f"{request.method} {path}"}, status=404)

    def _create(self, request: dict[str, Any]) -> web.Response:
        name = f"{request['organization'] or 'someone'}/{request['name']}"
        answer = {"url": f"{self.url}/{name}", "name": name}
        if name in self.repositories:
            return web.json_response({"error": "exists already", **answer}, status=409)
        self.repositories[name] = Repository(private=request.get("visibility") == "private")
        return web.json_response(answer)

    def _validate(self, card: str) -> web.Response:
        _, front, _ = card.split("---\n", 2)
        errors = [] if isinstance(yaml.safe_load(front), dict) else [{"message": "no mapping"}]
        return web.json_response({"errors": errors, "warnings": []}, status=400 if errors else 200)

    def _modes(self, files: list[dict[str, Any]]) -> web.Response:
        for file in files:
            file["uploadMode"] = "lfs" if file["size"] >= self.large else "regular"
            file["shouldIgnore"] = False
        return web.json_response({"files": files})

    def _batch(self, objects: list[dict[str, Any]]) -> web.Response:
        for entry in objects:
            entry["actions"] = {"upload": {"href": f"{self.url}/lfs/{entry['oid']}"}}
        return web.json_response({"transfer": "basic", "objects": objects})

    def _put(self, oid: str, content: bytes) -> web.Response:
        if hashlib.sha256(content).hexdigest() != oid:
            return web.Response(status=400)
        self.objects[oid] = content
        return web.Response()

    def _commit(
        self, name: str, repository: Repository, lines: list[dict[str, Any]]
    ) -> web.Response:
        header, *operations = ((line["key"], line["value"]) for line in lines)
        repository.commits.append(header[1]["summary"])
        for key, value in operations:
            stored = self.objects[value["oid"]] if key == "lfsFile" else None
            repository.files[value["path"]] = stored or base64.b64decode(value["content"])
        oid = f"{len(repository.commits):040x}"
        url = f"{self.url}/{name}/commit/{oid}"
        return web.json_response({"commitUrl": url, "commitOid": oid, "pullRequestUrl": None})
