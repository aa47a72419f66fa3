"""Choose one rank of a node to report an error when the store is out of reach."""

from __future__ import annotations

import fcntl
import os
import tempfile
from contextlib import suppress


class ReporterLock:
    """An unlinked file that all ranks of a node hold open, so it vanishes with them.

    ``token`` is unique to the start. Each rank opens the file; ``settle`` unlinks it once all have.
    If the file cannot be created, every rank reports: twice is better than never.
    """

    def __init__(self, token: str) -> None:
        self._file: int | None = None
        self._path = ""
        with suppress(OSError):  # no writable temporary folder, or a full disk
            self._path = os.path.join(tempfile.gettempdir(), f"hydra-yolov3-spp-{token}")
            self._file = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)

    def settle(self) -> None:
        """Unlink the file: every rank of the node has opened it, or never will."""
        if self._file is not None:
            with suppress(OSError):  # another rank has unlinked it
                os.unlink(self._path)

    def is_first(self) -> bool:
        """Whether this rank is the first of its node to ask."""
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
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
