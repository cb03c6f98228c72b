"""Packs the modules that gather a machine's facts into one command, so that one round trip is enough."""

from __future__ import annotations

import base64
import importlib.util
import io
import json
import lzma
import tokenize
from functools import cache
from pathlib import Path

from gpukiln.probe import scripts

NO_PYTHON = 127
STANDALONE = ("gather", "passthrough")  # the main module, and a module that is sent alone
UNPRIVILEGED = ("runner", "pod", "contact")  # profiles
# Characters of base 85 that Ansible would read as a template and a shell as a variable, and replacements.
BASE85_UNSAFE, BASE85_SAFE = "{%#$`!", ",.:/[]"


def gather_command(profile: str = "", mark: str = "-", max_seconds: float | None = None) -> str:
    """Shell command that prints a machine's facts; becomes root through sudo unless it is root.

    Containers, with the profiles runner and pod, are verified as their own user, without root.

    Args:
        profile: Key of `gpukiln.verify.checks.PROFILES`; `contact` for scripts/first-contact.
        mark: Printed on a line before and a line after the facts; see `facts_in`.
        max_seconds: After which it ends, whatever hangs; None for no limit.
    """
    limit = "-" if max_seconds is None else f"{max_seconds:.0f}"
    # -n: sudo must fail instead of asking for a password that nobody types.
    become = "" if profile in UNPRIVILEGED else "[ $(id -u) = 0 ] || s='sudo -n'; "
    return (
        f"if ! command -v python3 >/dev/null; then echo python3: not found >&2; exit {NO_PYTHON}; fi; "
        f"s=; {become}exec $s python3 -c '{_code()}' {profile or '-'} {mark} {limit}"
    )


def facts_in(output: str, mark: str) -> str:
    r"""The facts in the output of the command; a login shell may print text before and after them.

    Args:
        mark: The mark of the command.

    Raises:
        ValueError: The output has no facts.

    >>> facts_in("Welcome!\n-m-{}-m-", "-m-")
    '{}'
    >>> facts_in("Welcome!", "-m-")
    Traceback (most recent call last):
        ...
    ValueError: the machine's output has no facts
    """
    parts = output.split(mark)  # no line ends here: Ansible strips the last one of an output
    if len(parts) != 3:
        raise ValueError("the machine's output has no facts")
    return parts[1]


def contact_program(more: dict[str, str]) -> str:
    """scripts/first-contact as a program of one file, for machines without a checkout.

    Args:
        more: Further modules, by name.
    """
    files = ("__init__", "errors", "files")
    modules = {
        **{f"gpukiln.{name}".removesuffix(".__init__"): _text(f"{name}.py") for name in files},
        **module_sources(),
        **{
            f"gpukiln.probe.{name}": _text(f"probe/{name}.py")
            for name in _probe_modules()
            if _is_contact_only(name)
        },
        **more,
        "__main__": "import sys\nfrom gpukiln.probe.contact import main\nsys.exit(main())\n",
    }
    return _program(modules) + "\n"


@cache
def _code() -> str:
    """The program that gathers the facts.

    Linux takes at most 128 KiB for one argument of a program, and all of this is one: the sources, with
    NVIDIA's bindings of NVML, are compressed, and imported from there when they are needed.
    """
    return _program({"gpukiln": "", **module_sources(), "__main__": _text("probe/gather.py")})


def module_sources() -> dict[str, str]:
    """The text of each module that gathers the facts, and of what they import, by its name."""
    bindings = importlib.util.find_spec("pynvml")
    if bindings is None or bindings.origin is None:
        raise RuntimeError("found no module pynvml, wanted nvidia-ml-py installed with gpukiln")
    modules = (name for name in _probe_modules() if not _is_contact_only(name) and name not in STANDALONE)
    return {
        "gpukiln.probe": "",
        "gpukiln.redact": _text("redact.py"),
        **{f"gpukiln.probe.{name}": _text(f"probe/{name}.py") for name in modules},
        "gpukiln.probe.scripts": scripts.constants(),
        "pynvml": Path(bindings.origin).read_text(encoding="utf-8"),
    }


def _probe_modules() -> list[str]:
    return [path.stem for path in Path(__file__).parent.glob("*.py") if path.stem != "__init__"]


def _is_contact_only(name: str) -> bool:
    """Whether only scripts/first-contact needs a module of this package."""
    return name.startswith("contact") or name in ("recording", "packing")


def _text(name: str) -> str:
    """The text of a file of the package, read late because a packed module has no file."""
    return (Path(__file__).parents[1] / name).read_text(encoding="utf-8")


def without_comments(source: str) -> str:
    r"""Python source without its comments; a line keeps its number, so that a traceback names the right one.

    The space for one argument of a program is short, and no machine reads comments.

    >>> without_comments("a = 1  # why\nb = '# text'\n")
    "a = 1\nb = '# text'\n"
    """
    lines = source.splitlines()
    # By tokens: a # may be part of a text.
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column].rstrip()
    return "".join(f"{line}\n" for line in lines)


def _program(sources: dict[str, str]) -> str:
    # A small dictionary, because the machine needs that much memory to decompress.
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 1 << 20}]
    code = {name: without_comments(text) for name, text in sources.items()}
    packed = lzma.compress(json.dumps(code).encode(), filters=filters)
    # Base 85 needs 6 % less space than base 64, and one argument of a program has at most 128 KiB.
    text = base64.b85encode(packed).decode().translate(str.maketrans(BASE85_UNSAFE, BASE85_SAFE))
    unsafe = ",".join(str(ord(c)) for c in BASE85_UNSAFE)
    return "\n".join(
        (
            "import base64,importlib.abc,importlib.util as u,json,lzma,sys",
            f't="{text}".translate(str.maketrans("{BASE85_SAFE}",bytes([{unsafe}]).decode()))',
            "S=json.loads(lzma.decompress(base64.b85decode(t)))",
            "class F(importlib.abc.MetaPathFinder,importlib.abc.Loader):",
            " def find_spec(s,n,p=None,t=None):",
            '  if n in S: return u.spec_from_loader(n,s,is_package=any(k.startswith(n+".") for k in S))',
            " def exec_module(s,m): exec(S[m.__name__],m.__dict__)",
            "sys.meta_path.insert(0,F())",
            'exec(S["__main__"],sys.modules["__main__"].__dict__)',
        )
    )
