"""Standard output and standard error: a run goes on without them."""

import io
import os
import sys
from contextlib import suppress
from textwrap import indent

from data.errors import reason

LOST: dict[str, str] = {}  # by the name of a stream, why it cannot be written


class Output(io.TextIOBase):
    """``sys.stdout`` or ``sys.stderr``, as it is when it is written.

    One that cannot be written (its reader or terminal is gone, its disk is full) leads nowhere from
    then on: text that waits in it would end whoever writes or forks next.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.prefix = ""  # of each line, where several jobs share a terminal

    def write(self, text: str) -> int:
        """Write the text and flush it; of a first failure note the reason in LOST."""
        stream = getattr(sys, self._name)
        try:
            if stream is None:
                raise ValueError("it is closed")
            stream.write(indent(text, self.prefix))
            stream.flush()
        except UnicodeEncodeError:
            self.write(text.encode("ascii", "backslashreplace").decode())
        except (OSError, ValueError) as error:
            LOST.setdefault(self._name, f"{self._name} cannot be written ({reason(error)})")
            with suppress(OSError, ValueError, AttributeError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())
                stream.flush()
        return len(text)

    def isatty(self) -> bool:
        """Whether the stream is a terminal that is still there, for this process alone."""
        with suppress(ValueError, AttributeError):
            return not self.prefix and bool(getattr(sys, self._name).isatty())
        return False


STDOUT, STDERR = Output("stdout"), Output("stderr")


def keep_numbers() -> None:
    """Open /dev/null for closed standard streams: other files would get their numbers."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest number
