"""Whole videos of all containers are read whole, and cut ones are named."""

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from data.errors import DataError
from data.media import Medium, read_video

av = pytest.importorskip("av")  # a dependency of supervision; it writes what cameras write

WRITERS = {
    "a.mp4": ("libx264", {"movflags": "faststart"}),
    "fragments.mp4": ("mpeg4", {"movflags": "frag_keyframe+empty_moov"}),
    "a.mkv": ("libx264", {}),
    "live.webm": ("libvpx", {"live": "1"}),
    "a.avi": ("mjpeg", {}),
    "a.wmv": ("wmv2", {}),
    "a.flv": ("flv", {}),
    "a.ts": ("libx264", {}),
}
TIMES = np.cumsum([1, *[1 + 9 * (number % 7 == 3) for number in range(39)]])  # the first is late, some are missing


def written(path: Path) -> Path:
    """40 grey frames at TIMES / 25 seconds."""
    codec, options = WRITERS[path.name]
    with av.open(path, "w", container_options=options) as file:
        stream = file.add_stream(codec, 25, width=64, height=48)
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        for number, ticks in enumerate(TIMES.tolist()):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 40 + 4 * number, np.uint8), format="rgb24")
            frame.pts, frame.time_base = ticks, Fraction(1, 25)
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return path


@pytest.mark.parametrize("name", WRITERS)
def test_a_whole_video_is_never_called_cut_and_a_cut_one_always(name: str, tmp_path: Path) -> None:
    path = written(tmp_path / name)
    whole = path.read_bytes()
    for more in (b"", bytes(3000)):  # cameras fill their last block
        path.write_bytes(whole + more)
        cut: list[str] = []
        frames = list(read_video(Medium(path, name), cut))
        assert len({frame.number for frame in frames}) == len(frames) >= 40 and not cut
        seconds = TIMES[-1] / 25 - TIMES[0] / 25
        assert frames[-1].seconds - frames[0].seconds == pytest.approx(seconds, abs=0.1)
    for part in (0.55, 0.7, 0.9):
        path.write_bytes(whole[: int(part * len(whole)) // 188 * 188 + 100])
        cut = []
        try:
            frames = list(read_video(Medium(path, name), cut))
            assert cut[0].startswith(f"{path} ends after {len(frames)} ")
        except DataError as error:
            assert "holds no frame" in str(error)
