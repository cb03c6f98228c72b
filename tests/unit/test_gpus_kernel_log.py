"""What a kernel's log says of faults."""

import pytest

from gpukiln.catalog import xid
from gpukiln.gpus import kernel_log
from gpukiln.gpus.facts import facts

TABLE = xid.judged()


def test_machines_judge_by_the_catalogue() -> None:
    assert {int(number): row for number, row in facts()["xids"].items()} == TABLE


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
    [event] = kernel_log.events([line], TABLE)
    judged = (event.number, event.blames_hardware(TABLE), event.known(TABLE))
    assert judged == (number, blames, number != 4711)


def test_an_sxid_is_one_event_with_the_lines_that_say_more() -> None:
    start = "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 28006, "
    lines = (
        "Non-fatal, Link 46 MC TS crumbstore MCTO (First)",
        "Severity 0 Engine instance 46",
        "Data {0x1}",
    )
    [event] = kernel_log.events([start + line for line in lines], TABLE)
    assert (event.fatal, event.line) == (False, start + lines[0])


def test_a_number_counts_once_a_device_and_its_worst_word_stays() -> None:
    lines = [f"NVRM: Xid (PCI:0000:{d}:00): 31, pid={n}" for n in range(30) for d in ("3b", "5e")]
    lines += ["NVRM: Xid (PCI:0000:3b:00): 79, gone", "NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus."]
    assert [(e.device, e.number) for e in kernel_log.events(lines, TABLE)] == [
        ("0000:3b:00", 31),
        ("0000:5e:00", 31),
        ("0000:3b:00", 79),
    ]
    words = ("Nonfatal", "Fatal", "Nonfatal")
    lines = [f"NVRM: Xid (PCI:0000:3b:00): 145, RLW_CTRL {word} XC0" for word in words]
    [event] = kernel_log.events(lines, TABLE)
    assert event.fatal


def test_a_recovery_that_was_done_is_no_event() -> None:
    line = "NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from {} to {}"
    wanted, done = "0x1 (GPU Reset Required)", "0x0 (None)"
    assert kernel_log.events([line.format(done, wanted), line.format(wanted, done)], TABLE) == []
    [event] = kernel_log.events([line.format(wanted, done), line.format(done, wanted)], TABLE)
    assert event.blames_hardware(TABLE)


def test_an_event_is_told_with_its_meaning() -> None:
    line = "NVRM: Xid (PCI:0000:3b:00): {}, x"
    [event] = kernel_log.events([line.format(62)], TABLE)
    assert event.explained(TABLE) == f"{event.line} = {xid.explain(62)}"
    assert "look it up" in kernel_log.events([line.format(4711)], TABLE)[0].explained(TABLE)


def test_counts_are_of_all_lines_of_a_number() -> None:
    lines = [
        "NVRM: Xid (PCI:0000:3b:00): 145, RLW_CTRL Nonfatal XC0 (12 times)",
        "NVRM: Xid (PCI:0000:3b:00): 145, RLW_CTRL Fatal XC0",
        "NVRM: GPU 0000:5e:00.0: GPU has fallen off the bus.",
        "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 28006, Severity 0 Engine instance 46",
        "something else (3 times)",
    ]
    found = kernel_log.events(lines, TABLE)
    assert [(e.device, e.number, e.count) for e in found] == [("0000:3b:00", 145, 13), ("0000:5e:00", 79, 1)]
