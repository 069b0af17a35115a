"""A Hub in memory, over HTTP: the requests that `push_to_hub` and `from_pretrained` make.

with LocalHub(token="hf_secret") as hub:
    ...  # processes with HF_ENDPOINT=hub.url push and pull
    hub.repositories["user/model"].files("main")
    hub.requests  # what was asked, in order

`LocalHub.interrupt` makes a request of the future fail. What is served is what the Hub serves: revisions
that only a whole commit moves, large files by their sha256, error codes in `X-Error-Code`.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from hub_repository import HubError, Repository

LARGE_FILES = (".safetensors", ".bin", ".pt", ".pth", ".model")


_REPOSITORY, _REVISION = r"(?P<repository>[\w.-]+/[\w.-]+?)", r"(?P<revision>[^/]+)"
_API = rf"/api/models/{_REPOSITORY}"
# method, path, what `LocalHub.requests` and `LocalHub.interrupt` call it
ROUTES = [
    ("POST", r"/api/repos/create", "create"),
    ("POST", r"/api/validate-yaml", "validate"),
    ("POST", rf"{_API}/branch/(?P<ref>[^/]+)", "branch"),
    ("POST", rf"{_API}/tag/{_REVISION}", "tag"),
    ("POST", rf"{_API}/preupload/{_REVISION}", "preupload"),
    ("POST", rf"/{_REPOSITORY}\.git/info/lfs/objects/batch", "batch"),
    ("PUT", rf"/{_REPOSITORY}\.git/info/lfs/upload/(?P<oid>\w+)", "upload"),
    ("POST", rf"/{_REPOSITORY}\.git/info/lfs/verify", "verify"),
    ("POST", rf"{_API}/commit/{_REVISION}", "commit"),
    ("GET", rf"{_API}(/revision/{_REVISION})?", "info"),
    ("GET", rf"{_API}/tree/{_REVISION}(/(?P<path>.+))?", "tree"),
    ("GET", rf"/{_REPOSITORY}/resolve/{_REVISION}/(?P<path>.+)", "resolve"),
]
_WRITES = {"create", "branch", "tag", "preupload", "batch", "verify", "commit"}


@dataclass
class Request:
    """What a client asked and, in `status`, what it got; None: the connection was closed."""

    method: str
    path: str
    step: str = "unknown"
    arguments: dict[str, str] = field(default_factory=dict)
    query: dict[str, str] = field(default_factory=dict)
    token: str | None = None
    body: bytes = field(default=b"", repr=False)
    status: int | None = None

    @classmethod
    def parse(cls, method: str, target: str, token: str | None, body: bytes) -> Request:
        url = urlsplit(target)
        query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        request = cls(method, url.path, query=query, token=token, body=body)
        for verb, pattern, step in ROUTES:
            match = re.fullmatch(pattern, url.path)
            if match and verb == ("GET" if method == "HEAD" else method):
                groups = match.groupdict().items()
                request.arguments = {name: unquote(text) for name, text in groups if text is not None}
                request.step = step
                break
        return request

    @property
    def repository(self) -> str | None:
        return self.arguments.get("repository")

    @property
    def revision(self) -> str:
        return self.arguments.get("revision", "main")

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def operations(self) -> list[dict[str, Any]]:
        """Of a commit."""
        return [json.loads(line) for line in self.body.splitlines()]

    @property
    def files(self) -> list[str]:
        """The paths in a commit."""
        values = (operation["value"] for operation in self.operations)
        return sorted(value["path"] for value in values if "path" in value)


@dataclass
class Answer:
    content: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Answer:
        headers = {"Content-Type": "application/json"} | (headers or {})
        return cls(json.dumps(value).encode(), status, headers)


@dataclass
class _Interruption:
    step: str
    repository: str
    countdown: int
    status: int | None
    action: Callable[[], Any] | None


class LocalHub:
    """The server. Who has the token may write everywhere and read what is private.

    Attributes:
        url: for `HF_ENDPOINT`.
        token: for `HF_TOKEN`.
        repositories: by name, such as "user/model".
        requests: every request so far, in order.
    """

    def __init__(self, token: str):
        self.token = token
        self.repositories: dict[str, Repository] = {}
        self.requests: list[Request] = []
        self._tickets: dict[str, str] = {}
        self._interruptions: list[_Interruption] = []
        self._lock = threading.RLock()
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> LocalHub:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def interrupt(
        self,
        step: str,
        repository: str,
        *,
        nth: int = 1,
        status: int | None = 403,
        action: Callable[[], Any] | None = None,
    ) -> None:
        """Make the n-th request of this step from now on fail, once, with no effect.

        Args:
            step: as `ROUTES` calls it, such as "upload" or "commit".
            status: of the answer; None closes the connection without one.
            action: called first; it may kill the client.
        """
        self._interruptions.append(_Interruption(step, repository, nth, status, action))

    def asked(self, step: str, repository: str) -> list[Request]:
        """The requests of a step so far."""
        return [r for r in self.requests if (r.step, r.repository) == (step, repository)]

    def answer(self, request: Request) -> Answer | None:
        """None to close the connection."""
        with self._lock:
            self.requests.append(request)
            try:
                if self._is_interrupted(request):
                    return None
                self._authorize(request)
                answer = getattr(self, f"_{request.step}")(request)
            except HubError as error:
                content = {"error": str(error)} | error.details
                answer = Answer.of(content, error.status, error.headers)
            request.status = answer.status
            return answer

    def _is_interrupted(self, request: Request) -> bool:
        for interruption in self._interruptions:
            if (interruption.step, interruption.repository) != (request.step, request.repository):
                continue
            interruption.countdown -= 1
            if interruption.countdown == 0:
                self._interruptions.remove(interruption)
                if interruption.action is not None:
                    interruption.action()
                if interruption.status is not None:
                    raise HubError(interruption.status, "Interrupted.")
                return True
        return False

    def _authorize(self, request: Request) -> None:
        if request.token is not None and request.token != self.token:
            raise HubError(401, "Invalid credentials in Authorization header")
        has_token = request.token is not None
        repository = self.repositories.get(request.repository or "")
        if (
            request.step == "upload"
        ):  # which a ticket opens, as it does where clients do not send a token
            return
        if request.repository is not None and (
            repository is None or (repository.private and not has_token)
        ):
            status = 404 if has_token else 401
            raise HubError(status, "Repository not found", "RepoNotFound")
        if request.step in _WRITES and not has_token:
            raise HubError(401, "Invalid username or password.")

    # --- steps of a push --------------------------------------------------------------------------

    def _create(self, request: Request) -> Answer:
        wanted = request.json
        name = f"{wanted.get('organization') or 'user'}/{wanted['name']}"
        url = f"{self.url}/{name}"
        if name in self.repositories:
            raise HubError(409, "You already created this model repo", url=url)
        private = wanted.get("visibility") == "private"
        self.repositories[name] = Repository(name, private=private)
        return Answer.of({"url": url})

    def _validate(self, request: Request) -> Answer:
        return Answer.of({"errors": [], "warnings": []})

    def _branch(self, request: Request) -> Answer:
        start = request.json.get("startingPoint", "main")
        self.repositories[request.repository].point(request.arguments["ref"], start)
        return Answer.of({})

    def _tag(self, request: Request) -> Answer:
        self.repositories[request.repository].point(request.json["tag"], request.revision)
        return Answer.of({})

    def _preupload(self, request: Request) -> Answer:
        present = self.repositories[request.repository].files(request.revision)
        answers = []
        for file in request.json["files"]:
            path = file["path"]
            answer = {"path": path, "shouldIgnore": False}
            answer["uploadMode"] = "lfs" if path.endswith(LARGE_FILES) else "regular"
            if path in present:
                answer["oid"] = present[path].oid
            answers.append(answer)
        return Answer.of({"files": answers})

    def _batch(self, request: Request) -> Answer:
        lfs = f"{self.url}/{request.repository}.git/info/lfs"
        present = self.repositories[request.repository].large_files
        answers = []
        for wanted in request.json["objects"]:
            if wanted["oid"] not in present:
                ticket = secrets.token_hex(8)
                self._tickets[ticket] = wanted["oid"]
                upload = {"href": f"{lfs}/upload/{wanted['oid']}?ticket={ticket}"}
                wanted["actions"] = {"upload": upload, "verify": {"href": f"{lfs}/verify"}}
            answers.append(wanted)
        return Answer.of({"transfer": "basic", "objects": answers})

    def _upload(self, request: Request) -> Answer:
        oid = request.arguments["oid"]
        if self._tickets.get(request.query.get("ticket", "")) != oid:
            raise HubError(403, "This upload was not announced.")
        if hashlib.sha256(request.body).hexdigest() != oid:
            raise HubError(400, "The content does not have the sha256 it was announced with.")
        self.repositories[request.repository].large_files[oid] = request.body
        return Answer()

    def _verify(self, request: Request) -> Answer:
        wanted = request.json
        present = self.repositories[request.repository].large_files
        if len(present.get(wanted["oid"], b"")) != wanted["size"]:
            raise HubError(404, "LFS object not found")
        return Answer.of({})

    def _commit(self, request: Request) -> Answer:
        repository, ref = self.repositories[request.repository], request.revision
        url, answer = f"{self.url}/{repository.name}", {}
        if "create_pr" in request.query:
            ref = repository.open_pull_request(ref)
            answer["pullRequestUrl"] = f"{url}/discussions/{ref.rsplit('/', 1)[1]}"
        oid = repository.commit(ref, request.operations).oid
        return Answer.of(answer | {"commitOid": oid, "commitUrl": f"{url}/commit/{oid}"})

    # --- steps of a pull --------------------------------------------------------------------------

    def _info(self, request: Request) -> Answer:
        repository = self.repositories[request.repository]
        commit = repository.commit_at(request.revision)
        siblings = [{"rfilename": path} for path in sorted(commit.files)]
        about = {"id": repository.name, "modelId": repository.name, "private": repository.private}
        return Answer.of(about | {"sha": commit.oid, "siblings": siblings, "tags": []})

    def _tree(self, request: Request) -> Answer:
        files = self.repositories[request.repository].files(request.revision)
        folder = request.arguments.get("path", "")
        prefix = f"{folder}/" if folder else ""
        is_recursive = request.query.get("recursive", "").lower() == "true"
        entries = {}
        for path, blob in sorted(files.items()):
            if path.startswith(prefix):
                rest = path.removeprefix(prefix)
                if "/" not in rest or is_recursive:
                    entries[path] = {"type": "file", "path": path} | blob.describe()
                else:
                    path = prefix + rest.split("/")[0]
                    oid = hashlib.sha1(path.encode()).hexdigest()
                    entries[path] = {"type": "directory", "path": path, "oid": oid, "size": 0}
        if folder and not entries:
            raise HubError(404, f"{folder} does not exist", "EntryNotFound")
        return Answer.of(list(entries.values()))

    def _resolve(self, request: Request) -> Answer:
        commit = self.repositories[request.repository].commit_at(request.revision)
        headers = {"X-Repo-Commit": commit.oid}
        blob = commit.files.get(request.arguments["path"])
        if blob is None:
            error = HubError(404, "Entry not found", "EntryNotFound")
            error.headers |= headers
            raise error
        headers["ETag"] = f'"{blob.oid}"'
        if blob.is_large:
            headers |= {"X-Linked-Etag": f'"{blob.oid}"', "X-Linked-Size": str(len(blob.content))}
        return Answer(blob.content, headers=headers)

    def _unknown(self, request: Request) -> Answer:
        raise HubError(404, f"This hub does not know {request.method} {request.path}.")


class _Handler(BaseHTTPRequestHandler):
    """Bytes to `Request`, `Answer` to bytes."""

    hub: LocalHub
    protocol_version = "HTTP/1.1"  # connections are kept, so that every body must be read

    def _serve(self) -> None:
        authorization = self.headers.get("Authorization", "")
        token = authorization.removeprefix("Bearer ") or None
        request = Request.parse(self.command, self.path, token, self._read_body())
        answer = self.hub.answer(request)
        if answer is None:
            self.close_connection = True
            return
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer.content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.content)

    do_GET = do_HEAD = do_POST = do_PUT = _serve  # noqa: N815

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()  # the line break behind a chunk
        while self.rfile.readline().strip():  # trailers
            pass
        return body

    def log_message(self, *args: Any) -> None:
        """Nothing on stderr: `LocalHub.requests` is the log."""
