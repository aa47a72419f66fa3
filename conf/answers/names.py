"""What other YOLO programs and Darknet call an option, a value or a file, and what it is here.

Names that differ from ours by a few letters only are found without a table.
"""

from __future__ import annotations

# Names in lower case with ``_`` for ``-``. The first key that a program has is meant; ``key=value``
# stands for a name that is a fixed value here. docs/coming-from.md has the same rows.
TABLE = {
    # the training loop
    "num_epochs max_epochs": "train.epochs",
    "batch bs total_batch_size batch_size": "train.batch_size evaluate.batch_size batch_size",
    "img imgsz img_size imgs size input_size": "train.image_size evaluate.image_size image_size",
    "gpu gpus": "train.device device",
    "early_stopping": "train.patience",
    "amp": "train.precision",
    "half fp16": "train.precision=float16 evaluate.precision=float16 precision=float16",
    "noval": "evaluate.every=0",
    "sync_batchnorm": "train.sync_bn",
    "project save_dir output output_dir": "run_dir out",
    "name exp": "name out",
    # the optimiser
    "lr0 learning_rate base_lr": "optim.lr",
    "lrf": "optim.final_lr_ratio",
    "wd": "optim.weight_decay",
    "cos_lr": "optim.decay=cosine",
    "warmup_epochs warmup": "optim.burn_in_epochs",
    "burn_in warmup_steps warmup_iters": "optim.burn_in_min_steps",
    "warmup_momentum": "optim.burn_in_momentum",
    "warmup_bias_lr": "optim.burn_in_bias_lr",
    "max_norm grad_clip clip_grad gradient_clip_val": "optim.clip_norm",
    # the network, what it learns from and what it saw before
    "weights pretrained checkpoint ckpt": "ckpt model.weights weights",
    "cfg config": "model.cfg",
    "nc": "num_classes",
    "cache_images": "data.cache",
    "dataset": "data",
    # the loss
    "cls": "loss.classification",
    "obj": "loss.objectness",
    "cls_pw": "loss.class_positive_weight",
    "obj_pw": "loss.objectness_positive_weight",
    "fl_gamma": "loss.focal_gamma",
    "iou_t": "loss.anchor_iou",
    # random changes
    "hsv_h": "augment.hsv_hue",
    "hsv_s": "augment.hsv_saturation",
    "hsv_v": "augment.hsv_value",
    "flipud": "augment.flip_vertical",
    "fliplr flip": "augment.flip_horizontal",
    # detections
    "conf conf_thres conf_threshold score_thr score_threshold thresh threshold": "evaluate.confidence confidence",
    "iou iou_thres iou_threshold nms_thres nms_threshold nms": "evaluate.nms_iou nms_iou",
    "max_det": "evaluate.max_detections max_detections",
    "nosave": "draw=false",
    "view_img": "show",
    "include": "format",
    "dynamic": "dynamic_batch",
}
KEYS = {name: keys.split() for names, keys in TABLE.items() for name in names.split()}

# Values of other programs as regular expressions, by the last word of the key.
VALUES = {
    "device": {r"gpu|(cuda:)?\d+(,\d+)*": "cuda"},
    "precision": {"true": "auto", "false|fp32|32": "float32", "half|fp16|16": "float16", "bf16": "bfloat16"},
    "cache": {"true": "ram", "false": "none"},
    "resume": {"true": "auto"},
}

# What takes a file, by its suffix: the first key that a program has.
FILES = {
    ".cfg": ("model.cfg",),
    ".weights": ("weights", "model.weights"),
    ".pt": ("ckpt", "model.weights"),
    ".pth": ("model.weights",),
}
