"""Compare runs: options, curves, mean and spread over seeds, and whether a gain is real.

    python -m scripts.compare runs/a                 # of one run the report.html, as far as it is
    python -m scripts.compare runs/a runs/b
    python -m scripts.compare runs/base-0 runs/base-1 runs/wide-0 runs/wide-1 out=wide

Runs that differ in train.seed only are one setting; the others are compared with the first one.
Prints the comparison and writes compare.html.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below: --help and refused options need none of them
    from conf.programs import run

    run("compare")
    raise SystemExit

from pathlib import Path

from conf.build.report import report_run
from conf.schema_tools import CompareConfig
from train_utils.report.comparison import contents, print_comparison, write_comparison
from train_utils.report.gains import Gain, gain
from train_utils.report.groups import read_groups
from train_utils.run.run_folder import dated_folder


def compare(config: CompareConfig) -> list[Gain]:
    """Print and write the comparison; return the gain of each setting over the first.

    Of one run write the report. Raises TrainError if runs cannot be read or compared, or if the
    page cannot be written.
    """
    folders, out = [Path(run) for run in config.runs], None if config.out is None else Path(config.out)
    if len(folders) == 1:
        print(f"page: {report_run(folders[0], out)}")
        return []
    first, *others = groups = read_groups(folders)
    gains = [gain(first, other, config.resamples, config.confidence, config.seed) for other in others]
    found = contents(groups, gains, config.resamples)
    print_comparison(found)
    page = (out or dated_folder("compare")) / "compare.html"
    write_comparison(page, groups, found)
    print(f"\npage: {page}")
    return gains
