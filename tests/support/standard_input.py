"""A standard input that is this process's for a while, and that what it starts may take."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def standard_input(text: bytes = b"", *, blocking: bool = True) -> Iterator[int]:
    """A pipe that has a text; yields its descriptor, to see what is left of it.

    Args:
        blocking: False: as an ssh that was killed leaves it.
    """
    reader, writer = os.pipe()
    os.write(writer, text)
    os.close(writer)
    os.set_blocking(reader, blocking)
    before = os.dup(0)
    os.dup2(reader, 0)
    try:
        yield reader
    finally:
        os.dup2(before, 0)
        for descriptor in (reader, before):
            os.close(descriptor)
