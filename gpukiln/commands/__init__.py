"""The commands, one module for one or more verbs of a noun.

A command is a frozen dataclass: its fields are its options, its docstring is its help, and `run` calls the
domain package and prints what that returns (`gpukiln.cli.command`). `gpukiln.cli.main.NOUNS` lists them.
"""
