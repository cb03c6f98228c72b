"""The interface of the roles: argument_specs and defaults agree, and READMEs leave them to docs/roles.md."""

from pathlib import Path

import pytest
import yaml

from gpukiln.catalog import roles

ROOT = Path(__file__).resolve().parents[2]
GOOD = {"description": "How many.", "type": "int", "default": 1}


def a_role(folder: Path, *, options: dict, defaults: dict) -> roles.Role:
    for name, document in (
        (
            "meta/argument_specs.yml",
            {"argument_specs": {"main": {"short_description": "A", "options": options}}},
        ),
        ("defaults/main.yml", defaults),
    ):
        file = folder / "sample" / name
        file.parent.mkdir(parents=True)
        file.write_text(yaml.safe_dump(document))
    [role] = roles.load_roles(folder)
    return role


@pytest.mark.parametrize("role", roles.load_roles(), ids=lambda role: role.name)
def test_specification_and_defaults_agree(role: roles.Role) -> None:
    assert not list(roles.mistakes(role))


@pytest.mark.parametrize("role", roles.load_roles(), ids=lambda role: role.name)
def test_a_readme_leaves_the_variables_to_the_reference(role: roles.Role) -> None:
    text = (ROOT / "roles" / role.name / "README.md").read_text()
    assert f"](../../docs/roles.md#{role.name})" in text
    assert not [line for line in text.splitlines() if line.startswith(f"| `{role.name}_")]


def test_the_keys_of_a_dictionary_are_told() -> None:
    [row] = [line for line in roles.markdown().splitlines() if line.startswith("| `ci_runner_runners`")]
    assert "Keys: `user` (required): Who it runs as; made when it is missing. `folder`: Where" in row


def test_a_sound_role_has_no_mistake(tmp_path: Path) -> None:
    required = {"description": ["One.", "Two."], "required": True}
    options = {"sample_count": GOOD, "sample_name": required}
    role = a_role(tmp_path, options=options, defaults={"sample_count": 1})
    assert not list(roles.mistakes(role))
    assert role.variables[1].description == ("One.", "Two.")


@pytest.mark.parametrize(
    ("options", "defaults", "mistake"),
    [
        ({}, {"sample_count": 1}, "sample_count: argument_specs does not describe it"),
        (
            {"sample_count": {"type": "int"}},
            {"sample_count": 1},
            "sample_count: argument_specs does not desc",
        ),
        ({"sample_count": GOOD}, {}, "sample_count: it is not required, and defaults/main.yml does not"),
        ({"sample_count": GOOD}, {"sample_count": 2}, "sample_count: argument_specs says 1, defaults 2"),
        ({"other": GOOD}, {"other": 1}, "other: its name does not begin with the role's"),
    ],
)
def test_a_disagreement_is_told(tmp_path: Path, options: dict, defaults: dict, mistake: str) -> None:
    found = list(roles.mistakes(a_role(tmp_path, options=options, defaults={"sample_x": 1, **defaults})))
    assert any(line.startswith(mistake) for line in found), found


def platforms(role: str) -> list:
    return yaml.safe_load((ROOT / "roles" / role / "meta/main.yml").read_text())["galaxy_info"]["platforms"]


OWN_SYSTEMS = {"apt_sources", "pve_host"}


@pytest.mark.parametrize("role", sorted({role.name for role in roles.load_roles()} - OWN_SYSTEMS))
def test_every_role_is_for_the_same_systems(role: str) -> None:
    assert [one["name"] for one in platforms("apt_sources")] == ["Debian", "Ubuntu"]  # that have apt
    assert [one["name"] for one in platforms("pve_host")] == ["Debian"]  # Proxmox VE's
    assert platforms(role) == platforms("packages")
    assert [one["name"] for one in platforms(role)] == ["Debian", "Ubuntu", "EL", "Amazon Linux"]
