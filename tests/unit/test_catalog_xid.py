"""The table of Xid errors."""

from gpukiln.catalog import xid
from gpukiln.catalog.load import data


def test_every_action_has_words() -> None:
    used = {a for row in xid.xids().values() for a in (row.now, row.then) if a and a.isupper()}
    assert used - {"INFORMATIONAL"} <= set(data("xid")["actions"])


def test_applications_are_told_from_hardware() -> None:
    assert not any(xid.xids()[n].blames_hardware for n in (13, 31, 43, 45))
    assert all(xid.xids()[n].blames_hardware for n in (48, 62, 63, 74, 79, 95, 119, 154))


# NVIDIA's catalogue lets these go on: restart the application, or nothing to do
GOES_ON = (
    *(13, 25, 31, 40, 41, 43, 45, 67, 70, 71, 72, 75, 76, 77, 82, 83, 84, 85, 86, 88, 89, *range(96, 109)),
    *(*range(126, 136), 137, 139, 152, 153, 162, 163),
)


def test_what_the_catalogue_lets_go_on_blames_nothing() -> None:
    assert [n for n in GOES_ON if n not in xid.xids() or xid.xids()[n].blames_hardware] == []


def test_explanation_says_meaning_and_action() -> None:
    assert xid.explain(62) == (
        "Xid 62 PMU_HALT_ERROR: internal microcontroller halted; reset the GPU (`nvidia-smi --gpu-reset`)"
    )
    assert "names no action" in xid.explain(167)
