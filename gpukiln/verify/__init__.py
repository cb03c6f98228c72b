"""Verifies a machine with the suite in tests/host, and makes the reports.

Central values: `Facts` (what the probe gathered on the machine), `Check` (the declaration of a check, which
is a function of the facts) and `Verdict` (the result of every check). A verdict belongs to the suite with
whose digest it was given.

- `suite`: runs the suite in a process of its own; `plugin`: the pytest plugin inside of it; `target`: the
  machine; `gathering`, `buildah_backend`, `facts_backend`: how testinfra reaches it.
- `checks`, `needs`, `facts`, `compute_facts`: what a check is declared with and reads; `catalog`: lists
  them for docs/checks.md; `digest`: of the suite's files.
- `verdict`, `order`, `diagnosis`, `verification`: the results; `report`, `html`, `junit`: their views.
"""
