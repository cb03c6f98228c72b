"""Terraform for an EKS managed node group, or an Auto Scaling group whose machines join the cluster."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from gpukiln.catalog.instance_types import instance_type
from gpukiln.kubernetes.machines import GPU, allocatable
from gpukiln.kubernetes.nodes import userdata
from gpukiln.kubernetes.nodes.group import ACCELERATOR, TAINT, NodeGroup

TEMPLATES = Path(__file__).with_name("terraform")
AUTOSCALER = "k8s.io/cluster-autoscaler"
USER_DATA = "userdata.tftpl"
# An argument: indentation, name, value.
ASSIGNED = re.compile(r'^( *)([\w"./-]+) += (.*)$')


def files(group: NodeGroup) -> dict[str, str]:
    """A root module: main.tf, variables.tf, versions.tf and the user data template."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        # A misspelt name in a template is an error and no empty text.
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 - HCL, and every text goes through `hcl`
    )
    environment.filters["hcl"] = _hcl
    values = {
        "group": group,
        "labels": node_labels(group),
        "tags": autoscaler_tags(group),
        "taint": dict(zip(("key", "value", "effect"), TAINT, strict=True)),
        "user_data": USER_DATA,
    }
    modules = {
        name: formatted(environment.get_template(f"{template}.j2").render(values))
        for name, template in (
            ("main.tf", f"{group.provider}.tf"),
            ("variables.tf", "variables.tf"),
            ("versions.tf", "versions.tf"),
        )
    }
    return {**modules, USER_DATA: _user_data(group)}


def node_labels(group: NodeGroup) -> dict[str, str]:
    """Labels of the nodes, with the one by which cluster-autoscaler waits until their GPUs are ready."""
    key = instance_type(group.types[0]).gpu
    return {**group.node_labels(group.types), ACCELERATOR: f"nvidia-{key}"}


def autoscaler_tags(group: NodeGroup) -> dict[str, str]:
    """Tags from which cluster-autoscaler scales a group from zero (its cloudprovider/aws/README.md)."""
    key, value, effect = TAINT
    # With permission for DescribeNodegroup it reads labels of managed groups itself, but only as long as the
    # group had no node.
    template = f"{AUTOSCALER}/node-template"
    return {
        f"{AUTOSCALER}/enabled": "true",
        # cluster-autoscaler finds the groups of its cluster by these two tags (--node-group-auto-discovery).
        f"{AUTOSCALER}/{group.cluster}": "owned",
        **{f"{template}/label/{name}": text for name, text in node_labels(group).items()},
        f"{template}/taint/{key}": f"{value}:{effect}",
        # Without a node the autoscaler does not know that the type has GPUs, and starts none for a GPU pod.
        f"{template}/resources/{GPU}": f"{allocatable(group.types[0])[GPU]:f}",
    }


def _user_data(group: NodeGroup) -> str:
    """User data for templatefile(): values that only Terraform knows are its variables."""
    cluster = userdata.JoinValues(
        name="${cluster_name}",
        endpoint="${endpoint}",
        certificate_authority="${certificate_authority}",
        service_cidr="${service_cidr}",
        dns_ip="${dns_ip}",
    )
    key, value, effect = TAINT
    return userdata.user_data(group, cluster, node_labels(group), [f"{key}={value}:{effect}"])


def _hcl(value: Any) -> str:
    """A string, a number or a list of strings as HCL, whose escapes are JSON's except for templates."""
    text = json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
    # In HCL, ${ and %{ begin templates; doubled, they are plain text.
    return text.replace("${", "$${").replace("%{", "%%{")


def formatted(text: str) -> str:
    """HCL as `terraform fmt` writes it: `=` of adjacent lines aligned, a blank line between blocks."""
    text = re.sub(r"(?m)^}\n(?=\S)", "}\n\n", re.sub(r"\n{3,}", "\n\n", text))
    lines: list[str] = []
    for (indent, alone), group_lines in itertools.groupby(text.splitlines(), _place):
        group = list(group_lines)
        if indent is None or alone:
            lines += group
            continue
        rows = [match for line in group if (match := ASSIGNED.match(line))]
        widest = max(len(row[2]) for row in rows)
        lines += [f"{row[1]}{row[2]:{widest}} = {row[3]}" for row in rows]
    return "\n".join(lines) + "\n"


def _place(line: str) -> tuple[int | None, bool]:
    """The indentation of an argument, None if the line is none; and whether it spans several lines."""
    match = ASSIGNED.match(line)
    return (len(match[1]), match[3].endswith(("{", "[", "("))) if match else (None, False)
