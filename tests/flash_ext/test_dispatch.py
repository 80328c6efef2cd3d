"""The choice of a path and row is a pure function: every rule of it, without a GPU."""

from __future__ import annotations

import pytest

from flash_ext.dispatch import (
    Arch,
    Call,
    DType,
    Key,
    Layout,
    Mask,
    Pass,
    Variant,
    choose,
    mask_of,
    normalise_window,
    serves,
)
from flash_ext.extension import _C, table

H100, A100, T4, B200 = (9, 0), (8, 0), (7, 5), (10, 0)
TABLE = [
    Key(Pass.FWD, Arch.SIMT, DType.BF16, 256, 256, Mask.ANY, Layout.ANY, Variant.ANY),
    Key(Pass.FWD, Arch.SIMT, DType.F32, 256, 256, Mask.ANY, Layout.ANY, Variant.ANY),
    Key(Pass.FWD, Arch.SM80, DType.BF16, 128, 128, Mask.ANY, Layout.ANY, Variant.PLAIN),
    Key(Pass.FWD, Arch.SM90, DType.BF16, 64, 64, Mask.FULL, Layout.DENSE, Variant.PLAIN),
    Key(Pass.FWD, Arch.SM90, DType.BF16, 64, 64, Mask.CAUSAL, Layout.ANY, Variant.PLAIN),
    Key(Pass.FWD, Arch.SM90, DType.BF16, 128, 128, Mask.ANY, Layout.ANY, Variant.ANY),
]


def call(**changes) -> Call:
    plain = Call(Pass.FWD, DType.BF16, 64, 64, Mask.FULL, Layout.DENSE, Variant.PLAIN, False, True, H100)
    return plain._replace(**changes)


def pick(path=None, can_run=lambda row: True, **changes):
    return choose(call(**changes), TABLE, can_run, lambda row: f"row {row}", path)


@pytest.mark.parametrize(
    ("changes", "path", "row"),
    [
        ({}, "sm90", 3),
        ({"mask": Mask.CAUSAL}, "sm90", 4),
        ({"mask": Mask.LOCAL}, "sm90", 5),
        ({"layout": Layout.PACKED}, "sm90", 5),
        ({"head_dim": 65}, "sm90", 5),
        ({"head_dim_v": 65}, "sm90", 5),
        ({"variant": Variant.GENERAL}, "sm90", 5),
        ({"sinks": True}, "sm90", 3),
        ({"sinks": True, "variant": Variant.GENERAL}, "sm90", 5),
        ({"sinks": True, "capability": A100}, "simt", 0),
        ({"aligned": False}, "sm80", 2),
        ({"aligned": False, "variant": Variant.GENERAL}, "simt", 0),
        ({"head_dim": 129}, "simt", 0),
        ({"dtype": DType.F32}, "simt", 1),
        ({"capability": A100}, "sm80", 2),
        ({"capability": B200}, "sm80", 2),
        ({"capability": T4}, "simt", 0),
        ({"capability": None}, "cpu", -1),
    ],
)
def test_fastest_path(changes, path, row):
    choice = pick(**changes)
    assert (choice.path, choice.row) == (path, row)


def why_not(path: str, **changes) -> str:
    return dict(pick(**changes).passed_over)[path]


def test_reasons_say_why_not_the_faster_one():
    assert {"sm90", "sm80"} <= set(dict(pick(dtype=DType.F32).passed_over))
    for path in ("sm90", "sm80"):
        assert "no kernel" in why_not(path, dtype=DType.F32)
    assert "16 bytes" in why_not("sm90", aligned=False)
    assert "9.x" in why_not("sm90", capability=A100)


def test_rows_that_cannot_run_are_passed_over():
    assert pick(can_run=lambda row: row != 3).row == 5
    for rows, path, passed_over in ((3, "sm80", ["sm90"]), (2, "simt", ["sm90", "sm80"])):
        options = {"can_run": lambda row, rows=rows: row < rows}
        assert pick(**options).path == path
        assert all("not in this build" in why_not(faster, **options) for faster in passed_over)


def test_explicit_path():
    assert pick("simt").path == "simt"
    assert pick("reference").path == "reference"
    assert pick("cpu", capability=None).path == "cpu"
    for path, changes in {
        "sm90": {"capability": A100},
        "sm80": {"variant": Variant.GENERAL},
        "cpu": {},
        "simt": {"head_dim": 300},
    }.items():
        with pytest.raises(NotImplementedError, match=path):
            pick(path, **changes)
    with pytest.raises(NotImplementedError, match="host memory"):
        pick("sm80", capability=None)


def test_nothing_serves():
    with pytest.raises(NotImplementedError, match="sm90 .*; sm80 .*; simt .*"):
        pick(head_dim=300)
    with pytest.raises(NotImplementedError, match="float64"):
        pick(dtype=None, capability=None)


@pytest.mark.parametrize(
    ("causal", "window", "seqlen_q", "seqlen_k", "expected"),
    [
        (False, (-1, -1), 8, 8, (-1, -1)),
        (True, (-1, -1), 8, 8, (-1, 0)),
        (True, (-1, 3), 8, 8, (-1, 0)),
        (True, (2, 0), 8, 8, (2, 0)),
        (True, (-1, -1), 1, 8, (-1, -1)),
        (False, (7, 7), 8, 8, (-1, -1)),
        (False, (6, 6), 8, 8, (6, 6)),
        (False, (9, 3), 20, 10, (-1, 3)),
        (False, (8, 18), 20, 10, (8, 18)),
        (False, (2**31 - 1, 2**31 - 1), 20, 10, (-1, -1)),
        (False, (0, 0), 1, 1, (-1, -1)),
    ],
)
def test_windows(causal, window, seqlen_q, seqlen_k, expected):
    assert normalise_window(causal, window, seqlen_q, seqlen_k) == expected


def test_a_bound_that_is_dropped_cuts_nothing():
    def visible(window, seqlen_q, seqlen_k):
        left, right = (n if n >= 0 else 10**9 for n in window)
        diagonals = ((i + seqlen_k - seqlen_q, j) for i in range(seqlen_q) for j in range(seqlen_k))
        return [d - left <= j <= d + right for d, j in diagonals]

    for seqlen_q in range(1, 6):
        for seqlen_k in range(1, 6):
            for window in ((left, right) for left in range(-1, 7) for right in range(-1, 7)):
                kept = normalise_window(False, window, seqlen_q, seqlen_k)
                assert visible(window, seqlen_q, seqlen_k) == visible(kept, seqlen_q, seqlen_k)


def test_masks():
    assert mask_of(-1, -1) == Mask.FULL
    assert mask_of(-1, 0) == Mask.CAUSAL
    assert {mask_of(-1, 1), mask_of(0, 0), mask_of(5, -1)} == {Mask.LOCAL}


def test_enumerations_carry_the_numbers_of_the_extension():
    for row, key in enumerate(table()):
        name = _C.row_name(row).split()
        dtypes = {DType.F32: "fp32", DType.F16: "fp16", DType.BF16: "bf16", DType.E4M3: "e4m3"}
        dims = str(key.head_dim) if key.head_dim == key.head_dim_v else f"{key.head_dim}/{key.head_dim_v}"
        words = [Pass(key.pass_).name.lower(), Arch(key.arch).name.lower(), dtypes[DType(key.dtype)], dims]
        assert name[:4] == words
        assert Mask(key.mask).name.lower() in name[4]
        assert Layout(key.layout).name.lower() in name[5]
        assert Variant(key.variant).name.lower() in name[6]


def test_every_row_serves_itself():
    for key in table():
        mask = Mask.FULL if key.mask == Mask.ANY else key.mask
        layout = Layout.DENSE if key.layout == Layout.ANY else key.layout
        variant = Variant.PLAIN if key.variant == Variant.ANY else key.variant
        assert serves(key, key._replace(mask=mask, layout=layout, variant=variant))
        assert not serves(key, key._replace(head_dim=key.head_dim + 1, mask=mask, layout=layout, variant=variant))
