"""What weakens the proof of a run, in plain sentences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from conf.proof.facts import commit_of, on_gpu
from train_utils.report.proof import UNKNOWN
from train_utils.run.same_training import changed_values

NAMED = 3  # files or options in a sentence


def weaknesses(proof: Mapping[str, Any], log: str) -> Iterator[str]:
    """What makes a replay differ or impossible; ``log`` is the text of train.log."""
    starts, options = proof["starts"], proof["starts"][-1]["options"]["train"]
    if starts[0]["step"]:
        yield f"an earlier version, which kept no proof, made the first {starts[0]['step']} steps"
    if options["best_only"]:
        yield "train.best_only=true kept no checkpoint before the last steps to replay them from"
    if not options["deterministic"]:
        cpu, gpu = "another number of processes rounds differently", "a GPU may add in another order each time"
        yield f"train.deterministic=false: {gpu if on_gpu(starts[-1]) else cpu}"
    yield from (
        line.partition("warning: ")[2] for line in log.splitlines() if "warning: " in line and "deterministic" in line
    )
    for start in starts:
        if (commit := commit_of(start)) == UNKNOWN or "changes" in commit:
            yield f"from step {start['step']} on the code is that of no commit (commit {commit}): it has hashes only"
    for before, now in pairwise(starts):
        for key in ("code", "packages", "hardware", "processes"):
            if before[key] != now[key]:
                values = f" ({before[key]} -> {now[key]})" if key in ("hardware", "processes") else ""
                yield f"resumed at step {now['step']} with other {key}{values}"
        if changed := changed_values(before["options"], now["options"]):
            shown = listed([f"{key}: {change}" for key, change in changed.items()])
            yield f"resumed at step {now['step']} with other options ({shown})"


def listed(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
