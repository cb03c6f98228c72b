"""Completion of what is typed, for bash, zsh and fish: the shell asks the program itself."""

from __future__ import annotations

from gpukiln.errors import UsageError

# Each hands over the words before the cursor, the last one as far as it is typed.
SCRIPTS = {
    "bash": """\
_gpukiln() {
  local IFS=$'\\n'
  COMPREPLY=($(PROGRAM --complete -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _gpukiln PROGRAM
""",
    "zsh": """\
#compdef PROGRAM
_gpukiln() {
  local -a found
  found=("${(@f)$(PROGRAM --complete -- "${(@)words[2,CURRENT]}" 2>/dev/null)}")
  [[ -n $found ]] && compadd -a found || _files
}
compdef _gpukiln PROGRAM
""",
    "fish": """\
complete -c PROGRAM -a '(PROGRAM --complete -- (commandline -opc)[2..] (commandline -ct) 2>/dev/null)'
""",
}


def script(shell: str, program: str) -> str:
    """What a shell reads to complete a program's words.

    Raises:
        UsageError: It is another shell.
    """
    if shell not in SCRIPTS:
        raise UsageError(
            f"completion is for {', '.join(SCRIPTS)}, and {shell or 'no shell'} is named",
            hint="for example: source <(gpukiln completion bash)",
        )
    return SCRIPTS[shell].replace("PROGRAM", program)


def complete(words: list[str], program: str) -> list[str]:
    """What the last word may become.

    Args:
        words: What was typed behind the program's name; the last is begun, or empty.
        program: "gpukiln" or "invoke".
    """
    from gpukiln.cli.main import GPUKILN, NOUNS, commands, names
    from gpukiln.options import options_of

    *before, begun = words or [""]
    noun, _, verb = before[0].partition(".") if before else ("", "", "")
    if program == GPUKILN and not verb:
        verb = "".join(before[1:2])
    if "--" in before:
        valid = []
    elif noun in NOUNS and verb in commands(noun):
        options = options_of(commands(noun)[verb])
        valid = ["--help", *(flag for one in options if not one.rest for flag in one.flags)]
    elif program == GPUKILN:
        valid = list(commands(noun)) if noun in NOUNS else [*NOUNS, "init", "config", "completion"]
    else:
        valid = names()
    return [one for one in valid if one.startswith(begun)]
