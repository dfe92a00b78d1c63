"""What the client of one kind of object store needs, and the others do not. No pyspark."""

from __future__ import annotations

import asyncio
import time
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from cdcpipe.errors import CdcpipeError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["StorageError", "create_object", "google_deadlines", "wait_for_azure"]

_CONNECT_S: Final = 30.0
_ANSWER_S: Final = 60.0
"""How long Google's store may take for a connection, and be silent while an answer is awaited or comes."""
_REQUEST_S: Final = 1800.0
"""The longest time of a request to it. One moves at most a column of a large file's row group, or a part of a new file."""
_COPY_S, _COPY_PAUSE_S = 1800.0, 0.5
"""How long a copy of a file in Azure may take, and how often to ask for it."""
_COPY_HINT: Final = "start again: nothing is lost, and the files are copied anew"
_MOST_CONFLICTS, _CONFLICT_PAUSE_S = 10, 0.5
"""How often to repeat a PUT that S3 has refused because another request for the same object is under way, and when."""


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
    conflicts = 0
    while True:
        try:
            fs.pipe_file(path, data, mode="create")
        except FileExistsError:
            raise
        except OSError as ex:
            status = _s3_status(ex)
            if status == HTTPStatus.PRECONDITION_FAILED:
                raise FileExistsError(str(ex)) from ex
            if status != HTTPStatus.CONFLICT or conflicts == _MOST_CONFLICTS:
                raise
        else:
            return
        # The other request may be our own first one: its answer was lost, and the client has repeated it.
        conflicts += 1
        time.sleep(_CONFLICT_PAUSE_S)


def _s3_status(ex: OSError) -> int | None:
    """Return the HTTP status of the answer of S3 for which s3fs has raised this error; None if it is another error."""
    response = getattr(ex.__cause__, "response", None)  # of botocore's ClientError
    return response["ResponseMetadata"]["HTTPStatusCode"] if isinstance(response, dict) else None


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
