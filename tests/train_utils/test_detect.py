"""Detection as on a GPU: what overlaps, what the host waits for, what fusing changes."""

import pytest
import torch
from torch import Tensor

from data import Batch
from models import Darknet, Postprocess, for_detection, zoo_cfg
from tests.models.small_network import small
from tests.test_host_reads import HostReads
from train_utils.inference.detect import detect_batches

CUDA = torch.device("cuda")


def test_a_fused_network_in_channels_last_finds_the_same_and_waits_for_nothing() -> None:
    torch.manual_seed(0)
    model = small(80).eval()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_var.uniform_(0.5, 2)
    assert for_detection(model, torch.device("cpu")) is model
    on_cuda = for_detection(model, CUDA)  # the model decides where it is
    fused, before = (
        not any(isinstance(module, torch.nn.BatchNorm2d) for module in network.modules())
        for network in (on_cuda, model)
    )
    assert fused and not before, "a copy is fused, the model itself stays"
    assert on_cuda.layers[0].conv.weight.is_contiguous(memory_format=torch.channels_last)
    images = torch.rand(2, 3, 64, 64)
    with torch.inference_mode(), HostReads() as forward:
        raw_maps = on_cuda(images)
    assert not forward.reads and not forward.copies, forward
    assert forward.launches.total() <= 24, forward
    for ours, theirs in zip(raw_maps, model(images), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_gpu_finds_what_a_cpu_finds(precision: str) -> None:
    """Scores by rank, because rounding may swap neighbours; the forward pass has no hidden wait."""
    torch.manual_seed(0)
    model = Darknet(zoo_cfg("yolov3-tiny"), 80, width=0.25).eval()
    on_cuda = for_detection(model.cuda(), CUDA)
    postprocess = Postprocess(model.heads, confidence=0.001, nms_iou=0.6, max_detections=100, multi_label=True)
    images = torch.randint(0, 256, (3, 4, 3, 128, 128), dtype=torch.uint8)

    def computed(x: Tensor) -> list[Tensor]:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return on_cuda(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    batches = [Batch(one, torch.zeros(0, 6), torch.arange(4)) for one in images]
    on_gpu = detect_batches(computed, batches, postprocess, CUDA, precision=precision)
    found = [rows for _, batch in on_gpu for rows in batch]
    on_cpu = detect_batches(model.cpu(), batches, postprocess, torch.device("cpu"))
    expected = [rows for _, batch in on_cpu for rows in batch]
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.allclose(ours[:, 4], theirs[:, 4], atol=1e-4 if precision == "float32" else 2e-2)
