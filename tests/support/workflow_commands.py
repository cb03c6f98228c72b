"""Commands for test_workflows.py, each in a process of its own; what needs machines is a stand-in."""

import json
import os
import sys
from contextlib import contextmanager
from pathlib import Path

from gpukiln.cli.main import INVOKE, command
from gpukiln.cli.main import main as type_command
from gpukiln.clouds.embedded.layout import Layout
from gpukiln.errors import BusyError
from gpukiln.instances.launch import LaunchedMachine
from gpukiln.options import options_of, read
from gpukiln.state import state_home
from gpukiln.verify.target import Target


def plan():
    """Nothing to build where an image is verified, as TEST_VERIFIED says."""
    verified = os.environ.get("TEST_VERIFIED")
    print(json.dumps({"verified_image": verified}))
    return 0 if verified else 10


def build():
    """The record that a build would have left; its image is there already."""
    text = Path(os.environ["TEST_RECORD"]).read_text()
    file = state_home() / "builds" / json.loads(text)["build_id"] / "record.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    record = json.loads(text)
    print(json.dumps({**record, "image_id": record["bake"]["image_id"], "built": True}))
    return 0


STAND_INS = {"ami.plan": plan, "ami.build": build}


def main(words):
    """Run one command line, for example ["ami.release", "last", "--channel", "candidate"]."""
    name = words[0]
    read(f"invoke {name}", options_of(command(name)), words[1:])  # a wrong option fails here
    if os.environ.get("TEST_FAILS") == name:
        print("a step\nerror: role arn:aws:iam::111122223333:role/x may not\nnext: let it", file=sys.stderr)
        return 4
    if name in STAND_INS:
        return STAND_INS[name]()
    use_server_of_the_test()
    return type_command(words, INVOKE)


def use_server_of_the_test():
    """The real commands talk to the cloud that the test started."""
    from gpukiln.clouds import select  # noqa: PLC0415 - slow to import
    from gpukiln.pipeline import steps  # noqa: PLC0415 - slow to import
    from tests.support import release_cloud  # noqa: PLC0415 - slow to import

    url, home = os.environ["TEST_SERVER"].split()
    release_cloud.server = lambda: (url, Layout(Path(home)))
    has_gpus = "TEST_GPUS" in os.environ
    select.make_cloud = lambda _name, region, **_: release_cloud.Cloud(region, has_gpus=has_gpus)
    steps.machine_from_image = machine
    steps.run_suite = lambda _, instance_type, **__: release_cloud.verdict(on=instance_type, saw_gpu=True)


@contextmanager
def machine(_cloud, _image_id, *, instance_types, **_):
    """A machine of the first type; none is to be had where TEST_BUSY says so."""
    if "TEST_BUSY" in os.environ:
        raise BusyError(f"no zone has {instance_types[0]} now")
    yield (
        Target("i-1", "ssh://admin@192.0.2.1"),
        LaunchedMachine("i-1", instance_types[0], "us-west-2a", spot=True),
    )
