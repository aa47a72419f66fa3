"""Write the report of a run again, also of one that goes on or was stopped.

    python -m scripts.report runs/quickstart/2026-11-22_10-00-00

Writes report.html into the run's folder; a training does so at its end.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below: --help and refused options need none of them
    from conf.programs import run

    run("report")
    raise SystemExit

from pathlib import Path

from conf.build.run_report import report_run
from conf.schema_tools import ReportConfig


def report(config: ReportConfig) -> Path:
    """Write report.html of ``config.run`` and return it. Raises TrainError."""
    out = report_run(Path(config.run))
    print(f"report: {out}")
    return out
