"""The stand-in nvidia-smi says in NVIDIA's forms what the NVML beside it says, and refuses the rest."""

import os
import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from xml.etree import ElementTree

import pytest

from gpukiln.clouds.embedded.gpus import library as nvml
from gpukiln.clouds.embedded.gpus.profile import make_profile
from gpukiln.clouds.embedded.gpus.start import initial_rows
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
    "index,name,uuid,serial,pci.bus_id,pci.device_id,driver_version,vbios_version,persistence_mode,compute_mode,"
    "compute_cap,mig.mode.current,mig.mode.pending,ecc.mode.current,ecc.mode.pending,"
    "ecc.errors.uncorrected.volatile.total,ecc.errors.uncorrected.aggregate.total,retired_pages.pending,"
    "memory.total,memory.used,memory.free,memory.reserved,utilization.gpu,utilization.memory,temperature.gpu,"
    "temperature.memory,power.draw,power.draw.instant,power.limit,enforced.power.limit,clocks.sm,clocks.mem,"
    "clocks.max.sm,clocks.max.memory,pstate,clocks_event_reasons.active,clocks_event_reasons.hw_slowdown,"
    "clocks_event_reasons.hw_thermal_slowdown,clocks_event_reasons.sw_power_cap,pcie.link.gen.current,"
    "pcie.link.gen.max,pcie.link.width.current,pcie.link.width.max,reset_status.reset_required"
)
SIGNATURE = b"gpukiln simulated nvidia-smi"  # is in the program and in what it says of itself
ASKERS = (
    "gpukiln/probe",
    "gpukiln/workspaces",
    "scripts",
    "roles",
    "docker",
    "molecule",
    "examples/workflows",
)
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
    assert f"|    1   N/A  N/A            4711      C   ...{name[-31:]}     1024MiB |\n" in table
    assert re.search(r"\|    1   N/A  N/A               5      G   Xorg +4MiB \|\n", table)
    assert "        Process ID                        : 4711\n" in ask.ok("-q")


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
    assert "GPU0\t X \tPXB\t" in ask.ok("topo", "-m")


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
    assert "GPU Current Temp                  : GPU is lost\n" in ask("-q")[1]


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
        (("-lgc", "low"), 2, "ERROR: Option low is invalid for --lock-gpu-clocks."),
        (("dmon",), 2, "ERROR: Option dmon is not recognized. "),
        (("-l", "5"), 2, "ERROR: Option -l is not recognized. "),
        (("--query-retired-pages=x", "--format=csv"), 2, "ERROR: Option --query-retired-pages=x is not "),
        (("-pl", "much"), 2, "ERROR: Option much is invalid for --power-limit."),
        (("-pl", "300"), 3, "Changing power management limit is not supported for GPU: 00000000:00:1E.0."),
        (("-r", "-i", "1"), 0, "GPU 00000000:00:1F.0 was successfully reset.\nAll done.\n"),
        (("mig", "-lgip"), 6, "No MIG-enabled devices found."),
        *(
            (tuple(said.split()), 2, REFUSED)
            for said in (
                "-L -q",
                "-pm 1 -mig 1",
                "--format=csv",
                "-x",
                "--query-gpu=name --query-compute-apps=pid --format=csv",
                "topo",
                "topo -p2p r",
                "mig",
                "mig -lgi",
                "mig -cgi",
                "mig -dgi -gi",
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


@pytest.mark.parametrize("argv", [("dmon",), ("topo", "-p2p", "r"), ("-L", "-q"), ("nvlink", "-s")])
def test_what_is_refused_names_what_is_answered(ask: Asked, argv: tuple[str, ...]) -> None:
    code, out = ask(*argv)
    assert code == 2
    for option in (
        "-L",
        "-q [-x]",
        "--query-gpu=",
        "--query-compute-apps=",
        "-pm",
        "-lgc",
        "topo -m",
        "mig -lgip",
    ):
        assert option in out


def test_a_field_that_is_unknown_is_refused_with_the_fields_that_there_are(ask: Asked) -> None:
    out = ask(*query("nonsense"))[1]
    assert {*FIELDS.split(",")} - {"clocks.sm", "clocks.mem"} <= {*out.split()}


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
        before = initial_rows(machine) | on
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
        ("-e 0", {}, 0, f"Disabled Ecc support for GPU {BUS}.\nAll done.\nReboot required.\n"),
        (
            "-lgc 300,900",
            {},
            0,
            f'GPU clocks set to "(gpuClkMin 300, gpuClkMax 900)" for GPU {BUS}.\nAll done.\n',
        ),
        ("-lgc 600", {}, 0, f'GPU clocks set to "(gpuClkMin 600, gpuClkMax 600)" for GPU {BUS}.\n'),
        ("-rgc", {}, 0, f"All clocks reset to default for GPU {BUS}.\nAll done.\n"),
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
        ("mig -cgi 5g.90gb", {}, 6, "Unable to create a GPU instance on GPU  0 using profile 5g.90gb: Not"),
        (
            "mig -cgi 19",
            ALL_OF_IT,
            255,
            "Unable to create a GPU instance on GPU  0 using profile 19: Insufficient Resources\n"
            "Failed to create GPU instances: Insufficient Resources\n",
        ),
        ("mig -dci", ONE_HALF, 6, "No compute instances found: Not Found\n"),
        ("mig -dgi -gi 5", ONE_HALF, 6, "No GPU instances found: Not Found\n"),
        ("mig -dgi", ONE_HALF | ITS_PART, 255, "Unable to destroy GPU instance ID  2 from GPU  0: In use"),
        (
            "mig -dci -gi 2",
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


def test_profiles_are_shown_in_a_table(partitioned: Partitioned) -> None:
    code, profiles = partitioned("mig -lgip", ONE_HALF | ITS_PART)
    assert (code, profiles[: len(PROFILES)]) == (0, PROFILES)


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
        State(path).write(initial_rows(make_profile(instance, seed="i-1", driver=driver, cuda=cuda)) | rows)
        return lambda *argv: run(program, nvml.environment(library, path), *argv)

    return make


def test_the_xml_has_the_values_of_an_h100(simulated: Callable[..., Machine]) -> None:
    """Board, memory and limits as a capture of NVIDIA/k8s-test-infra has them, by its elements' names."""
    ask = simulated("p5.48xlarge", "580.105.08", "13.0")
    root = xml(ask("-q", "-x")[1])
    gpus = root.findall("gpu")
    assert (root.findtext("driver_version"), root.findtext("attached_gpus")) == ("580.105.08", "8")
    values = {
        "product_name": "NVIDIA H100 80GB HBM3",
        "fb_memory_usage/total": "81559 MiB",
        "gpu_power_readings/max_power_limit": "700.00 W",
        "pci/pci_device_id": "233010DE",
        "clocks/mem_clock": "2619 MHz",
        "mig_mode/current_mig": "Disabled",
        "ecc_mode/current_ecc": "Enabled",
    }
    assert {path: gpus[0].findtext(path) for path in values} == values
    assert re.fullmatch(r"\d+ C", gpus[0].findtext("temperature/gpu_temp") or "")
    assert [gpu.findtext("uuid") for gpu in gpus] == re.findall(r"UUID: (\S+)\)", ask("-L")[1])


def test_the_report_has_the_same_as_text(ask: Asked) -> None:
    out = ask.ok("-q", "-i", "0")
    assert out.index("==NVSMI LOG==") < out.index("    FB Memory Usage") < out.index("    Processes")
    assert "    Product Name                          : NVIDIA A100-SXM4-40GB\n" in out
    assert "Attached GPUs                             : 2\n" in out
    assert "        Total                             : 40960 MiB\n" in out
    assert "        Power Draw                        : 52.30 W\n" in out


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
    monkeypatch.setattr(agent, "check_output", lambda *_: out)
    assert xml(out).findtext("gpu/utilization/gpu_util") == "N/A"
    assert list(agent.gpu_use()) == []  # nothing runs on its instance
    ask.machine["gpus"][0].update(utilization={"gpu": 93, "memory": 40})
    monkeypatch.setattr(agent, "check_output", lambda *_: ask.ok("-q", "-x"))
    assert "GPU 0 computes" in list(agent.gpu_use())


TABLE = """\
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


def test_the_table_has_the_layout_of_590(simulated: Callable[..., Machine]) -> None:
    """The capture of an H100 with 590.48.01, but for address and temperature."""
    code, out = simulated("p5.48xlarge", "590.48.01", "13.1")("-i", "0")
    when, _, table = out.partition("\n")
    assert (code, len(when)) == (0, 31)
    assert table.startswith(TABLE)
    assert {len(line) for line in table.splitlines()} == {0, 91}


def test_it_is_not_built_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnavailableError, match="need gcc") as error:
        nvml.build_smi(tmp_path)
    assert "gcc" in error.value.hint


def test_what_the_compiler_refuses_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "smi").mkdir()
    (tmp_path / "smi" / "smi.c").write_text("int main(void) { return wrong; }\n")
    monkeypatch.setattr(nvml, "__file__", str(tmp_path / "library.py"))
    with pytest.raises(UnavailableError, match="gcc failed to build") as error:
        nvml.build_smi(tmp_path / "built")
    assert any("wrong" in line for line in error.value.details)
    assert not [path for path in (tmp_path / "built").rglob("*") if path.is_file()]
