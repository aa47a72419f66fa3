"""Whether the loader keeps the device busy: its workers alone, and before a training step."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path

import cv2

from data import (
    AugmentConfig,
    Batch,
    Colour,
    DataConfig,
    MultiScale,
    ShapesConfig,
    TrainBatchSampler,
    TrainDataset,
    make_loader,
    open_annotations,
)
from data.batches.loader import PREFETCHED_BATCHES
from scripts.bench.data_modes import LISTED, RepeatedSource, repeated
from scripts.bench.gpu import Rows
from scripts.bench.on_gpu.common import Settings, make_step, new_step, options, seconds_each, synthetic, wait_for

SIDE = 555  # of the drawn images, for as many pixels as COCO's


def loader(settings: Settings, rows: Rows) -> None:
    """Images a second that workers make, and the speed of a training that they feed."""
    cv2.setNumThreads(0)
    step, images = new_step(settings), settings.batches[-1]
    synthetic_speed = images / seconds_each(partial(make_step, step), [synthetic(settings, images)], settings)
    rows.add("step on synthetic input", synthetic_speed, "images/s")
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        drawn = Drawn(settings, Path(folder))
        rows.add("an image on disk", drawn.kilobytes, "kB")
        for workers, pool in settings.loaders:
            name = f"{workers} workers, {'tile pool' if pool else 'fresh tiles'}"
            rows.add(f"{name}: alone", drawn.speed(workers, pool, lambda _: None)[0], "images/s")
            fed, cores = drawn.speed(workers, pool, partial(make_step, step))
            rows.add(f"{name}: feeding a step", fed, "images/s")
            rows.add(f"{name}: against synthetic input", 100 * fed / synthetic_speed, "%", "97 %")
            rows.add(f"{name}: cores in use", cores, "", "5" if pool else "11")


class Drawn:
    """Drawn images, listed so often that a batch hardly has one twice."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings, self.images = settings, settings.batches[-1]
        shapes = ShapesConfig(settings.drawn, 1, 96 if settings.tiny else SIDE, 0)
        places = {"root": str(folder / "set"), "index_dir": str(folder / "index")}
        config = options(DataConfig, "data/shapes.yaml", shapes=shapes, **places)
        listed = open_annotations(config, "train")
        bytes_of_all = sum(Path(listed.path(number)).stat().st_size for number in range(len(listed)))
        self.kilobytes = bytes_of_all / len(listed) / 1e3
        self.source = RepeatedSource(listed, config.on_error)
        self.annotations = repeated(listed, -(-LISTED // len(listed)))

    def speed(self, workers: int, pool: int, use: Callable[[Batch], object]) -> tuple[float, float]:
        """Images a second, once all batches made ahead are used up, and the cores in use."""
        settings = self.settings
        augment = options(AugmentConfig, "augment/mosaic.yaml", tile_pool=pool, colour=Colour.device)
        sizes = MultiScale(settings.side, 1, 1, 32, 0)
        sampler = TrainBatchSampler(len(self.annotations), self.images, self.images, 1, 0, 0, sizes, tile_pool=pool)
        dataset = TrainDataset(self.annotations, augment, seed=0, epochs=300, images=self.source)
        batches = iter(make_loader(dataset, sampler, workers, settings.device))
        for count in (PREFETCHED_BATCHES * workers, 2 * settings.steps):  # the second time counts
            started, busy = time.perf_counter(), _cpu_seconds()
            for batch in islice(batches, count):
                use(batch)
            wait_for(settings.device)
        seconds = time.perf_counter() - started
        return count * self.images / seconds, (_cpu_seconds() - busy) / seconds


def _cpu_seconds() -> float:
    """CPU time of this process and its workers."""
    files = [Path(f"/proc/{child.pid}/stat") for child in multiprocessing.active_children()]
    ticks = [int(tick) for file in files for tick in file.read_text().rpartition(")")[2].split()[11:13]]
    return time.process_time() + sum(ticks) / os.sysconf("SC_CLK_TCK")
