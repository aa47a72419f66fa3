"""A fault on one of two ranks soon ends both and is reported once (see planted_faults.py)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.runs.fault_list import FAULTS
from tests.runs.planted_faults import strike_down

pytestmark = pytest.mark.slow
ENDING = {  # with the start of the single report
    "val-set": "Traceback",
    "loss-1": "Traceback",
    "evaluation": "Traceback",
    "full-disk": "error: cannot write ",
}
GOING_ON = ("full-disk-log",)


def test_faults_end_all_ranks_and_are_reported_once(tmp_path: Path) -> None:
    names = (*ENDING, *GOING_ON, "interrupt")
    with ThreadPoolExecutor(2) as pool:
        outcomes = dict(
            zip(names, pool.map(lambda name: strike_down(name, tmp_path / name), names), strict=True),
        )
    for name, outcome in outcomes.items():
        text = f"{name}: {outcome}"
        assert not outcome.left and outcome.seconds < 30, text
        assert [code == 0 for code in outcome.codes] == [FAULTS[name].goes_on] * 2 and None not in outcome.codes, text
    for name, beginning in ENDING.items():
        outcome = outcomes[name]
        errors = [line for line in outcome.sentences if line.startswith("error:")]
        assert outcome.tracebacks + len(errors) == 1, outcome
        told_by = outcome.texts[FAULTS[name].rank] if beginning == "Traceback" else "\n".join(outcome.texts)
        assert f"\n{beginning}" in f"\n{told_by}", f"{name}: {outcome}"

    texts = outcomes["interrupt"].texts
    assert outcomes["interrupt"].codes == [2, 130] and outcomes["interrupt"].sentences == [], "nobody was lost"
    assert [text.count("stopped by Ctrl-C") for text in texts] == [0, 1] and outcomes["interrupt"].tracebacks == 0

    run = tmp_path / "full-disk-log" / "run"
    assert any("cannot write" in line for line in outcomes["full-disk-log"].sentences)
    assert (run / "checkpoints" / "last.pt").exists() and (run / "times.csv").read_text().count("\n") == 3
