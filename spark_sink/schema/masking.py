"""Masks the values of a column, many at once. cdcpipe/masks.py says which columns are masked."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc

from cdcpipe.masks import HASH, REDACT

if TYPE_CHECKING:
    from cdcpipe.masks import Masks

__all__ = ["REDACTED", "masked"]

REDACTED: Final = "***"


def masked(texts: pa.Array, kind: str, masks: Masks) -> pa.StringArray:
    """Return the masked texts. NULL stays NULL. Python runs for each different value, and only with hash."""
    texts = texts.cast(pa.string())
    if kind == HASH:
        encoded = texts.dictionary_encode()
        begun = hmac.new(masks.with_key().key, digestmod="sha256")
        return pa.array([_digest(begun, text) for text in encoded.dictionary.to_pylist()], pa.string()).take(encoded.indices)
    if kind == REDACT:
        return pc.if_else(texts.is_valid(), pa.scalar(REDACTED), pa.scalar(None, pa.string()))
    return pa.nulls(len(texts), pa.string())


def _digest(begun: hmac.HMAC, text: str) -> str:
    digest = begun.copy()
    digest.update(text.encode())
    return digest.hexdigest()
