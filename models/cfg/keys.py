"""The layers and options of Darknet .cfg files that this project knows.

There are three kinds of options. Some shape the network; sections.py reads them. Some only steer
Darknet's own training or display and have no effect here. Some are not supported and must be 0.
Any other option might change what the network computes, so it is refused, never skipped.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class SectionKeys:
    """Option names of one kind of section: read, without effect here, and not supported."""

    used: frozenset[str]
    ignored: frozenset[str] = frozenset()
    unbuilt: frozenset[str] = frozenset()

    @property
    def known(self) -> frozenset[str]:
        """All keys that Darknet reads in this kind of section."""
        return self.used | self.ignored | self.unbuilt


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


NET = "net"

_TRACKER = "belongs to a tracker that learns from sequences of frames, and this project detects in single images"
_OTHER_DETECTOR = "is the head of another detector. fix: use a .cfg with [yolo] sections"
_CLASSIFIER = "belongs to a classifier, and this project builds detectors. fix: use a .cfg with [yolo] sections"

# Sections of Darknet that this project does not build, with the reason.
REFUSED_SECTIONS = {
    **dict.fromkeys(("crnn", "rnn", "lstm", "conv_lstm", "gru", "contrastive", "history"), _TRACKER),
    **dict.fromkeys(("region", "detection", "gaussian_yolo", "iseg", "detect"), _OTHER_DETECTOR),
    **dict.fromkeys(("softmax", "cost", "connected", "crop", "local"), _CLASSIFIER),
}

# Every layer may have these; they steer only Darknet's training.
_TRAINING = _names("stopbackward onlyforward dont_update burnin_update train_only_bn clip learning_rate")

# These skip parts of a .weights file, so the rest would no longer line up.
_LOADING = _names("dontload dontloadscales")

_WINDOW = "size stride stride_x stride_y padding"


def layer_keys(used: str, ignored: str = "", unbuilt: str = "") -> SectionKeys:
    """The keys of a layer: its own, and those that every layer may have."""
    return SectionKeys(_names(used), _names(ignored) | _TRAINING, _names(unbuilt) | _LOADING)


SECTION_KEYS = {
    NET: SectionKeys(
        used=_names("width height channels"),
        ignored=_names(
            # optimiser and schedule
            "batch subdivisions momentum decay learning_rate learning_rate_min burn_in max_batches policy power step"
            " scale steps scales gamma adam B1 B2 eps loss_scale ema_alpha batches_per_cycle batches_cycle_mult"
            " sgdr_cycle sgdr_mult dynamic_minibatch resize_step label_smooth_eps try_fix_nan seq_scales"
            # augmentation
            " angle aspect saturation exposure hue flip blur gaussian_noise mixup cutmix mosaic mosaic_bound letter_box"
            " max_crop min_crop crop adversarial_lr attention contrastive contrastive_jit_flip contrastive_color"
            " augment_speed track time_steps sequential_subdivisions unsupervised"
            # bookkeeping and display
            " optimized_memory workspace_size_limit_MB show_receptive_field max_chart_loss benchmark_layers"
            " use_cuda_graph weights_reject_freq equidistant_point num_sigmas_reject_badlabels"
            " badlabels_rejection_percentage badlabels_reject_threshold inputs notruth random"
        ),
    ),
    "convolutional": layer_keys(
        "filters size stride stride_x stride_y pad padding dilation groups batch_normalize cbn activation share_index"
        " xnor antialiasing",
        ignored="grad_centr bin_output binary assisted_excitation angle stream wait_stream",
        unbuilt="flipped dot reverse coordconv sway rotate stretch stretch_sway",
    ),
    "shortcut": layer_keys("from activation weights_type weights_normalization"),
    "route": layer_keys("layers groups group_id", ignored="stream wait_stream"),
    "upsample": layer_keys("stride scale"),
    "maxpool": layer_keys(f"{_WINDOW} maxpool_depth out_channels antialiasing", ignored="maxpool_zero_nonmax"),
    "local_avgpool": layer_keys(_WINDOW),
    "avgpool": layer_keys(""),
    "sam": layer_keys("from activation"),
    "scale_channels": layer_keys("from activation", unbuilt="scale_wh"),
    "dropout": layer_keys("probability dropblock dropblock_size_rel dropblock_size_abs"),
    "reorg": layer_keys("stride", unbuilt="reverse"),
    "reorg3d": layer_keys("stride", unbuilt="reverse"),
    "yolo": layer_keys(
        "mask anchors num classes scale_x_y new_coords iou_loss iou_normalizer cls_normalizer obj_normalizer"
        " ignore_thresh truth_thresh iou_thresh label_smooth_eps",
        ignored="jitter resize random iou_thresh_kind uc_normalizer delta_normalizer nms_kind beta_nms beta1"
        " objectness_smooth max_delta focal_loss counters_per_class max map show_details thresh"
        " embedding_layer track_history_size sim_thresh dets_for_show dets_for_track track_ciou_norm",
    ),
}

# Darknet's synonyms for section names.
SECTION_ALIASES = {
    "network": NET,
    "conv": "convolutional",
    "max": "maxpool",
    "avg": "avgpool",
    "local_avg": "local_avgpool",
    "drop": "dropout",
    "soft": "softmax",
    "conn": "connected",
}
