"""What a second converge of unchanged nodes costs against one round trip per task, in one run.

    scripts/run python -m bench.converge [--nodes 1,10,50] [--disk FILE] [--against CHECKOUT]

The nodes are copies of one that Molecule's scenario `default` has converged; with `--disk` that node's disk
is kept in FILE and used again. Measured on the same running nodes, one after the other, `--rounds` times,
each with the same ansible.cfg, inventory and forks:

    ssh       as many `ssh NODE true` over one open connection: no Ansible at all
    raw       a playbook of as many `raw: true`: Ansible's own cost per task. This is the floor.
    module    a playbook of as many `ping`: a task that starts Python on the node, as nearly every module does
    converge  ansible/node.yml, which must change nothing

With `--against` another checkout's ansible/node.yml runs on the same nodes in turns, as `other`.

"As many" is the number of tasks of the converge that ran on a node; tasks that only Ansible itself works on
(set_fact, include, assert) are not counted.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.fleet import ROOT, Fleet, fleet, make_disk

FORKS = 20  # as ansible.cfg and node.apply have it
SLOWEST = 15
INSIDE = "GPUKILN_BENCH_INSIDE"
# What never reaches a node.
LOCAL = {"set_fact", "assert", "debug", "fail", "meta", "validate_argument_spec", "group_by", "add_host"}


def play(fleet: Fleet, playbook: Path, folder: Path, root: Path = ROOT) -> tuple[float, list[dict[str, Any]]]:
    """Run a playbook as node.apply does.

    Args:
        fleet: The nodes.
        playbook: What to run.
        folder: For its log and its events.
        root: The checkout whose ansible.cfg counts.

    Returns:
        Seconds, and the events of ansible/plugins/callback/gpukiln_events.py.
    """
    log, events = folder / f"{playbook.stem}.log", folder / f"{playbook.stem}.jsonl"
    events.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "ANSIBLE_CONFIG": str(root / "ansible.cfg"),
        "ANSIBLE_CALLBACKS_ENABLED": "gpukiln_events,gpukiln_workers",
        "GPUKILN_EVENTS": str(events),
    }
    left_out = json.dumps({"gpukiln_left_out": ["nvidia_container_toolkit"]})
    command = [
        "ansible-playbook",
        "-i",
        str(fleet.inventory),
        str(playbook),
        "--forks",
        str(FORKS),
        "-e",
        left_out,
    ]
    started = time.monotonic()
    with log.open("w") as output:
        done = subprocess.run(command, env=environment, stdout=output, stderr=output, check=False)
    took = time.monotonic() - started
    if done.returncode:
        raise SystemExit(f"{playbook.name} failed:\n{log.read_text()[-4000:]}")
    return took, [json.loads(line) for line in events.read_text().splitlines()]


def on_nodes(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ends of tasks that ran on a node, each with the seconds that it took.

    Args:
        events: Of one playbook.
    """
    local, found = True, []
    for event in events:
        if event["event"] == "task_start":
            action = event["action"].removeprefix("ansible.builtin.")
            local = action in LOCAL or action.startswith(("include", "import"))
        elif event["event"] == "task_end" and event["status"] in ("ok", "changed") and not local:
            # a decision that knows what was seen before does not look
            found += [event] * bool(event.get("looks", 1))
    return found


def many(action: str, tasks: int, folder: Path) -> Path:
    """A playbook of the same task again and again.

    Args:
        action: The task's module and argument.
        tasks: How many.
        folder: Where it goes.
    """
    playbook = folder / f"{action.partition(':')[0]}.yml"
    rows = [f"    - name: Task {number}\n      ansible.builtin.{action}\n" for number in range(tasks)]
    playbook.write_text(f"- hosts: all\n  become: true\n  gather_facts: false\n  tasks:\n{''.join(rows)}")
    return playbook


def ssh_loop(fleet: Fleet, rounds: int, folder: Path) -> float:
    """Seconds of the same number of `ssh NODE true`, as many nodes at a time as Ansible has forks.

    Args:
        fleet: The nodes.
        rounds: Commands for each node.
        folder: For the connections' sockets.
    """

    def one(address: str) -> None:
        control = (
            "-o",
            "ControlMaster=auto",
            "-o",
            f"ControlPath={folder}/{address}.sock",
            "-o",
            "ControlPersist=60",
        )
        for _ in range(rounds):
            subprocess.run([*fleet.ssh(address, *control), "true"], check=True)
        subprocess.run([*fleet.ssh(address, *control, "-O", "exit")], check=True, capture_output=True)

    started = time.monotonic()
    with ThreadPoolExecutor(max_workers=FORKS) as pool:
        list(pool.map(one, fleet.addresses))
    return time.monotonic() - started


def measure(disk: Path, count: int, rounds: int, against: Path | None) -> dict[str, float]:
    """Measure one number of nodes, and print it.

    Args:
        disk: Of a converged node.
        count: How many nodes.
        rounds: How often; of each name the quickest counts.
        against: Another checkout.

    Returns:
        Seconds by name.
    """
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/var/tmp") as name:
        folder = Path(name)
        with fleet(disk, count, folder) as nodes:
            (work := folder / "work").mkdir()
            measured = [one_round(nodes, work, against) for _ in range(rounds)]
    best = {name: min(row[0][name] for row in measured) for name in measured[0][0]}
    row = "".join(f"{best[name]:10.1f}" for name in ("ssh", "raw", "module", "converge"))
    ratios = f"{best['converge'] / best['raw']:7.2f}{best['converge'] / best['module']:10.2f}"
    ends = measured[-1][1]
    print(f"{count:5}{len(ends) // count:6}{row}{ratios}{best['converge'] / count:8.1f}", flush=True)
    if against:
        others = on_nodes(measured[-1][2])
        print(
            f"      {against}: {len(others) // count} tasks, {best['other']:.1f} s; this tree takes"
            f" {best['converge'] / best['other']:.2f} of it",
            flush=True,
        )
    if count == 1:
        show_slowest(ends, measured[-1][0]["converge"])
    return best


def one_round(
    nodes: Fleet, folder: Path, against: Path | None
) -> tuple[dict[str, float], list[dict[str, Any]], list[dict[str, Any]]]:
    """Measure everything once.

    Args:
        folder: For playbooks, logs and sockets.
        against: Another checkout.

    Returns:
        Seconds by name, what `on_nodes` gives of the converge, and the events of the other checkout's.
    """
    converge, events = play(nodes, ROOT / "ansible/node.yml", folder)
    if changed := {event["task"] for event in events if event.get("status") == "changed"}:
        raise SystemExit(f"the nodes were not converged; these changed something: {sorted(changed)}")
    ends = on_nodes(events)
    tasks = len(ends) // len(nodes.addresses)
    times = {
        "converge": converge,
        "ssh": ssh_loop(nodes, tasks, folder),
        "raw": play(nodes, many("raw: 'true'", tasks, folder), folder)[0],
        "module": play(nodes, many("ping:", tasks, folder), folder)[0],
    }
    other: list[dict[str, Any]] = []
    if against:
        times["other"], other = play(nodes, against / "ansible/node.yml", folder, against)
    return times, ends, other


def show_slowest(ends: list[dict[str, Any]], total: float) -> None:
    """Print where the seconds went, tasks of one name together.

    Args:
        ends: What `on_nodes` gave.
        total: Seconds of the whole playbook.
    """
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    for event in ends:
        seconds[event["task"]].append(event["duration_s"])
    spent = sum(map(sum, seconds.values()))
    print(f"      on the node {spent:.1f} s, Ansible itself {total - spent:.1f} s; the slowest tasks:")
    for task, took in sorted(seconds.items(), key=lambda pair: -sum(pair[1]))[:SLOWEST]:
        print(f"      {sum(took):6.1f} s  {len(took)} x  {task}", flush=True)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.converge", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--nodes", default="1,10,50", help="numbers of nodes")
    parser.add_argument(
        "--rounds", type=int, default=2, help="of each measurement; the quickest counts, others work here too"
    )
    parser.add_argument("--against", type=Path, help="another checkout, whose converge is measured too")
    parser.add_argument("--disk", type=Path, help="keep the converged node's disk here, and use it again")
    options = parser.parse_args()
    counts = [int(word) for word in options.nodes.split(",")]
    if os.environ.get(INSIDE):
        return compare(options.disk, counts, options.rounds, options.against)
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/var/tmp") as folder:
        disk = (options.disk or Path(folder) / "node.raw").absolute()
        if not disk.exists():
            print("converging a node: the driver's module takes minutes to compile", flush=True)
            make_disk(disk)
        # In namespaces of its own: whatever way it ends, the machines and mounts end with it.
        unshare = ("unshare", "--mount", "--propagation=private", "--pid", "--fork", "--kill-child=KILL")
        inside = (sys.executable, "-m", "bench.converge", "--nodes", options.nodes, "--disk", str(disk))
        inside += ("--rounds", str(options.rounds))
        if options.against:
            inside += ("--against", str(options.against.absolute()))
        environment = {**os.environ, INSIDE: "1"}
        return subprocess.run(
            [*unshare, "--mount-proc", *inside], cwd=ROOT, env=environment, check=False
        ).returncode


def compare(disk: Path, counts: list[int], rounds: int, against: Path | None) -> int:
    """Measure each number of nodes, and print how it grows.

    Args:
        disk: Of a converged node.
        counts: Numbers of nodes.
        rounds: How often each is measured.
        against: Another checkout.
    """
    # `ip netns` keeps names in this folder: in a folder of its own nothing stays behind
    Path("/run/netns").mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run/netns"], check=True)
    print("nodes tasks     ssh s     raw s  module s converge s  / raw  / module  s/node")
    found = {count: measure(disk, count, rounds, against) for count in counts}
    first = counts[0]
    for count in counts[1:]:
        grows = {name: found[count][name] / found[first][name] for name in ("raw", "module", "converge")}
        words = ", ".join(f"{name} {times:.1f} x" for name, times in grows.items())
        print(f"{count} nodes against {first}: {words}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
