"""k8s.addons: golden files, what the API and the charts accept, what is refused and why.

examples/kubernetes-addons/rendered is the golden output; GPUKILN_GOLDEN=write writes it anew. What files for
clusters without Prometheus' operator repeat of those for clusters with it is not kept a second time.
"""

import copy
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from gpukiln.catalog.components import load_add_ons
from gpukiln.catalog.load import ROOT
from gpukiln.commands import k8s_addons
from gpukiln.errors import GpukilnError, IncompatibleError, UsageError
from gpukiln.kubernetes import folder
from gpukiln.kubernetes.addons import helm, monitoring, options, plugin, queue, render, runners, sharing
from gpukiln.kubernetes.addons.settings import Flavor, Runners, Settings, SharingSettings, Team
from gpukiln.kubernetes.manifest import load
from tests.support.exit_codes import invoke

EXAMPLE = ROOT / "examples/kubernetes-addons"
GOLDEN = EXAMPLE / "rendered"
MINORS = ("1.34", "1.35", "1.36", "1.37")
IMAGE = "registry.example/gpukiln/runner-gpu@sha256:" + "ab" * 32
REPEATED = (monitoring.DASHBOARD, monitoring.RULES)  # of grafana.yaml and objects.yaml
RUNNERS = Runners("https://github.com/organisation/repository", IMAGE)


@pytest.fixture(scope="module", autouse=True)
def _shipped_prices(tmp_path_factory):
    """Not those that somebody has asked AWS for on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPUKILN_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="module")
def example():
    settings = options.load_settings([EXAMPLE / "settings.yaml"], plain={})
    return render.render_files(settings, render.select_add_ons((), settings))


def values(text):
    [found] = load(text)
    return found


def test_the_example_is_what_is_rendered(example):
    wanted = {path: text for path, text in example.items() if path not in REPEATED}
    if os.environ.get("GPUKILN_GOLDEN") == "write":
        folder.write(GOLDEN, wanted)
    there = {str(path.relative_to(GOLDEN)): path.read_text() for path in GOLDEN.rglob("*") if path.is_file()}
    assert there == wanted


def test_what_the_example_leaves_out_is_in_its_other_files(example):
    [config] = load(example[monitoring.GRAFANA])
    assert [*config["data"].values()] == [example[monitoring.DASHBOARD]]
    [rules] = [one for one in load(example[monitoring.OBJECTS]) if one["kind"] == "PrometheusRule"]
    assert [rules["spec"]] == [*load(example[monitoring.RULES])]


@pytest.mark.parametrize("minor", MINORS)
def test_every_object_fits_its_schema(example, minor):
    kinds = set()
    for path, text in example.items():
        if not path.endswith(".yaml") or path.endswith("values.yaml") or "/plain/" in path:
            continue
        for one in load(text):
            if not one["apiVersion"].startswith(("kueue.", "monitoring.coreos.com/")):
                kubernetes_validate.validate(one, minor, strict=True)
                kinds.add(one["kind"])
    assert {"DaemonSet", "ValidatingAdmissionPolicy", "Job", "ConfigMap", "Namespace"} <= kinds


def test_the_check_finds_nothing_in_the_example(capsys):
    """The one finding is the proof of isolation's, which does on purpose what the rule is about."""
    with pytest.raises(SystemExit) as ended:
        invoke(["k8s.check", str(GOLDEN), "--json"])
    assert not ended.value.code
    document = json.loads(capsys.readouterr().out)
    assert document["findings"] == []
    assert [one["rule"] for one in document["skipped"]] == ["nvidia-visible-devices"]


# ---- the charts


def test_every_value_is_a_key_of_its_chart(example):
    found = {path: values(text) for path, text in example.items() if path.endswith("values.yaml")}
    assert len(found) == 5  # else one is not looked at here
    for path, content in found.items():
        head = example[path].splitlines()[0]
        chart = head.split()[5].rstrip(",")
        assert list(helm.unknown_keys(chart, content)) == []


@pytest.mark.parametrize(
    ("add_on", "wrong", "near"),
    [
        ("actions_runner_set", {"runnerLabels": ["gpu"]}, "scaleSetLabels"),
        ("actions_runner_set", {"tolerations": []}, "template"),
        ("actions_runner_set", {"runnerScaleDownDelaySecondsAfterScaleOut": 300}, "maxRunners"),
        ("actions_runner_set", {"template": {"specs": {}}}, "template.spec"),
        ("nvidia_device_plugin", {"deviceListStrategies": "cdi-cri"}, "deviceListStrategy"),
        ("nvidia_device_plugin", {"config": {"maps": {}}}, "config.map"),
        (
            "kueue",
            {"controllerManager": {"manager": {"resource": {}}}},
            "controllerManager.manager.resources",
        ),
        ("actions_runner_controller", {"flags": {"loglevel": "info"}}, "flags.logLevel"),
    ],
)
def test_a_key_that_a_chart_would_ignore_is_refused(add_on, wrong, near):
    with pytest.raises(UsageError, match="unknown key in chart") as refused:
        helm.values(add_on, wrong)
    assert near in refused.value.message + refused.value.hint


def test_what_is_below_a_free_key_is_whatever_kubernetes_takes():
    assert not list(
        helm.unknown_keys("nvidia-device-plugin", {"affinity": {"nodeAffinity": {}}, "nfd": {"x": 1}})
    )


def test_add_ons_have_a_chart_with_its_repository(tmp_path):
    for name, one in load_add_ons().items():
        assert one.chart or one.image or one.version, name
        assert one.source
        assert one.reason
    path = tmp_path / "components.yaml"
    row = '{version: "1", source: s, reason: r, review: 2027-01-01'
    path.write_text(f"components: {{}}\nadd_ons:\n  a: {row}, chart: a}}\n")
    with pytest.raises(UsageError, match="a chart needs its repository"):
        load_add_ons(path)
    path.write_text(f"components: {{}}\nadd_ons:\n  a: {row}, chart: a, repository: ftp://a}}\n")
    with pytest.raises(UsageError, match=r"a\.repository"):
        load_add_ons(path)
    path.write_text(f"components: {{}}\nadd_ons:\n  a: {row}, charts: a}}\n")
    with pytest.raises(UsageError, match="did you mean chart"):
        load_add_ons(path)


# ---- the device plugin and how GPUs are shared


def test_a_pod_can_not_ask_for_gpus_by_its_environment(example):
    found = values(example[plugin.VALUES])
    assert found["deviceListStrategy"] == "cdi-cri"  # not a variable that a pod can set as well
    assert found["securityContext"]["capabilities"]["add"] == ["SYS_ADMIN"]  # or the plugin sees none itself
    accepted = {line.rsplit(" ", 1)[1] for line in plugin.ISOLATION}
    assert accepted == {
        "accept-nvidia-visible-devices-envvar-when-unprivileged=false",
        "accept-nvidia-visible-devices-as-volume-mounts=false",
    }
    assert all(line in example[plugin.VALUES] for line in plugin.ISOLATION)


@pytest.mark.parametrize(("devices", "code"), [([], 0), (["/dev/nvidia0"], 1)])
def test_the_proof_of_isolation_fails_where_a_device_is_seen(example, devices, code):
    [job] = load(example[plugin.ISOLATION_CHECK])
    [container] = job["spec"]["template"]["spec"]["containers"]
    assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"} in container["env"]
    assert "nvidia.com/gpu" not in container["resources"]["limits"]
    program = f"import glob; glob.glob = lambda _: {devices}\n{container['command'][-1]}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert all(one in done.stderr for one in devices)


def test_the_plugin_runs_where_a_gpu_is_and_nowhere_else(example):
    found = values(example[plugin.VALUES])
    required = found["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    [term] = required["nodeSelectorTerms"]
    assert term == {
        "matchExpressions": [{"key": "nvidia.com/gpu.present", "operator": "In", "values": ["true"]}]
    }
    assert found["gfd"] == {"enabled": True}


@pytest.mark.parametrize(
    ("how", "flags", "shared"),
    [
        ("none", "none", None),
        (
            "time-slicing:4",
            "none",
            {
                "timeSlicing": {
                    "failRequestsGreaterThanOne": True,
                    "resources": [{"name": "nvidia.com/gpu", "replicas": 4}],
                }
            },
        ),
        ("mps:8", "none", {"mps": {"resources": [{"name": "nvidia.com/gpu", "replicas": 8}]}}),
        ("mig-single", "single", None),
        ("mig-mixed", "mixed", None),
    ],
)
def test_a_configuration_of_the_plugin(how, flags, shared):
    settings = Settings(sharing=sharing.parse(how))
    found = sharing.configurations(settings)["default"]
    assert found["flags"] == {"migStrategy": flags}
    assert found.get("sharing") == shared
    assert values(plugin.files(settings)[plugin.VALUES])["migStrategy"] == flags


def test_nodes_choose_by_label_and_the_chart_does_not_overrule_them(example):
    found = values(example[plugin.VALUES])
    configurations = {name: yaml.safe_load(text) for name, text in found["config"]["map"].items()}
    assert set(configurations) == {"default", "notebooks", "small"}
    assert found["config"]["default"] == "default"
    assert configurations["small"]["flags"]["migStrategy"] == "mixed"
    assert "migStrategy" not in found  # a value of the chart goes before the configurations


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("time-slicing", "0 pods for each GPU, wanted 2"),
        ("time-slicing:1", "wanted 2 or more"),
        ("time-slicing:x", "no number"),
        ("mps:49", "at most 48"),
        ("mig-single:4", "the size of a MIG device is its profile"),
        ("none:2", "whole GPUs"),
        ("time-slicing:4+mps:4", "in one way"),
        ("timeslicing:4", "did you mean time-slicing"),
    ],
)
def test_sharing_that_makes_no_sense_is_refused(how, why):
    with pytest.raises(GpukilnError) as refused:
        sharing.parse(how)
    assert why in refused.value.message + refused.value.hint


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (
            Settings(
                sharing=SharingSettings("mig-single"),
                flavors=(queue.parse_flavor("g4dn.xlarge", "karpenter"),),
            ),
            "T4 has no MIG",
        ),
        (
            Settings(sharing=SharingSettings("mig-mixed"), flavors=(queue.parse_flavor("l4", "karpenter"),)),
            "L4 has no MIG",
        ),
        (
            Settings(sharing=SharingSettings("mps", 4), flavors=(queue.parse_flavor("m60", "karpenter"),)),
            "older than Volta",
        ),
        (Settings(flavors=(Flavor("a", {"b": "c"}, "nvidia.com/mig-1g.5gb"),)), "only with mig-mixed"),
        (Settings(flavors=(Flavor("a", {"b": "c"}, "nvidia.com/gpus"),)), "wanted nvidia.com/gpu or a MIG"),
        (Settings(named_sharing={"default": SharingSettings()}), "all other nodes"),
        (Settings(named_sharing={"a": SharingSettings("mps", 1)}), "sharing of a by mps"),
    ],
)
def test_sharing_that_the_nodes_can_not_do_is_refused(settings, why):
    with pytest.raises(GpukilnError, match=why):
        sharing.configurations(settings)


def test_sharing_that_the_nodes_can_do_is_not():
    for how in ("mig-single", "mps:4"):
        kinds = (queue.parse_flavor("p5.48xlarge", "karpenter"),)
        assert sharing.configurations(Settings(sharing=sharing.parse(how), flavors=kinds))
    mixed = Settings(
        sharing=SharingSettings("mig-mixed"), flavors=(Flavor("a", {"b": "c"}, "nvidia.com/mig-1g.10gb"),)
    )
    assert sharing.configurations(mixed)


# ---- the queue

NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"}
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}


def only(required=(), **properties):
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


QUANTITY = {"type": "string", "pattern": r"^\d+(\.\d+)?(m|[KMGT]i?)?$"}
# As far as used, of kubernetes-sigs/kueue: apis/kueue/v1beta2/*_types.go
SPECS = {
    "ResourceFlavor": only(
        nodeLabels={**TEXTS, "maxProperties": 8},
        tolerations={
            "maxItems": 8,
            "items": only(
                ("key", "operator", "effect"),
                key={"type": "string"},
                operator={"const": "Exists"},  # and then without a value
                effect={"enum": ["NoSchedule", "PreferNoSchedule", "NoExecute"]},
            ),
        },
    ),
    "Cohort": only(),
    "ClusterQueue": only(
        ("resourceGroups", "namespaceSelector"),
        cohortName=NAME,
        namespaceSelector=only(matchLabels=TEXTS),
        queueingStrategy={"enum": ["StrictFIFO", "BestEffortFIFO"]},
        preemption=only(
            reclaimWithinCohort={"enum": ["Never", "LowerPriority", "Any"]},
            withinClusterQueue={"enum": ["Never", "LowerPriority", "LowerOrNewerEqualPriority"]},
        ),
        flavorFungibility=only(
            whenCanBorrow={"enum": ["MayStopSearch", "TryNextFlavor"]},
            whenCanPreempt={"enum": ["MayStopSearch", "TryNextFlavor"]},
        ),
        fairSharing=only(weight=QUANTITY),
        resourceGroups={
            "minItems": 1,
            "maxItems": 16,
            "items": only(
                ("coveredResources", "flavors"),
                coveredResources={"minItems": 1, "maxItems": 64, "uniqueItems": True},
                flavors={
                    "minItems": 1,
                    "maxItems": 64,
                    "items": only(
                        ("name", "resources"),
                        name=NAME,
                        resources={
                            "items": only(
                                ("name", "nominalQuota"),
                                name={"type": "string"},
                                nominalQuota=QUANTITY,
                                lendingLimit=QUANTITY,
                            )
                        },
                    ),
                },
            ),
        },
    ),
    "LocalQueue": only(("clusterQueue",), clusterQueue=NAME),
}


def check_queues(objects):
    """The fields, and what the API's own rules and the controller want of objects together."""
    names = {one["metadata"]["name"] for one in objects if one["kind"] == "ResourceFlavor"}
    queues = {one["metadata"]["name"] for one in objects if one["kind"] == "ClusterQueue"}
    for one in objects:
        if one["kind"] == "Namespace":
            continue
        assert one["apiVersion"] == "kueue.x-k8s.io/v1beta2"
        jsonschema.validate(one["spec"], SPECS[one["kind"]])
        if one["kind"] == "ClusterQueue":
            for group in one["spec"]["resourceGroups"]:
                for row in group["flavors"]:
                    assert row["name"] in names
                    assert [each["name"] for each in row["resources"]] == group["coveredResources"]
        if one["kind"] == "LocalQueue":
            assert one["spec"]["clusterQueue"] in queues


def queues(settings):
    return load(queue.files(settings)[queue.QUEUES])


def test_the_queues_are_what_kueue_takes(example):
    objects = load(example[queue.QUEUES])
    check_queues(objects)
    wrong = copy.deepcopy(objects)
    next(one for one in wrong if one["kind"] == "ClusterQueue")["spec"]["cohort"] = "gpu"  # of v1beta1
    with pytest.raises(jsonschema.ValidationError):
        check_queues(wrong)
    wrong = copy.deepcopy(objects)
    group = next(one for one in wrong if one["kind"] == "ClusterQueue")["spec"]["resourceGroups"][0]
    group["flavors"][0]["resources"].pop()
    with pytest.raises(AssertionError):
        check_queues(wrong)


def test_each_team_has_a_namespace_a_quota_and_the_queue_gpu(example):
    objects = load(example[queue.QUEUES])
    by_kind = {}
    for one in objects:
        by_kind.setdefault(one["kind"], []).append(one)
    assert {one["metadata"]["namespace"] for one in by_kind["LocalQueue"]} == {
        "vision",
        "language",
        "serving",
    }
    assert {one["metadata"]["name"] for one in by_kind["LocalQueue"]} == {"gpu"}
    vision, _, serving = by_kind["ClusterQueue"]
    [group] = vision["spec"]["resourceGroups"]
    assert group["coveredResources"] == ["cpu", "memory", "nvidia.com/gpu", "nvidia.com/mig-1g.10gb"]
    quotas = {row["name"]: {each["name"]: each for each in row["resources"]} for row in group["flavors"]}
    assert quotas["t4"]["nvidia.com/gpu"]["nominalQuota"] == "8"
    assert quotas["t4"]["cpu"]["nominalQuota"] == "32"  # of eight g4dn.xlarge
    assert quotas["t4"]["memory"]["nominalQuota"] == "128Gi"
    assert quotas["h100"]["memory"]["nominalQuota"] == "512Gi"  # memory_per_gpu
    [group] = serving["spec"]["resourceGroups"]
    assert {each["lendingLimit"] for row in group["flavors"] for each in row["resources"]} == {"0"}
    for one in by_kind["Namespace"]:  # who is privileged has all GPUs of the node
        assert one["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "baseline"


def test_a_job_can_not_pass_by_its_queue(example):
    text = values(example[queue.VALUES])["managerConfig"]["controllerManagerConfigYaml"]
    found = yaml.safe_load(text)
    assert found["manageJobsWithoutQueueName"] is True
    [where] = found["managedJobsNamespaceSelector"]["matchExpressions"]
    labels = [one["metadata"]["labels"] for one in load(example[queue.QUEUES]) if one["kind"] == "Namespace"]
    assert all(where["key"] in one for one in labels)
    assert "batch/job" in found["integrations"]["frameworks"]
    assert found["fairSharing"]["preemptionStrategies"]


PRODUCT = {"nvidia.com/gpu.product": "NVIDIA-A10G"}


@pytest.mark.parametrize(
    ("typed", "name", "labels", "resource"),
    [
        ("g5.xlarge", "g5-xlarge", {"node.kubernetes.io/instance-type": "g5.xlarge"}, "nvidia.com/gpu"),
        ("big=p5.48xlarge", "big", {"node.kubernetes.io/instance-type": "p5.48xlarge"}, "nvidia.com/gpu"),
        ("T4", "t4", {"karpenter.k8s.aws/instance-gpu-name": "t4"}, "nvidia.com/gpu"),
        ("a=k.io/gpu=A10G", "a", {"k.io/gpu": "A10G"}, "nvidia.com/gpu"),
        ("nvidia.com/gpu.product=NVIDIA-A10G", "nvidia-a10g", PRODUCT, "nvidia.com/gpu"),
        (
            "small=p5.48xlarge:mig-1g.10gb",
            "small",
            {"node.kubernetes.io/instance-type": "p5.48xlarge"},
            "nvidia.com/mig-1g.10gb",
        ),
    ],
)
def test_a_flavor_as_it_is_typed(typed, name, labels, resource):
    assert queue.parse_flavor(typed, "karpenter") == Flavor(name, labels, resource)


def test_a_flavor_by_gpu_is_told_apart_while_there_is_no_node():
    two = [queue.parse_flavor(name, "karpenter").labels for name in ("a100-40gb", "a100-80gb")]
    assert {one["karpenter.k8s.aws/instance-gpu-name"] for one in two} == {"a100"}
    assert [one["karpenter.k8s.aws/instance-gpu-memory"] for one in two] == ["40960", "81920"]
    assert queue.parse_flavor("t4", "managed").labels == {"k8s.amazonaws.com/accelerator": "nvidia-t4"}


@pytest.mark.parametrize(("typed", "near"), [("g5.xlarg", "g5.xlarge"), ("t5", "t4"), ("h10", "h100")])
def test_a_flavor_that_is_none_is_refused_with_the_nearest(typed, near):
    with pytest.raises(UsageError) as refused:
        queue.parse_flavor(typed, "karpenter")
    assert near in refused.value.message + refused.value.hint


def test_a_flavor_of_machines_that_nobody_gets_any_more_is_refused():
    with pytest.raises(IncompatibleError, match="retired") as refused:
        queue.parse_flavor("p3.2xlarge", "karpenter")
    assert "instead" in refused.value.hint


VISION = Team("vision", {"gpu": 4})


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (Settings(), "needs a team"),
        (Settings(kubernetes="1.33", teams=(VISION,)), "needs Kubernetes 1.34"),
        (Settings(teams=(VISION, VISION)), "vision is named twice"),
        (Settings(teams=(Team("a", {"t4": 1}),)), "unknown flavor of team a 't4'"),
        (Settings(teams=(Team("a", {"gpu": 0}),)), "no team has a GPU"),
        (Settings(teams=(Team("kube-system", {"gpu": 1}),)), "use a namespace whose privileged pods"),
        (Settings(teams=(Team("gpu-system", {"gpu": 1}),)), "use a namespace whose privileged pods"),
    ],
)
def test_queues_that_would_start_nothing_are_refused(settings, why):
    with pytest.raises(GpukilnError, match=why):
        queue.files(settings)


def test_shares_of_a_gpu_have_their_part_of_the_machine():
    kinds = (queue.parse_flavor("g4dn.xlarge", "karpenter"),)
    teams = (Team("a", {"g4dn-xlarge": 4}),)
    shared = Settings(sharing=SharingSettings("time-slicing", 4), flavors=kinds, teams=teams)
    [found] = [one for one in queues(shared) if one["kind"] == "ClusterQueue"]
    [row] = found["spec"]["resourceGroups"][0]["flavors"]
    assert [each["nominalQuota"] for each in row["resources"]] == ["4", "16Gi", "4"]  # one machine


# ---- the runners


def test_a_runner_has_its_gpu_its_hooks_and_its_cache(example):
    found = values(example[runners.VALUES])
    spec = found["template"]["spec"]
    [container] = spec["containers"]
    assert container["name"] == "runner"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert spec["nodeSelector"]["node.kubernetes.io/instance-type"] == "g4dn.xlarge"  # of the flavor
    assert (found["minRunners"], found["maxRunners"]) == (0, 4)
    objects = {one["kind"]: one for one in load(example[runners.OBJECTS])}
    env = {one["name"]: one["value"] for one in container["env"]}
    mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
    volumes = {one["name"]: one for one in spec["volumes"]}
    assert set(mounts.values()) == set(volumes)
    for job in ("STARTED", "COMPLETED"):
        place, _, script = env[f"ACTIONS_RUNNER_HOOK_JOB_{job}"].rpartition("/")
        assert volumes[mounts[place]]["configMap"]["name"] == objects["ConfigMap"]["metadata"]["name"]
        assert objects["ConfigMap"]["data"][script] == (ROOT / "scripts/hooks" / script).read_text()
    claim = volumes[mounts[env["CCACHE_DIR"]]]["persistentVolumeClaim"]["claimName"]
    assert claim == objects["PersistentVolumeClaim"]["metadata"]["name"]
    assert env["CCACHE_MAXSIZE"] == "45Gi"
    account = values(example[runners.CONTROLLER])["serviceAccount"]["name"]
    assert found["controllerServiceAccount"] == {"namespace": "arc-systems", "name": account}


def test_a_runner_fulfils_the_restricted_pod_security_standard(example):
    # kubernetes.io/docs/concepts/security/pod-security-standards, restricted
    spec = values(example[runners.VALUES])["template"]["spec"]
    pod, [container] = spec["securityContext"], spec["containers"]
    assert (
        f"USER {pod['runAsUser']}:{pod['runAsGroup']}\n"
        in (ROOT / "docker/runner-gpu/Dockerfile").read_text()
    )
    assert (pod["runAsNonRoot"], pod["seccompProfile"]) == (True, {"type": "RuntimeDefault"})
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    kinds = {kind for volume in spec["volumes"] for kind in volume if kind != "name"}
    assert kinds <= {"configMap", "emptyDir", "persistentVolumeClaim"}


def cache_of(url):
    files = runners.files(Settings(runners=replace(RUNNERS, url=url)))
    [volume] = [
        one for one in values(files[runners.VALUES])["template"]["spec"]["volumes"] if one["name"] == "ccache"
    ]
    claims = [one for one in load(files[runners.OBJECTS]) if one["kind"] == "PersistentVolumeClaim"]
    named = volume.get("persistentVolumeClaim", {}).get("claimName")
    assert [one["metadata"]["name"] for one in claims] == ([named] if named else [])
    return named, volume.get("emptyDir")


def test_a_repository_has_a_cache_of_its_own():
    github = "https://github.com"
    same = {cache_of(f"{github}/{name}") for name in ("O/r", "o/R", "o/r/", "o/r.git")}
    others = {cache_of(f"{github}/{name}") for name in ("o/r2", "o-r/x", "o/r-x", "o/r.x")}
    others.add(cache_of("https://github.example/o/r"))
    assert len(same) == 1
    assert len(same | others) == 6
    assert all(re.fullmatch(r"[a-z0-9-]{1,253}", name) for name, _ in same | others)


@pytest.mark.parametrize("path", ["organisation", "organisation/", "enterprises/all"])
def test_repositories_that_share_runners_share_no_cache(path):
    assert cache_of(f"https://github.com/{path}") == (None, {"sizeLimit": "50Gi"})


@pytest.mark.parametrize("hook", ["gpu-job-started.sh", "gpu-job-completed.sh"])
def test_the_hooks_find_what_they_source_where_they_are_mounted(example, tmp_path, hook):
    [data] = [one["data"] for one in load(example[runners.OBJECTS]) if one["kind"] == "ConfigMap"]
    for name, text in data.items():
        (tmp_path / name).write_text(text)
    absent = ("GPUKILN_DEVICES", "GPUKILN_GPU_PRESENT", "GPUKILN_JOURNAL")
    nothing = dict.fromkeys(absent, str(tmp_path / "none"))
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), **nothing}
    done = subprocess.run(
        ["bash", "-e", tmp_path / hook], env=env, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "no GPU" in done.stdout


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (replace(RUNNERS, image="registry.example/runner-gpu:latest"), "a tag can change"),
        (replace(RUNNERS, url="github.com/o/r"), "wanted the URL"),
        (replace(RUNNERS, url="https://github.com/"), "wanted the URL"),
        (replace(RUNNERS, flavor="t4"), "unknown flavor of the runners"),
        (None, "needs --runners and --image"),
    ],
)
def test_runners_that_would_not_run_are_refused(wrong, why):
    with pytest.raises(UsageError, match=why):
        runners.files(Settings(runners=wrong))
    assert runners.files(Settings(runners=RUNNERS))


# ---- the command and the script


@pytest.fixture
def typed(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GPUKILN_HOME", str(tmp_path / "home"))

    def run(*words, code=0):
        with pytest.raises(SystemExit) as ended:
            invoke(["k8s.addons", *words])
        shown = capsys.readouterr()
        assert (ended.value.code or 0) == code, shown
        return shown

    return run


def test_a_second_run_says_what_changed(typed, tmp_path):
    out = tmp_path / "out"
    first = typed("--team", "vision=4", "--output", str(out))
    assert {line.split()[0] for line in first.out.splitlines()} == {"new"}
    assert "accept-nvidia-visible-devices-envvar-when-unprivileged=false" in first.err
    again = typed("--team", "vision=4", "--output", str(out))
    assert {line.split()[0] for line in again.out.splitlines()} == {"same"}
    third = typed("--team", "vision=8", "--only", "queue", "--output", str(out)).out.splitlines()
    said = {line.split()[1].removeprefix(f"{out}/"): line.split()[0] for line in third}
    assert said["queue/queues.yaml"] == "changed"
    assert said["queue/values.yaml"] == "same"
    assert said["health/gpu-health.yaml"] == "other"
    assert (out / "health/gpu-health.yaml").is_file()
    (out / "queue/queues.yaml").write_bytes(b"\xff")  # not even text
    assert f"changed  {out}/queue/queues.yaml" in typed("--team", "vision=8", "--output", str(out)).out


def test_json_is_one_document_with_the_files(typed):
    document = json.loads(typed("--team", "vision=4", "--only", "queue", "--json").out)
    assert document["schema"] == "k8s.addons/1"
    assert [one["name"] for one in document["add_ons"]] == ["queue"]
    assert document["settings"]["teams"][0]["gpus"] == {"gpu": 4}
    files = {one["path"]: one for one in document["files"]}
    assert files["queue/queues.yaml"]["change"] is None
    assert "LocalQueue" in files["queue/queues.yaml"]["text"]


def test_without_a_folder_the_files_are_printed(typed):
    out = typed("--only", "plugin").out
    assert out.startswith("# namespace.yaml\n---\n")
    assert "# device-plugin/values.yaml\n" in out


def test_options_go_before_files_and_later_files_before_earlier(typed, tmp_path):
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    one.write_text("namespace: a\ncluster: one\nteams: [{name: vision, gpus: {gpu: 1}}]\ntaint: {key: a}\n")
    two.write_text("namespace: b\ntaint: {effect: NoExecute}\n")
    words = ("--values", str(one), "--values", str(two), "--cluster", "typed", "--team", "vision=2")
    found = json.loads(typed(*words, "--json").out)["settings"]
    assert (found["namespace"], found["cluster"], found["teams"][0]["gpus"]) == ("b", "typed", {"gpu": 2})
    assert found["taint"] == {"key": "a", "value": "true", "effect": "NoExecute"}


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--only", "quue"), 2, "did you mean queue"),
        (("--team", "vision"), 2, "can't read --team"),
        (("--team", "Vision=4"), 2, "small letters"),
        (("--team", "vision=t4:4"), 2, "unknown flavor of team vision"),
        (("--flavor", "t4", "--flavor", "h100", "--team", "vision=4"), 2, "names no flavor"),
        (("--flavor", "t4", "--team", "vision=t4:four"), 2, "can't read 't4:four'"),
        (("--kubernetes", "1.33", "--team", "vision=4"), 3, "--only"),
        (("--kubernetes", "v1.35"), 2, "minor version"),
        (("--provider", "karpentr"), 2, "karpenter"),
        (("--sharing", "mps:99"), 3, "at most 48"),
        (("--runners", "https://github.com/o/r"), 2, "runners need --image"),
        (("--runners", "https://github.com/o/r", "--image", "x:latest"), 2, "docker.push"),
        (("--only", "queue"), 2, "--team vision=4"),
        (("--values", "nowhere.yaml"), 2, "nowhere.yaml"),
        (("--namespace", "default"), 2, "charts refuse this namespace"),
        (("--region", "us-west-22"), 2, "us-west-2"),
        (("--sharing", "Notebooks=mps:4"), 2, "small letters"),
        (("--flavor", "t4", "--team", "vision=t4:1,t4:2"), 2, "names t4 twice"),
        (("--flavor", "radeon-pro-v520", "--team", "vision=1"), 2, "unknown GPU"),
    ],
)
def test_what_is_refused_says_why_and_what_to_do(typed, words, code, said):
    shown = typed(*words, code=code)
    assert said in shown.err
    assert not shown.out


def test_a_file_of_settings_with_a_typo_is_refused_with_the_nearest(typed, tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text("namespaces: a\n")
    assert "did you mean namespace" in typed("--values", str(path), code=2).err
    path.write_text("[a]\n")
    assert "wanted: keys with values" in typed("--values", str(path), code=2).err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kubernetes: 1.35", "put it in quotes"),
        ("teams: 5", "teams"),
        ("named_sharing:", "named_sharing"),
        ("runners: 5", "runners"),
        ("runners: {image: x}", "url is missing"),
        ("flavors: [{name: a, labels: {}}]", "labels"),
        ("cpu_per_gpu: 0", "cpu_per_gpu"),
        ("sharing: {strategy: mps, replica: 4}", "did you mean replicas"),
    ],
)
def test_a_file_of_settings_that_does_not_fit_is_refused(typed, tmp_path, text, said):
    path = tmp_path / "settings.yaml"
    path.write_text(f"{text}\n")
    for more in ((), ("--sharing", "a=mps:4")):
        assert said in typed("--values", str(path), *more, code=2).err


def test_a_team_whose_name_a_reader_takes_for_something_else_is_in_quotes(typed):
    out = typed("--only", "queue", "--flavor", "g5.xlarge", "--team", "y=4", "--team", "1e3=2").out
    assert "name: 'y'\n" in out
    assert "clusterQueue: '1e3'\n" in out


def test_options_fill_in_what_a_file_leaves_open(typed, tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text("runners: {most: 9, labels: [cuda]}\n")
    words = ("--values", str(path), "--runners", RUNNERS.url, "--image", IMAGE, "--only", "runners")
    found = json.loads(typed(*words, "--json").out)["settings"]["runners"]
    assert (found["most"], found["url"], found["labels"]) == (9, RUNNERS.url, ["cuda"])


def test_what_the_command_names_is_what_there_is():
    assert ", ".join(render.ADD_ONS) == k8s_addons.NAMES


def test_a_folder_that_is_a_file_is_refused(typed, tmp_path):
    path = tmp_path / "file"
    path.write_text("mine")
    assert "wanted a folder" in typed("--output", str(path), code=2).err
    assert path.read_text() == "mine"


def run_script(tmp_path, files, *, secret=True, conflict="", **environment):
    folder.write(tmp_path / "out", files)
    tools = tmp_path / "bin"
    tools.mkdir()
    log = tmp_path / "log"
    for name in ("helm", "kubectl"):
        fails = '[[ $* != *"get secret"* ]]' if not secret else "true"
        if conflict:
            fails = f'[[ $* != *"{conflict}" || $* == *--force-conflicts* ]]'
        (tools / name).write_text(f'#!/bin/bash\necho "{name} $*" >>{log}\n{fails}\n')
        (tools / name).chmod(0o755)
    env = {"PATH": f"{tools}:/usr/bin:/bin", **environment}
    script = ["bash", tmp_path / "out/install.sh"]
    done = subprocess.run(script, env=env, capture_output=True, check=False, text=True)
    return done.returncode, log.read_text().splitlines(), done.stderr


def test_the_script_installs_the_pinned_charts_in_order(example, tmp_path):
    code, lines, _ = run_script(tmp_path, example)
    assert code == 0
    charts = [line.split() for line in lines if line.startswith("helm")]
    pinned = {one.chart: one.version for one in load_add_ons().values() if one.chart}
    found = [(words[4].rpartition("/")[2], words[words.index("--version") + 1]) for words in charts]
    assert [name for name, _ in found] == [
        "nvidia-device-plugin",
        "dcgm-exporter",
        "kueue",
        "gha-runner-scale-set-controller",
        "gha-runner-scale-set",
    ]
    assert all(pinned[name] == version for name, version in found)
    for words in (line.split() for line in lines):  # every file that is named is there
        for option in ("--values", "--filename"):
            if option in words:
                assert (tmp_path / "out" / words[words.index(option) + 1]).is_file()
    installed = [line for line in lines if "queues.yaml" in line or " kueue " in line]
    assert installed[0].startswith("helm")  # the queues' kinds come with the chart


def test_the_script_stops_where_the_runners_secret_is_missing(example, tmp_path):
    code, lines, _ = run_script(tmp_path, example, secret=False)
    assert code != 0
    assert lines[-1].startswith("kubectl --namespace arc-runners get secret runner-gpu-github")


def test_the_script_says_what_to_do_on_a_conflict(example, tmp_path):
    # kubernetes.io/docs/reference/using-api/server-side-apply/#conflicts: leave the field, or force
    code, lines, errors = run_script(tmp_path, example, conflict="health/gpu-health.yaml")
    assert code == 1
    assert lines[-1].endswith("health/gpu-health.yaml")
    assert "to leave them to it, remove them\nfrom health/gpu-health.yaml" in errors
    assert "FORCE_CONFLICTS=1 bash install.sh" in errors


def test_the_script_takes_fields_over_where_that_is_asked_for(example, tmp_path):
    code, lines, _ = run_script(tmp_path, example, conflict="health/gpu-health.yaml", FORCE_CONFLICTS="1")
    assert code == 0
    assert all("--force-conflicts" in line for line in lines if line.startswith("kubectl apply"))


def test_the_script_is_clean(example, tmp_path):
    path = tmp_path / "install.sh"
    path.write_text(example["install.sh"])
    done = subprocess.run(
        [Path(sys.executable).parent / "shellcheck", path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
