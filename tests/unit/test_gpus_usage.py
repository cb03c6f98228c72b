"""Usage: GPU-hours, energy and money out of the ledger and of leases that hold, cut to a window."""

import datetime
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpukiln.gpus import cli
from gpukiln.gpus.leases import DETACHED, LeaseHolder, Leases
from gpukiln.gpus.selection import DeviceRequest
from gpukiln.gpus.store import LeaseStore, boot_clock
from tests.support import gpus

DAY = 86400.0
Told = Callable[..., dict[str, Any]]


def stamp(ago_s: float) -> str:
    at = datetime.datetime.fromtimestamp(time.time() - ago_s, datetime.UTC)
    return at.isoformat(timespec="milliseconds")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPUKILN_GPUS_STATE", str(tmp_path / "leases"))
    monkeypatch.setenv("GPUKILN_GPUS_CONFIG", str(tmp_path / "gpus.toml"))
    return tmp_path


@pytest.fixture
def told(folder: Path, capsys: pytest.CaptureFixture[str]) -> Told:
    del folder

    def run(*words: str) -> dict[str, Any]:
        assert cli.main(["usage", "--json", *words]) == 0
        return dict(json.loads(capsys.readouterr().out)["nodes"][0])

    return run


def used(folder: Path, **more: Any) -> None:
    """Write a use into the ledger: of one GPU for two hours until an hour ago, unless it says otherwise."""
    row: dict[str, Any] = {
        **{"lease": 1, "user": "ann", "project": "training", "device": "GPU-1", "model": "A100"},
        **{"share": 1.0, "started_at": stamp(3 * 3600), "ended_at": stamp(3600), "seconds": 7200.0},
        **{"energy_joules": 3600.0, "usd": 8.0, "price": "contract", "ended_by": "released", **more},
    }
    store = LeaseStore(folder / "leases")
    with store.change():
        names = ", ".join(row)
        store.db.execute(
            f"insert into ledger ({names}) values ({', '.join('?' * len(row))})",  # noqa: S608 - our names
            tuple(row.values()),
        )
    store.close()


def test_rows_are_summed_by_what_was_asked_for(folder: Path, told: Told) -> None:
    used(folder)
    used(folder, device="GPU-2")
    used(folder, lease=2, user="bob", project="", share=0.25, energy_joules=None, usd=None)
    said = told()
    assert [(row["key"], row["gpu_hours"], row["leases"]) for row in said["rows"]] == [
        ("ann", 4, 1),
        ("bob", 0.5, 1),
    ]
    assert said["rows"][0]["usd"] == 16
    assert said["rows"][1]["usd"] is None
    assert "price" in said["rows"][1]["unavailable"]["usd"]
    assert (said["total"]["usd_uses"], said["total"]["uses"]) == (2, 3)
    assert said["total"]["energy_joules"] == 7200
    assert [row["key"] for row in told("--by", "project")["rows"]] == ["training", ""]
    assert [row["key"] for row in told("--by", "device")["rows"]] == ["GPU-1", "GPU-2"]
    assert [row["key"] for row in told("--by", "lease")["rows"]] == ["L-1", "L-2"]


def test_what_began_before_the_window_is_cut_off_and_what_ended_before_is_none(
    folder: Path, told: Told
) -> None:
    used(folder)
    assert told("--since", "2h")["total"]["gpu_hours"] == pytest.approx(1, abs=0.01)
    assert told("--since", "2h")["total"]["usd"] == pytest.approx(4, abs=0.05)
    said = told("--since", "30m")
    assert (said["rows"], said["total"]["gpu_hours"]) == ([], 0)
    assert "no lease since" in said["message"]


def test_a_clock_that_was_set_back_meanwhile_costs_nobody_hours(folder: Path, told: Told) -> None:
    used(folder, started_at=stamp(3600), ended_at=stamp(7200))
    assert told("--since", "3h")["total"]["gpu_hours"] == 2
    assert told("--since", "1h")["total"]["gpu_hours"] == 0


def test_a_shared_gpu_is_accounted_by_its_share(folder: Path, told: Told) -> None:
    used(folder, share=0.5, usd=4.0)
    total = told()["total"]
    assert (total["gpu_hours"], total["energy_joules"], total["usd"]) == (1, 1800, 4)


def test_a_lease_that_holds_counts_until_now(
    folder: Path, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "gpus.toml").write_text("[price]\nusd_hour = 16.0\n")
    seen = gpus.snapshot(*(gpus.device(n, energy_joules=1000.0) for n in range(8)))
    later = gpus.snapshot(*(gpus.device(n, energy_joules=8200.0) for n in range(8)))
    monkeypatch.setattr(
        Leases, "energy_counters", lambda *_: {one.uuid: one.energy_joules for one in later.devices}
    )
    leases = Leases(LeaseStore(folder / "leases"), take_snapshot=lambda: seen)
    lease = leases.acquire(DeviceRequest(count=2), LeaseHolder("ann", 0), kind=DETACHED, hours=9.0).lease
    with leases.store.change():
        leases.store.update(lease.number, granted_boot=boot_clock() - 7200)
    said = told()
    assert said["rows"][0]["holding"] == 1
    assert said["rows"][0]["gpu_hours"] == pytest.approx(4, abs=0.01)
    assert said["rows"][0]["usd"] == pytest.approx(2 * 2 * 16 / 8, abs=0.05)
    assert said["rows"][0]["energy_joules"] == pytest.approx(2 * 7200)
    hour = told("--since", "1h")["total"]
    assert hour["gpu_hours"] == pytest.approx(2, abs=0.01)
    assert hour["energy_joules"] == pytest.approx(7200, rel=0.01)


def test_a_lease_that_is_released_by_hand_has_its_energy(
    folder: Path,
    told: Told,
    loaded_nvml: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = gpus.double(loaded_nvml, folder, "g5.12xlarge", driver="580.65.06")
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["lease", "-n", "2"]) == 0
    time.sleep(0.3)
    assert cli.main(["release", "--mine"]) == 0
    capsys.readouterr()
    total = told()["total"]
    assert (total["uses"], total["energy_uses"], total["holding"]) == (2, 2, 0)
    assert total["energy_joules"] > 0


def test_without_a_price_there_is_no_money_and_the_reason_says_how(folder: Path, told: Told) -> None:
    seen = gpus.snapshot()
    leases = Leases(LeaseStore(folder / "leases"), take_snapshot=lambda: seen)
    leases.acquire(DeviceRequest(), LeaseHolder("ann", 0), kind=DETACHED, hours=9.0)
    total = told()["total"]
    assert total["usd"] is None
    assert "usd_hour" in total["unavailable"]["usd"]
    assert total["energy_joules"] is None, "these GPUs have no counter"


def test_a_missing_store_is_told_and_not_made(folder: Path, told: Told) -> None:
    said = told()
    assert (said["rows"], said["total"]["uses"]) == ([], 0)
    assert "this machine has no leases yet" in said["message"]
    assert not (folder / "leases").exists()


def test_people_read_kwh_and_of_how_many_a_sum_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    used(folder, energy_joules=7.2e6)
    used(folder, lease=2, usd=None, energy_joules=None)
    assert cli.main(["usage"]) == 0
    said = capsys.readouterr().out
    assert "ann        4.00  2       2.000 (of 1 of 2)  8.00 (of 1 of 2)" in said
    assert cli.main(["usage", "--by", "colour"]) == 2
    assert cli.main(["usage", "--since", "soon"]) == 2
