r"""Convert between Darknet .weights and checkpoints, both ways.

    python -m scripts.convert_weights weights=yolov3-spp.weights model=yolov3-spp \
        names=coco.names out=yolov3-spp.pt
    python -m scripts.convert_weights weights=my.weights model.cfg=my.cfg out=my.pt
    python -m scripts.convert_weights ckpt=runs/coco/<date_time> out=mine.weights cfg=mine.cfg
    python -m scripts.convert_weights ckpt=yolov3-spp.pt out=darknet53.conv.74 up_to_layer=74

The checkpoint serves eval.py ckpt= (with data=), predict.py and export.py ckpt=, and train.py
model.weights=. Converted back to .weights it has the bytes of the original file. `weights` may also
be a .pt file with the state dict of another system. `up_to_layer`, which counts as in Darknet's
`partial` command, also cuts a .weights file directly.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below: --help and refused options need none of them
    from conf.programs import run

    run("convert")
    raise SystemExit

from dataclasses import replace
from pathlib import Path
from typing import Any

from conf.entry import to_dictionary
from conf.failures import ConfigError
from conf.network import TrainedNetwork, build_model, describe_network, model_from_checkpoint, open_detector
from conf.schema_tools import ConvertConfig
from models import Darknet, ModelError, fitted_cfg, load_cfg, save_darknet_weights
from models.config import ModelConfig
from train_utils.checkpoint import load_checkpoint, save_checkpoint


def convert(config: ConvertConfig) -> None:
    """Convert as configured and print what was written. Raises the errors of the parts."""
    to_checkpoint = check(config)
    if config.ckpt is not None:
        write_darknet(config, model_from_checkpoint(load_checkpoint(Path(config.ckpt)))[0])
        return
    source = replace(config.model, weights=config.weights)
    if not to_checkpoint:
        model, report = build_model(source, None, whole=True)
        print(report)
        write_darknet(config, model)
        return
    detector = open_detector(None, source, config.names, config.image_size)
    print(detector.note)
    save_checkpoint(Path(config.out), checkpoint_of(source, detector))
    print(f"wrote {config.out}: {len(detector.names)} classes, {detector.image_size} pixels")


def check(config: ConvertConfig) -> bool:
    """Whether to write a checkpoint. Raises ConfigError if the options make no conversion."""
    if (config.weights is None) == (config.ckpt is None):
        raise ConfigError("give one of weights=<.weights or state dict> and ckpt=<run folder or .pt file>")
    out, source = Path(config.out), Path(config.weights or config.ckpt or "")
    to_checkpoint = out.suffix in (".pt", ".pth")
    if out.is_dir() or not out.name:
        raise ConfigError(f"out={config.out} is a folder. fix: name a file in it")
    if out.exists() and source.exists() and out.samefile(source):
        raise ConfigError(f"out={config.out} is the file to convert. fix: choose another name")
    for key in ("weights", "freeze"):
        if config.ckpt is None and getattr(config.model, key):
            raise ConfigError(f"model.{key} is for training, but weights= is converted unchanged. fix: leave it out")
    if config.ckpt is not None and to_checkpoint:
        raise ConfigError(f"ckpt={config.ckpt} is a checkpoint already. fix: let out= end in .weights")
    if config.weights is not None and not to_checkpoint and config.up_to_layer is None:
        raise ConfigError(
            f"out={config.out} is not the name of a checkpoint. fix: let out= end in .pt, or give up_to_layer= to cut"
        )
    wrong = ("up_to_layer", "seen", "cfg") if to_checkpoint else ("names", "image_size")
    for key in wrong:
        if getattr(config, key) is not None:
            kind = "a checkpoint" if to_checkpoint else "a .weights file"
            raise ConfigError(f"{key} says nothing about {kind} such as out={config.out}. fix: leave {key} out")
    if config.cfg is not None and config.up_to_layer is not None:
        raise ConfigError("cfg would describe the whole network, up_to_layer cuts it. fix: leave one out")
    return to_checkpoint


def checkpoint_of(source: ModelConfig, detector: TrainedNetwork) -> dict[str, Any]:
    """The state of a checkpoint with a network and its weights, but no training and no data set."""
    assert isinstance(detector.model, Darknet)
    return {
        "network": describe_network(detector.model, source),
        "names": detector.names,
        "category_ids": detector.category_ids,
        "config": {
            "model": to_dictionary(replace(source, weights=None)),
            "evaluate": {"image_size": detector.image_size},
        },
        "weights_version": list(detector.model.weights_version),
        "epoch": 0,
        "step": 0,
        "seen": detector.model.seen,
        "ema": detector.model.state_dict(),
    }


def write_darknet(config: ConvertConfig, model: Darknet) -> None:
    """Write the .weights file, after the .cfg if ``cfg`` names one."""
    if config.seen is not None:
        model.seen = config.seen
    text = fitted_cfg(model)
    if config.cfg is not None:
        write_text(Path(config.cfg), text)
        print(f"wrote {config.cfg}, the .cfg of {config.out}")
    count = save_darknet_weights(model, config.out, config.up_to_layer)
    version = ".".join(map(str, model.weights_version))
    print(f"wrote {config.out}: {count:,} values, header {version}, trained on {model.seen:,} images")
    if config.cfg is None and config.up_to_layer is None and text != text_of(model.cfg.source):
        print(f"note: {model.cfg.source} is gone or does not fit this network. cfg=<file> writes a .cfg that fits")


def text_of(path: str) -> str | None:
    """The text of a .cfg as parsed, None if the file is gone or holds no network."""
    try:
        return load_cfg(path).text
    except ModelError:
        return None


def write_text(path: Path, text: str) -> None:
    """Write a text file. Raises ModelError if it exists with other content or cannot be written."""
    try:
        if path.exists() and path.read_text(encoding="utf-8", errors="replace") != text:
            raise ModelError(f"cfg={path} exists and differs. fix: choose another name")
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ModelError(
            f"cannot write cfg={path} ({error.strerror}). fix: choose a folder that you may write to"
        ) from error
