"""Reads and writes deletion vectors: sets of rows of a file that are not part of the Delta table any more. No Spark, no Java.

The formats are those of Delta's protocol (PROTOCOL.md, "Deletion Vectors"). A vector is a Roaring bitmap of row numbers. It is in a
file, which may have the vectors of several data files, or in the log itself.
"""

from __future__ import annotations

import base64
import string
import struct
import uuid
import zlib
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from pyroaring import BitMap

from spark_sink.files import places

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["file_name", "read", "write"]

_FILE_VERSION: Final = b"\x01"
_MAGIC: Final = 1681511377
_ONE_BITMAP: Final = struct.pack("<IQI", _MAGIC, 1, 0)
"""The header before the only bitmap, that of row numbers below 2**32. Row numbers have 64 bits, with a bitmap per upper half."""
_UUID_CHARACTERS: Final = 20

# Delta uses Z85. Python has the base 85 of RFC 1924. The two differ in the order of their characters.
_RFC_1924: Final = string.digits + string.ascii_uppercase + string.ascii_lowercase + "!#$%&()*+-;<=>?@^_`{|}~"
_Z85: Final = string.digits + string.ascii_lowercase + string.ascii_uppercase + ".-:+=^!/*?&<>()[]{}@%$#"
_FROM_Z85, _TO_Z85 = str.maketrans(_Z85, _RFC_1924), str.maketrans(_RFC_1924, _Z85)


def read(directory: Path, descriptor: Mapping[str, Any]) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Return the row numbers in a vector, in order. ``directory`` is the table's directory.

    Raises OSError; and ValueError if there is no valid vector, or if row numbers have more than 32 bits.
    """
    size, where = int(descriptor["sizeInBytes"]), descriptor["pathOrInlineDv"]
    match descriptor["storageType"]:
        case "i":
            data = base64.b85decode(where.translate(_FROM_Z85))[:size]
        case "u":
            data = _read_file(directory / _name(where), int(descriptor.get("offset") or 0), size)
        case other:
            raise ValueError(f"a deletion vector of the unknown storage type {other!r}")
    if len(data) != size or data[: len(_ONE_BITMAP)] != _ONE_BITMAP:
        raise ValueError(f"a deletion vector of an unknown format: {data[: len(_ONE_BITMAP)].hex()}")
    return np.asarray(BitMap.deserialize(data[len(_ONE_BITMAP) :]).to_array(), dtype=np.uint32)


def file_name(descriptor: Mapping[str, Any]) -> str | None:
    """Return the name of the file with a vector, in the table's directory; None if it is not in a file there."""
    return _name(descriptor["pathOrInlineDv"]) if descriptor["storageType"] == "u" else None


def _name(where: str) -> str:
    prefix, identity = where[:-_UUID_CHARACTERS], where[-_UUID_CHARACTERS:]
    name = f"deletion_vector_{uuid.UUID(bytes=base64.b85decode(identity.translate(_FROM_Z85)))}.bin"
    return f"{prefix}/{name}" if prefix else name


def _read_file(path: Path, offset: int, size: int) -> bytes:
    with path.open("rb") as stream:
        stream.seek(offset)
        framed = stream.read(size + 8)
    data = framed[4:-4]
    if len(framed) != size + 8 or framed != _framed(data):
        raise ValueError(f"{path} has no deletion vector of {size} bytes at {offset}")
    return data


def _framed(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data + struct.pack(">I", zlib.crc32(data))


def write(directory: Path, vectors: Sequence[np.ndarray[Any, Any]]) -> list[dict[str, Any]]:
    """Write vectors, given as row numbers, to a new file in the table's directory. Returns each vector's descriptor for the log."""
    identity = uuid.uuid4()
    where = base64.b85encode(identity.bytes).decode().translate(_TO_Z85)
    found = []
    written = bytearray(_FILE_VERSION)
    for rows in vectors:
        data = _ONE_BITMAP + BitMap(rows.astype(np.uint32)).serialize()
        found.append(
            {
                "storageType": "u",
                "pathOrInlineDv": where,
                "offset": len(written),
                "sizeInBytes": len(data),
                "cardinality": len(rows),
            }
        )
        written += _framed(data)
    places.write_file(directory / _name(where), bytes(written))
    return found
