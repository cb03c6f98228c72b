"""What removes something that a person made does so with consent alone: all commands are walked."""

import io
import re

import pytest

from gpukiln.cli.consent import require_consent
from gpukiln.cli.main import command, names
from gpukiln.errors import RefusedError
from gpukiln.options import options_of

# These remove what people made, and do it with --yes, or where somebody agreed on a terminal.
WITH_YES = {
    "ami.prune",
    "cloud.clean",
    "cloud.sweep",
    "gpu.mig",
    "gpu.reset",
    "node.runs",
    "workspace.down",
}
# These remove or end something that the option or the argument names, and no files that a person wrote.
OTHERWISE = {
    "cloud.refresh": "--force: machines end, and the disks of images stay",
    "cloud.stop": "--force: machines end, and the disks of images stay",
    "gpu.release": "the lease that is named",
    "k8s.job": "--replace: a Job that has ended",
    "workspace.move": "the old volume, after everything in it was copied",
    "workspace.up": "Ctrl-C: what the same call made, while nobody can use it",
}
REMOVES = re.compile(
    r"\b(remov\w*|delet\w*|put\w* .* away|goes then|wipe\w*|eras\w*|end (a|the|with))\b", re.IGNORECASE
)


def said(name: str) -> str:
    """All that a command's help says."""
    kind = command(name)
    return " ".join([kind.__doc__ or "", *(one.help for one in options_of(kind))])


def test_every_command_that_removes_something_takes_yes() -> None:
    speaking = {name for name in names() if REMOVES.search(said(name))}
    assert speaking - WITH_YES == set(OTHERWISE)
    defaults = {name: {one.name: one.default for one in options_of(command(name))} for name in names()}
    has_yes = {name: options["yes"] for name, options in defaults.items() if "yes" in options}
    assert has_yes == dict.fromkeys((*WITH_YES, "workspace.up"), False)  # the last costs money


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("typed", [io.StringIO("yes\n"), Terminal("no\n"), Terminal(""), None])
def test_nobody_consents_by_accident(monkeypatch: pytest.MonkeyPatch, typed: io.StringIO | None) -> None:
    monkeypatch.setattr("sys.stdin", typed)
    with pytest.raises(RefusedError):
        require_consent("removing it", ["all of it"], yes=False)


def test_what_is_going_to_be_done_is_shown_before_the_question(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal("yes\n"))
    require_consent("removing it", ["all of it"], yes=False)
    assert capsys.readouterr().err.startswith("all of it\nremoving it: type yes")
    require_consent("removing it", ["all of it"], yes=True)
    assert capsys.readouterr().err == ""
