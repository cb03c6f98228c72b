"""Bakes the checkout that is on PYTHONPATH from the last stage, without the boot and the checks.

Prints the bake as JSON, with the tasks that ran.
"""

import json

from gpukiln.catalog.load import ROOT
from gpukiln.clouds.select import make_cloud
from gpukiln.images.bake import BakeResources, bake, tool_versions
from gpukiln.images.builds import Builds, Record
from gpukiln.images.module_store import open_store
from gpukiln.images.plan import make_plan
from gpukiln.images.stages import stages_of
from gpukiln.progress import Progress
from gpukiln.sources.decisions import Probes
from gpukiln.state import state_home
from gpukiln.typed import dump

cloud, home = make_cloud("embedded", "us-west-2"), state_home()
plan = make_plan("eks-gpu", cloud, probes=Probes.real(home / "apt"), tools=tool_versions(), root=ROOT)
build = Builds(home).create(plan.image)
stages = stages_of(plan, cloud)
saved = BakeResources(open_store("", home, cloud), stages)
baked = bake(plan, cloud, build, Progress(), saved, stages.newest())
build.write(Record(build.id, "aborted", plan, error="nobody wanted to judge it"))
events = map(json.loads, (build.folder / "events.jsonl").read_text().splitlines())
tasks = [event["task"] for event in events if event["event"] == "task_end" and event["status"] != "skipped"]
print(json.dumps({**dump(baked), "tasks": tasks}))
