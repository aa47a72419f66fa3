"""Try a detector in a browser, on pictures, videos or the camera.

    python -m scripts.demo ckpt=runs/quickstart/...
    python -m scripts.demo model=yolov4 model.weights=yolov4.weights resize=stretch

Only this machine can open the page, unless host= says otherwise; it contacts no other server.
Ctrl-C ends it.
"""

if __name__ == "__main__":  # before the imports below: --help and refused options need none of them
    from conf.cli.program import start

    raise SystemExit(start("demo"))

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from conf import schema
from conf.schema import require
from data import Medium, OnBadFile
from data.errors import printable
from data.progress import log
from train_utils import distributed
from train_utils.inference.detector import Prediction, Predictor, ResultWriter, format_counts

SECONDS_BETWEEN_FRAMES = 0.2  # of the camera
BUTTONS: Any = ["download", "fullscreen"]  # of drawn pictures
# One pass at a time, and of those that wait the last.
ONE_PASS: dict[str, Any] = {"concurrency_id": "network", "concurrency_limit": 1, "trigger_mode": "always_last"}


def main(config: schema.DemoConfig) -> None:
    """Serve the page until Ctrl-C. Raises ConfigError without gradio."""
    log.info("the demo opens its network and its page")
    with tempfile.TemporaryDirectory(prefix="demo-") as folder:
        page = build(config, Path(folder))
        log.info(f"the demo is at {launch(page, config)} ; Ctrl-C ends it")
        page.block_thread()


def build(config: schema.DemoConfig, folder: Path) -> Any:
    """The page, as gradio Blocks; results are written below ``folder``."""
    require("gradio", "the demo")
    import gradio as gr

    predictor = Predictor(config, distributed.choose_device(config.device.value))
    network, session = predictor.network, Session(predictor, folder)
    with gr.Blocks(title="Detector", analytics_enabled=False, delete_cache=(3600, 3600)) as page:
        gr.Markdown(f"## Detector\n{plain(network.note)}; {network.image_size} pixels on {predictor.device.type}")
        with gr.Row():
            limits = getattr(network.model, "limits", {})  # of an exported file
            lowest, highest = limits.get("confidence", 0), limits.get("nms_iou", 1)
            confidence = gr.Slider(lowest, 1, config.confidence, step=0.01, label="Lowest confidence")
            overlap = gr.Slider(0, highest, config.nms_iou, step=0.01, label="Largest overlap (IoU)")
        settings = [confidence, overlap]
        with gr.Tab("Pictures and videos"):
            files = gr.File(file_count="multiple", file_types=["image", "video"], label="Drop them here", height=140)
            summary = gr.Markdown()
            drawn = gr.Gallery(
                label="Detections",
                columns=2,
                object_fit="contain",
                height="max-content",
                interactive=False,
                buttons=BUTTONS,
            )
            jsons = gr.File(file_count="multiple", label="As COCO json", interactive=False)
        with gr.Tab("Camera"), gr.Row():
            camera = gr.Image(sources=["webcam"], streaming=True, label="Camera: allow it, then Record")
            result = gr.Image(label="Detections", format="jpeg", interactive=False, buttons=BUTTONS)
        changes = [files.change, confidence.release, overlap.release]
        gr.on(changes, session.files, [files, *settings], [summary, drawn, jsons], **ONE_PASS)
        often: dict[str, Any] = {"stream_every": SECONDS_BETWEEN_FRAMES, "show_progress": "hidden"}
        camera.stream(session.camera, [camera, *settings], result, **ONE_PASS, **often)
    return page


def launch(page: Any, config: schema.DemoConfig) -> str:
    """Start serving the page; return its address."""
    import gradio as gr

    theme = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["monospace"])  # none from elsewhere
    address = {"server_name": config.host, "server_port": config.port}
    calm = {"quiet": True, "prevent_thread_lock": True, "share": False, "ssr_mode": False, "footer_links": []}
    page.queue(api_open=False).launch(theme=theme, **address, **calm)
    return str(page.local_url)


def plain(text: str) -> str:
    """A text as Markdown that shows it: names in it format and load nothing."""
    return re.sub(r"([\\`*_{}\[\]()#+.!<>|~$&-])", r"\\\1", printable(text))


class Session:
    """The page's callbacks, which take the values of its controls."""

    def __init__(self, predictor: Predictor, folder: Path) -> None:
        self.predictor, self.folder = predictor, folder

    def files(self, paths: list[str] | None, *limits: float) -> tuple[str, list[tuple[str, str]], list[str]]:
        """A text (with unreadable files), drawings by name, and the json files of predict.py."""
        out = Path(tempfile.mkdtemp(dir=self.folder))
        files = [Path(path) for path in paths or []]
        names = [path.name for path in files]
        if len(set(names)) < len(names):
            names = [f"{number} {name}" for number, name in enumerate(names, start=1)]
        media = list(map(Medium, files, names))
        writer = ResultWriter(media, self.predictor.network, out, video_suffix=".webm")
        with writer.drawn:
            for prediction in self._predict(media, *limits):
                writer.add(prediction)
        writer.close()
        drawn, missing = [], []
        for medium, name in writer.drawn_names.items():
            if (out / name).exists():
                drawn.append((str(out / name), medium))
            else:
                missing.append(medium)
        lines = [writer.summary(), format_counts(writer.counts)]
        if missing:
            lines.append(f"cannot be read: {', '.join(missing)}")
        text = "\n\n".join(map(plain, filter(None, lines)))
        return text, drawn, [str(out / "images.json"), str(out / "detections.json")]

    def camera(self, image: np.ndarray | None, *limits: float) -> np.ndarray | None:
        """The camera's image (uint8 RGB) with boxes."""
        if image is None:
            return None
        (prediction,) = self._predict([Medium(Path(), "camera", image=image)], *limits)
        return np.ascontiguousarray(prediction.plot()[..., ::-1])

    def _predict(self, media: list[Medium], confidence: float, overlap: float) -> Iterator[Prediction]:
        frames = self.predictor.frames(media, OnBadFile.skip, batch_size=1)
        return self.predictor.at(confidence=confidence, nms_iou=overlap).predict(frames)
