"""The Hugging Face Hub: what a repository lists, and the bytes of its files.

`huggingface_hub` gives addresses, the token and the connections. Its `hf_hub_download` is
not used: it keeps no partial file that a later run could continue, and compares sizes, not
hashes. Files are asked for by plain HTTP, which the hub also serves for what it keeps in Xet
storage.

Nothing that the hub answers is repeated in an error: addresses of stored files are signed,
and an answer might hold the token.
"""

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, TypeAlias

from huggingface_hub import HfApi, constants, get_session, get_token, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

from k3rs._k3rs import __version__
from k3rs.exceptions import CheckpointError, InputError, K3Error, ReadError
from k3rs.hub.manifest import MANIFEST_FILE, HashKind, ListedFile, Manifest

# Public names, which the library does not declare as such to type checkers.
if TYPE_CHECKING:
    import httpx2 as httpx
    from huggingface_hub.hf_api import RepoSibling
    from huggingface_hub.utils._headers import build_hf_headers
    from huggingface_hub.utils._http import parse_ratelimit_headers
else:
    from huggingface_hub.utils import build_hf_headers, httpx, parse_ratelimit_headers

__all__ = ["DEFAULT_RETRIES", "Attempts", "Hub", "StoppedError", "TransientError"]

Pieces: TypeAlias = Iterator[bytes]

DEFAULT_RETRIES = 10
_LISTING_RETRIES_MAX = 5
_FIRST_WAIT_S = 0.25
_LONGEST_WAIT_S = 60.0
_LONGEST_ASKED_WAIT_S = 900.0
_CONTINUE_HINT = "check the connection, then run the same command again: it continues"


class StoppedError(Exception):
    """Raised in a thread that was told to stop; never reaches the user."""


class TransientError(Exception):
    """Something that may work the next time; `wait_s` is how long the hub wants us to wait."""

    def __init__(self, what: str, wait_s: float | None = None) -> None:
        super().__init__(what)
        self.wait_s = wait_s


class Attempts:
    """Decides whether and when something that failed is tried again.

    Gives up after more than `retries` failures in a row. The waits between them double from a
    quarter of a second up to a minute, unless the hub says how long to wait. `stop` ends a wait.
    """

    def __init__(
        self, what: str, retries: int, stop: threading.Event, note: Callable[[str], None]
    ) -> None:
        self._what = what
        self._retries = retries
        self._stop = stop
        self._note = note
        self._failures = 0

    def failed(self, error: TransientError, *, progressed: bool = False) -> None:
        """Waits before the next attempt, or raises `ReadError`."""
        self._failures = 1 if progressed else self._failures + 1
        if self._failures > self._retries:
            raise ReadError(
                f"expected {self._what} from {constants.ENDPOINT}, found: {error} "
                f"(gave up after {self._failures} attempts)",
                _CONTINUE_HINT,
            ) from error
        wait_s = min(_FIRST_WAIT_S * 2.0 ** (self._failures - 1), _LONGEST_WAIT_S)
        if error.wait_s is not None:
            wait_s = error.wait_s
            if wait_s > _LONGEST_ASKED_WAIT_S:
                raise ReadError(
                    f"expected {self._what} from {constants.ENDPOINT}, found: {error}, and to "
                    f"wait for {wait_s:.0f} seconds",
                    "run the same command again later: it continues",
                ) from error
        self._note(f"{self._what}: {error}; trying again in {round(wait_s, 2):g} s")
        if self._stop.wait(wait_s):
            raise StoppedError


class Hub:
    """The hub at `HF_ENDPOINT`, with the token of the environment or the login, if any.

    Raises `InputError` for a token that cannot be one.
    """

    def __init__(
        self,
        *,
        retries: int = DEFAULT_RETRIES,
        stop: threading.Event,
        note: Callable[[str], None],
    ) -> None:
        self._retries = retries
        self._stop = stop
        self._note = note
        # Sent as a header, it would be repeated in the error of the HTTP library.
        token = get_token()
        if token is not None and re.fullmatch(r"[\x21-\x7e]+", token) is None:
            raise InputError(
                "expected a token of printable ASCII characters, found others",
                "check HF_TOKEN, or log in again with `hf auth login`",
            )

    def attempts(self, what: str) -> Attempts:
        """The patience that is had with `what`."""
        return Attempts(what, self._retries, self._stop, self._note)

    def listing(self, repo: str, revision: str | None) -> Manifest:
        """All files of a repository, at the commit that `revision` names at this moment."""
        what = f"the files of {repo}" + ("" if revision is None else f" at {revision}")
        retries = min(self._retries, _LISTING_RETRIES_MAX)
        attempts = Attempts(what, retries, self._stop, self._note)
        while True:
            try:
                with _translated(what, repo):
                    return _list(repo, revision)
            except TransientError as error:
                attempts.failed(error)

    @contextmanager
    def stream(
        self, repo: str, revision: str, path: str, offset: int
    ) -> Iterator[tuple[int, Pieces]]:
        """The content of a file from byte `offset` on, as it comes.

        Gives the offset at which it really begins, which is 0 where the server does not serve
        parts. Inside as well as at the beginning, `TransientError` is what may be tried again.
        """
        headers = build_hf_headers(library_name="k3rs", library_version=__version__)
        # Parts of compressed content could not be put together.
        headers["Accept-Encoding"] = "identity"
        if offset:
            headers["Range"] = f"bytes={offset}-"
        what = f"`{path}` of {repo}"
        url = hf_hub_url(repo, path, revision=revision)
        timeout = httpx.Timeout(constants.HF_HUB_DOWNLOAD_TIMEOUT)
        # Away from the hub, which is where stored files are, the session sends no token.
        with (
            _translated(what, repo),
            get_session().stream(
                "GET", url, headers=headers, timeout=timeout, follow_redirects=True
            ) as response,
        ):
            if response.status_code not in {200, 206}:
                raise _refusal(response, what, repo)
            start = 0
            if response.status_code == 206:
                start = _first_byte(response)
                if start != offset:
                    raise TransientError(f"bytes from {start} instead of {offset} on")
            yield start, response.iter_bytes()


def _list(repo: str, revision: str | None) -> Manifest:
    try:
        info = HfApi(library_name="k3rs", library_version=__version__).model_info(
            repo,
            revision=revision,
            files_metadata=True,
            timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
        )
        commit, siblings = info.sha, info.siblings
    except HFValidationError as error:
        raise InputError(
            f"expected a repository such as `moonshotai/Kimi-K3`, found `{repo}`",
            "give the two parts of its address on the hub, OWNER/NAME",
        ) from error
    except (HfHubHTTPError, OfflineModeIsEnabled):
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _strange_listing(repo) from error
    if not isinstance(commit, str) or not siblings or re.fullmatch("[0-9a-f]{40}", commit) is None:
        raise _strange_listing(repo)
    # A manifest in the repository would be in the place of ours.
    listed = (sibling for sibling in siblings if sibling.rfilename != MANIFEST_FILE)
    try:
        return Manifest(repo, commit, tuple(_listed_file(sibling, repo) for sibling in listed))
    except CheckpointError as error:
        raise CheckpointError(
            f"the files of {repo} from {constants.ENDPOINT}: {error}",
            error.hint or _strange_listing(repo).hint,
        ) from error


def _listed_file(sibling: "RepoSibling", repo: str) -> ListedFile:
    if sibling.size is None or (sibling.lfs is None and sibling.blob_id is None):
        raise _strange_listing(repo)
    if sibling.lfs is not None:
        return ListedFile(sibling.rfilename, sibling.size, HashKind.SHA256, sibling.lfs.sha256)
    return ListedFile(sibling.rfilename, sibling.size, HashKind.GIT_SHA1, str(sibling.blob_id))


def _strange_listing(repo: str) -> CheckpointError:
    return CheckpointError(
        f"expected the files of {repo} with sizes and hashes from {constants.ENDPOINT}, found "
        "something else",
        "check HF_ENDPOINT, and whether a proxy answers in place of the hub",
    )


@contextmanager
def _translated(what: str, repo: str) -> Iterator[None]:
    """Errors of the HTTP library as ours, without addresses and headers."""
    try:
        yield
    except HfHubHTTPError as error:
        raise _refusal(error.response, what, repo) from None
    except OfflineModeIsEnabled:
        raise ReadError(
            f"expected {what} from {constants.ENDPOINT}, found: HF_HUB_OFFLINE is set",
            "unset HF_HUB_OFFLINE",
        ) from None
    except (httpx.UnsupportedProtocol, httpx.InvalidURL):
        raise InputError(
            f"expected the address of a hub, found `{constants.ENDPOINT}`",
            "HF_ENDPOINT begins with https:// or http://",
        ) from None
    except httpx.TimeoutException:
        raise TransientError("no answer in time") from None
    except httpx.ConnectError as error:
        raise TransientError(f"no connection ({error})") from None
    except httpx.RequestError:
        raise TransientError("the connection broke") from None


def _refusal(response: httpx.Response, what: str, repo: str) -> K3Error | TransientError:
    """What an answer without content means."""
    status = response.status_code
    redirected = bool(response.history)
    found = f"HTTP {status}"
    if status in {408, 429} or status >= 500:
        return TransientError(found, _asked_wait_s(response))
    if status in {401, 403} and redirected:
        # The address of a stored file is signed for a while; the hub gives a new one.
        return TransientError(f"{found} from the storage")
    if status in {401, 403}:
        return ReadError(
            f"expected {what} from {constants.ENDPOINT}, found: access refused ({found})",
            f"check the name; if it is right, accept the conditions at {constants.ENDPOINT}/{repo} "
            "and set HF_TOKEN, or log in with `hf auth login`",
        )
    if status == 404:
        return CheckpointError(
            f"expected {what} from {constants.ENDPOINT}, found nothing of that name ({found})",
            "check the repository and --revision; a private one needs HF_TOKEN, or a login with "
            "`hf auth login`",
        )
    return ReadError(f"expected {what} from {constants.ENDPOINT}, found: {found}", _CONTINUE_HINT)


def _first_byte(response: httpx.Response) -> int:
    """Where the part that was sent begins in the file."""
    match = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
    if match is None:
        raise TransientError("a part of the file that does not say which")
    return int(match[1])


def _asked_wait_s(response: httpx.Response) -> float | None:
    """Seconds to wait by `Retry-After` (a number or a date), else by the hub's rate limit."""
    asked = response.headers.get("Retry-After", "").strip()
    if re.fullmatch(r"\d{1,9}", asked):
        return float(asked)
    if asked:
        at_s = _seconds_of_date(asked)
        # By the clock that has set the date: ours may be another one.
        now_s = _seconds_of_date(response.headers.get("Date", ""))
        return None if at_s is None else max(0.0, at_s - (now_s or time.time()))
    limit = parse_ratelimit_headers(response.headers)
    if response.status_code == 429 and limit is not None and limit.remaining == 0:
        return float(limit.reset_in_seconds)
    return None


def _seconds_of_date(text: str) -> float | None:
    """Seconds since 1970 of the date in a header, in UTC unless it says; else `None`."""
    try:
        date = parsedate_to_datetime(text)
        return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None
