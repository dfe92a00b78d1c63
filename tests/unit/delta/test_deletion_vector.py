"""Deletion vectors, without Spark."""

import base64
from pathlib import Path

import numpy as np
import pytest
from pyroaring import BitMap

from spark_sink.delta import deletion_vector


def test_deletion_vectors(tmp_path: Path) -> None:
    rows = [np.array([0, 5, 70_000]), np.arange(0, 200_000, 3), np.array([], dtype=np.int64)]
    said = deletion_vector.write(tmp_path, rows)
    assert [each["cardinality"] for each in said] == [3, 66_667, 0]
    for each, numbers in zip(said, rows, strict=True):
        assert np.array_equal(deletion_vector.read(tmp_path, each), numbers)
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    path.write_bytes(data[:20] + bytes([data[20] ^ 1]) + data[21:])
    with pytest.raises(ValueError, match="has no deletion vector"):
        deletion_vector.read(tmp_path, said[0])
    with pytest.raises(ValueError, match="storage type"):
        deletion_vector.read(tmp_path, said[0] | {"storageType": "x"})


def test_a_vector_in_the_log() -> None:
    data = deletion_vector._ONE_BITMAP + BitMap([3, 4, 7, 11, 18, 29]).serialize()
    text = base64.b85encode(data, pad=True).decode().translate(deletion_vector._TO_Z85)
    said = {"storageType": "i", "pathOrInlineDv": text, "sizeInBytes": len(data), "cardinality": 6}
    assert deletion_vector.read(Path("/"), said).tolist() == [3, 4, 7, 11, 18, 29]
    # The example in the protocol's text has another, older form.
    text = "wi5b=000010000siXQKl0rr91000f55c8Xg0@@D72lkbi5=-{L"
    with pytest.raises(ValueError, match="of an unknown format: 6439d3d0"):
        deletion_vector.read(Path("/"), said | {"pathOrInlineDv": text, "sizeInBytes": 40})
