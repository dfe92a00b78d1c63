"""What the client of one kind of object store needs, and the others do not. No pyspark."""

from __future__ import annotations

import asyncio
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from cdcpipe.errors import CdcpipeError
from cdcpipe.retry import RetryPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["StorageError", "create_object", "google_deadlines", "is_busy", "wait_for_azure"]

_CONNECT_S: Final = 30.0
_ANSWER_S: Final = 60.0
"""How long Google's store may take for a connection, and be silent while an answer is awaited or comes."""
_REQUEST_S: Final = 1800.0
"""The longest time of a request to it. One moves at most a column of a large file's row group, or a part of a new file."""
_COPY_S, _COPY_PAUSE_S = 1800.0, 0.5
"""How long a copy of a file in Azure may take, and how often to ask for it."""
_COPY_HINT: Final = "start again: nothing is lost, and the files are copied anew"
_PUTS: Final = RetryPolicy(attempts=8, first_pause_s=0.1, longest_pause_s=2.0)
"""S3 refuses a PUT while another request for the same object is under way. It may be our own, which the client has repeated."""


class StorageError(CdcpipeError):
    """An object store can't be reached, refuses a request, or lacks conditional writes."""


def google_deadlines() -> dict[str, Any]:
    """Return the option of gcsfs that ends a request to a silent network. Without it, a request waits for ever.

    The clients of the other stores have such deadlines of their own. gcsfs tries again what ends by one of the first two.
    """
    import aiohttp

    return {"requests_timeout": aiohttp.ClientTimeout(sock_connect=_CONNECT_S, sock_read=_ANSWER_S, total=_REQUEST_S)}


def create_object(fs: Any, path: str, data: bytes) -> None:
    """Create an object by a PUT on the condition that there is none. Raises FileExistsError if there is one.

    s3fs raises FileExistsError only if the answer names the condition in its body. Amazon's answers do, but those of MinIO and of
    some other servers do not. The status of the answer says the same.
    """
    try:
        _PUTS.call(partial(fs.pipe_file, path, data, mode="create"), OSError, where=_is_conflict)
    except OSError as ex:
        if _s3_status(ex) == HTTPStatus.PRECONDITION_FAILED:
            raise FileExistsError(str(ex)) from ex
        raise


def _is_conflict(ex: Exception) -> bool:
    return _s3_status(ex) == HTTPStatus.CONFLICT


def _s3_status(ex: Exception) -> int | None:
    """Return the HTTP status of the answer of S3 for which s3fs has raised this error; None if it is another error."""
    response = getattr(ex.__cause__, "response", None)  # of botocore's ClientError
    return response["ResponseMetadata"]["HTTPStatusCode"] if isinstance(response, dict) else None


def is_busy(ex: Exception) -> bool:
    """Tell whether a store has refused a request because it gets too many, or can't answer for the moment."""
    # gcsfs's HttpError has a code, Azure's HttpResponseError a status_code.
    status = _s3_status(ex) or getattr(ex, "code", None) or getattr(ex, "status_code", None)
    return status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)


def wait_for_azure(fs: Any, copied: Sequence[str]) -> None:
    """Wait until Azure has made these copies: it may answer a request for a copy before, and adlfs does not ask again.

    Raises StorageError if one is not made.
    """
    from fsspec import asyn

    async def wait(path: str) -> None:
        container, _, blob = path.partition("/")
        client, ends = fs.service_client.get_blob_client(container, blob), asyncio.get_running_loop().time() + _COPY_S
        # Without a status, another program has written the object since.
        while (status := (await client.get_blob_properties()).copy.status) not in ("success", None):
            if status != "pending":
                raise StorageError(f"the store did not copy a file to {path}: the copy is {status}", hint=_COPY_HINT)
            if asyncio.get_running_loop().time() > ends:
                raise StorageError(f"the store has not copied a file to {path} in {_COPY_S:.0f} s", hint=_COPY_HINT)
            await asyncio.sleep(_COPY_PAUSE_S)

    async def wait_for_all() -> None:
        await asyncio.gather(*map(wait, copied))

    asyn.sync(fs.loop, wait_for_all)
