r"""Convert between Darknet .weights and checkpoints, both ways.

    python -m scripts.convert_weights weights=yolov3-spp.weights model=yolov3-spp \
        names=coco.names out=yolov3-spp.pt
    python -m scripts.convert_weights weights=my.weights model.cfg=my.cfg out=my.pt
    python -m scripts.convert_weights ckpt=runs/coco/<date_time> out=mine.weights cfg=mine.cfg
    python -m scripts.convert_weights ckpt=yolov3-spp.pt out=darknet53.conv.74 up_to_layer=74

The checkpoint serves eval.py ckpt= (with data=), predict.py and export.py ckpt=, and train.py
model.weights=. Converted back to .weights it has the bytes of the original file. `weights` may also
be a .pt file with the state dict of another system. `up_to_layer`, which counts as in Darknet's
`partial` command, also cuts a .weights file; as in Darknet, the header then says 0 images.
"""

if __name__ == "__main__":  # before the imports below: --help and refused options need none of them
    from conf.cli.program import start

    raise SystemExit(start("convert"))

from dataclasses import replace
from pathlib import Path

from conf import ConfigError, compose, schema
from conf.cli import run_files
from data.progress import counted, log
from models import fitted_cfg, save_darknet_weights
from train_utils import build
from train_utils.checkpoint import save_checkpoint
from train_utils.inference import open_checkpoint


def convert(config: schema.ConvertConfig) -> None:
    """Convert as configured and print what was written."""
    if (config.weights is None) == (config.ckpt is None):
        raise ConfigError("give one of weights=<.weights or state dict> and ckpt=<run folder or .pt file>")
    out, source = Path(config.out), replace(config.model, weights=config.weights)
    if out.is_dir():
        raise ConfigError(f"out={out} is a folder", "name a file in it")
    to_checkpoint = out.suffix in (".pt", ".pth")
    if to_checkpoint != (config.weights is not None and config.up_to_layer is None):
        forms = "weights= becomes a checkpoint; ckpt=, or anything cut by up_to_layer=, becomes a Darknet file"
        fix = f"out={out.with_suffix('.weights' if to_checkpoint else '.pt')}"
        raise ConfigError(f"out={out} does not fit: {forms}", fix)
    run_files.refuse_existing(out, "out")
    if config.cfg is not None:
        cfg = Path(config.cfg)
        run_files.refuse_existing(cfg, "cfg")
        if cfg.resolve() == out.resolve():
            raise ConfigError("cfg and out are one file", f"cfg={out.with_suffix('.cfg')}")
        cfg.parent.mkdir(parents=True, exist_ok=True)
    if to_checkpoint:
        detector = open_checkpoint.open_detector(None, source, config.names, config.image_size)
        log.info(detector.note)
        options = {
            "model": compose.to_dictionary(replace(config.model, weights=None)),
            "evaluate": {"image_size": detector.image_size},
        }
        state = {  # without a training or a data set
            "network": build.describe_network(detector.model, config.model),
            "names": detector.names, "category_ids": detector.category_ids, "config": options,
            "weights_version": list(detector.model.weights_version), "epoch": 0, "step": 0,
            "seen": detector.model.seen, "ema": detector.model.state_dict(),
        }  # fmt: skip
        save_checkpoint(out, state)
        log.info(f"wrote {out}: {counted(len(detector.names), 'class')}, {detector.image_size} pixels")
        return
    if config.ckpt is not None:
        detector = open_checkpoint.open_checkpoint(config.ckpt)
        model, note = detector.model, detector.note
    else:
        model, report = build.build_model(source, None, whole=True)
        note = str(report)
    log.info(note)
    if config.up_to_layer is not None:
        model.seen = 0
    count = save_darknet_weights(model, out, config.up_to_layer)
    version = ".".join(map(str, model.weights_version))
    log.info(f"wrote {out}: {count:,} values, header {version}, trained on {model.seen:,} images")
    if config.cfg is not None:
        Path(config.cfg).write_text(fitted_cfg(model), encoding="utf-8")
    log.info(f"its .cfg: {config.cfg or 'add cfg=<file>, if classes, width or anchors changed'}")
    if any(head.box_bins for head in model.heads):
        log.info("Darknet cannot read it, because of its box_bins: model.box_bins=0 trains a network for Darknet")
