"""The command line: parses it, completes it, documents it, and prints results and errors.

`main.main` is the program: it finds the `command.Command` that was typed in `gpukiln.commands`, fills its
options (`gpukiln.options`, completed by `settings`), runs it, and turns an error into message and exit code.

- `command`: the base of all commands, the option groups that several of them have, and their output.
- `main`, `completion`, `streams`: the program, completion in shells, standard output and standard error.
- `settings`: defaults from variables, gpukiln.toml and AWS; `consent`: questions before a removal or a cost.
- `schemas`, `json_schema`, `fault_page`: the generated pages docs/schemas/*.json and docs/gpu-faults.md.
- `version`: what `--version` prints.
"""
