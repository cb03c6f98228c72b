"""What a kernel's log says of faults."""

import pytest

from gpukiln.catalog import xid
from gpukiln.gpus import kernel_log
from gpukiln.gpus.facts import facts
from gpukiln.probe import xids

TABLE = xid.xid_rules()


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
    judged = (event.number, event.blames_hardware(TABLE), event.is_known(TABLE))
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


BEGINNING = "[ 1843.308145] NVRM: The NVIDIA GPU 0000:b3:00.0"  # NVIDIA/NVSentinel#155
THREE = (
    BEGINNING,
    "               NVRM: (PCI ID: 10de:26b5) installed in this system has",
    "               NVRM: fallen off the bus and is not responding to commands.",
)
FAILED = "NVRM: GPU 0000:81:00.0: RmInitAdapter failed! (0x25:0x40:1470)"  # machine-shop-maintenance#76
REQUIRED = (  # NVIDIA/open-gpu-kernel-modules#446
    "NVRM: nvAssertOkFailedNoLog: Assertion failed: Reset required [NV_ERR_RESET_REQUIRED] (0x00000062) "
    "returned from pRmApi"
)
HEARTBEAT = "NVRM: GPU0 _kgspRpcRecvPoll: GSP RM heartbeat timed out"  # ublue-os/bazzite#4449
UNSUPPORTED = (
    "NVRM: The NVIDIA GPU 0000:01:00.0 (PCI ID: 10de:2b85)",
    "NVRM: installed in this system requires use of the NVIDIA open kernel modules.",
)


@pytest.mark.parametrize(
    ("lines", "kind", "device", "severity"),
    [
        (THREE, "Xid", "0000:b3:00", "error"),
        ([FAILED], "init-failed", "0000:81:00", "error"),
        (["NVRM: RmInitAdapter failed! (0x27:0x38:1193)"], "init-failed", "", "error"),
        ([REQUIRED], "reset-required", "", "error"),
        ([HEARTBEAT], "gsp-heartbeat", "", "warning"),
        (UNSUPPORTED, "unsupported", "0000:01:00", "error"),
    ],
)
def test_what_the_driver_logs_without_an_xid_is_an_event(
    lines: list[str], kind: str, device: str, severity: str
) -> None:
    [event] = kernel_log.events(lines, TABLE)
    assert (event.kind, event.device, event.severity(TABLE)) == (kind, device, severity)
    assert event.explain(TABLE).startswith(event.line)
    folded = xids.fold_faults(["something else", *lines, *lines])
    assert [(one.kind, one.count) for one in kernel_log.events(folded, TABLE)] == [(kind, 2)]


def test_a_message_of_three_lines_is_one_line_whatever_follows() -> None:
    lines = [*THREE, "[ 1843.439662] NVRM: The NVIDIA probe routine failed for 1 device(s)."]
    assert len(xids.join_messages(lines)) == 2
    assert xids.join_messages([BEGINNING, "usb 1-1: new device", *THREE[1:]])[1:] == [
        "usb 1-1: new device",
        *THREE[1:],
    ]


@pytest.mark.parametrize("number", [63, 92, 121, 160])
def test_what_needs_nothing_is_an_info(number: int) -> None:
    """NVIDIA's catalogue: IGNORE."""
    [event] = kernel_log.events([f"NVRM: Xid (PCI:0000:3b:00): {number}, x"], TABLE)
    assert event.severity(TABLE) == "info"


@pytest.mark.parametrize(
    ("number", "severity"),
    [(13, "info"), (31, "info"), (94, "warning"), (79, "error"), (119, "error"), (48, "error")],
)
def test_the_severity_of_an_xid_is_that_of_its_action(number: int, severity: str) -> None:
    [event] = kernel_log.events([f"NVRM: Xid (PCI:0000:3b:00): {number}, x"], TABLE)
    assert event.severity(TABLE) == severity


ACTION = "NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from {} to {}"
WANTED, NONE = "0x1 (GPU Reset Required)", "0x0 (None)"
RESET = (
    "NVRM: Xid (PCI:0000:3b:00): 119, pid=7, name=nvidia-smi, Timeout after 6s of waiting for RPC response",
    ACTION.format(NONE, WANTED),
)
DONE = ACTION.format(WANTED, NONE)


@pytest.mark.parametrize("done", [DONE, "gpukiln: GPU 0000:3b:00 was reset"])
def test_after_the_reset_that_was_advised_the_node_is_well(done: str) -> None:
    assert [one.number for one in kernel_log.events(RESET, TABLE)] == [119, 154]
    others = ("NVRM: Xid (PCI:0000:5e:00): 119, x", "NVRM: Xid (PCI:0000:3b:00): 79, gone")
    for lines in ((*RESET, *others, done), xids.fold_faults((*RESET, *others, done))):
        left = [(one.device, one.number) for one in kernel_log.events(lines, TABLE)]
        assert left == [("0000:5e:00", 119), ("0000:3b:00", 79)], "another GPU, and what takes a reboot"
    again = [*RESET, done, RESET[0]]
    assert [one.number for one in kernel_log.events(xids.fold_faults(again), TABLE)] == [119]


def test_an_event_is_told_with_its_meaning() -> None:
    line = "NVRM: Xid (PCI:0000:3b:00): {}, x"
    [event] = kernel_log.events([line.format(62)], TABLE)
    assert event.explain(TABLE) == f"{event.line} = {xid.explain(62)}"
    assert "look it up" in kernel_log.events([line.format(4711)], TABLE)[0].explain(TABLE)


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
