"""The tag that says by which options a machine was started."""

from dataclasses import replace

from gpukiln.workspaces.contract import Capabilities, Toolchain, Workspace
from gpukiln.workspaces.plan import TAG_CHARACTERS, TRUNCATED, option_hashes

PLAIN = Workspace("vision", "ann", "us-west-2")


def test_what_is_at_its_default_has_no_entry() -> None:
    assert option_hashes(PLAIN, "") == ""
    assert option_hashes(replace(PLAIN, idle_minutes=60), "").startswith("idle_minutes=")
    assert option_hashes(replace(PLAIN, idle_minutes=60), "") != option_hashes(
        replace(PLAIN, idle_minutes=61), ""
    )


def test_no_value_is_in_the_tag() -> None:
    secret = Capabilities(secrets={"HF_TOKEN": "/hugging-face/token"})
    assert "hugging" not in option_hashes(
        replace(PLAIN, capabilities=secret, agent_init_script="x" * 5000), ""
    )


def test_the_tag_fits_whatever_is_asked_for() -> None:
    has = Capabilities(
        persistent_home=False,
        network_egress="open",
        identity_mode="none",
        artifact_cache="s3://bucket/a",
        secrets={"A": "/a"},
        gui_vnc=True,
    )
    every = replace(
        PLAIN,
        capabilities=has,
        toolchain_template=Toolchain("a", "1"),
        vpc_id="vpc-1",
        subnet_ids=("subnet-1",),
        instance_profile_name="a",
        agent_init_script="true",
        ssh_from="10.0.0.0/8",
        services=("ollama",),
        idle_minutes=60,
    )
    tag = option_hashes(every, "https://example.org/r@0")
    assert len(tag) <= TAG_CHARACTERS
    assert tag.endswith(TRUNCATED)
    assert TRUNCATED not in option_hashes(replace(every, toolchain_template=None), "")
