"""Train again what docs/results/trainings.csv records; say whether the metric is in its interval.

python -m scripts.bench.rerun               # the rows
python -m scripts.bench.rerun shapes-tiny   # exits with 1 if the metric lies outside
"""

import csv
import shlex
import sys
import time

from conf import REPOSITORY, ConfigError
from conf.run import print_error
from conf.schema import TrainConfig
from train import train

TABLE = REPOSITORY / "docs" / "results" / "trainings.csv"


def read_rows() -> dict[str, dict[str, str]]:
    """The rows of the table by name."""
    with TABLE.open(newline="") as file:
        return {row["row"]: row for row in csv.DictReader(file)}


def rerun(name: str) -> bool:
    """Train as the row says, in runs/rerun/; return whether its metric lies in the interval.

    Raises ConfigError for an unknown row.
    """
    rows = read_rows()
    if name not in rows:
        raise ConfigError(f"{name} is not a row of {TABLE.name}. fix: one of {', '.join(rows)}")
    row = rows[name]
    program, *options = shlex.split(row["command"])[1:]
    assert program == "train.py", "rows are trainings"
    print(f"{row['command']}: {row['minutes'] or 'untimed'} minutes on machine B", flush=True)
    started = time.monotonic()
    outcome = train([*options, f"run_dir=runs/rerun/{name}-{time.strftime('%Y-%m-%d_%H-%M-%S')}"])
    value, low, high = outcome[row["metric"]], float(row["low"]), float(row["high"])
    verdict = "lies within" if (is_within := low <= value <= high) else "LIES OUTSIDE"
    print(
        f"{name}: {row['metric']} {value:.3f} {verdict} {low:.3f} to {high:.3f}; {row['machine']} had {row['value']} "
        f"at {row['commit']}; {(time.monotonic() - started) / 60:.1f} minutes, in {outcome.folder}"
    )
    return is_within


if __name__ == "__main__":
    if len(sys.argv) == 1:
        for each in read_rows().values():
            print(
                f"{each['row']:<22} {each['metric']} {each['value']} {each['minutes'] or '-':>4} min  {each['command']}"
            )
        sys.exit()
    try:
        sys.exit(0 if rerun(sys.argv[1]) else 1)
    except Exception as error:
        sys.exit(print_error(error, TrainConfig))
