"""The table of Xid errors."""

import pytest

from gpukiln.catalog import xid
from gpukiln.catalog.load import data


def test_every_action_has_words() -> None:
    used = {a for row in xid.xids().values() for a in (row.now, row.then) if a and a.isupper()}
    assert used - {"INFORMATIONAL"} <= set(data("xid")["actions"])


def test_applications_are_told_from_hardware() -> None:
    assert not any(xid.xids()[n].blames_hardware for n in (13, 31, 43, 45))
    assert all(xid.xids()[n].blames_hardware for n in (48, 62, 63, 74, 79, 95, 119, 154))


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("NVRM: Xid (PCI:0000:3b:00): 48, pid='<unknown>', name=<unknown>, DBE", 48),
        ("NVRM: Xid (0000:3b:00): 154, GPU recovery action changed", 154),
        ("NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus.", 79),
        ("nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 12028, Non-fatal", None),
    ],
)
def test_number_of_a_line(line: str, value: int | None) -> None:
    assert xid.number(line) == value


def test_explanation_says_meaning_and_action() -> None:
    assert xid.explain(62) == (
        "Xid 62 PMU_HALT_ERROR: internal microcontroller halted; reset the GPU (`nvidia-smi --gpu-reset`)"
    )
    assert "names no action" in xid.explain(167)
    assert "look it up" in xid.explain(4711)
