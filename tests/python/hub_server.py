"""A hub on this machine: repositories, a storage at another address, and things that go wrong."""

import hashlib
import json
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

SIGNATURE = "signature-that-nobody-may-see"
_PIECE_BYTES = 1 << 14


@dataclass
class Fault:
    """What one answer with content does wrong.

    `status` is answered in place of content, with `headers`. Otherwise content is sent, of
    which `cut_after` bytes arrive before the connection breaks, or after which it stalls until
    the server is closed; `whole` ignores that only a part was asked for, `shifted` sends a part
    that begins elsewhere, `flipped` has a wrong bit, and `appended` is sent after the content.
    `before` is called first.
    """

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    cut_after: int | None = None
    stalls: bool = False
    whole: bool = False
    shifted: bool = False
    flipped: bool = False
    appended: bytes = b""
    before: Callable[[], object] = lambda: None


@dataclass
class Repository:
    """The files of a repository at a commit; those in large file storage by their ending.

    With `token` nobody else may have them. `listing` changes what the listing says.
    """

    files: dict[str, bytes]
    token: str | None = None
    branches: dict[str, str] = field(default_factory=lambda: {"main": "a" * 40})
    listing: Callable[[dict[str, Any]], object] = lambda _: None


@dataclass(frozen=True)
class Request:
    """What a client has asked for."""

    at_storage: bool
    path: str
    range: str | None
    token: str | None
    encoding: str | None
    time_s: float


class HubServer:
    """Serves `repositories` until it is closed.

    `faults` are those of the next answers with the content of a file, by its name, or of the
    next listings, by that of the repository. `served_bytes` counts content.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.faults: defaultdict[str, list[Fault]] = defaultdict(list)
        self.requests: list[Request] = []
        self.served_bytes: Counter[str] = Counter()
        self.bytes_per_s: float | None = None
        self.closed = threading.Event()
        self.lock = threading.Lock()
        self._servers = [self._serve(_HubHandler), self._serve(_StorageHandler)]
        self.url, self.storage_url = (
            f"http://127.0.0.1:{server.server_address[1]}" for server in self._servers
        )

    def _serve(self, handler: type["_Handler"]) -> ThreadingHTTPServer:
        server = _Server(("127.0.0.1", 0), type("Handler", (handler,), {"hub": self}))
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return server

    def reset(self) -> None:
        """Forgets everything but the addresses."""
        for kept in (self.repositories, self.faults, self.requests, self.served_bytes):
            kept.clear()
        self.bytes_per_s = None

    def close(self) -> None:
        """Ends the service."""
        self.closed.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def content_requests(self, name: str) -> list[Request]:
        """Those for the content of a file at the hub itself."""
        ending = "/" + quote(name)
        return [
            request
            for request in self.requests
            if not request.at_storage and request.path.endswith(ending)
        ]


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of clients that were killed."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    at_storage = False
    protocol_version = "HTTP/1.1"
    # Else the content waits until the client has confirmed the headers, for 40 ms.
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is inherited
        """Says nothing."""

    def do_GET(self) -> None:
        with self.hub.lock:
            self.hub.requests.append(
                Request(
                    self.at_storage,
                    self.path,
                    self.headers["Range"],
                    self.headers["Authorization"],
                    self.headers["Accept-Encoding"],
                    time.monotonic(),
                )
            )
        try:
            self.answer(urlsplit(self.path).path)
        except ConnectionError:
            self.close_connection = True

    def answer(self, path: str) -> None:
        raise NotImplementedError

    def send(self, status: int, headers: Mapping[str, str], content: bytes = b"") -> None:
        self.send_response_only(status)
        for name, value in {"Date": self.date_time_string(), **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def next_fault(self, name: str) -> Fault:
        with self.hub.lock:
            waiting = self.hub.faults[name]
            return waiting.pop(0) if waiting else Fault()

    def send_file(self, name: str, content: bytes) -> None:
        fault = self.next_fault(name)
        fault.before()
        if fault.status:
            self.send(fault.status, fault.headers)
            return
        start = 0
        asked = self.headers["Range"]
        if asked is not None and not fault.whole:
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
            if start >= len(content):
                self.send(416, {"Content-Range": f"bytes */{len(content)}"})
                return
        if fault.shifted:
            start //= 2
        sent = bytearray(content[start:])
        if fault.flipped:
            sent[len(sent) // 2] ^= 1
        sent += fault.appended
        self.send_response(206 if start or fault.shifted else 200)
        if start or fault.shifted:
            place = f"bytes {start}-{len(content) - 1}/{len(content)}"
            self.send_header("Content-Range", place)
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        self._send_slowly(name, bytes(sent if fault.cut_after is None else sent[: fault.cut_after]))
        if fault.stalls:
            self.hub.closed.wait(30)
        if fault.cut_after is not None:
            self.close_connection = True

    def _send_slowly(self, name: str, content: bytes) -> None:
        for begin in range(0, len(content), _PIECE_BYTES):
            piece = content[begin : begin + _PIECE_BYTES]
            self.wfile.write(piece)
            with self.hub.lock:
                self.hub.served_bytes[name] += len(piece)
            if self.hub.bytes_per_s is not None:
                time.sleep(len(piece) / self.hub.bytes_per_s)


class _HubHandler(_Handler):
    def answer(self, path: str) -> None:
        parts = [unquote(part) for part in path.strip("/").split("/")]
        listing = parts[:2] == ["api", "models"]
        name = "/".join(parts[2:4] if listing else parts[:2])
        repository = self.hub.repositories.get(name)
        if repository is None:
            self.send(404, {"X-Error-Code": "RepoNotFound"})
        elif repository.token is not None and (
            self.headers["Authorization"] != f"Bearer {repository.token}"
        ):
            # As the hub does it, with more than anybody should repeat.
            repeated = str(self.headers["Authorization"])
            self.send(403 if self.headers["Authorization"] else 401, {"X-Error-Message": repeated})
        elif listing:
            self._list(name, repository, parts[5] if len(parts) > 5 else "main")
        else:
            self._resolve(repository, parts[3], "/".join(parts[4:]))

    def _list(self, name: str, repository: Repository, revision: str) -> None:
        fault = self.next_fault(name)
        fault.before()
        commit = repository.branches.get(revision)
        if revision in repository.branches.values():
            commit = revision
        if fault.status:
            self.send(fault.status, fault.headers)
        elif commit is None:
            self.send(404, {"X-Error-Code": "RevisionNotFound"})
        else:
            siblings = [_sibling(*item) for item in repository.files.items()]
            document = {"id": name, "sha": commit, "siblings": siblings}
            repository.listing(document)
            self.send(200, {"Content-Type": "application/json"}, json.dumps(document).encode())

    def _resolve(self, repository: Repository, revision: str, path: str) -> None:
        content = repository.files.get(path)
        if content is None or revision not in repository.branches.values():
            self.send(404, {"X-Error-Code": "EntryNotFound"})
        elif is_stored(path):
            place = f"{self.hub.storage_url}/{quote(path)}?Signature={SIGNATURE}"
            self.send(302, {"Location": place})
        else:
            self.send_file(path, content)


class _StorageHandler(_Handler):
    at_storage = True

    def answer(self, path: str) -> None:
        name = unquote(path).removeprefix("/")
        signed = parse_qs(urlsplit(self.path).query).get("Signature") == [SIGNATURE]
        if self.headers["Authorization"] is not None or not signed:
            self.send(400, {})
            return
        contents = (repository.files.get(name) for repository in self.hub.repositories.values())
        self.send_file(name, next(content for content in contents if content is not None))


def is_stored(path: str) -> bool:
    """Whether a file is in large file storage."""
    return path.endswith((".safetensors", ".model"))


def _sibling(path: str, content: bytes) -> dict[str, Any]:
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    sibling: dict[str, Any] = {"rfilename": path, "size": len(content), "blobId": blob}
    if is_stored(path):
        sha256 = hashlib.sha256(content).hexdigest()
        sibling["blobId"] = "b" * 40  # of the pointer, not of the content
        sibling["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 134}
    return sibling
