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

_PERCENT = re.compile(rb"\((\d+\.\d+)/100%\)")


def compress(disk: Path, target: Path, moved: Callable[[int], None] = lambda _: None) -> str:
    """Compress a raw disk by the program zstd, on all cores; the frame says how large the disk is.

    Args:
        moved: Called with each piece's bytes.

    Returns:
        The SHA-256 of the compressed file.

    Raises:
        UnavailableError: zstd failed, or is not installed.
    """
    digest = hashlib.sha256()
    command = ["zstd", "-q", "-3", "-T0", f"--stream-size={disk.stat().st_size}", "-c"]
    with target.open("wb") as file:
        try:
            process = subprocess.Popen(  # not by `programs`: it is fed and read at once, gigabytes each way
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                process_group=0,
            )
        except FileNotFoundError:
            raise UnavailableError(
                "zstd is not installed", hint="scripts/run installs what is missing: call it through that"
            ) from None
        failed: list[OSError] = []

        def keep() -> None:
            assert process.stdout  # noqa: S101 - a pipe
            try:
                while data := process.stdout.read(sparse.CHUNK):
                    digest.update(data)
                    file.write(data)
            except OSError as error:  # no room: zstd ends when nobody reads
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
            pass  # it has ended: its status says why
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
    """Have qemu-img convert a disk; the format that is read is given, never guessed by it.

    Raises:
        UnavailableError: It failed, it is not installed, or there is no room.
    """
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
            done = programs.run(command, limit_s=24 * 3600, folder=part.parent, output=output)
    finally:
        listener.join()
    if done.returncode:
        text = _PERCENT.sub(b"", output_bytes).decode(errors="replace").replace("\r", "\n")
        if "No space left" in text:
            raise programs.disk_full(part.parent)
        lines = [line for line in text.splitlines() if line.strip()] or ["it said nothing"]
        raise UnavailableError(f"qemu-img convert ended with {done.returncode}: {lines[-1].strip()}")
