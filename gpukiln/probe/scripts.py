"""Files of this repository that a verified machine runs or reads; `gpukiln.probe.packing` sends them."""

from gpukiln import recipes

FILES = {
    "SIGNATURE": "scripts/bootstrap/nvidia-module-signature.sh",
    "IDENTITIES": "roles/image_hygiene/files/machine-identities.txt",
    "CREDENTIALS": "roles/image_hygiene/files/credential-files.txt",
    "SETTINGS": "roles/image_hygiene/files/settings-files.txt",
}
"""Path by the constant that has the text."""


def _text(constant: str) -> str:
    return recipes.file(FILES[constant]).read_text(encoding="utf-8")


def _patterns(constant: str) -> tuple[str, ...]:
    lines = _text(constant).splitlines()
    return tuple(line for line in lines if line and not line.startswith("#"))


SIGNATURE = _text("SIGNATURE")
IDENTITIES = _patterns("IDENTITIES")
"""Shell patterns of files that each machine must generate itself; the role image_hygiene removes the same."""
CREDENTIALS = _patterns("CREDENTIALS")
"""Shell patterns of files with credentials, where ~ is each user's home; the role removes the same."""
SETTINGS = _patterns("SETTINGS")
"""Shell patterns of files in which no line may have a credential."""


def constants() -> str:
    """A module with only the constants, for a machine without the files of this repository."""
    return "".join(f"{name} = {globals()[name]!r}\n" for name in FILES)
