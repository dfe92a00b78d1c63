"""The names of tables by position: what is asked for the newest place is answered as for an earlier one."""

import random

import pytest

from spark_sink.schema.names import Names, Naming
from spark_sink.schema.table import Table

A, B, C, OTHER = (Table("public", name) for name in ("a", "b", "c", "other"))


@pytest.mark.parametrize("seed", range(5))
def test_the_newest_holder_of_a_name_is_the_one_that_a_search_finds(seed: int) -> None:
    chosen, names = random.Random(seed), Names()
    for lsn in range(1, 300):
        home = chosen.choice([A, B, C])
        names.add(Naming((lsn, 0), 16384, names.name(home), chosen.choice([A, B, C]), home))
        later = names.copy()
        later.add(Naming((1000, 0), 16385, OTHER, OTHER, OTHER))  # so that (lsn, 0) is not the newest place
        for name in (A, B, C):
            assert names.holder(name) == later.holder(name, (lsn, 0))
    assert len(names.namings) == 299


def test_a_copy_has_names_of_its_own() -> None:
    names = Names([Naming((1, 0), 16384, A, B, A)])
    other = names.copy()
    other.add(Naming((2, 0), 16384, B, C, A))
    assert [names.name(A), other.name(A)] == [B, C]
    assert [names.holder(C), other.holder(C), other.holder(B)] == [C, A, B]
    assert other.to_json()["names"][:1] == names.to_json()["names"]
