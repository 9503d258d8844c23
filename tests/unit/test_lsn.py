"""WAL positions: PostgreSQL's text form, and how they compare with the integers of columns."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutline.fleet.lsn import ORIGIN, Lsn


@given(st.integers(0, 2**64 - 1))
def test_the_text_form_round_trips(position: int) -> None:
    assert Lsn.parse(str(Lsn(position))) == position


def test_the_text_form_is_the_one_that_postgresql_writes() -> None:
    assert f"{Lsn(0x16_B374D848)} {Lsn(0x1_00000000)} {ORIGIN}" == "16/B374D848 1/0 0/0"
    assert repr([Lsn(0x2A)]) == "[Lsn(0/2A)]"


@pytest.mark.parametrize("text", ["", "0", "0/", "/0", "0/123456789", "g/0", "0/0 ", "-1/0"])
def test_any_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a WAL position"):
        Lsn.parse(text)


def test_a_position_compares_with_columns_and_can_be_sent_to_executors() -> None:
    assert (np.array([1, 2, 3]) >= Lsn(2)).tolist() == [False, True, True]
    sent = pickle.loads(pickle.dumps(Lsn(7)))
    assert (type(sent), sent) == (Lsn, 7)
    assert json.dumps(Lsn(7)) == "7"
