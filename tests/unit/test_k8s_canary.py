"""An image as a node of a cluster, on doubles of EC2 and of the API server: it joins and is removed."""

import base64
import contextlib
import json
import re
from dataclasses import replace

import pytest

from gpukiln.attest.statements import trusted_statements
from gpukiln.attest.trust import keys_of
from gpukiln.clouds import select
from gpukiln.clouds.tags import CANARY_TAG, CLUSTER_TAG
from gpukiln.commands.ami_verify import AmiVerify
from gpukiln.errors import (
    BusyError,
    GpukilnError,
    IncompatibleError,
    RefusedError,
    UnavailableError,
    UsageError,
)
from gpukiln.images.subject import Subject
from gpukiln.instances import access
from gpukiln.instances.orphans import sweep
from gpukiln.instances.tags import tag_list
from gpukiln.kubernetes import canary, cluster_verification
from gpukiln.kubernetes.canary import LABEL, CanaryOptions, remove_orphaned_nodes, verify_node
from gpukiln.kubernetes.cluster import Cluster
from gpukiln.kubernetes.cluster_verification import GpuTestOptions
from gpukiln.kubernetes.rbac import COMMAND_RULES
from gpukiln.pipeline import verify as pipeline_verify
from gpukiln.pipeline.verdict_tags import summarize_verdict, verdict_tags, write_cluster_verdict_tag
from gpukiln.progress import Progress
from gpukiln.verify.verdict import Verdict
from tests.support import kill_points
from tests.support.api_server import GPU, ApiServer, Fault, node
from tests.support.eks import make_cluster
from tests.support.endpoint import serve
from tests.support.exit_codes import code_of
from tests.support.host_evaluate import evaluate_check
from tests.support.signing import key_pair, public_part, trusting
from tests.support.verification_pods import Container

IMAGE = "registry.example/runner-gpu@sha256:" + "0" * 64
PLUGIN_IMAGE = "nvcr.io/nvidia/k8s-device-plugin:v0.17.4"
SUBJECT = Subject(
    image_id="ami-0123456789abcdef0",
    build_id="20261126-100000-eks-gpu-ab12",
    recipe="eks-gpu",
    profile="eks-node",
    instance_types=("g4dn.12xlarge",),
    base="eks-al2023",
    ssh_user="ec2-user",
    architecture="x86_64",
    driver="580.105.08",
    modules="open",
    cuda="",
)
OPTIONS = CanaryOptions(
    GpuTestOptions(IMAGE, wait_s=20.0), eks_cluster="prod", node_profile="nodes", ready_s=20.0
)


@pytest.fixture(scope="module")
def endpoint():
    with pytest.MonkeyPatch.context() as patch, serve() as endpoint:
        patch.setenv("MOTO_EC2_LOAD_DEFAULT_AMIS", "false")
        make_cluster(endpoint)
        yield endpoint


@pytest.fixture
def ec2(endpoint, monkeypatch, tmp_path):
    endpoint.forget()
    monkeypatch.setenv("GPUKILN_HOME", str(tmp_path))
    monkeypatch.setattr(canary, "POLL_S", 0.01)
    monkeypatch.setattr(cluster_verification, "POLL_S", 0.01)
    monkeypatch.setattr(access, "PAUSES_S", ())
    return endpoint


@pytest.fixture
def server(tmp_path, monkeypatch):
    server = ApiServer()
    server.runs_daemon_sets = True
    server.behave = container = Container(server)
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path)))
    server.add(node("old-1", gpus=1))  # of the pools that run today
    server.add(plugin())
    yield server
    container.end.set()
    server.close()


def plugin(**spec):
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": "nvidia-device-plugin", "namespace": "kube-system"},
        "spec": {
            "template": {
                "spec": {
                    "tolerations": [{"key": GPU, "operator": "Exists"}],
                    "containers": [{"name": "plugin", "image": PLUGIN_IMAGE}],
                    **spec,
                }
            }
        },
    }


class Machine:
    """What a machine of the image does: its kubelet registers by the user data, and follows reboots."""

    def __init__(self, ec2, server):
        self.server, self.boots, self.name = server, 0, "ip-10-0-0-1"
        self.joins = self.rejoins = self.ready = True
        self.gpus, self.user_data = 4, ""
        self.keeps_taint = True
        ec2.after = self

    def __call__(self, call):
        if call.get("Action") == "RunInstances" and "UserData" in call:
            self.user_data = base64.b64decode(call["UserData"]).decode()
            if self.joins:
                self.register()
        elif call.get("Action") == "RebootInstances" and self.rejoins:
            self.register(again=True)

    def register(self, *, again=False):
        self.boots += 1
        made = node(self.name, gpus=self.gpus)
        if again:
            with self.server.changed:
                made["spec"] = self.server.objects["nodes", "", self.name]["spec"]
                made["metadata"] = self.server.objects["nodes", "", self.name]["metadata"]
        else:
            labels = re.search(r"--node-labels=([^\"'\s]+)", self.user_data)[1]
            taints = re.search(r"--register-with-taints=([^\"'\s]+)", self.user_data)[1]
            made["metadata"]["labels"] |= dict(one.split("=") for one in labels.split(","))
            made["spec"]["taints"] = [
                {"key": key, "value": value, "effect": effect}
                for key, value, effect in (re.split("[=:]", one) for one in taints.split(","))
                if key != LABEL or self.keeps_taint
            ]
        made["status"]["nodeInfo"]["bootID"] = str(self.boots)
        if not self.ready:
            made["status"]["conditions"] = [
                {
                    "type": "Ready",
                    "status": "False",
                    "reason": "KubeletNotReady",
                    "message": "container runtime network not ready: cni plugin not initialized",
                }
            ]
        self.server.add(made)


@pytest.fixture
def machine(ec2, server):
    return Machine(ec2, server)


@pytest.fixture
def verified(ec2, machine, tmp_path, monkeypatch):
    """Verify; returns outcome and reason of a check."""
    monkeypatch.setattr(canary, "run_suite", lambda *_, **__: Verdict("t", "pod", "2026-01-01", 1.0, ()))

    def run(*checks, options=OPTIONS, subject=SUBJECT):
        assert machine.server.all("nodes")
        run.lines = []
        progress = Progress()
        monkeypatch.setattr(progress, "say", run.lines.append)
        verify_node(subject, ec2, Cluster(), options, tmp_path / "report", progress)
        facts = json.loads((tmp_path / "report" / "gathered.json").read_text())
        found = [evaluate_check(f"cluster.{name}", facts, profile="pod", expect_gpus=None) for name in checks]
        return found[0] if len(found) == 1 else found

    return run


def machines(ec2):
    described = ec2.client("ec2").describe_instances()["Reservations"]
    return [
        one["State"]["Name"]
        for reservation in described
        for one in reservation["Instances"]
        if one["State"]["Name"] != "terminated"
    ]


def nodes(server):
    return [one["metadata"]["name"] for one in server.all("nodes")]


def nothing_left(ec2, server):
    assert machines(ec2) == []
    assert nodes(server) == ["old-1"]
    assert [one for one in server.all("pods") if not one["metadata"].get("ownerReferences")] == []


def test_a_good_image_passes_and_nothing_is_left(ec2, server, verified):
    names = ("allocatable", "device-plugin", "gpu-counts", "isolated", "plugin-returns", "rejoins", "labels")
    found = verified(*names)
    assert {outcome for outcome, _ in found} == {"passed"}, found
    reasons = dict(zip(names, (reason for _, reason in found), strict=True))
    assert reasons["allocatable"] == "4 nvidia.com/gpu on 1 nodes, 4 free"
    assert reasons["gpu-counts"] == "2 and 4 GPUs"
    assert reasons["rejoins"].startswith("4 GPUs after")
    nothing_left(ec2, server)


def test_the_machine_joins_by_the_user_data_of_node_pools(ec2, machine, verified):
    verified("allocatable")
    [call] = ec2.asked("RunInstances")
    assert call["IamInstanceProfile.Name"] == "nodes"
    tags = {
        call[f"TagSpecification.1.Tag.{number}.Key"]: call[f"TagSpecification.1.Tag.{number}.Value"]
        for number in range(1, 20)
        if f"TagSpecification.1.Tag.{number}.Key" in call
    }
    assert tags[CLUSTER_TAG] == "double"
    assert {"gpukiln:build", "gpukiln:deadline"} <= tags.keys()
    assert f"{LABEL}={tags[CANARY_TAG]}:NoSchedule" in machine.user_data
    # nodeadm reads the parts of the outer message only
    assert machine.user_data.count("Content-Type: multipart/") == 1
    assert "application/node.eks.aws" in machine.user_data
    assert "cidr: 10.100.0.0/16" in machine.user_data
    assert "text/cloud-boothook" in machine.user_data  # the deadline


def test_no_other_pod_fits_at_any_moment(server, verified):
    """A pod that asks for a GPU and waits is never placed on the canary."""
    waiting = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "train"},
        "spec": {
            "tolerations": [{"key": GPU, "operator": "Exists"}],
            "containers": [{"name": "a", "image": "x", "resources": {"limits": {GPU: "2"}}}],
        },
        "status": {"phase": "Pending"},
    }
    server.add(waiting)
    placed = []
    patch = server.patch

    def patched(*arguments):
        result = patch(*arguments)
        placed.append(server.objects["pods", "default", "train"]["spec"].get("nodeName"))
        assert (result["spec"]["unschedulable"], [t["key"] for t in result["spec"]["taints"]]) == (
            True,
            [GPU],
        )
        return result

    server.patch = patched
    assert verified("allocatable")[0] == "passed"
    assert placed == [None]
    assert "nodeName" not in server.objects["pods", "default", "train"]["spec"]


def test_a_node_that_changed_meanwhile_is_cordoned_at_the_next_look(server, verified):
    patch, conflicts = server.patch, []

    def patched(plural, namespace, name, changes):
        if not conflicts:
            conflicts.append(name)
            changes["metadata"]["resourceVersion"] = "0"
        return patch(plural, namespace, name, changes)

    server.patch = patched
    assert verified("allocatable")[0] == "passed"
    assert conflicts == ["ip-10-0-0-1"]


SOON = replace(OPTIONS, ready_s=0.2)


def test_a_kubelet_that_does_not_join_is_the_reason_with_the_console(ec2, server, machine, verified):
    machine.joins = False
    outcome, reason = verified("allocatable", options=SOON)
    assert outcome == "failed"
    assert re.match(r"i-[0-9a-f]+ did not register as a node within 0 s; its console ", reason), reason
    assert verified("pod-starts", "nvidia-smi", options=SOON)[1][0] == "not_reached"
    nothing_left(ec2, server)


def test_a_node_that_is_not_ready_has_the_doctors_reason(ec2, server, machine, verified):
    machine.ready = False
    outcome, reason = verified("allocatable", options=SOON)
    assert (outcome, "cni plugin not initialized (an agent on the node reports it)" in reason) == (
        "failed",
        True,
    ), reason
    nothing_left(ec2, server)


def test_a_node_without_its_gpus_has_the_doctors_reason(ec2, server, machine, verified):
    machine.gpus = 0
    outcome, reason = verified("allocatable", options=SOON)
    assert (outcome, "ip-10-0-0-1 is not usable" in reason) == ("failed", True), reason
    nothing_left(ec2, server)


def test_a_plugin_that_does_not_come_back(ec2, server, verified, monkeypatch):
    monkeypatch.setattr(canary, "RETURN_S", 0.1)
    remove = server.remove

    def removed(plural, namespace, name):
        if plural == "pods" and name.startswith("nvidia-device-plugin"):
            server.agents_start = False
        return remove(plural, namespace, name)

    server.remove = removed
    outcome, reason = verified("plugin-returns")
    assert (outcome, "its successor is not ready or offers no GPUs" in reason) == ("failed", True), reason
    nothing_left(ec2, server)


def test_a_machine_that_does_not_come_back_after_a_reboot(ec2, server, machine, verified, monkeypatch):
    monkeypatch.setattr(canary, "RESTART_S", 0.1)
    machine.rejoins = False
    assert verified("rejoins") == ("failed", "after its reboot: its kubelet reported no new boot in 0 s")
    nothing_left(ec2, server)


def test_gpus_that_are_missing_after_a_reboot(ec2, server, machine, verified, monkeypatch):
    monkeypatch.setattr(canary, "RESTART_S", 0.1)
    register = machine.register

    def registered(*, again=False):
        machine.gpus = 3 if again else 4
        register(again=again)

    machine.register = registered
    outcome, reason = verified("rejoins")
    assert outcome == "failed"
    assert reason.startswith("after its reboot: ip-10-0-0-1 is not usable: it offers 3 GPUs and has 4"), (
        reason
    )
    nothing_left(ec2, server)


def test_a_node_without_the_canary_taint_is_refused(ec2, server, machine, verified):
    machine.keeps_taint = False
    with pytest.raises(RefusedError, match="so other pods may run there"):
        verified("allocatable")
    nothing_left(ec2, server)


def test_no_capacity_is_for_later(ec2, server, verified):
    ec2.refuse = lambda call: (
        ("InsufficientInstanceCapacity", "no") if call.get("Action") == "RunInstances" else None
    )
    with pytest.raises(BusyError, match=r"no capacity now for g4dn\.12xlarge"):
        verified("allocatable")
    nothing_left(ec2, server)


CALLS = [
    ("list", "nodes"),
    ("patch", "nodes"),
    ("list", "pods"),
    ("create", "pods"),
    ("get", "pods"),
    ("get", "pods/log"),
    ("create", "pods/eviction"),
]


@pytest.mark.parametrize("call", CALLS, ids=" ".join)
@pytest.mark.parametrize("skip", [0, 1])
def test_every_call_of_the_cluster_may_fail_and_nothing_is_left(ec2, server, verified, call, skip):
    server.faults.append(fault := Fault(*call, 500, skip))
    with contextlib.suppress(UnavailableError):
        verified("allocatable")
    assert fault not in server.faults or skip
    nothing_left(ec2, server)


def test_every_call_of_ec2_may_be_refused_once_and_the_next_command_equals_an_undisturbed_one(
    ec2, server, verified
):
    undisturbed = verified("allocatable")
    actions = dict.fromkeys(name for call in ec2.calls if (name := call.get("Action")))
    assert {"RunInstances", "RebootInstances", "TerminateInstances", "DescribeInstances"} <= {*actions}
    for action in actions:
        waiting = [action]

        def refuse(call, waiting=waiting):
            return (
                ("UnauthorizedOperation", "once")
                if call.get("Action") in waiting and not waiting.clear()
                else None
            )

        ec2.refuse = refuse
        with contextlib.suppress(GpukilnError):
            verified("allocatable")
        assert not waiting, f"{action} was not called"
        ec2.refuse = lambda _: None
        sweep(ec2, SUBJECT.build_id)
        assert verified("allocatable") == undisturbed, action
        nothing_left(ec2, server)


def test_a_pod_that_a_disruption_budget_keeps_does_not_keep_the_node(ec2, server, verified, monkeypatch):
    """429 is what the eviction API answers then (kubernetes.io, API-initiated eviction)."""
    evict = Cluster.evict

    def refused(self, pod, namespace):
        if pod == "guarded":
            raise BusyError("the disruption budget guard does not allow it")
        return evict(self, pod, namespace)

    def guarded(*arguments, **options):
        # Not by the scheduler: a pod that names its node is there before the canary cordons it.
        spec = {"nodeName": "ip-10-0-0-1", "containers": [{"name": "a", "image": "a:1"}]}
        metadata = {"name": "guarded", "namespace": "default"}
        status = {"phase": "Running", "conditions": []}
        server.add({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": status})
        return run(*arguments, **options)

    run = cluster_verification.run_test_pods
    monkeypatch.setattr(cluster_verification, "run_test_pods", guarded)
    monkeypatch.setattr(Cluster, "evict", refused)
    verified("allocatable")
    assert any("default/guarded ends with its machine" in line for line in verified.lines)
    nothing_left(ec2, server)


def test_interrupted_it_leaves_nothing(ec2, server, verified, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(cluster_verification, "run_test_pods", interrupted)
    with pytest.raises(KeyboardInterrupt):
        verified("allocatable")
    nothing_left(ec2, server)


def test_a_node_that_can_not_be_removed_is_reported_and_goes_with_the_next(ec2, server, verified):
    server.faults += [Fault("delete", "nodes", 500) for _ in range(2)]
    verified("allocatable")
    assert any("the next canary removes it" in line for line in verified.lines)
    assert (machines(ec2), nodes(server)) == ([], ["ip-10-0-0-1", "old-1"])
    lines = []
    remove_orphaned_nodes(Cluster(), ec2, lines.append)
    assert lines == ["removed the Node ip-10-0-0-1 of an earlier canary: its machine is gone"]
    nothing_left(ec2, server)


def test_the_node_of_another_accounts_canary_stays(ec2, server):
    other = node("ip-10-9-9-9", gpus=1)
    other["metadata"]["labels"][LABEL] = "ffffffff"
    server.add(other)
    remove_orphaned_nodes(Cluster(), ec2, print)
    assert "ip-10-9-9-9" in nodes(server)
    other["status"]["conditions"][0]["status"] = "Unknown"  # its kubelet has not reported for 40 s
    server.add(other)
    remove_orphaned_nodes(Cluster(), ec2, print)
    assert "ip-10-9-9-9" not in nodes(server)


def test_user_data_of_ones_own(machine, verified, tmp_path):
    file = tmp_path / "join.sh"
    file.write_text("#!/bin/bash\nkubeadm join\n")
    options = replace(OPTIONS, eks_cluster="", node_profile="", user_data=file)
    with pytest.raises(UsageError, match="has no GPUKILN_NODE_LABELS and no GPUKILN_NODE_TAINTS"):
        verified("allocatable", options=options)
    file.write_text(
        "#!/bin/bash\njoin --node-labels=GPUKILN_NODE_LABELS --register-with-taints=GPUKILN_NODE_TAINTS\n"
    )
    assert verified("allocatable", options=options)[0] == "passed"
    assert "text/x-shellscript" in machine.user_data
    file.write_text("join --node-labels=GPUKILN_NODE_LABELS --register-with-taints=GPUKILN_NODE_TAINTS\n")
    with pytest.raises(UsageError, match="of no kind that cloud-init knows"):
        verified("allocatable", options=options)


def test_what_is_missing_is_named_before_a_machine_starts(ec2, verified):
    with pytest.raises(UsageError, match="--node-profile is missing"):
        verified("allocatable", options=replace(OPTIONS, node_profile=""))
    with pytest.raises(UsageError, match="the context double is no ARN"):
        verified("allocatable", options=replace(OPTIONS, eks_cluster=""))
    with pytest.raises(IncompatibleError, match="the base debian-12 has no kubelet of EKS"):
        verified("allocatable", subject=replace(SUBJECT, base="debian-12"))
    with pytest.raises(UnavailableError, match="describe the EKS cluster test"):
        verified("allocatable", options=replace(OPTIONS, eks_cluster="test"))
    assert ec2.asked("RunInstances") == []


def test_killed_at_any_call_the_next_command_removes_all(ec2, server, verified):
    def work():
        verified("allocatable")

    steps = kill_points.steps_of(work)
    assert {"RunInstances", "RebootInstances", "TerminateInstances", "PATCH nodes"} <= {*steps}, steps
    nothing_left(ec2, server)
    for number in kill_points.select_steps(steps):
        assert kill_points.run_killed_at(number, work), steps[number - 1]
        sweep(ec2, SUBJECT.build_id)
        remove_orphaned_nodes(Cluster(), ec2, print)
        nothing_left(ec2, server)


def test_the_rights_are_those_that_it_uses(server, machine, verified):
    server.calls.clear()
    verified("allocatable")
    machine.gpus = 0
    verified("allocatable", options=SOON)
    used = {(verb, group, resource) for verb, group, resource, _ in server.calls}
    allowed = {
        (verb, rule.group, resource)
        for rule in COMMAND_RULES["canary"]
        for verb in rule.verbs
        for resource in rule.resources
    }
    assert used <= allowed
    assert allowed - used == set()


@pytest.fixture
def typed(ec2, proven, monkeypatch, capsys):
    """Type ami.verify --cluster; returns its exit code and what it printed."""
    if not ec2.client("eks").list_clusters()["clusters"]:  # the plan of `proven` resets moto
        make_cluster(ec2)
    build = proven.find("last")
    record = build.read()
    # A base that joins clusters, and real snapshots of an image need not exist to start a machine.
    base = replace(record.plan.base, name="eks-al2023")
    image_id = ec2.client("ec2").register_image(Name=f"gpukiln-{build.id}")["ImageId"]
    written = replace(
        record, plan=replace(record.plan, base=base), bake=replace(record.bake, image_id=image_id)
    )
    build.write(written)
    verified = verdict_tags(record.plan.image, map(summarize_verdict, record.newest_verdicts.values()))
    ec2.client("ec2").create_tags(Resources=[image_id], Tags=tag_list(verified))
    monkeypatch.setenv("GPUKILN_HOME", str(proven.folder.parent))
    monkeypatch.setattr(select, "make_cloud", lambda *_, **__: ec2)
    monkeypatch.setattr(pipeline_verify, "finish", lambda *_: None)
    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(key, "x")

    def run(**options):
        given = {"cluster": "double", "eks_cluster": "prod", "node_profile": "nodes", "pod_image": IMAGE}
        code = code_of(AmiVerify, build="last", **{**given, "wait_minutes": 1, **options})
        said = capsys.readouterr()
        return code, said.out + said.err, proven.find("last").read()

    return run


def tags_of_image(ec2, record):
    [image] = ec2.client("ec2").describe_images(ImageIds=[record.bake.image_id])["Images"]
    return {tag["Key"]: tag["Value"] for tag in image.get("Tags", [])}


def test_the_command_runs_the_suite_and_records_the_verdict(ec2, server, machine, typed):
    machine.gpus = 1  # the plan is for g4dn.xlarge
    code, shown, record = typed()
    assert code == 0, shown
    [verdict] = record.cluster_verdicts
    assert (verdict.profile, verdict.instance_type) == ("pod", "g4dn.xlarge")
    assert verdict.environment["Kubernetes"] == "1.34"
    assert "verified as a node of double on g4dn.xlarge" in shown
    outcomes = {check.id: check.outcome for check in verdict.checks}
    assert outcomes["cluster.rejoins"] == outcomes["cluster.plugin-returns"] == "passed"
    assert len(record.verdicts) == 1  # those of machines are others
    value = tags_of_image(ec2, record)["gpukiln:cluster-verdict:g4dn.xlarge:1.34"]
    assert value.startswith("passed profile=pod")
    assert f"suite={verdict.suite_version[:16]} digest={verdict.digest[:16]}" in value
    nothing_left(ec2, server)


def test_what_a_channel_requires_is_verified_and_signed(ec2, machine, typed, monkeypatch, tmp_path):
    key, other = key_pair(tmp_path, "sign"), key_pair(tmp_path, "other")
    required = {"gpus": ["t4"], "layers": ["cluster"], "kubernetes": ["1.33", "1.34"]}
    trusting(monkeypatch, key, **required)
    machine.gpus = 1
    code, shown, record = typed(for_="stable", sign_key=str(other))
    assert (code, "--sign-key is another key" in shown) == (6, True), shown
    assert ec2.asked("RunInstances") == []
    code, shown, record = typed(for_="stable", sign_key=str(key))
    assert code == 0, shown
    [verdict] = record.cluster_verdicts
    image = ec2.client("ec2").describe_images(ImageIds=[record.bake.image_id])["Images"][0]
    signed = trusted_statements(ec2.client("ssm"), image, ec2.region, keys_of([public_part(key)], ec2))
    assert signed.refused == ()
    claim = signed.cluster_verdicts["g4dn.xlarge_1.34"].claim
    assert (claim.verdict, claim.profile, claim.cluster_kubernetes) == (verdict.digest, "pod", "1.34")
    assert (claim.suite, claim.outcome, signed.verdicts) == (verdict.suite_version, "passed", {})
    # What is missing in Kubernetes 1.33 no machine of this cluster can show.
    code, shown, record = typed(for_="stable", sign_key=str(key))
    assert (code, "as a node in Kubernetes 1.34: nothing to verify" in shown) == (0, True), shown
    assert len(record.cluster_verdicts) == 1


def test_an_image_without_space_for_the_tag_is_refused_before_a_machine_starts(ec2, machine, typed, proven):
    machine.gpus = 1
    record = proven.find("last").read()
    image_id = record.bake.image_id
    value = "passed profile=pod at=2026-01-0{} suite=ab digest=cd gpu=no not_run=none"
    tags = {f"gpukiln:cluster-verdict:g4dn.xlarge:1.3{number}": value.format(9 - number) for number in (1, 2)}
    others = {f"team-{number}": "" for number in range(45 - len(tags_of_image(ec2, record)))}
    ec2.client("ec2").create_tags(Resources=[image_id], Tags=tag_list({**tags, **others}))
    code, shown, _ = typed()
    assert code == 6, shown
    assert f"{image_id} has 47 tags, and the verdict is one more" in shown
    assert f"--resources {image_id} --tags Key=gpukiln:cluster-verdict:g4dn.xlarge:1.32" in shown
    assert ec2.asked("RunInstances") == []


def test_a_verdict_on_simulated_gpus_changes_no_tag(ec2):
    verdict = Verdict("i-1", "pod", "2026-11-26T10:00:00+00:00", 1.0, (), instance_type="g4dn.xlarge")
    simulated = replace(verdict, simulated=True, environment={"Kubernetes": "1.34"})
    write_cluster_verdict_tag(ec2, SUBJECT, simulated)
    assert ec2.asked("CreateTags") == []


def test_a_kubelet_that_never_joins_is_a_failed_verdict(ec2, server, machine, typed):
    machine.joins = False
    code, shown, record = typed(wait_minutes=0)
    assert code == 1, shown
    [verdict] = record.cluster_verdicts
    outcomes = {check.id: check.outcome for check in verdict.checks}
    assert outcomes.pop("cluster.allocatable") == "failed"
    assert {name: one for name, one in outcomes.items() if one == "failed"} == {}
    assert outcomes["cluster.rejoins"] == outcomes["cluster.pod-starts"] == "not_reached"
    nothing_left(ec2, server)
