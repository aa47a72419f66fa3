"""The layers and options of Darknet .cfg files that this project knows.

Two kinds of options are told apart: those that shape the network, which the builder in graph.py reads, and those
that only steer Darknet's own training or display, which change nothing here (training is set by this project's
configuration). An option in neither list may change what the network computes, so it is refused, never skipped.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class SectionKeys:
    """Option names of one kind of section: those read, and those known to have no effect here."""

    used: frozenset[str]
    ignored: frozenset[str] = frozenset()

    @property
    def known(self) -> frozenset[str]:
        return self.used | self.ignored


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


NET = "net"

SECTION_KEYS = {
    NET: SectionKeys(
        used=_names("width height channels"),
        ignored=_names(
            # optimiser and schedule
            "batch subdivisions momentum decay learning_rate learning_rate_min burn_in max_batches policy power step"
            " scale steps scales gamma adam B1 B2 eps loss_scale ema_alpha batches_per_cycle batches_cycle_mult"
            " dynamic_minibatch resize_step label_smooth_eps try_fix_nan"
            # augmentation
            " angle aspect saturation exposure hue flip blur gaussian_noise mixup cutmix mosaic mosaic_bound letter_box"
            " max_crop min_crop adversarial_lr attention"
            # bookkeeping and display
            " optimized_memory workspace_size_limit_MB show_receptive_field max_chart_loss benchmark_layers"
            " weights_reject_freq equidistant_point num_sigmas_reject_badlabels badlabels_rejection_percentage"
            " badlabels_reject_threshold"
        ),
    ),
    "convolutional": SectionKeys(
        used=_names("filters size stride pad padding groups batch_normalize activation"),
        ignored=_names("stopbackward burnin_update train_only_bn grad_centr"),
    ),
    "shortcut": SectionKeys(used=_names("from activation")),
    "route": SectionKeys(used=_names("layers groups group_id"), ignored=_names("stopbackward")),
    "upsample": SectionKeys(used=_names("stride")),
    "maxpool": SectionKeys(used=_names("size stride padding")),
    "yolo": SectionKeys(
        used=_names("mask anchors num classes scale_x_y new_coords"),
        ignored=_names(
            "jitter resize random ignore_thresh truth_thresh iou_thresh iou_thresh_kind iou_loss iou_normalizer"
            " cls_normalizer obj_normalizer delta_normalizer nms_kind beta_nms objectness_smooth label_smooth_eps"
            " max_delta focal_loss counters_per_class max map show_details thresh"
        ),
    ),
}

# Darknet reads these section names as the same thing.
SECTION_ALIASES = {"network": NET, "conv": "convolutional", "max": "maxpool"}
