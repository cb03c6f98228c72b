"""Plain lines where there is no terminal; a failed step says so."""

import io
import re
import time

import pytest
from rich.console import Console

from gpukiln.progress import Progress


def reported(work, **arguments):
    out = io.StringIO()
    progress = Progress(console=Console(file=out, width=100), **arguments)
    work(progress)
    return out.getvalue(), progress


def test_a_step_tells_its_start_its_details_and_its_end():
    def work(progress):
        with progress.step("bake"):
            progress.say("nvtop : Install")

    text, progress = reported(work, expected={"bake": 90})
    assert ".. bake (last time 1m30s)" in text
    assert "nvtop : Install" in text
    assert "ok bake" in text
    assert list(progress.durations) == ["bake"]


def test_a_failure_is_reported_and_passed_on():
    def work(progress):
        with pytest.raises(ValueError, match="boom"), progress.step("bake"):
            raise ValueError("boom")

    text, _ = reported(work)
    assert "failed bake" in text
    assert "ok bake" not in text


def test_a_step_that_misses_its_aim_is_reported_as_failed():
    def work(progress):
        with progress.step("verify"):
            progress.fail()
        with progress.step("remove the machine"):
            pass

    text, _ = reported(work)
    assert "failed verify" in text
    assert "ok remove the machine" in text


def test_of_a_line_that_is_too_long_the_name_of_the_step_stays():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=60, color_system=None)
    progress = Progress(console=console)
    with progress.step("boot from the image"):
        progress.say("nvidia_persistence : Validating arguments against arg spec 'install'")
        time.sleep(0.2)  # rich paints ten times a second
    painted = [line for line in re.split(r"[\r\n]+", out.getvalue()) if "nvidia_pers" in line]
    assert painted
    assert all("boot from the image" in line for line in painted)
