r"""Try a detector in a browser: drop pictures or videos, or use the camera.

    python -m scripts.demo ckpt=runs/quickstart/...
    python -m scripts.demo model=yolov4 model.weights=yolov4.weights names=coco.names resize=stretch

The page is for this machine only, unless host= says otherwise, and asks no other server anything.
Ctrl-C ends it.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below: --help and refused options need none of them
    from conf.programs import run

    run("demo")
    raise SystemExit

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from conf.detector import Prediction, Predictor, format_counts
from conf.failures import ConfigError
from conf.network import open_detector
from conf.schema import DemoConfig
from data import Frame, FrameBatch, FrameBatches, Medium, OnBadFile
from predict import ResultWriter
from train_utils.distributed import init_distributed_mode

LOCAL = ("127.0.0.1", "localhost", "::1")
SECONDS_BETWEEN_FRAMES = 0.2  # of the camera


def main(config: DemoConfig) -> None:
    """Serve the page until Ctrl-C. Raises ConfigError without gradio, or if the port is in use."""
    with tempfile.TemporaryDirectory(prefix="demo-") as folder:
        page = build(config, Path(folder))
        launch(page, config)
        page.block_thread()


def build(config: DemoConfig, folder: Path) -> Any:
    """The page, as gradio Blocks; results are written below ``folder``."""
    try:
        import gradio as gr
    except ImportError as error:
        raise ConfigError("the demo needs gradio, which is not installed. fix: uv sync --extra demo") from error
    world = init_distributed_mode(config.device.value, timeout_seconds=60)
    network = open_detector(config.ckpt, config.model, config.names, config.image_size)
    session = Session(config, Predictor(config, network, world.device), folder)
    with gr.Blocks(title="Detector", analytics_enabled=False, delete_cache=(3600, 3600)) as page:
        gr.Markdown(f"## Detector\n{network.note}; {network.image_size} pixels on {world.device.type}")
        with gr.Row():
            confidence = gr.Slider(0, 1, config.confidence, step=0.01, label="Lowest confidence")
            overlap = gr.Slider(0, 1, config.nms_iou, step=0.01, label="Largest overlap (IoU)")
            names = [(name, number) for number, name in enumerate(network.names)]
            classes = gr.Dropdown(names, multiselect=True, label="Classes (none: all)")
        settings = [confidence, overlap, classes]
        with gr.Tab("Pictures and videos"):
            files = gr.File(file_count="multiple", file_types=["image", "video"], label="Drop them here", height=140)
            summary = gr.Markdown()
            drawn = gr.Gallery(
                label="Detections", columns=2, object_fit="contain", height="max-content", interactive=False,
                buttons=["download", "fullscreen"],
            )  # fmt: skip
            jsons = gr.File(file_count="multiple", label="As COCO json", interactive=False)
        with gr.Tab("Camera"), gr.Row():
            camera = gr.Image(sources=["webcam"], streaming=True, label="Camera")
            shown = gr.Image(label="Detections", format="jpeg", interactive=False, buttons=["download", "fullscreen"])
        busy: dict[str, Any] = {"concurrency_id": "network", "concurrency_limit": 1}  # one pass at a time
        gr.on(
            [files.change, confidence.release, overlap.release, classes.change],
            session.files, [files, *settings], [summary, drawn, jsons], **busy, trigger_mode="always_last",
        )  # fmt: skip
        camera.stream(
            session.camera, [camera, *settings], shown, **busy, stream_every=SECONDS_BETWEEN_FRAMES,
            show_progress="hidden", trigger_mode="always_last",
        )  # fmt: skip
    return page


def launch(page: Any, config: DemoConfig) -> str:
    """Start to serve the page and return its address. Raises ConfigError if the port is in use."""
    import gradio as gr

    theme = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["monospace"])  # none from elsewhere
    try:
        page.queue(api_open=False).launch(
            server_name=config.host, server_port=config.port, quiet=True, prevent_thread_lock=True, share=False,
            ssr_mode=False, footer_links=[], theme=theme,
        )  # fmt: skip
    except OSError as error:
        raise ConfigError(f"cannot listen on {config.host}:{config.port} ({error}). fix: another port=") from error
    print(f"the demo is at {page.local_url} ; Ctrl-C ends it", flush=True)
    if config.host not in LOCAL:
        print(f"warning: host={config.host} lets everyone in who reaches this machine", flush=True)
    return str(page.local_url)


class Session:
    """What the page calls; its functions take the values of its controls."""

    def __init__(self, config: DemoConfig, predictor: Predictor, folder: Path) -> None:
        self.config, self.predictor, self.folder = config, predictor, folder

    def files(
        self, paths: list[str] | None, confidence: float, overlap: float, classes: list[int]
    ) -> tuple[str, list[tuple[str, str]], list[str]]:
        """A text, drawn pictures and videos with their names, and the json files of predict.py.

        What cannot be read is left out and named in the text.
        """
        out = Path(tempfile.mkdtemp(dir=self.folder))
        files = [Path(path) for path in paths or []]
        unique = len({path.name for path in files}) == len(files)
        media = [Medium(path, path.name if unique else f"{n} {path.name}") for n, path in enumerate(files, start=1)]
        frames = FrameBatches(media, self.predictor.fit, 1, self.config.exif, OnBadFile.skip, self.config.workers)
        writer = ResultWriter(media, self.predictor.network, out, video_suffix=".webm")
        with writer.drawn:
            for prediction in self._predict(frames, confidence, overlap, classes):
                writer.add(prediction)
        writer.close()
        drawn = [(str(out / name), medium) for medium, name in writer.drawn_names.items() if (out / name).exists()]
        missing = sorted(set(writer.drawn_names) - {medium for _, medium in drawn})
        total = f"{writer.num_images} images, {writer.counts.total()} detections"
        lines = [total, format_counts(writer.counts), f"cannot be read: {', '.join(missing)}" if missing else ""]
        return "\n\n".join(filter(None, lines)), drawn, [str(out / "images.json"), str(out / "detections.json")]

    def camera(
        self, image: np.ndarray | None, confidence: float, overlap: float, classes: list[int]
    ) -> np.ndarray | None:
        """The image of the camera (uint8 RGB) with its boxes."""
        if image is None:
            return None
        batch = self.predictor.fit.batch(Frame(Medium(Path("camera"), "camera"), 1, image))
        (prediction,) = self._predict([batch], confidence, overlap, classes)
        return np.ascontiguousarray(prediction.draw()[..., ::-1])

    def _predict(
        self, batches: Iterable[FrameBatch], confidence: float, overlap: float, classes: list[int]
    ) -> Iterator[Prediction]:
        """The objects of the chosen classes on each frame; of all classes if none is chosen."""
        for prediction in self.predictor.at(confidence, overlap).predict(batches):
            yield prediction.select(np.isin(prediction.classes, classes)) if classes else prediction
