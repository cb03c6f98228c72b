"""Services of a workspace: their definitions, the release that fits, and the Compose file."""

import shutil
import subprocess
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpukiln.errors import IncompatibleError, UsageError
from gpukiln.gpus import engines
from gpukiln.images.subject import Subject
from gpukiln.workspaces import services
from gpukiln.workspaces.agent import RUN_FOLDER
from gpukiln.workspaces.services import compose, load, names, require_fit

TODAY = date(2026, 11, 23)
ONE, TWO = "GPU-11111111-2222-3333-4444-555555555555", "GPU-22222222-2222-3333-4444-555555555555"
GOOD = """
title: Mine
port: 9000
folder: /data
answers: /
computes: ""
needs_gpu: false
healthcheck: [CMD, "true"]
start_s: 5
environment: {COLOUR: red}
settings: [COLOUR]
releases:
  - {image: "example.com/mine:1@sha256:DIGEST", workload: cuda-12.4, source: nobody}
""".replace("DIGEST", "a" * 64)


def image(driver: str) -> Subject:
    return Subject(
        *("ami-1", "b1", "eks-gpu", "image", ("g4dn.xlarge",), "debian-12", "admin", "x86_64"),
        *(driver, "proprietary", ""),
    )


def mine(tmp_path: Path, old: str = "", new: str = "", name: str = "mine") -> Path:
    """A checkout with one service, changed in one place."""
    (tmp_path / "services").mkdir(exist_ok=True)
    assert old in GOOD
    (tmp_path / "services" / f"{name}.yaml").write_text(GOOD.replace(old, new, 1) if old else GOOD)
    return tmp_path


def document(*wanted: str, gpus: Any = "all", **more: Any) -> dict[str, Any]:
    found = yaml.safe_load(compose(load(wanted), gpus, user="ann", **more).text)
    assert isinstance(found, dict)
    return found


def schema_says(*paths: Path) -> int:
    checker = shutil.which("check-jsonschema")
    assert checker
    asked = [checker, "--builtin-schema", "vendor.compose-spec", *map(str, paths)]
    return subprocess.run(asked, capture_output=True, check=False).returncode


def test_those_of_the_checkout_can_be_read() -> None:
    assert names() == ["jupyter", "ollama", "vllm"]
    assert [one.name for one in load(names())] == names()
    assert [one.name for one in load(["vllm", "vllm"])] == ["vllm"]
    assert load([]) == ()


def test_a_typo_gets_a_suggestion() -> None:
    with pytest.raises(UsageError, match="unknown service 'olama'; valid: jupyter, ollama, vllm") as told:
        load(["olama"])
    assert told.value.hint == "did you mean ollama?"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("@sha256:" + "a" * 64, "", "wanted NAME:TAG@sha256:DIGEST"),
        (":1@sha256", "@sha256", "wanted NAME:TAG@sha256:DIGEST"),
        ("a" * 64, "a" * 63, "wanted NAME:TAG@sha256:DIGEST"),
        ("cuda-12.4", "olama", "unknown workload 'olama'"),
        ("{COLOUR: red}", "{COLOR: red}", "did you mean COLOUR"),
        ("port: 9000", "port: 80", "wanted 1024 to 65535"),
        ("port: 9000", "prot: 9000", "did you mean port"),
        ('computes: ""', "computes: magic", "found 'magic'"),
        ("title: Mine", "name: other\ntitle: Mine", "calls itself other"),
        ("start_s: 5\n", "", "start_s is missing"),
    ],
)
def test_a_definition_that_does_not_fit_is_refused(tmp_path: Path, old: str, new: str, words: str) -> None:
    assert load(["mine"], mine(tmp_path))[0].port == 9000
    with pytest.raises(UsageError) as told:
        load(["mine"], mine(tmp_path, old, new))
    assert words in " ".join((told.value.message, *told.value.details))


def test_a_service_without_a_release_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="it has no release"):
        load(["mine"], mine(tmp_path, GOOD[GOOD.index("releases:") :], "releases: []\n"))


def test_two_services_on_one_port_are_refused(tmp_path: Path) -> None:
    mine(tmp_path)
    with pytest.raises(UsageError, match="use port 9000"):
        load(["mine", "yours"], mine(tmp_path, name="yours"))


@pytest.mark.parametrize(
    ("driver", "tags"),
    [
        ("535.309.01", ["ollama:0.12.3", "vllm-openai:v0.14.0"]),
        ("550.163.01", ["ollama:0.32.0", "vllm-openai:v0.14.0"]),
        ("580.95.05", ["ollama:0.32.0", "vllm-openai:v0.27.1"]),
    ],
)
def test_the_newest_release_that_the_driver_runs_is_taken(driver: str, tags: list[str]) -> None:
    wanted = load(["ollama", "vllm", "jupyter"])
    found, notes = require_fit(wanted, "g4dn.xlarge", image(driver), TODAY)
    assert [one.releases[0].image.partition("@")[0].rpartition("/")[2] for one in found][:2] == tags
    assert [len(one.releases) for one in found] == [1, 1, 1]
    older = sum(one.releases[0] != before.releases[0] for one, before in zip(found, wanted, strict=True))
    assert len(notes) == older
    if driver.startswith("535"):
        assert notes[0] == (
            "ollama: ollama/ollama:0.12.3 is taken, for ollama/ollama:0.32.0: Ollama 0.30 and later needs "
            "driver 550 or later, ami-1 has 535.309.01"
        )


def test_a_driver_that_runs_no_release_is_refused_with_each_reason() -> None:
    with pytest.raises(IncompatibleError, match="no release of Ollama runs on") as told:
        require_fit(load(["ollama"]), "g4dn.xlarge", image("470.256.02"), TODAY)
    assert told.value.details == (
        "ollama/ollama:0.32.0: Ollama 0.30 and later needs driver 550 or later, ami-1 has 470.256.02",
        "ollama/ollama:0.12.3: Ollama before 0.30 needs driver 531 or later, ami-1 has 470.256.02",
    )
    assert "when the image is built" in told.value.hint


def test_a_gpu_that_runs_no_release_is_refused() -> None:
    with pytest.raises(IncompatibleError, match="no release of vLLM runs on") as told:
        require_fit(load(["vllm"]), "p2.xlarge", None, TODAY)
    assert "compute capability" in " ".join(told.value.details)


def test_compose_reads_every_file_and_no_other(tmp_path: Path) -> None:
    gpus: list[Any] = ["all", [ONE], [ONE, TWO], ()]
    asked = [(wanted, given) for wanted in (["ollama"], ["jupyter"], ["ollama", "jupyter"]) for given in gpus]
    asked.append((names(), [ONE]))
    paths = [tmp_path / f"{number}.yaml" for number, _ in enumerate(asked)]
    for path, (wanted, given) in zip(paths, asked, strict=True):
        path.write_text(compose(load(wanted), given, user="ann", secrets=True).text)
    assert schema_says(*paths) == 0
    paths[0].write_text(paths[0].read_text().replace("capabilities:", "capability:"))
    assert schema_says(*paths) == 1


def test_devices_are_all_or_named_and_never_both() -> None:
    def devices(gpus: Any) -> Any:
        return document("ollama", gpus=gpus)["services"]["ollama"]["deploy"]["resources"]["reservations"][
            "devices"
        ]

    capabilities = ["gpu", "compute", "utility"]
    assert devices("all") == [{"driver": "nvidia", "count": "all", "capabilities": capabilities}]
    named = {"driver": "nvidia", "device_ids": [ONE, TWO], "capabilities": capabilities}
    assert devices([ONE, TWO]) == [named]
    with pytest.raises(UsageError, match="refuses a count of GPUs together with names of GPUs"):
        devices(["all", ONE])
    for bad in (["0"], [ONE, "1"], ["T4"]):
        with pytest.raises(UsageError, match="is no UUID of a GPU"):
            devices(bad)
    assert devices(["all"]) == devices("all")
    assert (
        yaml.safe_load("\n".join(engines.arguments([ONE], "compose")))["deploy"]
        == (document("ollama", gpus=[ONE])["services"]["ollama"]["deploy"])
    )


def test_without_a_gpu_the_reservation_is_left_out_and_said_so() -> None:
    rendered = compose(load(["ollama", "jupyter"]), (), user="ann")
    assert "deploy" not in rendered.text
    assert [note.partition(":")[0] for note in rendered.notes] == ["ollama", "jupyter"]
    assert "computes on the processor" in rendered.notes[0]
    assert compose(load(["ollama"]), "all", user="ann").notes == ()
    with pytest.raises(IncompatibleError, match="vLLM needs a GPU"):
        compose(load(["ollama", "vllm"]), (), user="ann")


def test_only_the_machine_itself_reaches_a_service_and_its_files_are_in_the_home() -> None:
    for name, row in document(*names())["services"].items():
        [port] = row["ports"]
        assert port.startswith("127.0.0.1:")
        [volume] = row["volumes"]
        assert volume.startswith(f"/home/ann/services/{name}:/")
        assert row["restart"] == "unless-stopped"
        assert row["healthcheck"]["test"][0] == "CMD"
        assert services.PINNED.fullmatch(row["image"])


def test_secrets_are_read_only_where_there_are_some() -> None:
    assert "env_file" not in document("ollama")["services"]["ollama"]
    assert document("ollama", secrets=True)["services"]["ollama"]["env_file"] == [f"{RUN_FOLDER}/env"]


def test_no_value_is_taken_for_a_variable_of_compose() -> None:
    assert "$" not in compose(load(names()), "all", user="ann").text


def test_docker_compose_reads_it(tmp_path: Path) -> None:
    asked = ["docker", "compose", "version"]
    if not shutil.which("docker") or subprocess.run(asked, capture_output=True, check=False).returncode:
        pytest.skip("no docker compose here")
    path = tmp_path / "compose.yaml"
    path.write_text(compose(load(names()), [ONE], user="ann").text)
    asked = ["docker", "compose", "--file", str(path), "config"]
    done = subprocess.run(asked, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert ONE.encode() in done.stdout
