"""Detections as labels to correct in CVAT or Label Studio, and the pictures to label first.

    python -m scripts.prelabel ckpt=runs/coco/<date_time> source=pictures format=coco out=labels

The folder holds labels that the tool can import, and order.csv. See docs/use/labelling.md.
"""
