"""Batches whose JPEG files travel undecoded: the device decodes them and draws the samples.

A worker plans samples and computes their targets as ever, but only reads the files. What a GPU does
not decode, or would be more to carry and to hold than pixels are, the worker draws itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from data.errors import DataError
from data.files.jpeg import is_plain
from data.geometry import inverse
from data.images.orientation import turn_matrix
from data.images.source import Encoded
from data.samples.batch import Batch, make_batch, one_size, shared_memory
from data.samples.dataset import Drawn, Tile, TrainDataset
from data.samples.plan import Plan, Request
from data.samples.resample import resample

MOST_PIXELS = 24  # of a sample's decoded images, in multiples of its own


@dataclass
class EncodedBatch(Batch):
    """A batch on the host, to be drawn by ``to``: F files, S samples from files, K drawn ones.

    ``images`` (K, 3, H, W) are the drawn ones. P pictures, S first ones and M to be mixed into
    them, have up to T tiles each.
    """

    files: Tensor  # uint8 (bytes,): the JPEG files, one after the other
    ends: Tensor  # int64 (F,) in ``files``
    tiles: Tensor  # int64 (P, T), numbers of files; -1: none
    maps: Tensor  # float32 (P, T, 3, 3) take points of the picture to points of the stored image
    mixed: Tensor  # int64 (M,), numbers of first pictures
    shares: Tensor  # float32 (M,), their weights
    places: Tensor  # int64 (B,), where each sample of the batch is among those from files and drawn ones
    paths: tuple[str, ...]  # of the files, for messages

    shared: ClassVar[tuple[str, ...]] = ("images", "files")

    def pin_memory(self) -> EncodedBatch:
        """The batch itself: nvJPEG copies from ordinary memory before it returns."""
        return self

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """Decode the files on a device and draw the samples there.

        On a GPU the host waits for both, so a thread should do it. Raises DataError for a file that
        cannot be decoded.
        """
        moved = super().to(device, non_blocking)
        tiles, maps, mixed, shares, places = (
            tensor.to(device, non_blocking=non_blocking)
            for tensor in (self.tiles, self.maps, self.mixed, self.shares, self.places)
        )
        height, width = self.images.shape[2:]
        pictures = resample(decode(self._each_file(), self.paths, device), tiles, maps, (height, width))
        first, second = pictures[: len(tiles) - len(mixed)], pictures[len(tiles) - len(mixed) :]
        share = shares[:, None, None, None]
        first[mixed] = (first[mixed] * share + second * (1 - share)).round_().to(torch.uint8)
        images = torch.cat((first, moved.images.permute(0, 2, 3, 1)))[places].permute(0, 3, 1, 2)
        return Batch(images, moved.targets, self.indices, self.letterboxes, moved.gains)

    def _each_file(self) -> list[Tensor]:
        ends = self.ends.tolist()
        return [self.files[start:end] for start, end in zip([0, *ends], ends, strict=False)]


class EncodedDataset(TrainDataset):
    """Training samples that the device draws, as far as it can."""

    most_bytes = 2

    def __getitems__(self, requests: Sequence[Request]) -> EncodedBatch:
        """Return the batch of requests of one size, not yet drawn; torch's loader calls this."""
        size, (plans, pictures) = one_size(requests), self.planned(requests)
        files: dict[int, Encoded | None] = {}
        is_sent = [self._is_sent(plan, sample, files) for plan, sample in zip(plans, pictures, strict=True)]
        sent = [number for number, yes in enumerate(is_sent) if yes]
        kept = [number for number, yes in enumerate(is_sent) if not yes]
        buffer = shared_memory((len(kept), *size, 3))
        done = iter(self.draw(buffer.numpy(), [plans[n] for n in kept], [pictures[n] for n in kept]))
        drawn = [
            Drawn([tile for tiles in sample for tile in tiles], None, None) if yes else next(done)
            for yes, sample in zip(is_sent, pictures, strict=True)
        ]
        batch = make_batch(buffer, requests, self.targets(drawn, size), gains=self.gains(plans))
        return self._encoded(batch, [plans[n] for n in sent], [pictures[n] for n in sent], files, sent + kept)

    def _is_sent(self, plan: Plan, sample: list[list[Tile]], files: dict[int, Encoded | None]) -> bool:
        """Whether the device can draw a sample; reads the ``files`` of its images."""
        if plan.donor is not None:  # the worker needs its mask for the targets anyway
            return False
        pixels = plan.size[0] * plan.size[1]
        room, decoded = 3 * pixels * self.most_bytes, pixels * MOST_PIXELS
        for tile in (tile for tiles in sample for tile in tiles):
            if tile.position not in files:
                files[tile.position] = self._read(tile.position)
            file = files[tile.position]
            if file is None:
                return False
            room -= len(file.data)
            decoded -= file.header.height * file.header.width
        return room >= 0 and decoded >= 0

    def _read(self, position: int) -> Encoded | None:
        """Read a file; None if a worker has to decode it, or to say what is wrong with it."""
        try:
            file = self.images.read_encoded(position)
        except DataError:
            return None
        return file if file.header.kind == "JPEG" and is_plain(file.data, file.header.end) else None

    def _encoded(
        self,
        batch: Batch,
        plans: list[Plan],
        pictures: list[list[list[Tile]]],
        files: dict[int, Encoded | None],
        order: list[int],
    ) -> EncodedBatch:
        """Add to a ``batch`` what the device draws; ``order`` are its samples, drawn ones last."""
        mixed = [number for number, plan in enumerate(plans) if len(plan.pictures) == 2]
        drawn = [sample[0] for sample in pictures] + [pictures[number][1] for number in mixed]
        used = {tile.position: files[tile.position] for tiles in drawn for tile in tiles}
        sent = {position: file for position, file in used.items() if file is not None}
        numbers = {position: number for number, position in enumerate(sent)}
        ends = np.cumsum([len(file.data) for file in sent.values()], dtype=np.int64)
        memory = shared_memory((int(ends[-1]) if sent else 0,))
        memory.numpy()[:] = np.frombuffer(b"".join(file.data for file in sent.values()), dtype=np.uint8)
        most = max(map(len, drawn), default=0)
        tiles, maps = np.full((len(drawn), most), -1), np.zeros((len(drawn), most, 3, 3), dtype=np.float32)
        for row, picture in enumerate(drawn):
            for column, tile in enumerate(picture):
                _, _, header, orientation = sent[tile.position]
                turned = turn_matrix((header.height, header.width), orientation)
                tiles[row, column], maps[row, column] = numbers[tile.position], inverse(tile.matrix @ turned)
        return EncodedBatch(
            **vars(batch),
            files=memory,
            ends=torch.from_numpy(ends),
            tiles=torch.from_numpy(tiles),
            maps=torch.from_numpy(maps),
            mixed=torch.tensor(mixed, dtype=torch.int64),
            shares=torch.tensor([plans[number].share for number in mixed]),
            places=torch.from_numpy(np.argsort(order)),
            paths=tuple(file.path for file in sent.values()),
        )


def decode(files: Sequence[Tensor], paths: Sequence[str], device: torch.device) -> list[Tensor]:
    """Decode JPEG files (bytes,) to uint8 RGB (3, h, w) on a device. Raises DataError.

    On a GPU this is nvJPEG. It writes on a stream of its own without waiting for the current one,
    whose freed memory it may get (pytorch/vision#9606), so that one has to be done first.
    """
    if not files:
        return []
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    try:
        return _decode(files, device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
    for file, path in zip(files, paths, strict=True):
        try:
            _decode([file], device)
        except RuntimeError as error:
            raise DataError(
                f"{path} cannot be decoded on the {device.type} ({str(error).splitlines()[0]}). fix: replace the "
                "file, or set data.decode=cpu, where data.on_error=skip also leaves out such images"
            ) from error
    raise DataError(f"{len(files)} JPEG files cannot be decoded at once ({reason}). fix: data.decode=cpu")


def _decode(files: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    from torchvision.io import decode_jpeg  # slow

    images: list[Tensor] = decode_jpeg(list(files), mode="RGB", device=device)
    return images
