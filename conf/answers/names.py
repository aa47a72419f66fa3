"""What other YOLO programs and Darknet call an option, and its keys here.

Names stand in lower case with ``_`` for ``-``. Of the keys, in this order, the first that a program
has and that takes the given value is meant; ``key=value`` stands for a name that is a fixed value
here. tests/conf/answers holds each name to docs/coming-from.md.
"""

from __future__ import annotations

_TABLE = {
    # the training loop
    "epochs epoch num_epochs max_epochs": "train.epochs",
    "batch bs total_batch_size batch_size": "train.batch_size evaluate.batch_size batch_size",
    "img imgsz img_size imgs size input_size": "train.image_size evaluate.image_size image_size",
    "device gpu gpus i": "train.device device",
    "seed random_seed": "train.seed seed",
    "patience early_stopping": "train.patience",
    "workers num_workers": "data.workers workers threads",
    "amp precision": "train.precision",
    "half fp16": "train.precision=float16",
    "rect": "train.rect evaluate.rect rect",
    "noval": "evaluate.every=0",
    "sync_batchnorm": "train.sync_bn",
    "exp project save_dir output output_dir": "run_dir out",
    "name": "name out",
    # the optimiser
    "lr lr0 learning_rate base_lr": "optim.lr",
    "lrf": "optim.final_lr_ratio",
    "optimizer optimiser": "optim=sgd",
    "decay wd": "optim.decay optim.weight_decay",
    "cos_lr": "optim.decay=cosine",
    "linear_lr": "optim.decay=linear",
    "warmup_epochs": "optim.burn_in_epochs",
    "burn_in warmup_steps warmup_iters": "optim.burn_in_min_steps",
    "warmup_momentum": "optim.burn_in_momentum",
    "warmup_bias_lr": "optim.burn_in_bias_lr",
    "max_norm grad_clip clip_grad clip_grad_norm gradient_clip_val": "optim.clip_norm",
    # the network, what it learns from and what it saw before
    "weights pretrained checkpoint model_path": "ckpt model.weights weights",
    "cfg config": "model.cfg",
    "source images input": "source images",
    "nc": "num_classes",
    "single_cls": "data.single_class",
    "cache_images": "data.cache",
    "dataset": "data",
    # the loss
    "box_gain": "loss.box",
    "cls cls_gain": "loss.classification",
    "obj obj_gain": "loss.objectness",
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
    "angle rotation": "augment.degrees",
    "close_mosaic": "augment.close_mosaic_epochs",
    # detections
    "conf conf_thres conf_threshold score_thr score_threshold thresh threshold":
        "evaluate.confidence confidence",
    "iou iou_thres iou_threshold nms_thres nms_threshold nms":
        "evaluate.nms_iou nms_iou loss.iou",
    "max_det": "evaluate.max_detections max_detections",
    "nosave": "draw=false",
    "view_img": "show",
    "save_crop": "save_crops crops",
    "include": "format",
    "dynamic": "dynamic_batch",
}  # fmt: skip
KEYS = {name: keys.split() for names, keys in _TABLE.items() for name in names.split()}

# Values of other programs, by the last word of the key: "*" stands for a number, or several.
VALUES = {
    "device": {"*": "cuda", "gpu": "cuda", "cuda:*": "cuda"},
    "precision": {
        "true": "auto", "false": "float32", "fp16": "float16", "half": "float16", "16": "float16", "bf16": "bfloat16",
        "fp32": "float32", "32": "float32", "fp64": "float64",
    },
    "cache": {"true": "ram", "false": "none"},
    "resume": {"true": "auto"},
    "multi_scale": {"true": "[0.67,1.5]", "false": "[1.0,1.0]"},
    "format": {"pt2": "torch", "torchscript": "torch"},
}  # fmt: skip

# Words of other programs' command lines that say what train.py, eval.py, ... say by their name.
VERBS = frozenset(("yolo", "detect", "train", "val", "predict", "export", "detector", "test", "map", "mode"))
