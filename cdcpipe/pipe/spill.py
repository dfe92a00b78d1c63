"""Moves bytes out of memory, to files without names in ``$TMPDIR``. The kernel deletes them at the end of the process.

    spills = Spills()
    spill = spills.open()
    spill.append(b"some bytes")
    spill.read(5, 5)
    spill.close()

The number of open files is bounded, however many spills there are. Up to ``MAX_FILES`` spills have one file each, so that closing a
spill frees its disk space at once. Further spills share these files. A file consists of blocks; each block belongs to one spill,
and a free block is used again. A file is cut off after its last used block, and closed with its last spill.
"""

from __future__ import annotations

import os
import tempfile
from array import array
from collections.abc import Iterable
from typing import IO, Final

from cdcpipe.errors import OutputError

__all__ = ["MAX_FILES", "Spill", "Spills"]

MAX_FILES: Final = 16
_BLOCK_BYTES: Final = 64 << 10


class Spills:
    """A set of files. ``open`` begins a spill in one of them."""

    def __init__(self) -> None:
        self._files: list[_File] = []

    def open(self) -> Spill:
        """Begin a spill. Raises OutputError if no file can be created."""
        self._files = [file for file in self._files if file.users]
        if len(self._files) < MAX_FILES:
            self._files.append(_File())
        return Spill(min(self._files, key=lambda file: file.users))


class Spill:
    """Bytes in blocks of a file. Every method raises OutputError if the disk fails."""

    __slots__ = ("_blocks", "_file", "size")

    def __init__(self, file: _File) -> None:
        self._file = file
        self._blocks = array("Q")
        self.size = 0
        file.users += 1

    def append(self, data: bytes | bytearray) -> None:
        """Add to the end."""
        with memoryview(data) as view:
            pos = 0
            while pos < len(view):
                offset = self.size % _BLOCK_BYTES
                if offset == 0:
                    self._blocks.append(self._file.take_block())
                piece = view[pos : pos + _BLOCK_BYTES - offset]
                self._file.write(piece, self._blocks[-1] * _BLOCK_BYTES + offset)
                pos += len(piece)
                self.size += len(piece)

    def read(self, pos: int, size: int) -> bytes:
        """Return ``size`` bytes from ``pos`` on. All of them must have been written."""
        data = bytearray()
        while len(data) < size:
            block, offset = divmod(pos + len(data), _BLOCK_BYTES)
            count = min(size - len(data), _BLOCK_BYTES - offset)
            data += self._file.read(self._blocks[block] * _BLOCK_BYTES + offset, count)
        return bytes(data)

    def truncate(self, size: int) -> None:
        """Keep the first ``size`` bytes."""
        kept = -(-size // _BLOCK_BYTES)
        self._file.free_blocks(self._blocks[kept:])
        del self._blocks[kept:]
        self.size = size

    def close(self) -> None:
        """Free the disk space."""
        self._file.leave(self._blocks)


class _File:
    """A file of blocks. ``users`` is the number of spills in it."""

    def __init__(self) -> None:
        self.users = 0
        self._count = 0
        self._free: set[int] = set()
        # tempfile would use another writable directory if $TMPDIR does not exist. Here that is an error.
        self._directory = os.environ.get("TMPDIR") or tempfile.gettempdir()
        try:
            self._file: IO[bytes] = tempfile.TemporaryFile(dir=self._directory, prefix=".tmp-cdcpipe-", buffering=0)  # noqa: SIM115 - open until its last spill is closed
        except OSError as ex:
            raise self._error(ex) from ex

    def _error(self, ex: OSError) -> OutputError:
        return OutputError(
            f"cannot keep a transaction in progress in {self._directory}: {ex.strerror}",
            hint="make room there, set TMPDIR to a larger directory, or keep more in memory (--spill-threshold);"
            " nothing of this transaction was confirmed",
        )

    def take_block(self) -> int:
        if self._free:
            return self._free.pop()
        self._count += 1
        return self._count - 1

    def free_blocks(self, blocks: Iterable[int]) -> None:
        count = self._count
        self._free.update(blocks)
        while self._count - 1 in self._free:
            self._count -= 1
            self._free.discard(self._count)
        if self._count < count:
            try:
                self._file.truncate(self._count * _BLOCK_BYTES)
            except OSError as ex:
                raise self._error(ex) from ex

    def leave(self, blocks: Iterable[int]) -> None:
        self.users -= 1
        if self.users:
            self.free_blocks(blocks)
        else:
            self._file.close()

    def write(self, data: memoryview, pos: int) -> None:
        written = 0
        try:
            while written < len(data):
                written += os.pwrite(self._file.fileno(), data[written:], pos + written)
        except OSError as ex:
            raise self._error(ex) from ex

    def read(self, pos: int, size: int) -> bytes:
        data = b""
        try:
            while len(data) < size:
                piece = os.pread(self._file.fileno(), size - len(data), pos + len(data))
                if not piece:
                    raise OutputError("another program has cut a file with a transaction in progress")
                data += piece
        except OSError as ex:
            raise self._error(ex) from ex
        return data
