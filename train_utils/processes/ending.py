"""How this rank ends: who reports an error, and whom a rank waits for before it exits.

Imports no torch: a program whose options are refused ends before torch is imported.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from train_utils.launch.environment import peek_rank
from train_utils.processes.communicators import CommunicatorWatch
from train_utils.processes.lost_peers import Lookout

FIRST_SECONDS = 4.0  # for rank 0 to report what all ranks refuse: a launcher ends it once another has failed


@dataclass
class Ending:
    """What this rank closes when it leaves its peers; process_group.py fills it in."""

    joining: bool = False  # peers cannot learn of an error here yet
    lookout: Lookout | None = None
    watch: CommunicatorWatch | None = None  # on CUDA
    losses: tuple[type[BaseException], ...] = ()  # torch's errors for a lost peer
    destroy_group: Callable[[], None] | None = None  # if the process group was opened here

    def leave(self, keep: bool) -> None:
        """Stop the lookout and, unless ``keep``, destroy the group if it was opened here."""
        self.joining = False
        if self.lookout is not None:
            self.lookout.close()
            self.lookout = None
        if self.watch is not None:
            self.watch.close()
            self.watch = None
        if self.destroy_group is not None and not keep:
            destroy, self.destroy_group = self.destroy_group, None
            destroy()


ending = Ending()


def shutdown() -> None:
    """Leave the process group; one that another program opened stays open."""
    ending.leave(keep=False)


def should_report_error() -> bool:
    """Whether this rank reports the error to the user: the first rank to ask does.

    Without a process group it is rank 0. While ranks join they cannot know of each other's errors,
    so every rank reports. If the store is lost and no error was reported, the first rank of each
    node does. Call ``let_others_hear`` after reporting.
    """
    if ending.lookout is not None:
        return ending.lookout.claim()
    return ending.joining or peek_rank() == 0


def let_others_hear() -> None:
    """After ``should_report_error``: wait some seconds until this rank may safely exit."""
    if ending.lookout is not None:
        ending.lookout.let_others_hear()
    elif not ending.joining and peek_rank() > 0:
        time.sleep(FIRST_SECONDS)


def name_lost_peers(error: BaseException) -> BaseException:
    """Turn a lost peer or collective time-out into a DistributedError that names the ranks.

    Other errors are returned as they are. Takes seconds, in which live ranks answer.
    """
    return error if ending.lookout is None else ending.lookout.explain(error, ending.losses)
