"""GitHub Actions runners with GPUs: a scale set on gpukiln's runner image that is empty without jobs.

Keys and names: actions/actions-runner-controller 0.14.2, charts/gha-runner-scale-set; the hooks' variables:
actions/runner, docs/adrs/1751-runner-job-hooks.md; uid 1001: docker/runner-gpu/Dockerfile.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any
from urllib.parse import urlsplit

from gpukiln.catalog.load import ROOT
from gpukiln.errors import UsageError
from gpukiln.kubernetes.addons import helm
from gpukiln.kubernetes.addons.settings import Runners, Settings
from gpukiln.kubernetes.machines import GPU, GPU_PRESENT
from gpukiln.kubernetes.manifest import Manifest, dump
from gpukiln.parsing import refuse_credentials
from gpukiln.typed import unknown
from gpukiln.units import Memory

CONTROLLER, VALUES, OBJECTS = "runners/controller-values.yaml", "runners/values.yaml", "runners/objects.yaml"
CONTROLLER_NAMESPACE, NAMESPACE = "arc-systems", "arc-runners"
ACCOUNT = "arc-controller"
HOOKS, HOOKS_FOLDER = "gpu-job-hooks", "/etc/gpukiln/hooks"
CACHE = "/ccache"
USER_ID = 1001


def files(settings: Settings) -> dict[str, str]:
    runners = _require_runners(settings)
    return {
        CONTROLLER: helm.values(
            "actions_runner_controller",
            {
                "serviceAccount": {"create": True, "name": ACCOUNT},
                "replicaCount": 2,
                # eventual: a new image is rolled out after the running jobs ended; immediate would double the
                # runners.
                "flags": {"logLevel": "info", "updateStrategy": "eventual"},
            },
        ),
        OBJECTS: dump(*_objects(runners)),
        VALUES: helm.values(
            "actions_runner_set",
            _values(settings, runners),
            f"A workflow selects it by `runs-on: {runners.name}`. Each pod runs one job and is removed.",
        ),
    }


def install(settings: Settings) -> tuple[str, ...]:
    runners = _require_runners(settings)
    return (
        helm.upgrade_command("actions_runner_controller", "arc", CONTROLLER_NAMESPACE, CONTROLLER),
        helm.apply_command(OBJECTS),
        "# The Secret has github_app_id, github_app_installation_id and github_app_private_key, or "
        "github_token.\n"
        f"kubectl --namespace {NAMESPACE} get secret {runners.secret}",
        helm.upgrade_command("actions_runner_set", runners.name, NAMESPACE, VALUES),
    )


def _require_runners(settings: Settings) -> Runners:
    runners = settings.runners
    if runners is None:
        raise UsageError(
            "the add-on runners needs --runners and --image",
            hint="--runners URL --image REF, or leave runners out of --only",
        )
    wrong = UsageError(
        f"--runners {runners.url!r}, wanted the URL of a repository, organisation or enterprise",
        hint="https://github.com/my-organisation/my-repository, for example",
    )
    refuse_credentials(runners.url, "--runners", where="the rendered values")
    try:
        where = urlsplit(runners.url)
    except ValueError:  # https://[::1
        raise wrong from None
    if where.scheme != "https" or not where.netloc or not where.path.strip("/"):
        raise wrong
    if not re.fullmatch(r"[^\s@]+@sha256:[0-9a-f]{64}", runners.image):
        raise UsageError(
            f"--image {runners.image!r}, wanted an image with its digest: a tag can change",
            hint="`invoke docker.push --image runner-gpu --repository REPOSITORY` prints it",
        )
    known = [flavor.name for flavor in settings.flavors]
    if runners.flavor and runners.flavor not in known:
        raise unknown("flavor of the runners", runners.flavor, known)
    return runners


def _values(settings: Settings, runners: Runners) -> dict[str, Any]:
    labels = next((flavor.labels for flavor in settings.flavors if flavor.name == runners.flavor), {})
    return {
        "githubConfigUrl": runners.url,
        "githubConfigSecret": runners.secret,
        "runnerScaleSetName": runners.name,
        **({"scaleSetLabels": list(runners.labels)} if runners.labels else {}),
        # A runner that waits for jobs would hold its GPU.
        "minRunners": 0,
        "maxRunners": runners.most,
        "controllerServiceAccount": {"namespace": CONTROLLER_NAMESPACE, "name": ACCOUNT},
        "template": {
            # A runner can't continue its job on another node; it is removed when the job ends.
            "metadata": {"annotations": {"karpenter.sh/do-not-disrupt": "true"}},
            "spec": {
                "nodeSelector": {GPU_PRESENT: "true", **labels},
                "tolerations": [settings.taint.toleration()],
                "securityContext": {
                    "runAsNonRoot": True,
                    "runAsUser": USER_ID,
                    "runAsGroup": USER_ID,
                    "fsGroup": USER_ID,
                    # Changing the owner of every file of a full cache would delay each start.
                    "fsGroupChangePolicy": "OnRootMismatch",
                    "seccompProfile": {"type": "RuntimeDefault"},
                },
                "containers": [_container(runners)],
                "volumes": _volumes(runners),
            },
        },
    }


def _container(runners: Runners) -> dict[str, Any]:
    return {
        "name": "runner",  # the chart requires this name
        "image": runners.image,
        "command": ["/home/runner/run.sh"],
        # The image has no sudo and no setuid programs.
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "env": [
            {"name": "ACTIONS_RUNNER_HOOK_JOB_STARTED", "value": f"{HOOKS_FOLDER}/gpu-job-started.sh"},
            {"name": "ACTIONS_RUNNER_HOOK_JOB_COMPLETED", "value": f"{HOOKS_FOLDER}/gpu-job-completed.sh"},
            {"name": "CCACHE_DIR", "value": CACHE},
            {"name": "CCACHE_MAXSIZE", "value": _cache_limit(runners)},
        ],
        "resources": {
            "requests": {"cpu": runners.cpu, "memory": runners.memory},
            "limits": {"memory": runners.memory, GPU: str(runners.gpus)},
        },
        "volumeMounts": [
            {"name": "hooks", "mountPath": HOOKS_FOLDER, "readOnly": True},
            {"name": "ccache", "mountPath": CACHE},
            # Containers have 64 MiB of /dev/shm by default, too little for PyTorch's data loaders.
            {"name": "shared-memory", "mountPath": "/dev/shm"},  # noqa: S108 - in the container
        ],
    }


def _volumes(runners: Runners) -> list[dict[str, Any]]:
    return [
        {"name": "hooks", "configMap": {"name": HOOKS, "defaultMode": 0o555}},
        {"name": "ccache", **_cache(runners)},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": runners.shared_memory}},
    ]


def _cache(runners: Runners) -> dict[str, Any]:
    """The volume of the compiler cache.

    A job that can write to the cache can change what later jobs build. So only runners of one repository
    share a
    volume: the repository whose job a runner of an organisation gets is unknown when its pod is created.
    """
    if _repository(runners):
        # ReadWriteMany: runners on different nodes share the volume.
        return {"persistentVolumeClaim": {"claimName": _claim(runners)}}
    return {"emptyDir": {"sizeLimit": runners.ccache}}


def _cache_limit(runners: Runners) -> str:
    """Nine tenths of the volume, because ccache removes files only after it has written new ones."""
    return Memory.of_mib(Memory.parse(runners.ccache, "ccache").mib * 9 // 10).quantity


def _repository(runners: Runners) -> str:
    """ORGANISATION/REPOSITORY in lower case, as GitHub compares it; empty for runners of an organisation."""
    path = urlsplit(runners.url).path.strip("/").removesuffix(".git").lower()
    owner, slash, name = path.partition("/")
    return path if slash and "/" not in name and owner != "enterprises" else ""


def _claim(runners: Runners) -> str:
    repository = _repository(runners)
    # Two repositories whose readable names are equal still get different claims.
    digest = hashlib.sha256(f"{urlsplit(runners.url).netloc.lower()}/{repository}".encode()).hexdigest()
    readable = re.sub("[^a-z0-9]+", "-", repository).strip("-")[:100]
    return f"{runners.name}-ccache-{readable}-{digest[:8]}"


def _objects(runners: Runners) -> tuple[Manifest, ...]:
    scripts = sorted((ROOT / "scripts" / "hooks").glob("*.sh"))
    return (
        {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": NAMESPACE, "labels": {"pod-security.kubernetes.io/enforce": "baseline"}},
        },
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": HOOKS, "namespace": NAMESPACE},
            "data": {script.name: script.read_text(encoding="utf-8") for script in scripts},
        },
        *([_volume_claim(runners)] if _repository(runners) else ()),
    )


def _volume_claim(runners: Runners) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": _claim(runners), "namespace": NAMESPACE},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "storageClassName": runners.storage_class,
            "resources": {"requests": {"storage": runners.ccache}},
        },
    }
