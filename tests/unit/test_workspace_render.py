"""A workspace as Terraform reads it: golden files, and what must never be in them.

They are written anew with GPUKILN_GOLDEN=write in the environment.
"""

import base64
import json
import os
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpukiln.errors import UsageError
from gpukiln.offers.model import Figure, Offer
from gpukiln.workspaces import lifecycle
from gpukiln.workspaces.contract import Capabilities, ComputeProfile, Toolchain, Workspace
from gpukiln.workspaces.plan import describe_offer
from gpukiln.workspaces.render import RENDERED_FILE, terraform, tfvars

GOLDEN = Path(__file__).parents[1] / "support/golden"
PRICE = Figure(Decimal("0.752"), "USD/hour", "Price List", "2026-11-01", 22, stale=False)
T4 = Offer(
    instance_type="g4dn.2xlarge",
    region="us-west-2",
    gpu="T4",
    gpus=1,
    gpu_fraction=1.0,
    gpu_memory_mib=16384,
    vcpu=8,
    memory_mib=32768,
    local_gb=225,
    arch="x86_64",
    efa=0,
    market="on-demand",
    price=PRICE,
    on_demand=PRICE,
    spot=(),
    zones=("us-west-2a", "us-west-2b"),
)
NO_PRICE = replace(T4, instance_type="g4dn.4xlarge", vcpu=16, price=None, zones=None)
LEAST = Workspace("vision", "ann", "us-west-2")
WHOLE = Workspace(
    workspace_name="vision",
    owner="ann",
    region="us-west-2",
    compute_profile=ComputeProfile(8, "32Gi", "1Ti", 1, "nvidia-t4"),
    capabilities=Capabilities(
        network_egress="open",
        artifact_cache="s3://people/cache",
        secrets={"HF_TOKEN": "/people/ann/hf"},
    ),
    toolchain_template=Toolchain("datasci-toolchain", "1.1.0"),
    vpc_id="vpc-1",
    subnet_ids=("subnet-1", "subnet-2"),
    agent_init_script="echo ${HOME} %{x}\n",
    ssh_from="203.0.113.7/32",
    services=("ollama",),
    spot=True,
    idle_minutes=60,
)
SPOT = replace(T4, market="spot")
CASES = {"least": (LEAST, (T4, NO_PRICE)), "whole": (WHOLE, (SPOT,))}


def rendered(wanted, offers):
    return tfvars(
        wanted,
        offers,
        image_id="ami-0123456789abcdef0",
        user_data=b"\x1f\x8bdata",
        image_digest="sha256:abc",
        image_verdict="passed 2026-11-22",
        more_tags={"gpukiln:user": "ann"},
    )


@pytest.mark.parametrize("name", CASES)
def test_it_is_what_it_was(name):
    values = rendered(*CASES[name])
    files = {
        "tfvars": values,
        "terraform": terraform(CASES[name][0], values, source="../coder")["main.tf.json"],
    }
    for kind, content in files.items():
        golden = GOLDEN / f"workspace-{name}.{kind}.json"
        if os.environ.get("GPUKILN_GOLDEN") == "write":
            golden.write_text(json.dumps(content, indent=1) + "\n")
        assert json.loads(json.dumps(content)) == json.loads(golden.read_text())


def test_it_is_the_same_each_time_and_holds_the_user_data_whole():
    one, other = (rendered(*CASES["whole"]) for _ in range(2))
    assert json.dumps(one) == json.dumps(other)
    assert base64.b64decode(one["machine"]["user_data_base64"]) == b"\x1f\x8bdata"


def test_a_root_module_is_whole_and_its_texts_are_no_templates():
    values = rendered(*CASES["whole"])
    files = terraform(WHOLE, values, source="../coder")
    assert set(files) == {"main.tf.json", RENDERED_FILE}
    assert files[RENDERED_FILE] == values
    called = files["main.tf.json"]["module"]["workspace"]
    assert called["agent_init_script"] == "echo $${HOME} %%{x}\n"
    assert called["rendered"] == "${path.module}/rendered.json"
    assert "image_id" not in called  # none was asked for


def test_each_machine_is_told_with_its_price_or_that_none_is_known():
    assert describe_offer(T4, "us-west-2a") == "g4dn.2xlarge on-demand in us-west-2a, 0.752 USD/hour"
    assert describe_offer(NO_PRICE, "us-west-2a").endswith("no price known")
    offers = rendered(*CASES["least"])["offers"]
    assert [one["usd_hour"] for one in offers] == ["0.752", None]
    assert [one["tags"] for one in offers] == [{"gpukiln:usd-hour": "0.752"}, {"gpukiln:usd-hour": ""}]


@pytest.mark.parametrize(
    ("wanted", "offers", "words"),
    [
        (LEAST, (), "no machine to render"),
        (replace(LEAST, ssh_from="0.0.0.0/0"), (T4,), "is every address"),
        (replace(LEAST, capabilities=Capabilities(secrets={"A": "no reference"})), (T4,), "secret A"),
    ],
)
def test_what_makes_no_sense_is_refused(wanted, offers, words):
    with pytest.raises(UsageError, match=words):
        rendered(wanted, offers)


def test_spot_and_its_shutdown_go_together():
    one, other = rendered(LEAST, (T4,)), rendered(WHOLE, (SPOT,))
    assert one["machine"]["instance_initiated_shutdown_behavior"] == "stop"
    assert one["offers"][0]["instance_market_options"] is None
    assert other["machine"]["instance_initiated_shutdown_behavior"] == "terminate"
    assert other["offers"][0]["instance_market_options"]["market_type"] == "spot"


def test_programs_find_a_workspace_of_terraform_by_the_same_variables():
    machine = SimpleNamespace(instance_id="i-1", ssh_address="10.0.0.1", user="ann")
    found = SimpleNamespace(name="vision", owner="ann", region="us-west-2", machines=(machine,))
    values = rendered(*CASES["least"])
    told = {values["variables"]["instance"]: "i-1", values["variables"]["host"]: "10.0.0.1"}
    assert lifecycle.environment(found) == values["runtime_env"] | told
