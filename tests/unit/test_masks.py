"""Masks: which columns they find, the key of hashes, and masked values, many at once."""

from __future__ import annotations

import hmac
import pickle
import shlex
from itertools import pairwise

import pyarrow as pa
import pytest

from cdcpipe.errors import InvalidArgumentsError
from cdcpipe.masks import KEY_VARIABLE, Masks, parse_masks
from cdcpipe.publishing import exactly
from spark_sink.schema.masking import masked

KEY = "0123456789abcdef"


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    return KEY


def test_the_options() -> None:
    assert parse_masks(["a.b.c=hash", "a.b.c=d=null", "*.*.x=off"]) == {"a.b.c": "hash", "a.b.c=d": "null", "*.*.x": "off"}
    for text in "a.b.c", "a.b.c=sha1", "a.b=hash", "=hash":
        with pytest.raises(InvalidArgumentsError, match="--mask takes SCHEMA"):
            parse_masks([text])


def test_the_columns() -> None:
    masks = Masks.of({"public.t.a": "hash", "*.*.a": "redact", "public.t.b*": "hash", "public.t.bb": "null", "*.*.z": "off"})
    assert masks.kinds("public", "t", ["id", "a", "b", "bb", "z"]) == {"a": "redact", "b": "hash", "bb": "null"}
    assert masks.kinds("other", "t", ["a", "b"]) == {"a": "redact"}
    masks.check_there("public", "t", ["a", "bb"])
    masks.check_there("public", "u", ["x"])
    with pytest.raises(InvalidArgumentsError, match=r"public\.t has no column 'bb', which --mask names") as raised:
        masks.check_there("public", "t", ["a"])
    # What the hint says is understood, and does what it says.
    assert raised.value.hint
    dropped, _, renamed = raised.value.hint.partition(". If it was renamed")
    assert dropped.endswith(": --mask public.t.bb=off --mask 'public.t.b*b=null'")
    assert "--mask public.t.bb=off --mask 'public.t.b*b=null' --mask 'public.t.NEW*=null'" in renamed
    for hint in dropped, raised.value.hint:
        mended = given(masks, hint)
        mended.check_there("public", "t", ["a"])
        mended.check_there("public", "t", ["a", "NEW"])
        # Changes from before still have the column.
        assert mended.kinds("public", "t", ["bb"]) == {"bb": "null"}
    assert mended.kinds("public", "t", ["NEW"]) == {"NEW": "null"}
    masks.check_key("public", "t", ["id", "a", "b"], ["id", "b"])
    with pytest.raises(InvalidArgumentsError, match=r"public\.t: redact masks the key's a"):
        masks.check_key("public", "t", ["id", "a", "b"], ["id", "a"])


def test_a_table_that_was_renamed() -> None:
    masks = Masks.of({"public.old.a": "hash", "*.*.b": "null"})
    masks.check_renamed(("public", "old"), ("public", "old"), ["a", "b"])
    masks.check_renamed(("public", "old"), ("public", "new"), ["b", "c"])
    with pytest.raises(InvalidArgumentsError, match=r"public\.new has rows of public\.old, and --mask names a of public") as raised:
        masks.check_renamed(("public", "old"), ("public", "new"), ["a", "b"])
    assert raised.value.hint
    assert raised.value.hint.endswith("--mask public.new.a=hash")
    given(masks, raised.value.hint).check_renamed(("public", "old"), ("public", "new"), ["a", "b"])


ODD = ("crm.person", "it's a $table", 'x"*y')


@pytest.mark.parametrize("name", ODD)
def test_hints_quote_names(name: str) -> None:
    """What a hint says to give, a shell takes, and then the same start goes on."""
    before, now, columns = (name, "old"), (name, name), [f"a{name}", f"b{name}"]
    masks = Masks.of({exactly(*before, columns[0]): "hash", exactly(*before, columns[1]): "null"})
    with pytest.raises(InvalidArgumentsError, match="has rows of") as raised:
        masks.check_renamed(before, now, columns)
    mended = given(masks, raised.value.hint)
    mended.check_renamed(before, now, columns)
    mended.check_there(*now, columns)
    assert mended.kinds(*now, columns) == {columns[0]: "hash", columns[1]: "null"}
    with pytest.raises(InvalidArgumentsError, match="under the former name only") as raised:
        masks.check_columns(before, dict(enumerate(columns)), before, {0: columns[0], 1: name})
    given(masks, raised.value.hint).check_columns(before, dict(enumerate(columns)), before, {0: columns[0], 1: name})
    with pytest.raises(InvalidArgumentsError, match="which --mask names") as raised:
        masks.check_there(*before, ["id", columns[1]])
    mended = given(masks, raised.value.hint)
    mended.check_there(*before, ["id", columns[1]])
    assert mended.kinds(*before, columns) == {columns[0]: "hash", columns[1]: "null"}


@pytest.mark.parametrize("name", ["d", "ky", "email"])
def test_the_mask_of_a_dropped_column_leaves_the_others_alone(name: str) -> None:
    masks, others = Masks.of({f"public.t.{name}": "hash"}), ["id", "key", "note", "email_verified"]
    with pytest.raises(InvalidArgumentsError, match="which --mask names") as raised:
        masks.check_there("public", "t", others)
    assert given(masks, raised.value.hint).kinds("public", "t", [name, *others]) == {name: "hash"}


def given(masks: Masks, hint: str | None) -> Masks:
    """Return the masks after a start with the options that a hint names."""
    assert hint
    said = hint[hint.index("--mask ") :].partition("; with the *")[0].replace(". If it was renamed", " ")
    words = shlex.split(said.partition(". Only if")[0])
    options = [after for word, after in pairwise(words) if word == "--mask"]
    return Masks.of({**masks.as_kinds, **parse_masks(options)})


def test_columns_that_have_left_their_masks() -> None:
    """Another column may have the name by now: the numbers tell."""
    masks, person = Masks.of({"public.person.ssn": "hash", "*.*.b": "null"}), ("public", "person")
    before = {1: "id", 2: "ssn", 3: "token", 5: "b"}
    masks.check_columns(person, before, person, before)
    masks.check_columns(person, before, person, {1: "id", 3: "ssn", 4: "ssn_raw", 5: "b"})  # the masked column was dropped
    masks.check_columns(person, {}, person, {2: "raw"})
    swapped = {1: "id", 2: "ssn_raw", 3: "ssn", 5: "b"}
    with pytest.raises(InvalidArgumentsError, match=r"column public\.person\.ssn_raw was public\.person\.ssn, and") as raised:
        masks.check_columns(person, before, person, swapped)
    # What the hint says is understood, and descriptions from before the rename need not have the column.
    assert raised.value.hint
    assert "--mask 'public.person.ssn_raw*=hash'" in raised.value.hint
    mended = given(masks, raised.value.hint)
    mended.check_columns(person, before, person, swapped)
    mended.check_there(*person, before.values())
    with pytest.raises(InvalidArgumentsError, match=r"column public\.people\.ssn was public\.person\.ssn"):
        masks.check_columns(person, before, ("public", "people"), before)


def test_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed, others = Masks.of({"a.b.c": "hash"}), Masks.of({"a.b.c": "null"})
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert (others.with_key(), others.fingerprint) == (others, None)
    with pytest.raises(InvalidArgumentsError, match="is not set") as raised:
        hashed.with_key()
    assert "export the key that they were made with" in raised.value.hint
    assert f"export {KEY_VARIABLE}=$(openssl rand -hex 32)" in raised.value.hint
    monkeypatch.setenv(KEY_VARIABLE, "short")
    with pytest.raises(InvalidArgumentsError, match="has 5 bytes"):
        hashed.with_key()
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    one = hashed.fingerprint
    assert KEY not in repr(hashed.with_key())
    # Executors have the key with the work, not in their environment.
    sent = pickle.dumps(hashed.with_key())
    monkeypatch.delenv(KEY_VARIABLE)
    assert pickle.loads(sent).fingerprint == one
    monkeypatch.setenv(KEY_VARIABLE, KEY + "x")
    assert hashed.fingerprint != one


@pytest.mark.parametrize("texts", [[], [None], ["a", None, "a", "", "ü😀", "***", "x" * 100_000], [None, None]])
def test_masked_values(key: str, texts: list[str | None]) -> None:
    masks, array = Masks.of({"a.b.c": "hash"}), pa.array(texts, pa.string())
    expected = [None if text is None else hmac.new(key.encode(), text.encode(), "sha256").hexdigest() for text in texts]
    for values in array, pa.chunked_array([array]).combine_chunks(), array.cast(pa.large_string()):
        assert masked(values, "hash", masks).to_pylist() == expected
        assert masked(values, "redact", masks).to_pylist() == [None if text is None else "***" for text in texts]
        assert masked(values, "null", masks).to_pylist() == [None] * len(texts)
        assert {masked(values, kind, masks).type for kind in ("hash", "redact", "null")} == {pa.string()}
    assert masked(array[1:], "hash", masks).to_pylist() == expected[1:]


@pytest.mark.parametrize(
    ("columns", "may"),
    [(["id", "email"], True), (["id", "phone"], False), (["id", "name"], False), ([], False)],
)
def test_only_columns_that_another_mask_names_may_be_shown(columns: list[str], may: bool) -> None:
    masks = Masks.of({"public.orders.email": "redact", "*.*.name": "redact"})
    assert masks.may_name("public", "orders_1", columns) == may
    assert not masks.may_name("public", "orders", ["email", "name"])
