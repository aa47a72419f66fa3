"""Compare a run's proof with the files that are there now."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from conf.build.agreement import ROOT
from conf.proof.facts import code_of, commit_of, initial_weights, listed, packages
from conf.schema import TrainConfig
from conf.sources.resume import read_config
from data import Annotations
from data.index.hashes import hash_file, hash_set
from train_utils.report.proof import TABLE, digest_of_proof
from train_utils.run.same_training import changed_values


class Check(NamedTuple):
    """One row of the result."""

    what: str
    holds: bool | None  # None: it was not checked
    detail: str


def judged(what: str, differences: Sequence[str], same: str) -> Check:
    """A check that holds if there are no differences, with ``same`` as its detail."""
    return Check(what, not differences, listed(differences) if differences else same)


def check_run(folder: Path, proof: Mapping[str, Any], options: TrainConfig) -> Iterator[Check]:
    """Check the proof itself, the files of the run, and its initial weights."""
    yield judged("proof", ["proof.json was edited"] * (proof["digest"] != digest_of_proof(proof)), "as it was written")
    changed = changed_values(proof["starts"][-1]["options"], read_config(folder))
    yield judged("options", [f"{key}: {change}" for key, change in changed.items()], "config.yaml as it was used")
    found = [name for name, digest in proof["files"].items() if hash_file(folder / name) != digest]
    yield judged("files", found, f"{len(proof['files'])} tables and checkpoints")
    initial = proof["initial weights"]
    now = initial_weights(options)["sha256"]
    found = [initial["file"] + " is missing" * (not now)] * (now != initial["sha256"])
    yield judged("first weights", found, initial["file"])


def check_program(proof: Mapping[str, Any], options: TrainConfig, root: Path = ROOT) -> Iterator[Check]:
    """Check source code and packages."""
    commit, now, versions = commit_of(proof["starts"][-1]), code_of(options, root), packages()
    found = [path for path, _, _ in differing(proof["code"], now)]
    yield judged("code", found, f"{len(now)} files, commit {commit}")
    found = [f"{name}: {before} -> {here}" for name, before, here in differing(proof["packages"], versions)]
    yield judged("packages", found, f"{len(versions)} versions")


def check_data(folder: Path, proof: Mapping[str, Any], sets: Mapping[str, Annotations]) -> Iterator[Check]:
    """Check every image and its labels."""
    kept = folder / TABLE
    text = kept.read_text(encoding="utf-8", errors="surrogateescape") if kept.is_file() else ""
    table = list(csv.reader(text.splitlines()))[1:]
    for name, part in sets.items():
        rows, whole = hash_set(part, shown=True)
        before = {path: digests for split, path, *digests in table if split == name}
        now = {path: digests for path, *digests in rows if before}
        unlisted = "class names, order, ids or outlines" if before else f"something that {TABLE} named"
        found = [change_of(*change) for change in differing(before, now)] or [unlisted]
        changed = whole != proof["data"][name]["sha256"]
        yield judged(f"{name} data", found * changed, f"{len(rows):,} images and their labels")


def change_of(path: str, before: Sequence[str] | None, now: Sequence[str] | None) -> str:
    """How an image changed, by the digests of its bytes and labels."""
    if before is None or now is None:
        return f"{path} was {'added' if before is None else 'removed'}"
    return " and ".join(
        f"{path} ({what})" for what, old, new in zip(("image", "labels"), before, now, strict=True) if old != new
    )


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """The keys whose values differ or that only one of the two has, with both values."""
    keys = dict.fromkeys((*before, *now))
    return [(key, before.get(key), now.get(key)) for key in keys if before.get(key) != now.get(key)]
