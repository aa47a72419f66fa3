"""A training that does not fit into the memory."""

import resource
from pathlib import Path

import pytest

from conf.errors import TrainError
from data import ensure_shapes
from tests.runs.process_group import run_group
from tests.small_run import SHAPES, small_run
from train import train


def run_out(folder: Path) -> str:
    """The error of a training whose address space is too small."""
    ensure_shapes(folder / "shapes", SHAPES)
    config = small_run(
        folder / "shapes", folder / "run", "train.batch_size=8", "train.image_size=640", "model.width=0.25"
    )
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 400 * 2**20, hard))
    try:
        train(config)
    except TrainError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    return "it fitted"


@pytest.mark.release
def test_out_of_memory_names_the_next_smaller_pass(tmp_path: Path) -> None:
    (sentence,) = run_group(run_out, 1, tmp_path)
    assert "train.micro_batch_size=8" in sentence and "fix: train.micro_batch_size=4, or" in sentence
