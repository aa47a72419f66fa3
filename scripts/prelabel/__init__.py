"""Detections as labels to correct in CVAT or Label Studio, and the pictures to label first.

    python -m scripts.prelabel ckpt=runs/coco/<date_time> source=pictures format=coco out=labels

The folder holds labels that the tool can import, and order.csv. See docs/use/labelling.md.
"""

from pathlib import Path

from conf.schema_inference import PrelabelConfig


def prelabel(config: PrelabelConfig) -> Path:
    """Write the folder as configured and return its path.

    Raises ConfigError if the folder exists, for videos and for ONNX files, and the errors of
    unreadable pictures and weights.
    """
    from scripts.prelabel.folder import write  # imports torch, which --help does without

    return write(config)
