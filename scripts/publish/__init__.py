"""Write a trained network to a folder that is ready for a model hub.

    python -m scripts.publish ckpt=runs/coco/<date_time> out=my-detector license=apache-2.0
    python predict.py ckpt=my-detector source=pictures

The folder holds the weights (safetensors), the network (.cfg), class names, settings, a model card
with the figures of the run, and proof.json if the run has one. `Detector("my-detector")` and
`ckpt=my-detector` open it. Nothing is uploaded: the command for that is printed.
"""

from __future__ import annotations

from pathlib import Path

from conf.schema_tools import PublishConfig


def publish(config: PublishConfig) -> Path:
    """Write the folder as configured and return its path.

    Raises ConfigError if the folder exists, and the errors of an unreadable checkpoint.
    """
    from scripts.publish.folder import write  # imports torch, which --help does without

    return write(config)
