"""A cast gives the value that the text says, or none. Python's decimals are the oracle."""

from decimal import Context, Decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdcpipe.types.arrow.casts import convert_text

EXACT = Context(prec=200)
TYPES = [(38, 18), (38, 10), (38, 0), (38, 38), (10, 2), (7, 7)]
NUMBERS = st.from_regex(r"-?(0|[1-9][0-9]{0,44})(\.[0-9]{1,40})?", fullmatch=True)


def is_held(number: Decimal, precision: int, scale: int) -> bool:
    shifted = number.scaleb(scale, EXACT)
    return abs(number) < Decimal(10) ** (precision - scale) and shifted == shifted.to_integral_value(context=EXACT)


@given(st.sampled_from(TYPES), st.lists(NUMBERS, min_size=1, max_size=5))
def test_a_decimal_has_the_value_of_its_text(kind: tuple[int, int], texts: list[str]) -> None:
    converted = convert_text(pa.array(texts), pa.decimal128(*kind))
    numbers = [Decimal(text) for text in texts]
    assert converted.array.to_pylist() == [number if is_held(number, *kind) else None for number in numbers]
    assert converted.exact.to_pylist() == [text for text, number in zip(texts, numbers, strict=True) if not is_held(number, *kind)]


@pytest.mark.parametrize("text", ["700000000000000000001", "-350000000000000000000", "400000000000000000000", "NaN", "-Infinity"])
def test_a_number_with_more_digits_before_the_point_than_its_type_stays_a_text(text: str) -> None:
    """Arrow scales the number in 128 bits, and some results that overflow look like numbers of 38 digits."""
    numbers, lists = pa.decimal128(38, 18), pa.list_(pa.decimal128(38, 18))
    for given_text, kind, value in (("1.5", numbers, Decimal("1.5")), ("{1.5}", lists, [Decimal("1.5")])):
        large = text if kind == numbers else f"{{1,{text}}}"
        converted = convert_text(pa.array([given_text, large]), kind)
        assert (converted.array.to_pylist(), converted.exact.to_pylist()) == ([value, None], [large])
