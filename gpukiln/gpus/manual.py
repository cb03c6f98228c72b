"""The man page and the bash completion of gpukiln-gpu, generated from the verbs."""

from __future__ import annotations

from collections.abc import Iterator

from gpukiln import __version__
from gpukiln.gpus.verb import JSON, Verb
from gpukiln.gpus.verbs import verbs
from gpukiln.options import Option

# The codes of gpukiln/errors.py, in the words of this program; docs/gpus.md has the same table.
EXIT_CODES = (
    ("0", "success; also on a machine without a GPU, with the reason"),
    ("1", "a check failed"),
    ("2", "wrong usage"),
    ("3", "this machine can never serve the request"),
    ("4", "the driver does not answer, or another program is missing"),
    ("5", "a GPU can't be read; the others are reported"),
    ("6", "refused by a safety rule"),
    ("75", "not now: other leases have the devices"),
    ("130", "interrupted"),
)
FILES = (
    ("/etc/gpukiln/gpus.toml", "limits of leases, and the machine's price"),
    ("/var/lib/gpukiln/gpus", "the leases, and the locks of their jobs"),
)


def man_page() -> str:
    """The text of gpukiln-gpu.1, in the format of man(7)."""
    return "\n".join(_man()) + "\n"


def _man() -> Iterator[str]:
    yield f'.TH GPUKILN-GPU 1 "" "gpukiln {__version__}" "User Commands"'
    yield ".SH NAME"
    yield r"gpukiln-gpu \- examine GPUs, lease them, run on them, account for them"
    yield ".SH SYNOPSIS"
    for verb in verbs().values():
        yield f".B gpukiln\\-gpu {_roff(verb.name)}"
        rest = f" \\-\\- {verb.takes_command}" if verb.takes_command else ""
        first = "".join(f" [{_value(option)}]" for option in verb.options if option.first)
        yield f"{first} [OPTION]...{rest}".strip()
        yield ".br"
    yield ".SH DESCRIPTION"
    yield _roff(
        "Root and the members of the group gpu can lease GPUs. A GPU is named by its UUID, the beginning of"
    )
    yield _roff("that, its index or its PCI address.")
    yield ".SH VERBS"
    for verb in verbs().values():
        yield f".SS {_roff(verb.name)}"
        yield _roff(verb.help)
        # Not `all_options`: the command behind `--` is in the synopsis.
        for option in (*verb.options, JSON):
            yield ".TP"
            yield f".B {_typed(option)}"
            yield _roff(option.help)
        for example in verb.examples:
            yield ".PP"
            yield f".RS\ngpukiln\\-gpu {_roff(verb.name)} {_roff(example)}\n.RE"
    yield ".SH EXIT STATUS"
    for code, text in EXIT_CODES:
        yield f".TP\n.B {code}\n{_roff(text)}"
    yield ".SH FILES"
    for path, text in FILES:
        yield f".TP\n.I {_roff(path)}\n{_roff(text)}"


def _value(option: Option) -> str:
    return _roff(option.value or option.flag[2:].upper())


def _typed(option: Option) -> str:
    names = [f"-{option.letter}"] * bool(option.letter) + [option.flag]
    value = "" if option.default is False else f" {_value(option)}"
    return ", ".join(_roff(name) for name in names) + value


def _roff(text: str) -> str:
    r"""A text without requests and escapes of roff (man(7), groff(7)).

    >>> _roff("--json")
    '\\-\\-json'
    >>> _roff(".TH at the start of a line")
    '\\&.TH at the start of a line'
    """
    # A plain - is a hyphen, which can't be searched for and pasted as an option.
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq")
    return f"\\&{text}" if text.startswith((".", "'")) else text


def completion() -> str:
    """The text of the completion for bash."""
    every = verbs()
    cases = "\n".join(f"    {verb.name}) words='{_words(verb)}' ;;" for verb in every.values())
    return f"""# Completion of gpukiln-gpu for bash.
_gpukiln_gpu() {{
  local words='' i
  local current=${{COMP_WORDS[COMP_CWORD]}}
  for ((i = 1; i < COMP_CWORD; i++)); do
    [[ ${{COMP_WORDS[i]}} != -- ]] || return 0
  done
  case ${{COMP_WORDS[1]}} in
{cases}
  esac
  if ((COMP_CWORD == 1)); then
    words='{" ".join(every)}'
  fi
  mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")
}}
complete -o default -F _gpukiln_gpu gpukiln-gpu
"""


def _words(verb: Verb) -> str:
    return " ".join(option.flag for option in (*verb.options, JSON))
