"""The memory of loader workers must not grow with the data set."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import DataLoader, Dataset

from data import Annotations
from tests.data.conftest import CocoSet

SMALL, LARGE = 2_000, 20_000


class Walk(Dataset[int]):
    """Read an image's labels; return the process's private dirty bytes."""

    def __init__(self, annotations: Annotations) -> None:
        self.annotations = annotations

    def __getitems__(self, indices: list[int]) -> list[int]:
        for index in indices:
            self.annotations.training_boxes(index)
            self.annotations.file_name(index)
        rows = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return [int(row.split()[1]) * 1024 for row in rows if row.startswith("Private_Dirty")]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_memory_of_a_worker_does_not_grow_with_the_data_set(empty_set: CocoSet) -> None:
    """One image under many names, eight boxes each; the larger index takes 10 MB."""
    empty_set.add_image(np.zeros((64, 64, 3), dtype=np.uint8), [])
    first = empty_set.root / "images" / "10.png"
    names = [f"{number}.png" for number in range(LARGE)]
    for name in set(names) - {first.name}:
        (empty_set.root / "images" / name).hardlink_to(first)
    image = empty_set.json["images"][0]
    memory = {}
    for count in (SMALL, LARGE):
        empty_set.json["images"] = [image | {"id": i, "file_name": names[i]} for i in range(count)]
        box = {"bbox": [3.0, 4.0, 20.0, 30.0], "category_id": 1, "iscrowd": 0, "area": 600.0}
        empty_set.json["annotations"] = [box | {"id": i, "image_id": i % count} for i in range(8 * count)]
        annotations = empty_set.open()
        for workers in (1, 8):
            # Every fourth image touches every page; each worker reads them all.
            batches = [list(range(start, count, 40)) for start in range(0, 40, 4) for _ in range(workers)]
            loader = DataLoader(Walk(annotations), batch_sampler=batches, num_workers=workers, collate_fn=max)
            memory[count, workers] = max(list(loader)[-workers:])
    for workers in (1, 8):
        assert memory[LARGE, workers] - memory[SMALL, workers] < 4 << 20
