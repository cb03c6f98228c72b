"""GitHub Actions runners with GPUs: a scale set on the project's runner image, none while there is no job.

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
                # Another image waits until the jobs that run are done.
                "flags": {"logLevel": "info", "updateStrategy": "eventual"},
            },
        ),
        OBJECTS: dump(*_objects(runners)),
        VALUES: helm.values(
            "actions_runner_set",
            _values(settings, runners),
            f"A workflow asks for it by `runs-on: {runners.name}`. Each pod runs one job and goes.",
        ),
    }


def install(settings: Settings) -> tuple[str, ...]:
    runners = _require_runners(settings)
    return (
        helm.upgrade_command("actions_runner_controller", "arc", CONTROLLER_NAMESPACE, CONTROLLER),
        helm.apply_command(OBJECTS),
        f"# It holds github_app_id, github_app_installation_id and github_app_private_key, or github_token.\n"
        f"kubectl --namespace {NAMESPACE} get secret {runners.secret}",
        helm.upgrade_command("actions_runner_set", runners.name, NAMESPACE, VALUES),
    )


def _require_runners(settings: Settings) -> Runners:
    runners = settings.runners
    if runners is None:
        raise UsageError(
            "nothing is said about runners", hint="--runners URL --image REF, or --only without runners"
        )
    wrong = UsageError(
        f"runners of {runners.url!r}, wanted the address of a repository, organisation or enterprise",
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
            f"the runners' image is {runners.image!r}, wanted one with its digest: a tag can move",
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
        "minRunners": 0,
        "maxRunners": runners.most,
        "controllerServiceAccount": {"namespace": CONTROLLER_NAMESPACE, "name": ACCOUNT},
        "template": {
            # A job is not moved; its runner goes when it is done.
            "metadata": {"annotations": {"karpenter.sh/do-not-disrupt": "true"}},
            "spec": {
                "nodeSelector": {GPU_PRESENT: "true", **labels},
                "tolerations": [settings.taint.toleration()],
                "securityContext": {
                    "runAsNonRoot": True,
                    "runAsUser": USER_ID,
                    "runAsGroup": USER_ID,
                    "fsGroup": USER_ID,
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
        "name": "runner",  # the chart finds it by this name
        "image": runners.image,
        "command": ["/home/runner/run.sh"],
        # The image has no sudo, and nothing in it gains rights by its file.
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
    """Where a runner's compiler cache lies.

    Whoever writes to a cache decides what others compile. Only a set that one repository registers keeps one:
    which repository's job a runner of an organisation gets is not known when its pod is made.
    """
    if _repository(runners):
        return {"persistentVolumeClaim": {"claimName": _claim(runners)}}
    return {"emptyDir": {"sizeLimit": runners.ccache}}


def _cache_limit(runners: Runners) -> str:
    """Nine tenths of the volume, for ccache removes files after it has written others."""
    return Memory.of_mib(Memory.parse(runners.ccache, "ccache").mib * 9 // 10).quantity


def _repository(runners: Runners) -> str:
    """ORGANISATION/REPOSITORY, in lower case as GitHub compares it; empty for an organisation's runners."""
    path = urlsplit(runners.url).path.strip("/").removesuffix(".git").lower()
    owner, slash, name = path.partition("/")
    return path if slash and "/" not in name and owner != "enterprises" else ""


def _claim(runners: Runners) -> str:
    repository = _repository(runners)
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
