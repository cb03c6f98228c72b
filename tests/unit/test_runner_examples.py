"""The files that users copy for CI on GPUs: every key is real, and each step fails when it should."""

import copy
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from gpukiln.catalog.components import load_components

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docker" / "runner-gpu" / "examples"
VALUES = EXAMPLES / "arc-values.yaml"
WORKFLOW = ROOT / "examples/workflows/gpu.yml"
GUIDE = ROOT / "docs" / "runner-image.md"
HOOKS = "/opt/gpukiln/hooks/"

# The keys of the chart gha-runner-scale-set 0.14.2: its values.yaml, with those that are commented out there.
CHART_KEYS = (
    *("githubConfigUrl", "githubConfigSecret", "scaleSetLabels", "runnerGroup", "runnerScaleSetName"),
    *("minRunners", "maxRunners", "proxy", "githubServerTLS", "keyVault", "containerMode", "template"),
    *("listenerTemplate", "listenerMetrics", "controllerServiceAccount", "namespaceOverride", "labels"),
    *("annotations", "resourceMeta", "fullnameOverride"),
)
# Those of Kubernetes 1.34's PodSpec, Container and so on that a pod for runners has a use for.
POD_KEYS = (
    *("containers", "initContainers", "volumes", "tolerations", "nodeSelector", "affinity"),
    *("priorityClassName", "securityContext", "serviceAccountName", "imagePullSecrets", "runtimeClassName"),
    *("topologySpreadConstraints", "terminationGracePeriodSeconds"),
)
CONTAINER_KEYS = (
    *("name", "image", "command", "args", "env", "envFrom", "resources", "volumeMounts"),
    *("securityContext", "imagePullPolicy", "workingDir", "lifecycle"),
)


def only(keys: tuple[str, ...], **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {**{key: {} for key in keys}, **properties},
        "additionalProperties": False,
    }


QUANTITIES = {"type": "object", "additionalProperties": {"type": ["string", "integer"]}}
CONTAINER = only(
    CONTAINER_KEYS,
    image={"pattern": r"^[^@:/]+(:\d+)?/[^@:]+@sha256:[0-9a-f]{64}$"},
    command={"type": "array", "items": {"type": "string"}},
    env={"type": "array", "items": only(("name", "value", "valueFrom"), value={"type": "string"})},
    resources=only((), requests=QUANTITIES, limits={**QUANTITIES, "required": ["nvidia.com/gpu"]}),
    volumeMounts={"type": "array", "items": only(("name", "mountPath", "subPath", "readOnly"))},
)
VOLUME = only(
    ("name", "secret", "configMap", "hostPath", "ephemeral"),
    persistentVolumeClaim=only(("claimName", "readOnly")),
    emptyDir=only((), medium={"enum": ["", "Memory"]}, sizeLimit={"type": "string"}),
)
RUNNER = {"properties": {"name": {"const": "runner"}}}
POD = only(
    POD_KEYS,
    containers={"type": "array", "items": CONTAINER, "contains": RUNNER},
    volumes={"type": "array", "items": VOLUME},
    tolerations={
        "type": "array",
        "items": only(
            ("key", "value", "tolerationSeconds"),
            operator={"enum": ["Exists", "Equal"]},
            effect={"enum": ["NoSchedule", "PreferNoSchedule", "NoExecute"]},
        ),
    },
)
SCHEMA = {
    **only(
        CHART_KEYS,
        template=only(("metadata",), spec=POD),
        githubConfigUrl={"pattern": "^https://"},
        githubConfigSecret={"type": "string"},
        runnerScaleSetName={"type": "string", "maxLength": 45},
        minRunners={"type": "integer", "minimum": 0},
        maxRunners={"type": "integer", "minimum": 1},
    ),
    "required": ["githubConfigUrl", "githubConfigSecret", "template"],
}


def values() -> Any:
    return yaml.safe_load(VALUES.read_text())


def runner(document: Any) -> Any:
    return document["template"]["spec"]["containers"][0]


def environment(document: Any) -> dict[str, str]:
    return {row["name"]: row["value"] for row in runner(document)["env"]}


def test_every_key_of_the_values_is_one_of_the_chart_or_the_pod() -> None:
    jsonschema.validate(values(), SCHEMA)


@pytest.mark.parametrize(
    "wrong",
    [
        {"runnerLabels": ["gpu"]},
        {"runnerResources": {}},
        {"tolerations": []},
        {"image": "x"},
        {"runnerScaleDownDelaySecondsAfterScaleOut": 1},
        {"githubConfigUrl": "my-organisation"},
    ],
)
def test_what_charts_of_old_understood_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**values(), **wrong}, SCHEMA)


@pytest.mark.parametrize(
    "wrong",
    [{"image": "r.example/a:latest"}, {"name": "main"}, {"resources": {"limits": {"cpu": 1}}}, {"imagee": 1}],
)
def test_a_container_that_gets_no_gpu_or_another_image_is_refused(wrong: dict[str, Any]) -> None:
    document = copy.deepcopy(values())
    runner(document).update(wrong)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, SCHEMA)


def test_the_hooks_and_the_cache_are_where_the_values_say() -> None:
    settings = environment(values())
    for job in ("STARTED", "COMPLETED"):
        hook = settings[f"ACTIONS_RUNNER_HOOK_JOB_{job}"]
        assert hook.startswith(HOOKS)
        assert (ROOT / "scripts" / "hooks" / hook.removeprefix(HOOKS)).is_file()
    mounts = {mount["mountPath"]: mount["name"] for mount in runner(values())["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in values()["template"]["spec"]["volumes"]}
    assert set(mounts.values()) == set(volumes)
    claim = yaml.safe_load((EXAMPLES / "ccache-volume.yaml").read_text())
    cache = volumes[mounts[settings["CCACHE_DIR"]]]
    assert cache["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert (claim["apiVersion"], claim["kind"]) == ("v1", "PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


def test_the_guide_puts_the_pushed_image_into_the_values(tmp_path: Path) -> None:
    """The command that the guide shows is run on a copy of the file."""
    (command,) = re.findall(r"^ +(sed .*arc-values\.yaml.*)$", GUIDE.read_text(), re.MULTILINE)
    reference = "111122223333.dkr.ecr.us-west-2.amazonaws.com/gpukiln/runner-gpu@sha256:" + "ab" * 32
    (tmp_path / "arc-values.yaml").write_text(VALUES.read_text())
    env = {"PATH": os.environ["PATH"], "image": reference}
    done = subprocess.run(
        ["bash", "-ec", command], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    assert not done.stderr
    after = yaml.safe_load((tmp_path / "arc-values.yaml").read_text())
    before = values()
    assert runner(after)["image"] == reference
    runner(before)["image"] = reference
    assert after == before


def workflow() -> Any:
    return yaml.safe_load(WORKFLOW.read_text())


def steps() -> dict[str, str]:
    return {step["name"]: step["run"] for step in workflow()["jobs"]["gpu"]["steps"]}


def test_the_workflow_fits_its_schema_and_asks_for_the_scale_set_of_the_values() -> None:
    checker = Path(sys.executable).parent / "check-jsonschema"
    subprocess.run(
        [checker, "--builtin-schema", "vendor.github-workflows", WORKFLOW], check=True, stdout=subprocess.PIPE
    )
    job = workflow()["jobs"]["gpu"]
    assert job["runs-on"] == values()["runnerScaleSetName"]
    assert job["defaults"]["run"]["shell"] == "bash"  # with pipefail; without the word GitHub leaves it out
    expressions = set(re.findall(r"\$\{\{\s*(.*?)\s*\}\}", WORKFLOW.read_text()))
    assert expressions <= {"github.workflow", "github.ref"}  # GitHub's contexts reference


def test_the_workflow_tests_the_cuda_version_of_the_image() -> None:
    assert workflow()["jobs"]["gpu"]["env"]["CUDA_VERSION"] == load_components()["cuda"].version


SMI = """case $* in
  *query-gpu=compute_cap*) echo 8.6 ;;
  *query-gpu=*) echo '0, A10G, GPU-1234, 8.6' ;;
esac"""
NVCC = """case $* in
  --version) echo 'Cuda compilation tools, release 12.1, V12.1.105' ;;
  -arch=sm_86\\ -o\\ *add\\ *add.cu) grep -q __global__ "${@: -1}" && install -m 755 "$KERNEL" "$3" ;;
  *) echo "nvcc: $*" >&2; exit 1 ;;
esac"""
PYTHON = """case $* in
  '-m venv '*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  '-m pip '*) [[ $* == *torch==2.* ]] ;;
  -) exec "$REAL_PYTHON" - ;;
  *) echo "python: $*" >&2; exit 1 ;;
esac"""
TORCH = """
import types
__version__ = "2.4.1+double"
version = types.SimpleNamespace(cuda="12.1")
cuda = types.SimpleNamespace(is_available=lambda: True, get_device_name=lambda _: "double")
class Ones:
    total = 1024**3
    def __matmul__(self, other): return self
    def sum(self): return self
    def item(self): return float(self.total)
def ones(rows, columns, device):
    assert (rows, columns, device) == (1024, 1024, "cuda")
    return Ones()
"""
DRIVER, COMPILER, FRAMEWORK, EVIDENCE = (
    *("The driver sees a GPU", "CUDA compiles a kernel, and the GPU runs it", "PyTorch computes on the GPU"),
    "What the driver says",
)


def run_step(folder: Path, name: str, **changed: str) -> subprocess.CompletedProcess[str]:
    """Run a step as GitHub's runner does, with stand-ins for the tools of the image."""
    tools = {
        "nvidia-smi": SMI,
        "nvcc": NVCC,
        "python3": PYTHON,
        "kernel": "echo right",
        "torch": TORCH,
        **changed,
    }
    for place in ("bin", "temp", "lib"):
        (folder / place).mkdir()
    for tool in ("nvidia-smi", "nvcc", "python3", "kernel"):
        (folder / "bin" / tool).write_text(f"#!/bin/bash\n{tools[tool]}\n")
        (folder / "bin" / tool).chmod(0o755)
    (folder / "lib" / "torch.py").write_text(tools["torch"])
    (folder / "step.sh").write_text(steps()[name])
    env = {
        **workflow()["jobs"]["gpu"]["env"],
        "PATH": f"{folder}/bin:/usr/bin:/bin",
        "RUNNER_TEMP": str(folder / "temp"),
        "KERNEL": str(folder / "bin" / "kernel"),
        "REAL_PYTHON": sys.executable,
        "PYTHONPATH": str(folder / "lib"),
    }
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(folder / "step.sh")]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=30)


@pytest.mark.parametrize("name", [DRIVER, COMPILER, FRAMEWORK, EVIDENCE])
def test_a_step_passes_where_all_is_well(name: str, tmp_path: Path) -> None:
    done = run_step(tmp_path, name)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "changed", "said"),
    [
        (
            DRIVER,
            {"nvidia-smi": 'echo "couldn\'t communicate with the NVIDIA driver"; exit 9'},
            "communicate",
        ),
        (DRIVER, {"nvidia-smi": "echo 'No devices were found'"}, "::error::Found no GPU"),
        (DRIVER, {"nvidia-smi": f"{SMI}\n[[ $# == 0 ]]"}, ""),
        (COMPILER, {"nvcc": "exit 127"}, "::error::Found another nvcc"),
        (COMPILER, {"nvcc": NVCC.replace("12.1", "12.10")}, "::error::Found another nvcc"),
        (COMPILER, {"nvcc": NVCC.replace("sm_86", "sm_90")}, "nvcc: -arch=sm_86"),
        (COMPILER, {"nvidia-smi": "echo lost; exit 15"}, ""),
        (COMPILER, {"kernel": "echo 'no kernel image is available' >&2; exit 1"}, "no kernel image"),
        (FRAMEWORK, {"python3": PYTHON.replace("torch==2.", "torch==3.")}, ""),
        (FRAMEWORK, {"torch": "raise ImportError('libcudart.so.12')"}, "libcudart.so.12"),
        (FRAMEWORK, {"torch": TORCH.replace("12.1", "13.0")}, "built with CUDA 13.0, wanted 12.1"),
        (FRAMEWORK, {"torch": TORCH.replace("True", "False")}, "finds no GPU"),
        (FRAMEWORK, {"torch": TORCH.replace("1024**3", "7")}, "sum is 7.0"),
        (EVIDENCE, {"nvidia-smi": "exit 9"}, ""),
    ],
)
def test_a_step_fails_when_what_it_tests_does(
    name: str, changed: dict[str, str], said: str, tmp_path: Path
) -> None:
    done = run_step(tmp_path, name, **changed)
    assert done.returncode != 0, done.stdout
    assert said in done.stdout + done.stderr
