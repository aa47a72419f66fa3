"""One process of a node speaks for all where the store, by which they settle that, is out of reach."""

from __future__ import annotations

import fcntl
import os
import tempfile
from contextlib import suppress


class NodeClaim:
    """A file that the processes of a node have open together, and that has no name any more: it ends with them.

    ``token`` is like no other start's. Each process opens it, and when all have (``settle``) its name is removed.
    Where it cannot be made, each process speaks for itself: better twice than not at all.
    """

    def __init__(self, token: str) -> None:
        self._file: int | None = None
        self._path = ""
        with suppress(OSError):  # no temporary folder that may be written, or no place in it
            self._path = os.path.join(tempfile.gettempdir(), f"hydra-yolov3-spp-{token}")
            self._file = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)

    def settle(self) -> None:
        """All processes of the node have opened the file, or will not come."""
        if self._file is not None:
            with suppress(OSError):  # the first of the node has removed it
                os.unlink(self._path)

    def is_first(self) -> bool:
        """Whether this process is the first of its node to ask."""
        if self._file is None:
            return True
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            if os.fstat(self._file).st_size > 0:
                return False
            os.pwrite(self._file, b"1", 0)
        except OSError:  # a full disk
            return True
        finally:
            with suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_UN)
        return True

    def close(self) -> None:
        """This process asks no more."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
