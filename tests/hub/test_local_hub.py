"""The hub of these tests refuses what the Hub refuses."""

import hashlib
import http.client
import json

import pytest
from hub_process import TOKEN
from local_hub import LocalHub

CONTENT = b"weights"
OID = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def hub():
    with LocalHub(TOKEN) as hub:
        ask(hub, "POST", "/api/repos/create", {"name": "model", "organization": "user"})
        yield hub


def ask(hub, method, path, body=b"", token=TOKEN):
    connection = http.client.HTTPConnection(hub.url.removeprefix("http://"), timeout=10)
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(method, path, body, {"Authorization": f"Bearer {token}"} if token else {})
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response, content


def announce(hub, oid=OID):
    path = "/user/model.git/info/lfs/objects/batch"
    _, content = ask(hub, "POST", path, {"objects": [{"oid": oid, "size": len(CONTENT)}]})
    (wanted,) = json.loads(content)["objects"]
    return wanted["actions"]["upload"]["href"].removeprefix(hub.url) if "actions" in wanted else None


def commit(hub, *operations, **changes):
    lines = [{"key": "header", "value": {"summary": "a commit"}}, *operations]
    body = b"\n".join(json.dumps(line).encode() for line in lines)
    return ask(hub, "POST", "/api/models/user/model/commit/main", body, **changes)[0].status


LARGE = {"key": "lfsFile", "value": {"path": "model.safetensors", "oid": OID, "size": len(CONTENT)}}
SMALL = {"key": "file", "value": {"path": "config.json", "content": "e30="}}


def test_damaged_upload_is_refused(hub):
    path = announce(hub)
    assert ask(hub, "PUT", path, CONTENT[:-1])[0].status == 400
    assert commit(hub, SMALL, LARGE) == 400
    assert hub.repositories["user/model"].files() == {}  # the small one neither
    assert ask(hub, "PUT", path, CONTENT)[0].status == 200
    assert commit(hub, SMALL, LARGE) == 200
    response, content = ask(hub, "GET", "/user/model/resolve/main/model.safetensors")
    assert (content, response.headers["X-Linked-Etag"]) == (CONTENT, f'"{OID}"')
    assert announce(hub) is None  # it is there


def test_upload_that_was_not_announced_is_refused(hub):
    assert ask(hub, "PUT", f"/user/model.git/info/lfs/upload/{OID}", CONTENT)[0].status == 403


@pytest.mark.parametrize("token", [None, "hf_of_another"])
def test_writes_need_the_token(hub, token):
    assert commit(hub, SMALL, token=token) == 401
    assert ask(hub, "POST", "/api/repos/create", {"name": "other"}, token=token)[0].status == 401
    assert list(hub.repositories) == ["user/model"]
    assert len(hub.repositories["user/model"].history()) == 1


def test_chunked_body_is_read(hub):
    lines = iter([json.dumps(SMALL).encode()[:7], json.dumps(SMALL).encode()[7:]])
    connection = http.client.HTTPConnection(hub.url.removeprefix("http://"), timeout=10)
    path = "/api/models/user/model/commit/main"
    connection.request("POST", path, lines, {"Authorization": f"Bearer {TOKEN}"}, encode_chunked=True)
    assert connection.getresponse().status == 200
    assert hub.repositories["user/model"].files()["config.json"].content == b"{}"


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/user/other/resolve/main/config.json", "RepoNotFound"),
        ("/user/model/resolve/v1/config.json", "RevisionNotFound"),
        ("/user/model/resolve/main/config.json", "EntryNotFound"),
        ("/api/models/user/model/revision/v1", "RevisionNotFound"),
        ("/api/models/user/model/tree/main/templates", "EntryNotFound"),
    ],
)
def test_missing_things_have_their_codes(hub, path, code):
    response, _ = ask(hub, "GET", path)
    assert (response.status, response.headers["X-Error-Code"]) == (404, code)


def test_interruption_happens_once_and_changes_nothing(hub):
    hub.interrupt("commit", "user/model", nth=2)
    assert [commit(hub, SMALL) for _ in range(3)] == [200, 403, 200]
    hub.interrupt("commit", "user/model", status=None)
    with pytest.raises(http.client.RemoteDisconnected):
        commit(hub, SMALL)
    assert len(hub.repositories["user/model"].history()) == 3
