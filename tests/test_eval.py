"""eval.py: protocols, and metrics that others measured with the same weights."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from conf import ConfigError
from conf.cli.from_checkpoint import complete_from_checkpoint
from conf.cli.program import options_of
from conf.compose import compose
from conf.schema import EvalConfig
from data import ShapesConfig, ensure_shapes
from eval import evaluate
from tests.small_run import SHAPES, random_weights, rows, small_run
from tests.train_utils.coco_sets import plain_pycocotools
from train import train
from train_utils.coco_eval import ABSENT, METRICS, OPERATING_POINT, PER_CLASS
from train_utils.inference import open_checkpoint
from train_utils.report.plots import PLOTS
from train_utils.train_state import LOSS_NAMES


@pytest.mark.release
def test_darknet_weights_score_what_opencv_scores_with_them(shared_dir: Path, tmp_path: Path) -> None:
    """By pycocotools on OpenCV's detections (shared_dir/darknet/README.md)."""
    network = shared_dir / "darknet" / "yolo-fastest-1.1"
    options = [
        f"model.cfg={network / 'yolo-fastest-1.1.cfg'}", "evaluate=darknet", "evaluate.image_size=320",
        f"model.weights={network / 'yolo-fastest-1.1.weights'}", "data=coco", "data.val.images=images/val2017",
        f"data.root={shared_dir / 'data' / 'coco128'}", f"data.index_dir={tmp_path}", "data.workers=0", "device=cpu",
    ]  # fmt: skip
    metrics = evaluate(options)
    assert metrics["AP"] == pytest.approx(0.161054, abs=0.001)
    assert metrics["AP50"] == pytest.approx(0.369500, abs=0.001)


def test_a_results_file_of_another_system_scores_as_pycocotools_scores_it(
    shared_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    coco = shared_dir / "data" / "coco128"
    results = shared_dir / "darknet" / "yolo-fastest-1.1" / "opencv_coco128_val_results.json"
    data = [
        "data=coco", f"data.root={coco}", f"data.index_dir={tmp_path}", "data.val.images=images/val2017", "device=cpu",
        f"out={tmp_path / 'out'}",
    ]  # fmt: skip
    expected = plain_pycocotools(coco / "annotations" / "instances_val2017.json", results).stats.tolist()
    assert round(expected[0], 6) == 0.161054 and round(expected[1], 4) == 0.3695
    metrics = evaluate([*data, f"detections={results}"])
    assert list(metrics.values()) == expected
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"metrics.json", "per_class.json"}
    monkeypatch.setitem(sys.modules, "hotcoco", None)  # without it pycocotools writes the same bytes
    evaluate([*data, f"detections={results}", f"out={tmp_path / 'without'}"])
    assert "\nscored by pycocotools 2." in capsys.readouterr().out
    for name in ("metrics.json", "per_class.json"):
        assert (tmp_path / "without" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    for wrong in ([f"ckpt={results}"], ["model=yolov3", "model.weights=a.weights"]):
        with pytest.raises(ConfigError, match=r"detections= are scored as they are. fix: leave out ckpt and model"):
            compose("eval", EvalConfig, [*data, f"detections={results}", *wrong], complete_from_checkpoint)
    with pytest.raises(ConfigError, match=r"^evaluate\.confidence has no effect here: .* fix: leave evaluate"):
        evaluate([*data, f"detections={results}", "evaluate.confidence=0.9"])
    with pytest.raises(ConfigError, match=r"scored against data\. fix: add data="):
        compose("eval", EvalConfig, [f"detections={results}"], complete_from_checkpoint)


@pytest.mark.release
def test_a_results_file_is_scored_as_of_a_single_class(shared_dir: Path, tmp_path: Path) -> None:
    """The oracle does without classes, too."""
    coco, name = shared_dir / "data" / "coco128", "opencv_coco128_val_results.json"
    results = shared_dir / "darknet" / "yolo-fastest-1.1" / name
    oracle = plain_pycocotools(coco / "annotations" / "instances_val2017.json", results)
    oracle.params.useCats = 0
    for step in (oracle.evaluate, oracle.accumulate, oracle.summarize):
        step()
    places = [f"data.root={coco}", f"data.index_dir={tmp_path}", "data.val.images=images/val2017"]
    metrics = evaluate(["data=coco", *places, "device=cpu", f"detections={results}", "data.single_class=true"])
    assert list(metrics.values()) == oracle.stats.tolist()


def of_run(root: Path, size: int) -> list[str]:
    """Options of eval.py for the run ``root/run``; its checkpoint names the drawn set."""
    return [f"ckpt={root / 'run'}", "data.workers=0", "device=cpu", f"evaluate.image_size={size}"]


@pytest.mark.release
def test_training_scores_as_the_evaluation_does_with_stretched_images(tmp_path: Path) -> None:
    options = ["train.batch_size=8", "train.epochs=1", "evaluate=darknet", "data.exif=ignore"]
    metrics = train(small_run(tmp_path / "shapes", tmp_path / "run", *options))
    ckpt = f"ckpt={tmp_path / 'run'}"
    assert metrics == evaluate([ckpt, "device=cpu"]) != evaluate([ckpt, "device=cpu", "evaluate=coco"])
    alone = options_of("eval", [ckpt, "evaluate.confidence=0.3"]).evaluate
    assert (alone.confidence, alone.resize.value, alone.nms_iou, alone.image_size) == (0.3, "stretch", 0.45, 64)
    assert Path(options_of("eval", [ckpt]).data.index_dir) == Path("datasets/.index").absolute(), "not the run's"
    exported = options_of("export", [ckpt]).evaluate
    predicting = [options_of("predict", [ckpt, "source=a", *more]) for more in ([], ["resize=letterbox"])]
    assert [one.resize.value for one in (exported, *predicting)] == ["stretch", "stretch", "letterbox"]
    assert [(one.exif.value, one.rect) for one in predicting] == [("ignore", False)] * 2


@pytest.mark.release
@pytest.mark.parametrize(
    ("loss", "network", "frozen"),
    [("yolov3", "yolov3-tiny", 22), ("darknet", "yolov3-tiny", 22), ("yolox", "yolov3-tiny-decoupled", 35)],
)
def test_the_validation_loss_is_the_training_loss_of_the_same_images_and_weights(
    loss: str, network: str, frozen: int, tmp_path: Path
) -> None:
    """Of one step on all images, with frozen statistics and a rate of next to nothing.

    The objectness term is a mean over the cells, so batches that divide the images change nothing.
    """
    ensure_shapes(tmp_path / "shapes", SHAPES)
    (labels,) = (tmp_path / "shapes").rglob("instances_train.json")
    shutil.copy(labels, labels.with_name("instances_val.json"))
    same = [
        "data.val.images=train", "augment=none", "optim.lr=1e-12", "optim.warmup_epochs=0", f"model={network}",
        "train.batch_size=18", "train.epochs=1", "train.precision=float32", "evaluate.every=1", f"loss={loss}",
        "model.box_bins=0", random_weights(tmp_path / "a.pt", network), f"model.freeze={frozen}",
    ]  # fmt: skip
    of_parts = {"yolov3": ["loss_objectness"], "darknet": LOSS_NAMES, "yolox": []}[loss]
    for batch_size, names in ((18, LOSS_NAMES), (5, of_parts)):
        run = tmp_path / f"run{batch_size}"
        train(small_run(tmp_path / "shapes", run, *same, f"evaluate.batch_size={batch_size}"))
        (row,) = rows(run)
        assert float(row["loss"]) > 1 and (float(row["loss_l1"]) > 0) == (loss == "yolox")
        for name in names:
            assert float(row[f"val_{name}"]) == pytest.approx(float(row[name]), rel=1e-5), (name, batch_size)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("trained")
    shapes = ShapesConfig(train_images=48, val_images=11, image_size=96)
    options = ["train.image_size=96", "train.batch_size=16", "train.epochs=20", "augment=none", "optim.lr=0.02"]
    train(small_run(root / "shapes", root / "run", *options, shapes=shapes))
    return root


@pytest.mark.release
def test_what_out_holds_and_pycocotools_makes_the_same_metrics_of_it(trained, tmp_path, capsys) -> None:
    metrics = evaluate([*of_run(trained, 96), f"ckpt={trained}", "plots=true", f"out={tmp_path}"])  # its newest run
    said = capsys.readouterr().out
    assert f"{trained / 'run'}: epoch 20, " in said
    kept = {"metrics.json", "per_class.json", "detections.json", "images.json", "best_detections.npz", "plots"}
    assert {path.name for path in tmp_path.iterdir()} == kept
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {*PLOTS, "mistakes.csv", "mistakes.html"} - {
        "curves.png"
    }
    assert f"plots: {tmp_path / 'plots'}" in said
    written = json.loads((tmp_path / "metrics.json").read_text())
    about = written.pop("about")
    assert written == metrics and list(metrics) == list(METRICS)
    assert (about["scored"], about["split"], about["evaluate"]["nms_iou"]) == (str(trained / "run"), "val", 0.6)
    assert metrics["AP50"] > 0.02, "too little is found to test with"
    truth = next((trained / "shapes").rglob("*val*.json"))
    evaluation = plain_pycocotools(truth, tmp_path / "detections.json")
    assert evaluation.stats.tolist() == list(metrics.values())  # no tolerance
    per_class = json.loads((tmp_path / "per_class.json").read_text())
    for index, name in enumerate(per_class):
        of_class = evaluation.eval["precision"][:, :, index, 0, 2]
        assert per_class[name]["AP"] == of_class[of_class > -1].mean()
        assert list(per_class[name]) == [*PER_CLASS, *OPERATING_POINT, "images", "boxes"]
    assert any(row["f1"] > 0 for row in per_class.values())
    assert all(row["f1"] == ABSENT or row["threshold"] > 0.001 for row in per_class.values())
    assert all(name in said for name in (*per_class, *METRICS, "all", "P", "R", "F1"))


@pytest.mark.release
def test_a_network_is_scored_on_some_of_its_classes(trained: Path, tmp_path: Path, capsys) -> None:
    for name, more in (("all", []), ("some", ["data.classes=[star,0]"])):
        evaluate([*of_run(trained, 96), *more, "evaluate.max_detections=10000", f"out={tmp_path / name}"])
        assert ("validation set is another one than in the training ({'" in capsys.readouterr().out) == bool(more)
    every, some = (json.loads((tmp_path / name / "per_class.json").read_text()) for name in ("all", "some"))
    assert list(some) == ["circle", "star"] and all(some[name]["AP"] == every[name]["AP"] for name in some)
    assert max(row["AP"] for row in some.values()) > 0
    rows = {name: json.loads((tmp_path / name / "detections.json").read_text()) for name in ("all", "some")}
    assert rows["some"] == [row for row in rows["all"] if row["category_id"] in (1, 4)]


@pytest.mark.release
def test_a_run_on_some_classes_is_scored_and_resumed_on_them(tmp_path: Path) -> None:
    options = ["train.batch_size=8", "data.classes=[star,0]", "train.epochs=1", "evaluate=coco"]
    metrics = train(small_run(tmp_path / "shapes", tmp_path / "run", *options))
    for _ in range(2):  # into the folder of the run, again and again
        assert evaluate([*of_run(tmp_path, 64), f"out={tmp_path / 'run'}"]) == metrics
    assert list(json.loads((tmp_path / "run" / "per_class.json").read_text())) == ["circle", "star"]
    assert {row["category_id"] for row in json.loads((tmp_path / "run" / "detections.json").read_text())} == {1, 4}
    (annotations,) = (tmp_path / "shapes").glob("*/annotations/instances_train.json")
    labels = [row["category_id"] for row in json.loads(annotations.read_text())["annotations"]]
    of_train = evaluate([*of_run(tmp_path, 64), "split=train"]).per_class
    assert [of_train[name]["boxes"] for name in ("circle", "star")] == [labels.count(1), labels.count(4)]
    last = f"ckpt={tmp_path}/run/checkpoints/last.pt"
    for other in ("evaluate.confidence=0.2", "split=test", "data.classes=[star]", last):
        key = other.partition("=")[0]
        with pytest.raises(
            ConfigError, match=rf"run holds a run, .* \({key} would differ\)\. fix: out=<other folder>$"
        ):
            evaluate([*of_run(tmp_path, 64), other, f"out={tmp_path / 'run'}"])
    log = (tmp_path / "run" / "train.log").read_text()
    assert "data.classes" in log and "boxes that data.classes leaves out" in log
    with pytest.raises(ConfigError, match=r"knows 2 classes \(circle, star\).* fix: data\.classes="):
        evaluate([*of_run(tmp_path, 64), "data.classes=[circle,cross]"])
    with pytest.raises(ConfigError, match=r"data\.classes: \['star', 0\] -> None"):
        train([f"resume={tmp_path / 'run'}", "data.classes=null"])
    train([f"resume={tmp_path / 'run'}", "train.epochs=2"])
    opened = open_checkpoint.open_checkpoint(str(tmp_path / "run"))
    assert (opened.names, opened.category_ids) == (["circle", "star"], [1, 4])
