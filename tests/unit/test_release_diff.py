"""ami.diff and ami.notes: what changed, which way, and what is known to be wrong with it."""

import json
import zipfile
from dataclasses import replace

import pytest

from gpukiln.commands import ami_diff
from gpukiln.errors import UsageError
from gpukiln.images.builds import Bake, Builds, Record
from gpukiln.images.digest import explain_change
from gpukiln.release.compared_image import find_compared_image
from gpukiln.release.diff import compare
from gpukiln.release.diff_view import markdown, sections
from gpukiln.release.notes import make_notes, predecessor
from gpukiln.release.osv import OsvAffected, OsvEvent, OsvRange, is_affected, load_osv
from gpukiln.release.versions import direction
from gpukiln.verify.verdict import CheckResult, Verdict
from tests.support.exit_codes import code_of

PACKAGES = {"bash": "5.2.15-2+b1", "libc6": "2.36-9", "gone": "1", "zlib1g": "1:1.2.13-1", "same": "1"}
NEWER = {"bash": "5.2.15-2+b13", "libc6": "2.36-9~rc1", "fresh": "2", "zlib1g": "1:1.2.13-1", "same": "1"}
GLIBC = {"source": "glibc", "architecture": "amd64", "licenses": []}


def component(version, status="installed", **more):
    said = {"status": status, "version": version, "branch": None, "source": "here", "reason": "why"}
    return {**said, **more}


def osv(name, *events, package="glibc", ecosystem="Debian:12", **more):
    affected = {
        "package": {"ecosystem": ecosystem, "name": package},
        "ranges": [{"type": "ECOSYSTEM", "events": list(events)}],
    }
    return {"id": name, "modified": "2026-11-01T00:00:00Z", "affected": [affected], **more}


@pytest.fixture
def builds(tmp_path, monkeypatch):
    monkeypatch.setenv("GPUKILN_HOME", str(tmp_path / "home"))
    return Builds(tmp_path / "home")


@pytest.fixture
def make(builds, planned):
    """Writes a build's record and the files next to it; returns what `find_compared_image` reads."""

    def one(number, packages, components, *, kernel, outcomes, boot_s=None, size=None):
        build = builds.create(f"eks-gpu-{number}")
        checks = tuple(CheckResult(name, f"{name} is right", "boot", *out) for name, out in outcomes.items())
        verdict = Verdict("i-1", "image", f"2026-11-2{number}T00:00:00+00:00", 9.0, checks)
        baked = Bake(f"ami-0{number}", f"image {number}", "us-west-2", kernel, components, packages)
        record = Record(build.id, "verified", planned, baked, (verdict,), {"bake": 60.0 * number})
        record = replace(record, plan=replace(planned, created_at=f"2026-11-2{number}T00:00:00+00:00"))
        build.write(record)
        if size:
            details = {"libc6": {**GLIBC, "source_version": packages["libc6"], "installed_kib": size}}
            (build.folder / "image.json").write_text(json.dumps({"package_details": details}))
        if boot_s:
            build.report_folder(1).mkdir(parents=True)
            (build.report_folder(1) / "facts.json").write_text(json.dumps({"boot": {"startup_s": boot_s}}))
        return find_compared_image(builds, str(build.record_file))

    return one


@pytest.fixture
def two(make):
    """An image and its successor, which is worse in some ways and better in others."""
    old = make(
        1,
        PACKAGES,
        {
            "nvidia_driver": component("535.309.01", branch=535),
            "nvidia_container_toolkit": component("1.17.7"),
            "docker": component("20.10.24", package={"name": "docker.io", "version": "20.10.24-1"}),
        },
        kernel="6.1.0-9-cloud-amd64",
        outcomes={"a.same": ("passed",), "a.worse": ("passed",), "a.gone": ("not_run", "no GPU")},
        boot_s=30.4,
        size=2048,
    )
    new = make(
        2,
        NEWER,
        {
            "nvidia_driver": component("535.288.01", branch=535),
            "nvidia_container_toolkit": component("1.19.1"),
            "docker": component("20.10.24", "left_out", reason="no | route"),
        },
        kernel="6.1.0-56-cloud-amd64",
        outcomes={"a.same": ("passed",), "a.worse": ("failed", "found | wanted"), "a.new": ("passed",)},
        boot_s=40.6,
        size=4096,
    )
    return old, new


@pytest.mark.parametrize(
    ("old", "new", "family", "way"),
    [
        ("1.0-1", "1.0-2", "debian", "upgraded"),
        ("1.0", "1.0~rc1", "debian", "downgraded"),
        ("9", "1:1", "debian", "upgraded"),
        ("1.10", "1.9", "debian", "downgraded"),
        ("1.0-1", "1.0-1+b1", "debian", "upgraded"),
        ("1.0-1.el9", "1.0-1.el9_1", "redhat", "upgraded"),
        ("1.0~rc1-1", "1.0-1", "redhat", "upgraded"),
        ("1.0^git1-1", "1.0-1", "redhat", "downgraded"),
        ("1.0-1", "1.0-2", None, "changed"),
        ("not a version", "1.0-2", "debian", "changed"),
        (None, "1", "debian", "added"),
        ("1", None, "debian", "removed"),
        ("1", "1", "debian", None),
    ],
)
def test_the_order_is_the_package_managers(old, new, family, way):
    assert direction(old, new, family) == way


def test_what_changed_and_which_way(two):
    diff = compare(*two)
    assert {change.name: change.direction for change in diff.packages} == {
        "bash": "upgraded",
        "libc6": "downgraded",
        "gone": "removed",
        "fresh": "added",
    }
    facts = {change.name: change for change in diff.facts}
    assert (facts["kernel"].old, facts["kernel"].direction) == ("6.1.0-9-cloud-amd64", "upgraded")
    assert facts["nvidia_driver"].direction == "downgraded"
    assert facts["nvidia_container_toolkit"].direction == "upgraded"
    assert (facts["docker"].old, facts["docker"].new, facts["docker"].direction) == (
        "20.10.24-1",
        "left out",
        "removed",
    )
    assert (facts["first boot"].old, facts["first boot"].new) == ("30 s", "41 s")
    assert (facts["size of the packages"].old, facts["size of the packages"].new) == ("2 MiB", "4 MiB")
    assert facts["runs on"].direction is None
    assert diff.durations == {"bake": (60.0, 120.0)}
    checks = {check.id: (check.old, check.new, check.is_worse) for check in diff.checks}
    assert checks == {
        "a.worse": ("passed", "failed", True),
        "a.gone": ("not_run", None, False),
        "a.new": (None, "passed", False),
    }


def test_shipped_advisories_say_what_is_fixed_and_what_is_introduced(two):
    diff = compare(*two)
    assert {row.id for row in diff.fixed} == {"CVE-2025-23266", "CVE-2025-23267", "CVE-2026-24260"}
    introduced = {row.id: (row.package, row.fixed) for row in diff.introduced}
    assert introduced["CVE-2026-24187"] == ("nvidia_driver", "535.309.01")
    assert diff.remaining == ()
    assert diff.vulnerability_notes == ("packages were not checked: no --vulnerabilities FILE was given",)


def test_a_branch_that_a_bulletin_does_not_name_is_said(make):
    driver = {"nvidia_driver": component("570.211.01", branch=570)}
    side = make(1, {}, driver, kernel="6.1", outcomes={"a": ("passed",)})
    assert (
        "NVIDIA bulletin 5821 (2026-05) names no fix for driver branch 570"
        in compare(side, side).vulnerability_notes
    )


def test_packages_are_matched_by_source_and_by_the_distributions_own_order(two, tmp_path):
    data = tmp_path / "osv.json"
    records = [
        osv("CVE-1", {"introduced": "0"}, {"fixed": "2.36-9"}, database_specific={"severity": "HIGH"}),
        osv("CVE-2", {"introduced": "0"}, {"fixed": "2.36-9~rc1"}),
        osv("DSA-3", {"introduced": "0"}, aliases=["CVE-3"]),
        osv("CVE-4", {"introduced": "0"}, withdrawn="2026-11-02T00:00:00Z"),
        osv("CVE-5", {"introduced": "0"}, ecosystem="Debian:13"),
        osv("CVE-6", {"introduced": "0"}, package="libc6"),  # the binary's name is not the source's
        osv("CVE-7", {"introduced": "0"}, {"fixed": "2"}, package="gone"),
    ]
    data.write_text(json.dumps(records))
    diff = compare(*two, load_osv([data]))
    shipped = {"nvidia_driver", "nvidia_container_toolkit"}

    def names(rows):
        return {row.id for row in rows if row.package not in shipped}

    assert names(diff.introduced) == {"CVE-1"}
    assert names(diff.fixed) == {"CVE-7"}
    assert names(diff.remaining) == {"DSA-3"}
    [row] = [row for row in diff.introduced if row.id == "CVE-1"]
    assert (row.package, row.version, row.fixed, row.severity) == ("glibc", "2.36-9~rc1", "2.36-9", "HIGH")
    assert diff.vulnerability_notes == ()


def test_data_that_does_not_fit_the_image_is_said(two, make, tmp_path):
    data = tmp_path / "osv.json"
    data.write_text(json.dumps(osv("CVE-5", {"introduced": "0"}, ecosystem="Debian:13")))
    assert compare(*two, load_osv([data])).vulnerability_notes == (
        "packages were not checked: no record is for Debian:12",
    )
    data.write_text(json.dumps(osv("CVE-5", {"introduced": "not a version"}, package="libc6")))
    bare = make(3, PACKAGES, {}, kernel="6.1", outcomes={"a": ("passed",)})
    first, second = compare(bare, bare, load_osv([data])).vulnerability_notes
    assert "was baked before source packages were recorded" in first
    assert second.startswith("1 ranges can't be compared")
    amazon = replace(bare.record.plan.base, distribution="amazon", release="2023")
    amazon = replace(bare, record=replace(bare.record, plan=replace(bare.record.plan, base=amazon)))
    [note] = compare(amazon, amazon, load_osv([data])).vulnerability_notes
    assert note == "packages were not checked: OSV has no data for amazon 2023"


@pytest.mark.parametrize(
    ("version", "events", "affected"),
    [
        ("1", [OsvEvent(introduced="0"), OsvEvent(fixed="2")], True),
        ("2", [OsvEvent(introduced="0"), OsvEvent(fixed="2")], False),
        ("2~rc1", [OsvEvent(introduced="0"), OsvEvent(fixed="2")], True),
        ("1", [OsvEvent(introduced="2")], False),
        (
            "3",
            [OsvEvent(fixed="4"), OsvEvent(introduced="3"), OsvEvent(introduced="0"), OsvEvent(fixed="2")],
            True,
        ),
        (
            "2",
            [OsvEvent(fixed="4"), OsvEvent(introduced="3"), OsvEvent(introduced="0"), OsvEvent(fixed="2")],
            False,
        ),
        ("2", [OsvEvent(introduced="0"), OsvEvent(last_affected="2")], True),
        ("2.1", [OsvEvent(introduced="0"), OsvEvent(last_affected="2")], False),
        ("not a version", [OsvEvent(introduced="0")], None),
    ],
)
def test_ranges_are_evaluated_as_the_schema_says(version, events, affected):
    assert (
        is_affected(version, OsvAffected(ranges=(OsvRange("ECOSYSTEM", tuple(events)),)), "debian")
        is affected
    )
    assert is_affected(version, OsvAffected(ranges=(OsvRange("GIT", tuple(events)),)), "debian") is False
    assert is_affected(version, OsvAffected(versions=(version,)), "debian") is True


def test_records_come_in_every_usual_form(tmp_path):
    rows = [osv("CVE-1"), osv("CVE-2")]
    texts = {
        "list.json": json.dumps(rows),
        "lines.jsonl": "\n".join(map(json.dumps, rows)),
        "answer.json": json.dumps({"vulns": rows}),
    }
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for row in rows:
            archive.writestr(f"{row['id']}.json", json.dumps(row))
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    for name in (*texts, "all.zip"):
        assert [record.id for record in load_osv([tmp_path / name])] == ["CVE-1", "CVE-2"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no json", "is no JSON: "),
        (b'{"id": "CVE-1", "modified": "x"}\nno json', "is no JSON, line 2: "),
        (b'[{"id": "CVE-1"}]', r"record 1: modified is missing"),
        (
            b'{"id": "C", "modified": "x", "affected": [{"package": {"name": "a"}}]}',
            "ecosystem is missing",
        ),
        (b'{"id": "C", "modified": "x", "affected": [{"ranges": 3}]}', "affected.0.ranges: "),
        (b"[]", "has no record"),
        (b"3", "no record of OSV"),
        (b"[" * 9999 + b"]" * 9999, "nested deeper than"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path, content, message):
    path = tmp_path / "osv.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message) as caught:
        load_osv([path])
    assert str(path) in caught.value.message


def test_a_missing_and_a_damaged_file_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"can't read .*absent"):
        load_osv([tmp_path / "absent"])
    path = tmp_path / "all.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("CVE-1.json", json.dumps(osv("CVE-1")))
    path.write_bytes(path.read_bytes().replace(b'"id"', b'"ix"'))
    with pytest.raises(UsageError, match="damaged zip file"):
        load_osv([path])


def test_the_command_shows_it_as_text_markdown_and_json(two, builds, capsys):
    old, new = two[0].record.build_id, str(builds.find("last").folder)
    assert code_of(ami_diff.AmiDiff, old, new) == 0
    text = capsys.readouterr().out
    for said in ("535.309.01", "535.288.01", "downgraded", "CVE-2025-23266", "a.worse", "+60 s"):
        assert said in text
    assert code_of(ami_diff.AmiDiff, old, new, format="markdown") == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert "| a.worse | passed | failed | found \\| wanted | worse |" in rows
    assert code_of(ami_diff.AmiDiff, old, new, json=True) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["old"], document["new"]) == ("ami-01", "ami-02")
    assert document["packages"][0]["direction"] == "upgraded"
    assert code_of(ami_diff.AmiDiff, old, new, format="html") == 2
    assert code_of(ami_diff.AmiDiff, old, "nonsense") == 2
    assert code_of(ami_diff.AmiDiff, old, new, vulnerabilities=",") == 2


def test_of_the_changed_inputs_files_are_counted_and_the_rest_is_told(two):
    files = ("roles/nvtop/tasks/main.yml", "roles/nvtop/vars/main.yml", "ami/eks-gpu/eks-gpu.pkr.hcl")
    files += ("scripts/bootstrap/a.sh", "ansible.cfg")
    new = {"recipe nvtop": "{}", "component nvtop": "install 3.0.1-1"}
    new |= {f"file {name}": "1" for name in files}
    lines = tuple(explain_change(dict.fromkeys(new, "0"), new))
    *_, inputs = sections(replace(compare(*two), inputs=lines))
    assert set(inputs.notes) == {
        "role nvtop: 2 files",
        "template of eks-gpu: 1 file",
        "scripts/bootstrap: 1 file",
        "ansible.cfg: 1 file",
        "changed: how nvtop is installed (components.yaml, gpukiln.toml or --set)",
        "available version of nvtop: 0 -> 3.0.1-1",
    }


def test_the_notes_tell_what_is_new_and_what_to_mind(two, make, builds):
    old, new = two
    assert predecessor(builds, new).baked.image_id == "ami-01"
    assert predecessor(builds, old) is None
    text = make_notes(new, old)
    for said in (
        "# image 2\n",
        "Verification FAILED: do not roll it out: 2 passed, 1 failed, 0 not run.",
        "- nvidia_driver downgraded: 535.309.01 -> 535.288.01\n",
        "- fixes CVE-2025-23266, CVE-2025-23267, CVE-2026-24260\n",
        "- checks that no longer pass: a.worse\n",
        "| docker | left out | no \\| route |\n",
        "- new: CVE-2026-24187 in nvidia_driver 535.288.01, fixed in 535.309.01\n",
        "## Changes since image 1 (`ami-01`)\n",
        f"- commit: `{new.record.plan.git_commit or 'none'}`\n",
    ):
        assert said in text
    first = make_notes(old, None)
    assert "- the first image of its kind" in first
    assert "Changes since" not in first
    assert "- not run (no GPU): a.gone\n" in first
    assert "- known, in the image before too: CVE-2025-23266 in nvidia_container_toolkit" in first
    # the one that failed is nobody's predecessor
    newest = make(3, NEWER, {}, kernel="6.1", outcomes={"a.same": ("passed",)})
    assert predecessor(builds, newest).baked.image_id == "ami-01"


def test_what_was_not_verified_or_not_baked_has_no_notes(two, builds, capsys):
    build = builds.find("last")
    build.write(replace(two[1].record, verdicts=()))
    assert code_of(ami_diff.AmiNotes, "last") == 2
    assert "was not verified" in capsys.readouterr().err
    build.write(replace(two[1].record, bake=None, state="failed"))
    assert code_of(ami_diff.AmiNotes, "last", since=two[0].record.build_id) == 2
    assert "has no image: it is failed" in capsys.readouterr().err


@pytest.mark.usefixtures("two")
def test_damaged_facts_are_named(builds):
    facts = builds.find("last").report_folder(1) / "facts.json"
    facts.write_text("[]")
    with pytest.raises(UsageError, match=r"facts\.json can't be read"):
        find_compared_image(builds, "last")


def test_markdown_means_only_itself():
    assert markdown("a|b *c*\n<d> `e` nvidia_driver") == r"a\|b \*c\* \<d> \`e\` nvidia_driver"
