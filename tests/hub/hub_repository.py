"""The repositories of `local_hub.py`: what a push changes, all or nothing."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


class HubError(Exception):
    """An answer that is an error; `code` is the header by which clients tell a kind of 404."""

    def __init__(self, status: int, message: str, code: str | None = None, **details: Any):
        super().__init__(message)
        self.status = status
        self.headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self.details = details


@dataclass(frozen=True)
class Blob:
    """The content of a file; a large one goes by its sha256, another by git's sha1."""

    content: bytes
    is_large: bool = False

    @property
    def oid(self) -> str:
        if self.is_large:
            return hashlib.sha256(self.content).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()

    def describe(self) -> dict[str, Any]:
        large = {"oid": self.oid, "size": len(self.content), "pointerSize": 134}
        return {"oid": self.oid, "size": len(self.content)} | ({"lfs": large} if self.is_large else {})


@dataclass(frozen=True)
class Commit:
    oid: str
    message: str
    parent: Commit | None
    files: Mapping[str, Blob]


class Repository:
    """Commits, and the branches, tags and pull requests that point to them."""

    def __init__(self, name: str, *, private: bool = False):
        self.name = name
        self.private = private
        self.large_files: dict[str, bytes] = {}  # by sha256, those uploaded: of a commit or not yet
        self.commits: dict[str, Commit] = {}
        self.refs: dict[str, str] = {}
        self._move("main", "initial commit", {})

    def files(self, revision: str = "main") -> Mapping[str, Blob]:
        return self.commit_at(revision).files

    def history(self, revision: str = "main") -> list[Commit]:
        """The commits up to a revision, the first one first."""
        commits, commit = [], self.commit_at(revision)
        while commit is not None:
            commits.append(commit)
            commit = commit.parent
        return commits[::-1]

    def commit_at(self, revision: str) -> Commit:
        oid = self.refs.get(revision, revision)
        if oid not in self.commits:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return self.commits[oid]

    def point(self, ref: str, start: str) -> None:
        """A new branch or tag."""
        if ref in self.refs:
            raise HubError(409, f"Reference already exists: {ref}")
        self.refs[ref] = self.commit_at(start).oid

    def open_pull_request(self, start: str) -> str:
        number = 1 + sum(ref.startswith("refs/pr/") for ref in self.refs)
        self.point(f"refs/pr/{number}", start)
        return f"refs/pr/{number}"

    def commit(self, ref: str, operations: Iterable[dict[str, Any]]) -> Commit:
        """Apply the operations of a request, all or none of them."""
        if ref not in self.refs:
            raise HubError(404, f"Invalid rev id: {ref}", "RevisionNotFound")
        head = self.commit_at(ref)
        files, message = dict(head.files), ""
        for operation in operations:
            kind, value = operation["key"], operation["value"]
            if kind == "header":
                message = value["summary"]
                if value.get("parentCommit", head.oid) != head.oid:
                    raise HubError(412, "A commit has happened since.")
            elif kind == "file":
                files[value["path"]] = Blob(base64.b64decode(value["content"]))
            elif kind == "lfsFile":
                if value["oid"] not in self.large_files:
                    raise HubError(400, f"LFS object {value['oid']} of {value['path']} is missing.")
                files[value["path"]] = Blob(self.large_files[value["oid"]], is_large=True)
            elif kind == "deletedFile":
                files.pop(value["path"])
            elif kind == "deletedFolder":
                folder = value["path"].rstrip("/") + "/"
                files = {path: blob for path, blob in files.items() if not path.startswith(folder)}
            else:
                raise HubError(400, f"Unknown operation {kind!r}.")
        return self._move(ref, message, files)

    def _move(self, ref: str, message: str, files: Mapping[str, Blob]) -> Commit:
        parent = self.commits.get(self.refs.get(ref, ""))
        content = {path: blob.oid for path, blob in sorted(files.items())}
        identity = json.dumps([len(self.commits), message, parent and parent.oid, content])
        commit = Commit(hashlib.sha1(identity.encode()).hexdigest(), message, parent, dict(files))
        self.commits[commit.oid] = commit
        self.refs[ref] = commit.oid
        return commit
