"""First contact with a GPU machine: records everything that the suite would read there in one folder.

    scripts/first-contact FOLDER                       on the machine, in a checkout
    scripts/run scripts/first-contact --pack FILE      makes one file of it; there: python3 FILE FOLDER

It reads, and computes like the suite's compute layer. It changes no setting, runs without root (with root it
reads more of the kernel's log), and ends within three minutes whatever hangs. Runs with Python 3.9 or newer,
the standard library and pynvml, which a packed file contains.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gpukiln import __version__
from gpukiln.probe import contact_calls, cuda, packing, recording
from gpukiln.probe.base import (
    NOT_REACHED,
    NotReachedError,
    pci_gpus,
    require_driver_answers,
    run_unrecorded,
    watch,
)
from gpukiln.probe.child import Send, call, in_child
from gpukiln.probe.contact_doubles import answers, contradictions
from gpukiln.probe.contact_folder import Folder, default_folder
from gpukiln.probe.contact_machine import COMMANDS, describe_machine, sampling
from gpukiln.probe.ptx import expected_result
from gpukiln.probe.sections import gather_section
from gpukiln.probe.simulated import is_simulated

TOTAL_S = 165.0  # of the three minutes; the rest is for killing what hangs
COMMAND_S, NVML_S, COMPUTE_S, PACKED_S = 15.0, 60.0, 60.0, 60.0
DONE, FAILED, USAGE, NO_GPU, IN_PART, INTERRUPTED = 0, 1, 2, 4, 5, 130
SCHEMA = 1
NOT_FOUND = 127  # the shell's exit status for a missing command
CALLS, SECOND = "cuda.part", "second.part"  # files that exist while it runs
# a module of a packed file: the command and the doubles' answers, which a checkout has as files
PACKED_DATA = "gpukiln.probe.contact_given"
MARK = "5f1d-facts-of-a-first-contact"  # around the facts in the output of the packed command
WRONG_ELEMENT = 12345  # the element for which `expect_wrong` expects a wrong value


class Contact:
    """The steps; each writes its results, and how it ended.

    Args:
        command: The command that verify sends; empty where it can't be packed here.
        doubles: The doubles' answers.
    """

    def __init__(self, folder: Folder, command: str, doubles: Any) -> None:
        self.folder, self.command, self.doubles = folder, command, doubles
        self.state: dict[str, Any] = {"schema": SCHEMA, "gpukiln": __version__, "ended": "no", "steps": []}
        self.nvml: Any = None
        self.calls: list[dict[str, Any]] = []
        self.runs: list[dict[str, Any]] = []
        self.problems: list[str] = []  # wrong results; differences from the doubles are added at the end

    def step(self, name: str, work: Callable[[], Any]) -> None:
        """Run a step, and record in state.json how it ended."""
        began = time.monotonic()
        row = {"step": name, "ended": "no", "why": "", "seconds": 0.0}
        self.state["steps"].append(row)
        # Before and after each step, so that a killed run shows where it was.
        self.save("no")
        try:
            watch.limit(0)
            why = work()
            row.update(ended="failed" if why else "done", why=str(why or ""))
        except NotReachedError as error:
            row.update(ended="not reached", why=str(error))
        except Exception as error:
            row.update(ended="failed", why=f"{type(error).__name__}: {error}")
        row["seconds"] = round(time.monotonic() - began, 2)
        sys.stderr.write(
            self.folder.shown(f"{row['ended']:>11}  {row['seconds']:6.1f} s  {name}  {row['why']}\n")
        )
        self.save("no")

    def save(self, ended: str) -> None:
        """Write state.json; `ended` is yes, no (still running, or killed) or interrupted."""
        self.state["ended"] = ended
        self.folder.data("state.json", self.state)

    def all(self) -> None:
        """Run every step, the most important first."""
        self.step("here", lambda: self.folder.data("here.json", describe_machine()))
        for name, argv in COMMANDS.items():
            self.step(name, functools.partial(self.save_output, name, argv))
        self.step("nvml", self.ask_nvml)
        # The link's speed and the clocks matter while the GPU works; an idle GPU lowers both.
        with sampling(str(self.folder.path / "samples.csv"), TOTAL_S):
            self.step("compute", lambda: self.compute("first"))
        self.step("wrong expectation", self.expect_wrong)
        self.step("packed command", self.packed)
        self.step("compute again", lambda: self.compute("second"))
        self.step("compute a third time", lambda: self.compute("third"))
        self.step("two at once", self.two_at_once)
        self.step("contradictions", self.compare)

    def save_output(self, name: str, argv: Sequence[str]) -> str:
        """Save a command's output and status, which differs where a GPU lacks the feature."""
        done = run_unrecorded(*argv, timeout=COMMAND_S)
        self.folder.text(f"{name}.txt", f"{done['out']}\n# exit {done['rc']}\n# {done['err']}\n")
        return str(done["err"]) if done["rc"] == NOT_FOUND else ""

    def ask_nvml(self) -> str:
        """Save the result of read_nvml, and each call of NVML with its code."""
        if importlib.util.find_spec("pynvml") is None:
            return (
                "found no pynvml: make a packed file where scripts/run works (--pack FILE), and run that file"
            )
        watch.limit(0)

        def receive(message: dict[str, Any]) -> None:
            self.nvml = message.get("nvml", self.nvml)
            self.calls += [message["call"]] if "call" in message else []

        ended = contact_calls.ask_nvml(receive)
        self.folder.data("nvml-calls.json", self.calls)
        if self.nvml:
            form = {"schema": recording.SCHEMA, "gpukiln": __version__, "pci": pci_gpus()}
            self.nvml = recording.redact(self.nvml)
            self.folder.data("recording.json", {**form, "nvml": self.nvml})
        return ended

    def compute(self, name: str) -> str:
        """Save the compute section, as the suite gathers it, and its duration."""
        result = _cuda()
        self.runs.append({"run": name, **result})
        self.folder.data("compute.json", self.runs)
        return _problem(result["found"])

    def expect_wrong(self) -> str:
        """Expect one wrong element; every GPU must then be reported as wrong."""

        def work() -> dict[str, Any]:
            def wrong(tiles: int) -> bytes:
                expected = bytearray(expected_result(tiles))
                # One bit, as a damaged memory cell would have it.
                expected[4 * WRONG_ELEMENT] ^= 1
                return bytes(expected)

            vars(cuda)["expected_result"] = wrong  # in this child only
            return _cuda()

        require_driver_answers()
        row = {"run": "wrong expectation", **call(work, COMPUTE_S)}
        self.folder.data("compute-wrong.json", row)
        missed = [str(gpu["bus_id"]) for gpu in row["found"].get("gpus", []) if gpu["ok"]]
        if missed:
            self.problems.append(
                f"cuda: a wrong element was expected, but not reported by {', '.join(missed)}"
            )
            return self.problems[-1]
        errors = [str(gpu["error"]) for gpu in row["found"].get("gpus", []) if not gpu["busy"]]
        right = errors and all(f"first in element {WRONG_ELEMENT}:" in error for error in errors)
        return "" if right else f"found another problem: {_problem(row['found'])}"

    def two_at_once(self) -> str:
        """Run two compute sections at the same time, and save both."""
        path = self.folder.path / SECOND

        def work(send: Send) -> None:
            send(limit=2 * COMPUTE_S, at="two at once")
            # Processes, not threads: two jobs on a machine are two processes, each with its own context.
            second = os.fork()
            if second == 0:
                with contextlib.suppress(BaseException):
                    path.write_text(json.dumps(_cuda()), encoding="utf-8")
                os._exit(0)
            send(found=_cuda())
            os.waitpid(second, 0)

        require_driver_answers()
        results: list[dict[str, Any]] = []
        ended = in_child(
            work, lambda message: results.append(message["found"]) if "found" in message else None
        )
        if path.exists():
            results.append(json.loads(path.read_text(encoding="utf-8")))
            path.unlink()
        self.folder.data("compute-two.json", results)
        return ended or "; ".join(filter(None, (_problem(result["found"]) for result in results)))

    def packed(self) -> str:
        """Run the command that verify sends, with the sections that only read and need no root."""
        if not self.command:
            return (
                "the command can't be packed without pynvml: make a packed file (--pack FILE), and run "
                "that file"
            )
        began = time.monotonic()
        done = run_unrecorded("sh", "-c", self.command, timeout=PACKED_S + 5)
        row: dict[str, Any] = {
            "rc": done["rc"],
            "err": done["err"],
            "bytes": len(self.command),
            "sections": {},
            "seconds": round(time.monotonic() - began, 2),
        }
        if done["rc"] == 0:
            facts = json.loads(packing.facts_in(done["out"], MARK))
            row["sections"] = {name: facts.get(name) for name in ("gpus", "cuda", "hung", "seconds")}
            if isinstance(facts.get("nvml"), dict) and "gpus" in facts["nvml"]:
                row["sections"]["nvml"] = recording.redact(facts["nvml"])
        self.folder.data("packed.json", row)
        return "" if done["rc"] == 0 else f"exit {done['rc']}: {done['err'][-200:]}"

    def compare(self) -> str:
        """Compare with the doubles: save the answers that they never give."""
        summed = self.sum_up()
        runs = [row["found"] for row in self.runs]
        seen = answers(self.nvml, self.calls, runs, summed)
        self.folder.data("answers.json", seen)
        lines = self.problems + (contradictions(seen, self.doubles) if self.doubles else [])
        self.folder.text("contradictions.txt", "".join(f"{line}\n" for line in lines))
        sys.stdout.write(self.folder.shown("".join(f"{line}\n" for line in lines)))
        return "" if self.doubles else "found no tests/doubles/answers.json"

    def sum_up(self) -> list[dict[str, Any]]:
        """Save the calls of CUDA so far."""
        summed = contact_calls.summarize_cuda_calls(str(self.folder.path / CALLS))
        self.folder.data("cuda-calls.json", summed)
        return summed

    def code(self) -> int:
        """The exit code."""
        if self.problems:
            return FAILED
        return DONE if all(row["ended"] == "done" for row in self.state["steps"]) else IN_PART


def _cuda() -> dict[str, Any]:
    """The compute section: {found, seconds}.

    Raises:
        NotReachedError: A tool hangs, or the time was up.
    """
    row = gather_section("cuda", cuda.cuda)
    if isinstance(row["found"], dict) and NOT_REACHED in row["found"]:
        raise NotReachedError(row["found"][NOT_REACHED])
    return {"found": row["found"], "seconds": row["seconds"]}


def _problem(section: Any) -> str:
    if not isinstance(section, dict) or "gpus" not in section:
        return str(section)[:300]
    wrong = [f"{gpu['bus_id']}: {gpu['error']}" for gpu in section["gpus"] if not gpu["ok"]]
    return "; ".join(filter(None, [section["error"], *wrong]))


def packed_data(root: Path) -> tuple[str, Any]:
    """The command that verify sends, and the doubles' answers; each empty where it is not available."""
    if importlib.util.find_spec(PACKED_DATA):
        module = importlib.import_module(PACKED_DATA)
        return str(module.COMMAND), module.ANSWERS
    path = root / "tests" / "doubles" / "answers.json"
    doubles = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    if importlib.util.find_spec("pynvml") is None:
        return "", doubles
    return packing.gather_command("contact", MARK, PACKED_S), doubles


def _stop(_number: int, _frame: Any) -> None:
    raise KeyboardInterrupt


def contact(path: Path, root: Path) -> int:
    """Examine this machine.

    Args:
        path: The folder; it does not exist, or is empty.
        root: The checkout, if there is one.

    Returns:
        The exit code.
    """
    if is_simulated():
        sys.stderr.write(
            "the GPUs of this machine are simulated, wanted real ones; run this on a machine with a GPU\n"
        )
        return NO_GPU
    if not pci_gpus():
        sys.stderr.write("found no NVIDIA GPU on the PCI bus, wanted one; run this on a machine with a GPU\n")
        return NO_GPU
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        sys.stderr.write(f"{path} exists already, wanted a new folder; name another one, or move it\n")
        return USAGE
    watch.start(TOTAL_S)
    group = 0

    def alive(**message: Any) -> None:
        nonlocal group
        group = message.get("group", group)

    # The process group of the current command, for Ctrl-C below.
    watch.send = alive
    signal.signal(signal.SIGTERM, _stop)
    folder = Folder(path, os.uname().nodename)
    contact_calls.record_cuda_calls(str(path.resolve() / CALLS))
    steps = Contact(folder, *packed_data(root))
    try:
        steps.all()
    except KeyboardInterrupt:
        steps.sum_up()
        with contextlib.suppress(FileNotFoundError):
            (path / SECOND).unlink()
        steps.save("interrupted")
        if group:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        sys.stderr.write(f"interrupted; the results so far are in {path}\n")
        return INTERRUPTED
    steps.save("yes")
    sys.stderr.write(f"wrote {path}\n")
    return steps.code()


def main(arguments: Sequence[str] | None = None, root: Path = Path()) -> int:
    """The command; see the module.

    Args:
        arguments: Of the command line; the process's own when None.

    Returns:
        The exit code: 0 all was done, 1 a wrong result was not detected, 2 usage, 4 no GPU, 5 done in part,
        130 interrupted.
    """
    parser = argparse.ArgumentParser(prog="first-contact", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "folder", nargs="?", type=Path, help="a new folder for the results (default: first-contact)"
    )
    parser.add_argument("--pack", type=Path, metavar="FILE", help="write this program as one file, and exit")
    options = parser.parse_args(arguments)
    if not options.pack:
        return contact(options.folder or default_folder(), root)
    if importlib.util.find_spec("pynvml") is None:
        sys.stderr.write("found no pynvml, which the file must contain; run this with scripts/run\n")
        return NO_GPU
    command, doubles = packed_data(root)
    data = f"COMMAND = {command!r}\nANSWERS = {doubles!r}\n"
    options.pack.write_text(packing.contact_program({PACKED_DATA: data}), encoding="utf-8")
    sys.stderr.write(
        f"wrote {options.pack}; on the machine with the GPU: python3 {options.pack.name} FOLDER\n"
    )
    return DONE
