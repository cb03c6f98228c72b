"""A project without a checkout: an installed wheel bakes an image with the project's own roles and versions.

What stands in: DCGM's repository and packages, which a role of the project puts on the machine before the
shipped role asks for them. Nothing stands for a verdict: the build is interrupted while it boots, and
test_rehearsal.py has an installed wheel verify an image.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpukiln.disks.mount import mounted_root
from gpukiln.images.digest import explain_change
from tests.support import documents
from tests.support.installed import Installed
from tests.support.interrupted_build import interrupt_boot
from tests.support.standin.dcgm import dcgm
from tests.support.standin.packages import specification
from tests.support.standin.platforms import BUILD

pytestmark = pytest.mark.e2e

DCGM, EXPORTER = "4.6.9", "4.8.9"  # components.yaml has others
AGENT = """\
- name: Write the agent's settings
  ansible.builtin.copy: {content: "port: 9100\\n", dest: /etc/site-agent.yaml, mode: "0644"}
"""
MIRROR = """\
- name: Bring the mirror
  ansible.builtin.copy: {{src: mirror/, dest: {0}/, mode: "0644", directory_mode: "0755"}}
"""
SETTINGS = """\
cloud = "embedded"
region = "us-west-2"
image = "shop-gpu"

[components.dcgm]
version = "{dcgm}"
{repository}

[components.dcgm_exporter]
version = "{exporter}"
{repository}

[roles]
before = ["site_mirror"]
after = ["site_agent"]
"""
REPOSITORY = """\
repository.apt.url = "file://{0}"
repository.apt.key_url = "file://{0}/gpgkey"
repository.apt.key_fingerprint = "{1}"
"""
COMPONENTS = "components: [nvidia_driver, nvidia_persistenced, dcgm, dcgm_exporter]\n"
# A project that has a role of its own in place of a shipped one.
REPLACED = """\
cloud = "embedded"
region = "us-west-2"

[roles]
replace = ["nvtop"]
"""


class Shop:
    """A project in a folder of its own, and `gpukiln` as its wheel installs it."""

    def __init__(self, here, folder: Path) -> None:
        self.here, self.folder = here, folder / "shop"
        self.installed = Installed(folder, environment=here.environment)
        done = self.installed.run("init", str(self.folder), "--image", "shop-gpu")
        assert done.returncode == 0, done.stderr

    def document(self, *words: str):
        return self.installed.document(*words, cwd=self.folder)

    def write(self, name: str, text: str) -> None:
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_text(text)


@pytest.fixture(scope="module")
def shop(image_cloud, tmp_path_factory):
    return Shop(image_cloud, tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="module")
def image(shop, tmp_path_factory):
    """The record of the project's image."""
    mirror = tmp_path_factory.mktemp("mirror") / "mirror"  # the plan asks for it here, the machine there
    packages = specification(dcgm(f"1:{DCGM}-1", f"{EXPORTER}-1"))
    (mirror.parent / "packages.json").write_text(json.dumps(packages))
    build = [sys.executable, BUILD, "apt", mirror, mirror.parent / "packages.json"]
    key = subprocess.run(build, check=True, capture_output=True, text=True).stdout.strip()
    repository = REPOSITORY.format(mirror, key)
    shop.write("gpukiln.toml", SETTINGS.format(dcgm=DCGM, exporter=EXPORTER, repository=repository))
    definition = (shop.folder / "ami/shop-gpu/image.yaml").read_text().partition("components:")[0]
    layers = definition.replace("boot, runtime]", "boot]")
    shop.write("ami/shop-gpu/image.yaml", layers + COMPONENTS)
    shop.write("roles/site_mirror/tasks/main.yml", MIRROR.format(mirror))
    shutil.copytree(mirror, shop.folder / "roles/site_mirror/files/mirror")
    shop.write("roles/site_agent/tasks/main.yml", AGENT)
    said = interrupt_boot(shop.here, shop.installed.start("ami", "build", cwd=shop.folder))
    assert "no image of it was verified on this machine yet" in said  # why it was built
    return shop.document("ami", "show", "last")


@pytest.fixture(scope="module")
def root(shop, image):
    """The file system of the image's disk."""
    [ami] = shop.here.aws("ec2", "describe-images", "--image-ids", image["bake"]["image_id"])["Images"]
    snapshot = ami["BlockDeviceMappings"][0]["Ebs"]["SnapshotId"]
    with mounted_root(shop.here.home / f"cloud/snapshots/{snapshot}.raw") as folder:
        yield folder


def test_the_image_has_what_the_projects_roles_wrote(image, root):
    assert (root / "etc/site-agent.yaml").read_text() == "port: 9100\n"
    assert image["plan"]["own_roles"] == {"before": ["site_mirror"], "after": ["site_agent"], "replace": []}
    assert (image["state"], image["verdicts"]) == ("aborted", [])
    assert [use["cached"] for use in image["bake"]["modules"]] == [True]  # the run's first image has the same


def test_the_image_has_the_versions_that_the_project_pins(image, root):
    own = json.loads((root / "etc/gpukiln/image.json").read_text())
    wanted = {
        "datacenter-gpu-manager-4-core": f"1:{DCGM}-1",
        "datacenter-gpu-manager-exporter": f"{EXPORTER}-1",
    }
    assert {name: own["packages"].get(name) for name in wanted} == wanted
    status = (root / "var/lib/dpkg/status").read_text()
    for name, version in wanted.items():
        [fields] = [part for part in status.split("\n\n") if part.startswith(f"Package: {name}\n")]
        assert f"\nVersion: {version}\n" in fields
    assert image["plan"]["image"] == own["image"] == "shop-gpu"


def test_a_changed_role_is_another_image(shop, image):
    before = shop.document("ami", "plan")
    assert before["digest"] == image["plan"]["digest"]
    assert before["verified_image"] is None  # no machine has verified it
    shop.write("roles/site_agent/tasks/main.yml", AGENT.replace("9100", "9101"))
    after = shop.document("ami", "plan")
    assert after["digest"] != before["digest"]
    assert explain_change(before["inputs"], after["inputs"]) == ["changed role site_agent: tasks/main.yml"]


def test_a_changed_role_is_why_there_is_something_to_build(shop, tmp_path):
    """Since the run's first image, which a checkout built and verified: an installed wheel finds it."""
    first, installed = shop.here.document, shop.installed
    planned = installed.document("ami", "plan", "--region", "us-west-2")
    assert planned["verified_image"] == first["image_id"]
    (tmp_path / "gpukiln.toml").write_text(REPLACED)
    role = tmp_path / "roles/nvtop"
    shipped = installed.packages / "gpukiln/_recipes/roles/nvtop"
    # that file is an input of a project's roles alone
    shutil.copytree(shipped, role, ignore=shutil.ignore_patterns("argument_specs.yml"))
    assert installed.document("ami", "plan", cwd=tmp_path)["verified_image"] == first["image_id"]
    variables = role / "defaults/main.yml"
    variables.write_text(variables.read_text().replace("[nvtop]", "[nvtop, tree]"))
    planned = installed.document("ami", "plan", cwd=tmp_path)
    assert planned["verified_image"] is None
    since, *changes = planned["why_build"]
    assert since.startswith(f"since {first['image_id']} of build {first['build_id']}, verified on ")
    assert changes == ["changed role nvtop: defaults/main.yml"]


def test_the_document_of_a_build_has_its_published_form(image_cloud):
    documents.check(image_cloud.document)
