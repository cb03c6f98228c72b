"""Completion in bash, zsh and fish: the shell asks the program for the words that can follow."""

from __future__ import annotations

from gpukiln.errors import UsageError

# Each passes the words up to the cursor behind `--`, so that typed options are no options of --complete; the
# last word may be incomplete. Where the program has no word, the shell completes file names (-o default and
# _files).
SCRIPTS = {
    # 2>/dev/null, because an error would appear in the middle of the line that is being typed. In bash the
    # words are separated by newlines alone, and the program's own name, the word 0, is left out.
    "bash": """\
_gpukiln() {
  local IFS=$'\\n'
  COMPREPLY=($(PROGRAM --complete -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _gpukiln PROGRAM
""",
    # The first line is for a file of $fpath, the last for a script that is sourced (zshcompsys(1)).
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
    """The script that a shell sources to complete a program's words.

    Raises:
        UsageError: No such shell is supported.
    """
    if shell not in SCRIPTS:
        raise UsageError(
            f"completion is for {', '.join(SCRIPTS)}, and {shell or 'no shell'} is named",
            hint="for example: source <(gpukiln completion bash)",
        )
    return SCRIPTS[shell].replace("PROGRAM", program)


def complete(words: list[str], program: str) -> list[str]:
    """The words that the last word may be completed to.

    Args:
        words: The words after the program's name; the last is incomplete or empty.
        program: "gpukiln" or "invoke".
    """
    from gpukiln.cli.main import GPUKILN, NOUNS, commands, names
    from gpukiln.options import options_of

    *before, begun = words or [""]
    noun, _, verb = before[0].partition(".") if before else ("", "", "")
    # `gpukiln NOUN VERB` are two words, Invoke's noun.verb is one.
    if program == GPUKILN and not verb:
        verb = "".join(before[1:2])
    if "--" in before:  # a command for another program follows, whose words only the shell knows
        valid = []
    elif noun in NOUNS and verb in commands(noun):
        options = options_of(commands(noun)[verb])
        valid = ["--help", *(flag for option in options if not option.rest for flag in option.flags)]
    elif program == GPUKILN:
        valid = list(commands(noun)) if noun in NOUNS else [*NOUNS, "init", "config", "completion"]
    else:
        valid = names()
    return [word for word in valid if word.startswith(begun)]
