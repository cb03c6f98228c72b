"""The stand-in nvidia-smi says in NVIDIA's forms what the NVML beside it says, and refuses the rest."""

import os
import re
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from xml.etree import ElementTree

import pytest

from gpukiln.clouds.embedded.gpus import library as nvml
from gpukiln.clouds.embedded.gpus.profile import make_profile
from gpukiln.clouds.embedded.gpus.start import start_rows
from gpukiln.clouds.embedded.gpus.state import State, append_region
from gpukiln.errors import UnavailableError
from gpukiln.workspaces import agent
from tests.doubles.nvml_machine import made_up_machine
from tests.support import nvml_double

ROOT = Path(__file__).parents[2]
UUIDS = [f"GPU-00000000-0000-0000-0000-{n:012d}" for n in range(2)]
BUS_IDS = ["00000000:00:1E.0", "00000000:00:1F.0"]
# What monitoring asks nvidia-smi for, by NVIDIA's `--help-query-gpu`.
FIELDS = (
    "index,name,uuid,serial,pci.bus_id,pci.device_id,driver_version,vbios_version,"
    "persistence_mode,compute_mode,compute_cap,mig.mode.current,mig.mode.pending,ecc.mode.current,"
    "ecc.mode.pending,ecc.errors.uncorrected.volatile.total,ecc.errors.uncorrected.aggregate.total,"
    "retired_pages.pending,memory.total,memory.used,memory.free,memory.reserved,utilization.gpu,"
    "utilization.memory,temperature.gpu,temperature.memory,power.draw,power.draw.instant,"
    "power.limit,enforced.power.limit,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.memory,pstate,"
    "clocks_event_reasons.active,clocks_event_reasons.hw_slowdown,"
    "clocks_event_reasons.hw_thermal_slowdown,clocks_event_reasons.sw_power_cap,pcie.link.gen.current,"
    "pcie.link.gen.max,pcie.link.width.current,pcie.link.width.max,gsp.mode.current,fabric.state,"
    "fabric.status,reset_status.reset_required"
)
SIGNATURE = b"gpukiln simulated nvidia-smi"  # is in the program and in what it says of itself
ASKERS = ("gpukiln/probe", "scripts", "roles", "docker", "molecule")
REFUSED = "Invalid combination of input arguments."


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nvml.build_smi(tmp_path_factory.mktemp("smi"))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nvml_double.build(tmp_path_factory.mktemp("nvml"))


class Asked:
    """nvidia-smi beside the double of NVML."""

    def __init__(self, program: Path, library: Path, spec: Path) -> None:
        self.program, self.library, self.spec = program, library, spec
        self.machine = made_up_machine()
        self.errors: dict[str, int] = {}

    def __call__(self, *argv: str) -> tuple[int, str]:
        nvml.write_state(self.spec, self.machine, errors=self.errors)
        return run(self.program, nvml.environment(self.library, self.spec), *argv)

    def ok(self, *argv: str) -> str:
        code, out = self(*argv)
        assert code == 0, out
        return out


def run(program: Path, env: dict[str, str], *argv: str) -> tuple[int, str]:
    done = subprocess.run(
        [str(program), *argv], env=env, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.stderr == ""  # NVIDIA's writes its errors to stdout too
    return done.returncode, done.stdout


@pytest.fixture
def ask(program: Path, library: Path, tmp_path: Path) -> Asked:
    return Asked(program, library, tmp_path / "spec")


def query(fields: str, *style: str) -> tuple[str, str]:
    return f"--query-gpu={fields}", "--format=" + ",".join(("csv", *style))


def test_the_gpus_are_listed(ask: Asked) -> None:
    assert ask.ok("-L") == "".join(
        f"GPU {n}: NVIDIA A100-SXM4-40GB (UUID: {uuid})\n" for n, uuid in enumerate(UUIDS)
    )


def test_it_says_that_it_is_simulated(ask: Asked) -> None:
    first, *rest = ask.ok("-h").splitlines()
    assert first == "NVIDIA System Management Interface -- v535.309.01"
    assert any(SIGNATURE.decode() in line for line in rest)
    said = ask.ok("--version")
    assert "DRIVER version      : 535.309.01\n" in said
    assert SIGNATURE.decode() in said
    assert SIGNATURE in ask.program.read_bytes()


@pytest.mark.parametrize("code", [0, 18])
def test_help_knows_the_version_by_the_librarys_name_where_the_driver_cannot_be_asked(
    program: Path, library: Path, tmp_path: Path, code: int
) -> None:
    named = tmp_path / "libnvidia-ml.so.535.309.01"
    named.write_bytes(library.read_bytes())
    (tmp_path / nvml.SONAME).symlink_to(named.name)
    machine = made_up_machine()
    machine["driver"] = None
    nvml.write_state(tmp_path / "spec", machine, errors={"nvmlInit": code} if code else {})
    env = nvml.environment(tmp_path / nvml.SONAME, tmp_path / "spec")
    assert run(program, env, "-h")[1].splitlines()[0].endswith(" v535.309.01")


def test_every_field_that_monitoring_and_gpukiln_ask_for_is_answered(ask: Asked) -> None:
    for line in ask.ok(*query(FIELDS, "noheader")).splitlines():
        assert len(line.split(", ")) == FIELDS.count(",") + 1
    texts = [
        path.read_text(errors="replace")
        for folder in ASKERS
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    ]
    asked = {
        fields for text in texts for fields in re.findall(r"(?:--query-gpu=|^fields=)([\w.,]+)", text, re.M)
    }
    assert len(asked) > 3
    for fields in asked:
        ask.ok(*query(fields.strip(",")))


@pytest.mark.parametrize(
    ("fields", "style", "wanted"),
    [
        ("index,name", (), "index, name\n1, NVIDIA A100-SXM4-40GB\n"),
        ("memory.total,power.draw", (), "memory.total [MiB], power.draw [W]\n40960 MiB, 52.30 W\n"),
        ("memory.total, memory.used", ("noheader", "nounits"), "40960, 3\n"),
        (
            "clocks.sm,clocks.max.memory",
            (),
            "clocks.current.sm [MHz], clocks.max.memory [MHz]\n210 MHz, 1215 MHz\n",
        ),
        ("uuid,pci.bus_id,serial", ("noheader",), f"{UUIDS[1]}, {BUS_IDS[1]}, 1320000000001\n"),
        ("persistence_mode,mig.mode.current,ecc.mode.pending", ("noheader",), "Enabled, Disabled, Enabled\n"),
        (
            "clocks_event_reasons.active,clocks_throttle_reasons.gpu_idle",
            ("noheader",),
            "0x0000000000000001, Active\n",
        ),
        ("fan.speed,retired_pages.pending,compute_cap", ("noheader",), "[N/A], [N/A], [N/A]\n"),
        ("fabric.state,fabric.status,pcie.link.width.max", ("noheader",), "Completed, Success, 16\n"),
        ("ecc.errors.uncorrected.aggregate.total,temperature.gpu", ("noheader",), "1, 31\n"),
    ],
)
def test_fields_are_answered_in_nvidias_form(
    ask: Asked, fields: str, style: tuple[str, ...], wanted: str
) -> None:
    assert ask.ok(*query(fields, *style), "-i", "1") == wanted


@pytest.mark.parametrize("said", ["1", UUIDS[1], BUS_IDS[1], "0000:00:1f.0", "00:1F.0"])
def test_a_gpu_is_chosen_by_index_uuid_or_address(ask: Asked, said: str) -> None:
    assert ask.ok(*query("index", "noheader"), f"--id={said}") == "1\n"
    assert ask.ok("-i", f"0,{said}", *query("index", "noheader")) == "0\n1\n"


def test_processes_are_listed_and_shown(ask: Asked) -> None:
    name = "/opt/a/very/long/path/of/a/program/python3"
    ask.machine["gpus"][1]["processes"] = [
        {"pid": 4711, "name": name, "kind": "compute", "memory": 1024},
        {"pid": 5, "name": "Xorg", "kind": "graphics", "memory": 4},
    ]
    fields = "--query-compute-apps=pid,process_name,used_memory,gpu_uuid,gpu_name,gpu_bus_id"
    header, row = ask.ok(fields, "--format=csv").splitlines()
    assert header == "pid, process_name, used_gpu_memory [MiB], gpu_uuid, gpu_name, gpu_bus_id"
    assert row == f"4711, {name}, 1024 MiB, {UUIDS[1]}, NVIDIA A100-SXM4-40GB, {BUS_IDS[1]}"
    table = ask.ok()
    assert f"|    1   N/A  N/A      4711      C   ...{name[-35:]}     1024MiB |\n" in table
    assert re.search(r"\|    1   N/A  N/A         5      G   Xorg +4MiB \|\n", table)
    assert "Process ID                        : 4711\n" in ask.ok("-q", "-d", "PIDS")


TABLE = """\
+---------------------------------------------------------------------------------------+
| NVIDIA-SMI 535.309.01             Driver Version: 535.309.01   CUDA Version: 12.2     |
|-----------------------------------------+----------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id        Disp.A | Volatile Uncorr. ECC |
| Fan  Temp   Perf          Pwr:Usage/Cap |         Memory-Usage | GPU-Util  Compute M. |
|                                         |                      |               MIG M. |
|=========================================+======================+======================|
|   0  NVIDIA A100-SXM4-40GB           On | 00000000:00:1E.0 Off |                    0 |
| N/A   31C    P0              52W / 400W |      3MiB / 40960MiB |     93%      Default |
|                                         |                      |             Disabled |
+-----------------------------------------+----------------------+----------------------+
"""


def test_the_table_has_the_layout_of_535(ask: Asked) -> None:
    ask.machine["gpus"][0].update(utilization={"gpu": 93, "memory": 40}, pstate=0, compute_mode=0)
    when, _, table = ask.ok().partition("\n")
    assert len(when) == 31
    assert table.startswith(TABLE)
    assert {len(line) for line in table.splitlines()} == {89}
    assert "|  No running processes found   " in table


def test_the_report_has_its_sections_or_those_asked_for(ask: Asked) -> None:
    out = ask.ok("-q")
    assert out.index("==NVSMI LOG==") < out.index("    FB Memory Usage") < out.index("    Fabric")
    assert "    Product Name                          : NVIDIA A100-SXM4-40GB\n" in out
    assert "Attached GPUs                             : 2\n" in out
    out = ask.ok("-q", "-d", "memory,POWER", "-i", "0")
    assert "        Total                             : 40960 MiB\n" in out
    assert "        Power Draw                        : 52.30 W\n" in out
    assert "Temperature" not in out
    assert ask("-q", "-d", "NOTHING") == (2, "Failed to parse --display/-d flags\n")


def test_the_topology_is_a_matrix(ask: Asked) -> None:
    head, first, *rest = ask.ok("topo", "-m").splitlines()
    assert head == "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID"
    assert re.fullmatch("GPU0\t X \tNV12\t0(-[0-9]+)?\t0\t\tN/A", first), "every processor is near"
    assert "Legend:" in rest
    ask.machine["gpus"][0]["nvlinks"][3]["state"] = False
    assert "GPU0\t X \tNV11\t" in ask.ok("topo", "-m")
    for gpu in ask.machine["gpus"]:
        gpu["nvlinks"] = []
        gpu["peers"][0]["p2p"]["nvlink"] = 5
        gpu["peers"][0]["p2p"]["read"] = 1
    assert "GPU0\t X \tPXB\t" in ask.ok("topo", "-m")
    assert " GPU0\tX\tCNS\t\n" in ask.ok("topo", "-p2p", "r")


def test_links_have_a_state_a_speed_and_errors(ask: Asked) -> None:
    ask.machine["gpus"][0]["nvlinks"][1]["state"] = False
    ask.machine["gpus"][0]["nvlinks"][2]["errors"]["replay"] = 3
    out = ask.ok("nvlink", "-s", "-i", "0").splitlines()
    assert out[1:3] == ["\t Link 0: 25 GB/s", "\t Link 1: <inactive>"]
    assert len(out) == 13
    assert "\t Link 2: Replay Errors: 3\n" in ask.ok("nvlink", "-e")
    for gpu in ask.machine["gpus"]:
        gpu["nvlinks"] = None
    assert ask.ok("nvlink", "-s") == "No NVLink devices found.\n"


LOST = "Unable to determine the device handle for GPU"


def test_a_lost_gpu_ends_what_is_asked_of_all_and_not_what_is_asked_of_another(ask: Asked) -> None:
    ask.errors = {"1.nvmlDeviceGetPciInfo_v3": 15}
    for argv in ((), ("-L",), ("-q",), query("name"), ("topo", "-m"), ("-pm", "1"), ("-i", "1")):
        code, out = ask(*argv)
        assert code == 15, argv
        assert out.startswith(LOST), argv
        assert "GPU is lost.  Reboot the system to recover this GPU\n" in out, argv
    assert ask(*query("index", "noheader"), "-i", "0") == (0, "0\n")


def test_a_gpu_lost_while_it_is_asked_is_an_error_in_its_cells(ask: Asked) -> None:
    ask.errors = {"0.nvmlDeviceGetTemperature": 15, "0.nvmlDeviceGetFanSpeed": 999}
    code, out = ask(*query("index,temperature.gpu,fan.speed", "noheader"))
    assert (code, out) == (15, "0, [GPU is lost], [Unknown Error]\n1, 31, [N/A]\n")
    code, table = ask()
    assert code == 15
    assert "|ERR!  ERR!" in table
    assert "GPU Current Temp                  : GPU is lost\n" in ask("-q", "-d", "TEMPERATURE")[1]


def test_the_address_of_a_lost_gpu_is_named_where_the_library_tells_it(program: Path, tmp_path: Path) -> None:
    source = tmp_path / "lost.c"
    source.write_text(
        "#include <string.h>\n"
        "int nvmlInit_v2(void) { return 0; }\n"
        "int nvmlDeviceGetCount_v2(unsigned *n) { *n = 1; return 0; }\n"
        "int nvmlDeviceGetHandleByIndex_v2(unsigned n, void **to) { (void)n; (void)to; return 15; }\n"
        'int gpukilnBusId(unsigned n, char *to) { (void)n; strcpy(to, "00000000:00:1E.0"); return 0; }\n'
    )
    library = tmp_path / nvml.SONAME
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    code, out = run(program, {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)})
    assert code == 15
    assert out == f"{LOST}0000:00:1E.0: GPU is lost.  Reboot the system to recover this GPU\n\n"


@pytest.mark.parametrize(
    ("errors", "code", "words"),
    [
        (
            {"nvmlInit": 9},
            9,
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. ",
        ),
        ({"nvmlInit": 18}, 18, "Failed to initialize NVML: Driver/library version mismatch\n"),
        ({"nvmlInit": 999}, 255, "Failed to initialize NVML: Unknown Error\n"),
        ({"nvmlInit": 4}, 4, "Failed to initialize NVML: Insufficient Permissions\n"),
        (
            {"nvmlDeviceGetCount_v2": 999},
            255,
            "Unable to determine the number of available GPUs: Unknown Error",
        ),
        ({"0.nvmlDeviceGetHandleByIndex_v2": 999}, 255, LOST),
    ],
)
def test_what_is_wrong_with_the_driver_is_said_with_its_code(
    ask: Asked, errors: dict[str, int], code: int, words: str
) -> None:
    ask.errors = errors
    found, out = ask()
    assert found == code
    assert out.startswith(words)


def test_a_machine_without_the_library_says_so(program: Path, tmp_path: Path) -> None:
    (tmp_path / nvml.SONAME).write_text("no library")
    env = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    code, out = run(program, env, "-L")
    assert code == 12
    assert out.startswith("NVIDIA-SMI couldn't find libnvidia-ml.so library in your system.")
    assert run(program, env, "-h")[0] == 0


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (query("name,nonsense"), 2, 'Field "nonsense" is not a valid field to query.\n'),
        (("--query-compute-apps=x", "--format=csv"), 2, 'Field "x" is not a valid field to query.\n'),
        (("--query-gpu=name",), 2, '"--format=" switch is missing.'),
        (("--query-gpu=name", "--format=noheader"), 2, "Format modifier --format=csv is mandatory."),
        (("--query-gpu=name", "--format=csv,xml"), 2, "Format modifier is not recognized."),
        (("-i", "9"), 6, "No devices were found\n"),
        (("-i", "GPU-1", "-L"), 6, "No devices were found\n"),
        (("--nonsense",), 2, "ERROR: Option --nonsense is not recognized. "),
        (("-i",), 2, "ERROR: Option -i is missing its value. "),
        (("-pm", "3"), 2, "ERROR: Option 3 is invalid for --persistence-mode."),
        (("-pl", "much"), 2, "ERROR: Option much is invalid for --power-limit."),
        (("-ac", "1215"), 2, "ERROR: Option 1215 is invalid for --applications-clocks."),
        (("-l", "0"), 2, "ERROR: Option 0 is invalid for --loop."),
        (("dmon", "-c", "0"), 2, "ERROR: Option 0 is invalid for -c."),
        (("--help-query-nonsense",), 2, "ERROR: Option --help-query-nonsense is not recognized. "),
        (("-pl", "300"), 3, "Changing power management limit is not supported for GPU: 00000000:00:1E.0."),
        (("-r", "-i", "1"), 0, "GPU 00000000:00:1F.0 was successfully reset.\nAll done.\n"),
        (("mig", "-lgip"), 6, "No MIG-enabled devices found."),
        *(
            (tuple(said.split()), 2, REFUSED)
            for said in (
                "-L -q",
                "-pm 1 -mig 1",
                "-d MEMORY",
                "--format=csv",
                "-x",
                "-q -x -d MEMORY",
                "--query-gpu=name --query-compute-apps=pid --format=csv",
                "dmon -s x",
                "--lock-memory-clocks-deferred=9",
                "--auto-boost-default=0",
                "conf-compute -q",
                "topo",
                "topo -mp",
                "topo -p2p z",
                "nvlink",
                "nvlink -s -e",
                "mig",
                "mig -lcip",
                "mig -cgi",
                "mig -lgi -lci",
                "mig -dgi -gi all",
                "mig -dgi -C",
            )
        ),
    ],
)
def test_what_is_wrong_or_not_answered_is_refused(
    ask: Asked, argv: tuple[str, ...], code: int, words: str
) -> None:
    found, out = ask(*argv)
    assert (found, out[: len(words)]) == (code, words)


def test_a_machine_without_gpus_has_none(ask: Asked) -> None:
    ask.machine = {**made_up_machine(), "gpus": []}
    assert ask() == (6, "No devices were found\n")


BUS = "00000000:00:1E.0"


Partitioned = Callable[..., tuple[int, str]]
ONE_HALF = {"mig.gi.2.profile": "9", "mig.gi.2.start": "0"}  # an instance of three slices
ITS_PART = {"mig.gi.2.ci.0.slices": "3", "mig.gi.2.ci.0.start": "0"}
ALL_OF_IT = {"mig.gi.0.profile": "0", "mig.gi.0.start": "0"}
OFF = {"mig.current": "0", "mig.pending": "0"}


@pytest.fixture
def partitioned(program: Path, library: Path, tmp_path: Path) -> Partitioned:
    """Run it on one A100 with MIG on, changed as a test wants."""

    def ask(argv: str, rows: Mapping[str, str]) -> tuple[int, str]:
        machine = make_profile("p4d.24xlarge", seed="i-1", driver="535.309.01", cuda="12.2")
        machine["gpus"] = [{**machine["gpus"][0], "bus_id": BUS, "peers": []}]
        path = tmp_path / "state"
        append_region(path)
        on = {"gpus.0.mig.current": "1", "gpus.0.mig.pending": "1", "gpus.0.persistence": "0"}
        before = start_rows(machine) | on
        State(path).write(before | {f"gpus.0.{name}": value for name, value in rows.items()})
        return run(program, nvml.environment(library, path), *argv.split())

    return ask


@pytest.mark.parametrize(
    ("argv", "rows", "code", "words"),
    [
        ("-pm 1", {}, 0, f"Enabled persistence mode for GPU {BUS}.\nAll done.\n"),
        ("-pm 0", {}, 0, f"Persistence mode is already Disabled for GPU {BUS}.\nAll done.\n"),
        (
            "--persistence-mode=1",
            {"fail.nvmlDeviceSetPersistenceMode": "4"},
            4,
            f"Unable to set persistence mode for GPU {BUS}: Insufficient Permissions\n"
            "Terminating early due to previous errors.\n",
        ),
        ("-mig 1", {}, 0, f"Enabled MIG Mode for GPU {BUS}\nAll done.\n"),
        ("-mig 1", OFF, 0, f"Warning: MIG mode is in pending enable state for GPU {BUS}:"),
        ("-mig 0", {}, 0, f"Warning: MIG mode is in pending disable state for GPU {BUS}:"),
        (
            "-mig 1",
            {"fail.nvmlDeviceSetMigMode": "3"},
            3,
            f"Unable to enable MIG Mode for GPU {BUS}: Not Supported\n",
        ),
        ("-pl 300", {}, 0, f"Power limit for GPU {BUS} was set to 300.00 W from 400.00 W.\nAll done.\n"),
        (
            "-pl 90",
            {},
            2,
            "Provided power limit 90.00 W is not a valid power limit which should be between 1",
        ),
        ("-c 3", {}, 0, f"Set compute mode to EXCLUSIVE_PROCESS for GPU {BUS}.\nAll done.\n"),
        (
            "-c PROHIBITED",
            {"fail.nvmlDeviceSetComputeMode": "4"},
            4,
            "Unable to set the compute mode for GPU ",
        ),
        ("-c 1", {}, 2, "Exclusive_Thread was deprecated!"),
        ("-e 0", {}, 0, f"Disabled Ecc support for GPU {BUS}.\nAll done.\nReboot required.\n"),
        ("-p 0", {}, 0, f"Reset volatile ECC errors to zero for GPU {BUS}.\nAll done.\n"),
        (
            "-ac 1215,1410",
            {},
            0,
            f'Applications clocks set to "(MEM 1215, SM 1410)" for GPU {BUS}.\nAll done.\n',
        ),
        ("-rac", {"fail.nvmlDeviceResetApplicationsClocks": "4"}, 4, "Unable to set applications clocks for"),
        ("-r -i 0", {}, 0, f"GPU {BUS} was successfully reset.\nAll done.\n"),
        (
            "--gpu-reset",
            {"fail.gpukilnReset": "19"},
            255,
            f"GPU {BUS} is currently in use by",
        ),
        (
            "-L",
            ONE_HALF | ITS_PART | {"uuid": "GPU-1"},
            0,
            "GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-1)\n  MIG 3g.20gb     Device  0: (UUID: MIG-",
        ),
        (
            "mig -cgi 9 -C",
            {},
            0,
            "Successfully created GPU instance ID  2 on GPU  0 using profile MIG 3g.20gb (ID  9)\n"
            "Successfully created compute instance ID  0 on GPU  0 GPU instance ID  2 using profile MIG "
            "3g.20gb (ID  2)\n",
        ),
        ("mig -cgi 3g.20gb:0", {}, 0, "Successfully created GPU instance ID  1 on GPU  0"),
        ("mig -cgi 3g.20gb:x", {}, 2, "Unable to create a GPU instace on GPU  0 using profile 3g.20gb: inv"),
        ("mig -cgi 3g.20gb:7", {}, 2, "Unable to create a GPU instance on GPU  0 using profile 3g.20gb: Inv"),
        ("mig -cgi 5g.90gb", {}, 6, "Unable to create a GPU instance on GPU  0 using profile 5g.90gb: Not"),
        (
            "mig -cgi 19",
            ALL_OF_IT,
            255,
            "Unable to create a GPU instance on GPU  0 using profile 19: Insufficient Resources\n"
            "Failed to create GPU instances: Insufficient Resources\n",
        ),
        ("mig -lgi", {}, 6, "No GPU instances found: Not Found\n"),
        ("mig -lci", {}, 6, "No compute instances found: Not Found\n"),
        (
            "mig -cci 3g.20gb -gi 2",
            ONE_HALF,
            0,
            "Successfully created compute instance ID  0 on GPU  0 GPU instance ID  2",
        ),
        ("mig -cci 7g.40gb", ONE_HALF | ITS_PART, 6, "Unable to create a compute instance on GPU  0"),
        ("mig -cci -gi 5", ONE_HALF | ITS_PART, 6, "No GPU instances found: Not Found\n"),
        ("mig -dgi", ONE_HALF | ITS_PART, 255, "Unable to destroy GPU instance ID  2 from GPU  0: In use"),
        (
            "mig -dci -ci 0 -gi 2",
            ONE_HALF | ITS_PART,
            0,
            "Successfully destroyed compute instance ID  0 from GPU  0 GPU instance ID  2\n",
        ),
        ("mig -lgip", OFF, 6, "No MIG-enabled devices found.\n"),
    ],
)
def test_a_gpu_is_changed_through_nvml(
    partitioned: Partitioned, argv: str, rows: dict[str, str], code: int, words: str
) -> None:
    found, out = partitioned(argv, rows)
    assert (found, out[: len(words)]) == (code, words)


PROFILES = """\
+-----------------------------------------------------------------------------+
| GPU instance profiles:                                                      |
| GPU   Name             ID    Instances   Memory     P2P    SM    DEC   ENC  |
|                              Free/Total   GiB              CE    JPEG  OFA  |
|=============================================================================|
|   0  MIG 1g.5gb        19     3/7        4.75       No     14     0     0   |
|                                                             1     0     0   |
+-----------------------------------------------------------------------------+
|   0  MIG 1g.5gb+me     20     1/1        4.75       No     14     1     0   |
|                                                             1     1     1   |
+-----------------------------------------------------------------------------+
"""
INSTANCES = """\
+-------------------------------------------------------+
| GPU instances:                                        |
| GPU   Name             Profile  Instance   Placement  |
|                          ID       ID       Start:Size |
|=======================================================|
|   0  MIG 3g.20gb          9        2          0:4     |
+-------------------------------------------------------+
"""
COMPUTE_INSTANCES = """\
+--------------------------------------------------------------------+
| Compute instances:                                                 |
| GPU     GPU       Name             Profile   Instance   Placement  |
|       Instance                       ID        ID       Start:Size |
|         ID                                                         |
|====================================================================|
|   0      2       MIG 3g.20gb          2         0          0:3     |
+--------------------------------------------------------------------+
"""
MIG_DEVICES = """\
| MIG devices:                                                                          |
+------------------+--------------------------------+-----------+-----------------------+
| GPU  GI  CI  MIG |                   Memory-Usage |        Vol|      Shared           |
|      ID  ID  Dev |                     BAR1-Usage | SM     Unc| CE ENC DEC OFA JPG    |
|                  |                                |        ECC|                       |
|==================+================================+===========+=======================|
|  0    2   0   0  |               0MiB / 19968MiB  | 42    N/A |  3   0    2    0    0 |
|                  |               0MiB / 32767MiB  |           |                       |
+------------------+--------------------------------+-----------+-----------------------+
"""


def test_partitions_are_shown_in_tables(partitioned: Partitioned) -> None:
    divided = ONE_HALF | ITS_PART
    code, profiles = partitioned("mig -lgip", divided)
    assert (code, profiles[: len(PROFILES)]) == (0, PROFILES)
    assert partitioned("mig -lgi", divided) == (0, INSTANCES)
    assert partitioned("mig -lci -gi 2", divided) == (0, COMPUTE_INSTANCES)
    assert MIG_DEVICES in partitioned("", divided)[1]
    assert "|  No MIG devices found  " in partitioned("", {})[1]


SUPPORT = ROOT / "tests" / "support" / "smi"
# Machines whose GPUs were captured with these drivers, see elements.txt.
MACHINES = {
    535: ("g4dn.xlarge", "535.309.01", "12.2"),
    590: ("p5.48xlarge", "590.48.01", "13.1"),
    595: ("g6e.2xlarge", "595.80", "13.2"),
    610: ("g4dn.xlarge", "610.57.04", "13.3"),
}


def captured_fields(branch: int) -> list[tuple[str, str]]:
    """Names and aliases, or "-", of --query-gpu's fields, in their order."""
    rows = [line.split() for line in (SUPPORT / "query_fields.txt").read_text().splitlines()]
    return [(name, alias) for name, alias, *branches in rows if name != "#" and str(branch) in branches]


def captured_elements() -> dict[str, dict[str, list[str]]]:
    """Machine of a capture: {parent: its children}."""
    machines: dict[str, dict[str, list[str]]] = {}
    for line in (SUPPORT / "elements.txt").read_text().splitlines():
        if line.startswith("["):
            captured = machines.setdefault(line.strip("[]"), {})
        elif not line.startswith("#"):
            parent, _, children = line.partition(": ")
            captured[parent] = children.split()
    return machines


Machine = Callable[..., tuple[int, str]]


def xml(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text)  # noqa: S314 - the program under test wrote it


@pytest.fixture(scope="module")
def simulated(program: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Machine]:
    """Make a machine of an instance type with a driver; asking it gives code and output."""
    folder = tmp_path_factory.mktemp("machines")

    def make(instance: str, driver: str, cuda: str, **rows: str) -> Machine:
        library = nvml_double.build(folder, branch=int(driver.partition(".")[0]))
        path = folder / f"{instance}-{driver}-{len(list(folder.iterdir()))}"
        append_region(path)
        State(path).write(start_rows(make_profile(instance, seed="i-1", driver=driver, cuda=cuda)) | rows)
        return lambda *argv: run(program, nvml.environment(library, path), *argv)

    return make


@pytest.mark.parametrize("branch", sorted(MACHINES))
def test_the_fields_are_those_of_the_drivers_branch(simulated: Callable[..., Machine], branch: int) -> None:
    ask, wanted = simulated(*MACHINES[branch]), captured_fields(branch)
    code, out = ask("--help-query-gpu")
    listed = re.findall(r'\n\n"([^"]+)"(?: or "([^"]+)")?\n', out)
    assert code == 0
    assert [name for name, _ in listed] == [name for name, _ in wanted]
    if branch >= 590:
        assert [alias or "-" for _, alias in listed if alias != "clocks.max.sm"] == [
            alias for name, alias in wanted if name != "clocks.max.sm"
        ]
    code, out = ask(*query(",".join(name for name, _ in wanted)), "-i", "0")
    header, row = out.splitlines()
    assert code == 0
    assert [cell.partition(" [")[0] for cell in header.split(", ")] == [name for name, _ in wanted]
    assert len(row.split(", ")) == len(wanted)


def test_a_field_of_another_branch_is_refused(simulated: Callable[..., Machine]) -> None:
    for branch, field in (
        (535, "platform.host_id"),
        (590, "reset_status.reset_required"),
        (595, "bbx.time_run"),
    ):
        refused = f'Field "{field}" is not a valid field to query.\n\n'
        assert simulated(*MACHINES[branch])(*query(f"name,{field}")) == (2, refused)


def test_what_a_branch_has_deprecated_says_so(simulated: Callable[..., Machine]) -> None:
    """As the H100 of 590.48.01, and 535 before it."""
    fields = "display_mode,power.management,clocks.applications.graphics"
    deprecated = ", ".join(["[Requested functionality has been deprecated]"] * 3)
    assert simulated(*MACHINES[590])(*query(fields, "noheader"), "-i", "0") == (0, deprecated + "\n")
    assert "1590 MHz" in simulated(*MACHINES[535])(*query(fields, "noheader"))[1]


def test_the_xml_has_the_elements_of_captures(simulated: Callable[..., Machine]) -> None:
    machines = captured_elements()
    assert len(machines) == 4
    for name, wanted in machines.items():
        code, out = simulated(*name.split())("-q", "-x", "-i", "0")
        assert code == 0, name
        gpu = xml(out).find("gpu")
        assert gpu is not None
        found: dict[str, list[str]] = {}

        def note(parent: ElementTree.Element, path: str, into: dict[str, list[str]]) -> None:
            if len(parent) and path != "supported_clocks":
                into[path or "gpu"] = [child.tag for child in parent]
                for child in parent:
                    note(child, f"{path}/{child.tag}".lstrip("/"), into)

        note(gpu, "", found)
        assert found == wanted, name


def test_the_report_has_the_labels_of_captures(simulated: Callable[..., Machine]) -> None:
    machines = re.split(r"^\[(.+)\]\n", (SUPPORT / "labels.txt").read_text(), flags=re.M)[1:]
    assert len(machines) == 4
    for name, labels in zip(machines[::2], machines[1::2], strict=True):
        code, out = simulated(*name.split())("-q", "-i", "0")
        rows = out.partition("\nGPU 00")[2].splitlines()[1:]
        found = [re.sub(r" +: .*", "", row).rstrip() for row in rows if row.strip()]
        assert code == 0, name
        assert [label for label in found if label != "    Processes"] == labels.splitlines(), name
        assert {row.index(" : ") for row in rows if " : " in row} == {54}, name


def test_the_matrix_of_590_is_underlined(simulated: Callable[..., Machine]) -> None:
    """Into a pipe too: the captures of an H100 and an RTX 4080 Super."""
    code, out = simulated(*MACHINES[595])("topo", "-m")
    assert code == 0
    assert out.startswith("\t\x1b[4mGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\nGPU0\t X \t")


def test_the_xml_has_the_values_of_an_h100_and_an_l40s(simulated: Callable[..., Machine]) -> None:
    """Boards, memory and limits of the captures; the names of what a parser of the field reads."""
    for machine, count, values in (
        (
            ("p5.48xlarge", "580.105.08", "13.0"),
            8,
            {
                "product_name": "NVIDIA H100 80GB HBM3",
                "product_architecture": "Hopper",
                "fb_memory_usage/total": "81559 MiB",
                "gpu_power_readings/max_power_limit": "700.00 W",
                "pci/pci_device_id": "233010DE",
                "pci/pci_gpu_link_info/pcie_gen/max_link_gen": "5",
                "temperature/gpu_temp_max_tlimit_threshold": "-8 C",
                "fabric/state": "Completed",
                "clocks/mem_clock": "2619 MHz",
                "display_mode": "Requested functionality has been deprecated",
            },
        ),
        (
            ("g6e.2xlarge", "595.91.07", "13.2"),
            1,
            {
                "product_name": "NVIDIA L40S",
                "product_architecture": "Ada Lovelace",
                "fb_memory_usage/total": "46068 MiB",
                "pci/pci_bus_id": "00000000:30:00.0",
                "pci/pci_gpu_link_info/link_widths/current_link_width": "8x",
                "mig_mode/current_mig": "N/A",
                "fabric/state": "N/A",
                "gpu_power_readings/power_state": "Requested functionality has been deprecated",
                "applications_clocks/mem_clock": "Requested functionality has been deprecated",
            },
        ),
    ):
        ask = simulated(*machine)
        root = xml(ask("-q", "-x")[1])
        gpus = root.findall("gpu")
        assert (root.findtext("driver_version"), root.findtext("attached_gpus")) == (machine[1], str(count))
        assert len(gpus) == count
        assert {path: gpus[0].findtext(path) for path in values} == values
        assert [gpu.findtext("uuid") for gpu in gpus] == re.findall(r"UUID: (\S+)\)", ask("-L")[1])


def test_mig_devices_and_processes_are_in_the_xml(partitioned: Partitioned, ask: Asked) -> None:
    code, out = partitioned("-q -x", ONE_HALF | ITS_PART)
    device = xml(out).find("gpu/mig_devices/mig_device")
    assert code == 0
    assert device is not None
    assert [device.findtext(tag) for tag in ("index", "gpu_instance_id", "compute_instance_id")] == [
        *("0", "2", "0")
    ]
    assert device.findtext("device_attributes/shared/multiprocessor_count") == "42"
    assert device.findtext("fb_memory_usage/total") == "19968 MiB"
    ask.machine["gpus"][0]["processes"] = [{"pid": 7, "name": "a<b>&c", "kind": "compute", "memory": 9}]
    process = xml(ask.ok("-q", "-x")).find("gpu/processes/process_info")
    assert process is not None
    assert [(child.tag, child.text) for child in process] == [
        ("gpu_instance_id", "N/A"),
        ("compute_instance_id", "N/A"),
        ("pid", "7"),
        ("type", "C"),
        ("process_name", "a<b>&c"),
        ("used_memory", "9 MiB"),
    ]


def test_a_workspace_s_idle_rule_reads_mig_mode_and_utilization_of_the_xml(
    partitioned: Partitioned, ask: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, out = partitioned("-q -x", ONE_HALF | ITS_PART)
    monkeypatch.setattr(agent, "command", lambda *_: out)
    assert xml(out).findtext("gpu/utilization/gpu_util") == "N/A"
    assert list(agent.computing()) == []  # nothing runs on its instance
    ask.machine["gpus"][0].update(utilization={"gpu": 93, "memory": 40})
    monkeypatch.setattr(agent, "command", lambda *_: ask.ok("-q", "-x"))
    assert "GPU 0 computes" in list(agent.computing())


WIDE = """\
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 590.48.01              Driver Version: 590.48.01      CUDA Version: 13.1     |
+-----------------------------------------+------------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |
|                                         |                        |               MIG M. |
|=========================================+========================+======================|
|   0  NVIDIA H100 80GB HBM3          On  |   00000000:53:00.0 Off |                    0 |
| N/A   29C    P0             69W /  700W |       0MiB /  81559MiB |      0%      Default |
|                                         |                        |             Disabled |
+-----------------------------------------+------------------------+----------------------+
"""


def test_the_table_of_590_is_wider(simulated: Callable[..., Machine]) -> None:
    """The capture of an H100 with 590.48.01, but for address and temperature."""
    code, out = simulated(*MACHINES[590])("-i", "0")
    when, _, table = out.partition("\n")
    assert (code, len(when)) == (0, 31)
    assert table.startswith(WIDE)
    assert {len(line) for line in table.splitlines()} == {0, 91}


QUERIES = {
    "accounted-apps": "pid,gpu_util,mem_util,max_memory_usage,time",
    "retired-pages": "retired_pages.address,retired_pages.timestamp,retired_pages.cause",
    "remapped-rows": "remapped_rows.correctable,remapped_rows.failure",
    "supported-clocks": "mem,gr",
}
HEADERS = {
    "accounted-apps": "pid, gpu_utilization [%], mem_utilization [%], max_memory_usage [MiB], time [ms]",
    "retired-pages": "retired_pages.address, retired_pages.timestamp, retired_pages.cause",
    "remapped-rows": "remapped_rows.correctable, remapped_rows.failure",
    "supported-clocks": "memory [MHz], graphics [MHz]",
}


@pytest.mark.parametrize("name", sorted(QUERIES))
def test_lists_are_queried_too(ask: Asked, name: str) -> None:
    header, *rows = ask.ok(f"--query-{name}=gpu_uuid,{QUERIES[name]}", "--format=csv,nounits").splitlines()
    assert header == f"gpu_uuid, {HEADERS[name]}"
    assert {row.count(",") for row in rows} <= {header.count(",")}
    listed = re.findall(r'\n\n"([^"]+)"', ask.ok(f"--help-query-{name}"))
    assert listed[:5] == ["timestamp", "gpu_name", "gpu_bus_id", "gpu_serial", "gpu_uuid"]
    assert set(HEADERS[name].split(" [")[0].split(", ")) <= set(listed)


def test_pages_that_are_not_retired_have_a_row_for_each_cause(ask: Asked) -> None:
    """As an H100 with 590.48.01."""
    asked = "--query-retired-pages=retired_pages.address,retired_pages.timestamp,retired_pages.cause"
    assert ask.ok(asked, "--format=csv,noheader", "-i", "0") == (
        "[N/A], [N/A], Single Bit ECC\n[N/A], [N/A], Double Bit ECC\n"
    )


DMON = """\
# gpu    pwr  gtemp  mtemp     sm    mem    enc    dec    jpg    ofa   mclk   pclk 
# Idx      W      C      C      %      %      %      %      %      %    MHz    MHz 
"""
PMON = """\
# gpu         pid   type     sm    mem    enc    dec    jpg    ofa    command 
# Idx           #    C/G      %      %      %      %      %      %    name 
"""


def test_devices_and_processes_are_monitored(ask: Asked) -> None:
    out = ask.ok("dmon", "-c", "1")
    assert out.startswith(DMON)
    assert re.fullmatch(r"    0     52     3\d(?: +(?:\d+|-)){9} ", out.splitlines()[2])
    assert len(out.splitlines()) == 4
    dated = ask.ok("dmon", "-c", "1", "-i", "0", "-s", "m", "-o", "TD").splitlines()
    assert dated[0] == "#Date       Time        gpu     fb   bar1   ccpm "
    assert dated[1] == "#YYYYMMDD   HH:MM:SS    Idx     MB     MB     MB "
    assert re.match(r" \d{8}   \d\d:\d\d:\d\d      0      3 ", dated[2])
    every = ask.ok("dmon", "-c", "1", "-i", "0", "-s", "pucvmet").splitlines()
    assert {len(line) for line in every} == {6 + 21 * 7}
    ask.machine["gpus"][1]["processes"] = [
        {"pid": 4711, "name": "/opt/python3", "kind": "compute", "memory": 1024}
    ]
    assert ask.ok("pmon", "-c", "1") == (
        PMON
        + "    0          -     -      -      -      -      -      -      -    -              \n"
        + "    1       4711     C      -      -      -      -      -      -    python3        \n"
    )
    assert "   1024 " in ask.ok("pmon", "-c", "1", "-s", "um", "-i", "1")


def test_a_loop_ends_with_the_interrupt(ask: Asked) -> None:
    nvml.write_state(ask.spec, ask.machine)
    loop = subprocess.Popen(
        [str(ask.program), *query("index"), "-lms", "20", "-i", "0"],
        env=nvml.environment(ask.library, ask.spec),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert loop.stdout is not None
    with loop, loop.stdout:
        assert [loop.stdout.readline() for _ in range(3)] == ["index\n", "0\n", "0\n"]
        loop.send_signal(signal.SIGINT)
        assert loop.wait(timeout=30) == -signal.SIGINT


def test_output_goes_to_a_file(ask: Asked, tmp_path: Path) -> None:
    assert ask.ok("-q", "-x", "-f", str(tmp_path / "log.xml")) == ""
    assert xml((tmp_path / "log.xml").read_text()).tag == "nvidia_smi_log"
    code, out = ask("-L", "-f", str(tmp_path / "none" / "log"))
    assert (code, out) == (2, f"Failed to open {tmp_path}/none/log for writing\n")


def test_sections_that_need_to_be_asked_for(ask: Asked) -> None:
    assert "Supported Clocks" not in ask.ok("-q")
    out = ask.ok("-q", "-d", "SUPPORTED_CLOCKS,POWER,ACCOUNTING", "-i", "0")
    for label in ("    Supported Clocks", "    Power Samples\n        Duration", "    Accounted Processes"):
        assert label in out


def test_it_is_not_built_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnavailableError, match="there is no gcc") as error:
        nvml.build_smi(tmp_path)
    assert "gcc" in error.value.hint


def test_what_the_compiler_refuses_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "smi").mkdir()
    (tmp_path / "smi" / "smi.c").write_text("int main(void) { return wrong; }\n")
    monkeypatch.setattr(nvml, "__file__", str(tmp_path / "library.py"))
    with pytest.raises(UnavailableError, match="gcc can't build") as error:
        nvml.build_smi(tmp_path / "built")
    assert any("wrong" in line for line in error.value.details)
    assert not [path for path in (tmp_path / "built").rglob("*") if path.is_file()]
