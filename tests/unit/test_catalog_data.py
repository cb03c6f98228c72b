"""The catalogue's data fits its types and hangs together."""

from datetime import date
from typing import Literal

import pytest

from gpukiln.catalog import container_toolkit, cuda, drivers, kubernetes
from gpukiln.catalog.gpus import architectures, gpu, gpus
from gpukiln.catalog.instance_types import instance_type, instance_types
from gpukiln.catalog.load import read_yaml, version_key
from gpukiln.errors import UsageError
from gpukiln.typed import load, strict


def test_every_machine_has_a_known_gpu_and_living_alternatives() -> None:
    for name, machine in instance_types().items():
        assert gpu(machine.gpu), name
        for other in machine.alternatives:
            assert instance_type(other).status != "retired", f"{name} -> {other}"
            assert instance_type(other).driver == "datacenter", f"{name} -> {other}"


def test_every_retired_or_fractional_machine_has_an_alternative() -> None:
    for name, machine in instance_types().items():
        if machine.status == "retired" or machine.driver == "grid":
            assert machine.alternatives, name
        assert (machine.gpu_fraction < 1) == (machine.driver == "grid"), name


def test_every_nvidia_gpu_has_a_known_architecture() -> None:
    for key, board in gpus().items():
        assert (board.manufacturer == "NVIDIA") == (board.arch is not None), key
        assert board.arch is None or board.arch in architectures(), key


def test_branches_agree_with_their_releases() -> None:
    for number, row in drivers.branches().items():
        assert row.latest is None or version_key(row.latest)[0] == number
    for bulletin in drivers.bulletins():
        assert all(version_key(fixed)[0] == number for number, fixed in bulletin.fixed.items())


def test_the_way_forward_is_the_long_term_branch_that_lasts_longest() -> None:
    forward = drivers.recommended_branch(date(2026, 11, 21))
    assert (forward.branch, forward.type, forward.eol) == (580, "LTSB", date(2028, 6, 30))


def test_the_safe_toolkit_has_no_flaw_and_the_one_before_it_has() -> None:
    assert container_toolkit.first_safe() == "1.19.1"
    assert not container_toolkit.flaws("1.19.1")
    assert [row.cve for row in container_toolkit.flaws("1.19.0")] == ["CVE-2026-24260"]


def test_cuda_floor_is_that_of_its_major_version() -> None:
    assert cuda.needs("12.1").first == cuda.needs("12.1.1").first == "525.60.13"
    with pytest.raises(UsageError, match=r"unknown CUDA version '12\.11'"):
        cuda.needs("12.11")


def test_kubernetes_support_ends_in_order() -> None:
    days = [support.extended_until for support in kubernetes.versions().values()]
    assert days == sorted(days)


@pytest.mark.parametrize(
    ("name", "near"),
    [("g4dn.xlage", "g4dn.xlarge"), ("g5.xl", "g5.xlarge"), ("p6-b200.24xlarge", "p6-b200.48xlarge")],
)
def test_a_mistyped_machine_names_the_nearest(name: str, near: str) -> None:
    with pytest.raises(UsageError) as caught:
        instance_type(name)
    assert near in caught.value.hint


def test_versions_order_by_number() -> None:
    assert version_key("535.99") < version_key("535.309.01") < version_key("550.9")
    with pytest.raises(UsageError, match="is no version"):
        version_key("535-server")


def test_a_record_refuses_a_misspelt_key_and_says_where() -> None:
    @strict
    class Thing:
        size: int

    assert load(Thing, {"size": 1}, where="x") == Thing(size=1)
    with pytest.raises(UsageError, match=r"things.yaml: 2 mistakes") as caught:
        load(Thing, {"sise": 1}, where="things.yaml")
    assert caught.value.details == (
        "size is missing",
        "unknown key 'sise'; valid: size; did you mean size?",
    )


def test_a_mistake_says_what_was_found_and_what_is_wanted_in_our_words() -> None:
    @strict
    class Part:
        names: tuple[str, ...]
        since: date
        kind: Literal["a", "b"] = "a"
        is_big: bool = False

    @strict
    class Thing:
        parts: dict[str, Part | None]
        size: int = 0

    sound = {"names": ["x"], "since": "2026-12-31"}
    for wrong, message in (
        ({"parts": {"p": {**sound, "names": "x"}}}, "parts.p.names: found 'x', wanted a list, [A, B]"),
        (
            {"parts": {"p": {**sound, "names": [1.5]}}},
            'parts.p.names.0: found 1.5, wanted a text: put it in quotes, "1.5"',
        ),
        ({"parts": {"p": {**sound, "since": "soon"}}}, "found 'soon', wanted a day such as 2026-12-31"),
        ({"parts": {"p": {**sound, "kind": "c"}}}, "parts.p.kind: found 'c', wanted 'a' or 'b'"),
        ({"parts": {"p": {**sound, "is_big": "no!"}}}, "parts.p.is_big: found 'no!', wanted true or false"),
        ({"parts": {"p": {**sound, "kin": "a"}}}, "unknown key in parts.p: 'kin'; valid: is_big, kind, "),
        ({"parts": {}, "size": None}, "size: it has no value, wanted a whole number"),
        ({"parts": ["p"]}, "parts: found ['p'], wanted keys with values, KEY: VALUE"),
        (None, "it has no value, wanted keys with values, KEY: VALUE"),
    ):
        with pytest.raises(UsageError) as caught:
            load(Thing, wrong, where="things.yaml")
        assert message in caught.value.message


def test_a_broken_file_is_one_line(tmp_path) -> None:  # type: ignore[no-untyped-def]
    broken = tmp_path / "a.yaml"
    broken.write_text("a: [1")
    with pytest.raises(UsageError, match="no valid YAML"):
        read_yaml(broken)
    broken.write_text("- 1")
    with pytest.raises(UsageError, match="wanted: keys with values"):
        read_yaml(broken)
    with pytest.raises(UsageError, match="can't read"):
        read_yaml(tmp_path / "none.yaml")
