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


# NVIDIA's catalogue lets these go on: restart the application, or nothing to do
GOES_ON = (
    *(13, 25, 31, 40, 41, 43, 45, 67, 70, 71, 72, 75, 76, 77, 82, 83, 84, 85, 86, 88, 89, *range(96, 109)),
    *(*range(126, 136), 137, 139, 152, 153, 162, 163),
)


def test_what_the_catalogue_lets_go_on_blames_nothing() -> None:
    assert [n for n in GOES_ON if n not in xid.xids() or xid.xids()[n].blames_hardware] == []


@pytest.mark.parametrize(
    ("line", "number", "blames"),
    [
        ("NVRM: Xid (PCI:0000:3b:00): 48, pid='<unknown>', name=<unknown>, DBE", 48, True),
        (
            "NVRM: Xid (0000:3b:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset)",
            154,
            True,
        ),
        ("NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus.", 79, True),
        ("NVRM: GPU at PCI:0000:3b:00: GPU-1b2c has fallen off the bus.", 79, True),
        ("NVRM: Xid (PCI:0000:3b:00): 145, RLW_REMAP Nonfatal XC0 i0 Link 02 (0x4 0x1)", 145, False),
        ("NVRM: Xid (PCI:0000:3b:00): 145, RLW_REMAP Fatal XC1 i0 Link 10 (0x82 0x40)", 145, True),
        ("nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 22013, Non-fatal, Link 28 Minion", 22013, False),
        (
            "nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 11001, Fatal, Link 04 ingress invalid command",
            11001,
            True,
        ),
        ("NVRM: Xid (PCI:0000:3b:00): 4711, something new", 4711, False),
    ],
)
def test_an_event_of_a_line(line: str, number: int, blames: bool) -> None:
    [event] = xid.events([line])
    assert (event.number, event.blames_hardware, event.known) == (number, blames, number != 4711)


def test_an_sxid_is_one_event_with_the_lines_that_say_more() -> None:
    start = "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 28006, "
    lines = (
        "Non-fatal, Link 46 MC TS crumbstore MCTO (First)",
        "Severity 0 Engine instance 46",
        "Data {0x1}",
    )
    [event] = xid.events([start + line for line in lines])
    assert (event.fatal, event.line) == (False, start + lines[0])


def test_a_number_counts_once_a_device_and_its_worst_word_stays() -> None:
    lines = [f"NVRM: Xid (PCI:0000:{d}:00): 31, pid={n}" for n in range(30) for d in ("3b", "5e")]
    lines += ["NVRM: Xid (PCI:0000:3b:00): 79, gone", "NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus."]
    assert [(e.device, e.number) for e in xid.events(lines)] == [
        ("0000:3b:00", 31),
        ("0000:5e:00", 31),
        ("0000:3b:00", 79),
    ]
    words = ("Nonfatal", "Fatal", "Nonfatal")
    [event] = xid.events([f"NVRM: Xid (PCI:0000:3b:00): 145, RLW_CTRL {word} XC0" for word in words])
    assert event.fatal


def test_a_recovery_that_was_done_is_no_event() -> None:
    line = "NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from {} to {}"
    wanted, done = "0x1 (GPU Reset Required)", "0x0 (None)"
    assert xid.events([line.format(done, wanted), line.format(wanted, done)]) == []
    [event] = xid.events([line.format(wanted, done), line.format(done, wanted)])
    assert event.blames_hardware


def test_explanation_says_meaning_and_action() -> None:
    assert xid.explain(62) == (
        "Xid 62 PMU_HALT_ERROR: internal microcontroller halted; reset the GPU (`nvidia-smi --gpu-reset`)"
    )
    assert "names no action" in xid.explain(167)
    assert "look it up" in xid.explain(4711)
