from __future__ import annotations

import base64

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutline.wal.decoding.transactions import global_ids


def derive_global_ids(gids: list[str], form: str) -> list[str]:
    names: list[str] = global_ids(pa.array(gids, pa.string()), form).to_pylist()
    return names


@given(st.lists(st.text()))
def test_exact_uses_every_gid_unchanged(gids: list[str]) -> None:
    assert derive_global_ids(gids, "exact") == gids


@given(st.integers(-(2**31), 2**31 - 1), st.binary(max_size=64), st.lists(st.binary(max_size=64), min_size=1))
def test_the_branches_of_an_xa_transaction_have_one_global_id(
    form: int, transaction: bytes, branches: list[bytes]
) -> None:
    # The JDBC driver writes an Xid in this form. An empty global id names nothing, so the gid is used unchanged.
    name = f"{form}_{base64.b64encode(transaction).decode()}"
    gids = [f"{name}_{base64.b64encode(branch).decode()}" for branch in branches]
    assert derive_global_ids(gids, "xa") == ([name] * len(gids) if transaction else gids)


def test_xa_transactions_with_different_names_stay_apart() -> None:
    gids = ["1_YQ==_Yg==", "1_YQ==_Yw==", "1_ZA==_Yg==", "2_YQ==_Yg==", "1_YQ==", "order-1_YQ==_Yg==", ""]
    assert derive_global_ids(gids, "xa") == ["1_YQ==", "1_YQ==", "1_ZA==", "2_YQ==", *gids[4:]]


def test_the_connections_of_a_citus_transaction_have_one_global_id() -> None:
    gids = ["citus_0_1234_56_0", "citus_0_1234_56_12", "citus_0_1234_57_0", "citus_1_1234_56_0"]
    others = ["citus_0_1234_56", "citus_0_1234_56_x", "my_citus_0_1_2_3"]
    assert derive_global_ids(gids + others, "citus") == [
        "citus_0_1234_56",
        "citus_0_1234_56",
        "citus_0_1234_57",
        "citus_1_1234_56",
        *others,
    ]


@pytest.mark.parametrize(
    ("form", "gids", "expected"),
    [
        (r"^(?P<global>[^/]+)/\d+$", ["a/1", "a/2", "b/1", "b"], ["a", "a", "b", "b"]),
        # What Python's regexes allow and Arrow's don't: unnamed groups, look-around, back-references.
        (r"^(?P<global>(tx|job)-\d+)", ["tx-1:a", "job-1:b", "x"], ["tx-1", "job-1", "x"]),
        (r"(?P<global>\d+)(?=-branch)", ["7-branch-1", "7-branch-2", "7"], ["7", "7", "7"]),
        # A regex that matches an empty name must not merge all transactions into one.
        (r"^(?P<global>tx\d+)?", ["tx1", "a", "b"], ["tx1", "a", "b"]),
        (r"^(?P<global>\d*)", ["12", "a", "b"], ["12", "a", "b"]),
        (r"(?P<global>é+)", ["éé-1", "ü"], ["éé", "ü"]),
    ],
)
def test_the_named_group_of_a_regex_is_the_global_id(form: str, gids: list[str], expected: list[str]) -> None:
    assert derive_global_ids(gids, form) == expected


def test_no_gids_have_no_global_ids() -> None:
    for form in ("exact", "xa", "citus", r"(?P<global>x)"):
        assert derive_global_ids([], form) == []


def test_a_slice_uses_only_its_own_gids() -> None:
    gids = pa.array(["a/1", "b/1", "c/1"], pa.string()).slice(1)
    assert global_ids(gids, r"(?P<global>.)/").to_pylist() == ["b", "c"]
