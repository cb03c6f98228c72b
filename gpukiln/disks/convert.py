"""A raw disk in other formats: by qemu-img, or compressed by zstd."""

import hashlib
import os
import re
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

from gpukiln import programs
from gpukiln.disks import sparse
from gpukiln.errors import UnavailableError
from gpukiln.progress import Meter, Progress

# The progress line of `qemu-img convert -p`: " (12.34/100%)", with a carriage return behind it.
_PERCENT = re.compile(rb"\((\d+\.\d+)/100%\)")


def compress(disk: Path, target: Path, moved: Callable[[int], None] = lambda _: None) -> str:
    """Compress a raw disk with the program zstd on all cores; the frame's header has the size of the disk.

    Args:
        moved: Called with the number of bytes of each piece.

    Returns:
        The SHA-256 of the compressed file.

    Raises:
        UnavailableError: zstd failed, or is not installed.
    """
    digest = hashlib.sha256()
    # --stream-size: from a pipe zstd does not know the size, and then no reader can allocate or check it.
    command = ["zstd", "-q", "-3", "-T0", f"--stream-size={disk.stat().st_size}", "-c"]
    with target.open("wb") as file:
        try:
            process = subprocess.Popen(  # not by `programs`: gigabytes go in and out at the same time
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                # Ctrl-C reaches this process alone, which ends zstd.
                process_group=0,
            )
        except FileNotFoundError:
            raise UnavailableError(
                "zstd is not installed", hint="scripts/run installs missing tools: run the command through it"
            ) from None
        failed: list[OSError] = []

        def keep() -> None:
            assert process.stdout  # noqa: S101 - a pipe
            try:
                while data := process.stdout.read(sparse.CHUNK):
                    digest.update(data)
                    file.write(data)
            except OSError as error:  # the disk is full; without a reader zstd would block, so it is killed
                failed.append(error)
                process.kill()

        reader = threading.Thread(target=keep)
        reader.start()
        try:
            assert process.stdin  # noqa: S101 - a pipe
            for piece in sparse.pieces(disk):
                process.stdin.write(piece)
                moved(len(piece))
            process.stdin.close()
        except BrokenPipeError:
            pass  # zstd has ended: its exit status says why
        except BaseException:
            process.kill()
            raise
        finally:
            reader.join()
            process.wait()
        assert process.stderr  # noqa: S101 - a pipe
        stderr = process.stderr.read().decode(errors="replace").strip()
    if failed:
        raise failed[0]
    if process.returncode:
        raise UnavailableError(
            f"zstd ended with {process.returncode}: {stderr}", hint="run the same command again"
        )
    return digest.hexdigest()


def convert(disk: Path, part: Path, source_form: str, form: str, progress: Progress, *options: str) -> None:
    """Convert a disk with qemu-img. The source format is always given: a guess could follow a backing file.

    Raises:
        UnavailableError: qemu-img failed or is not installed, or the disk is full.
    """
    # qemu-img prints its progress to stdout only; a pipe brings it here while the program runs.
    total, (read, write) = sparse.data_bytes(disk), os.pipe()
    meter, output_bytes = Meter(progress, total), bytearray()

    def listen() -> None:
        with os.fdopen(read, "rb", buffering=0) as output:
            while data := output.read(4096):
                output_bytes.extend(data)
                if percentages := _PERCENT.findall(data):
                    meter.reach(int(float(percentages[-1]) / 100 * total))

    listener = threading.Thread(target=listen)
    listener.start()
    command = ["qemu-img", "convert", "-p", "-f", source_form, "-O", form, *options, str(disk), str(part)]
    try:
        with os.fdopen(write, "wb", buffering=0) as output:
            # A day: hundreds of GiB to a slow disk take hours, a hang must still end.
            done = programs.run(command, limit_s=24 * 3600, folder=part.parent, output=output)
    finally:
        listener.join()
    if done.returncode:
        text = _PERCENT.sub(b"", output_bytes).decode(errors="replace").replace("\r", "\n")
        if "No space left" in text:
            raise programs.disk_full(part.parent)
        lines = [line for line in text.splitlines() if line.strip()] or ["without a message"]
        raise UnavailableError(f"qemu-img convert ended with {done.returncode}: {lines[-1].strip()}")
