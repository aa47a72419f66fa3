"""Labels in the layouts that CVAT and Label Studio import."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.sax.saxutils import quoteattr

from conf.build.network import TrainedNetwork
from train_utils.scores.result_files import ImageResult, coco_files, file_names, write_json, write_yolo

DATA = "obj_train_data"


def write_coco(folder: Path, results: Sequence[ImageResult], detector: TrainedNetwork) -> None:
    """Write annotations/instances_default.json, CVAT's "COCO 1.0"."""
    content, rows = coco_files(results, detector.names, detector.category_ids)
    annotations = [
        {**row, "id": number, "area": row["bbox"][2] * row["bbox"][3], "iscrowd": 0, "segmentation": []}
        for number, row in enumerate(rows, start=1)
    ]
    content |= {"info": {"description": detector.origin}, "licenses": [], "annotations": annotations}
    write_json(folder / "annotations" / "instances_default.json", content)


def write_yolo_set(folder: Path, results: Sequence[ImageResult], detector: TrainedNetwork) -> None:
    """Write obj.data, obj.names, train.txt and a .txt per picture, CVAT's "YOLO 1.1"."""
    labels = file_names([result.name for result in results], ".txt")
    for result in results:
        write_yolo(folder / DATA / labels[result.name], result, scores=False)
    for name, lines in {
        "obj.data": [f"classes = {len(detector.names)}", "names = obj.names", "train = train.txt"],
        "obj.names": detector.names,
        "train.txt": sorted(f"{DATA}/{result.name}" for result in results),
    }.items():
        (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def write_label_studio(
    folder: Path, results: Sequence[ImageResult], detector: TrainedNetwork, below: str, certainty: Mapping[str, float]
) -> None:
    """Write tasks.json with predictions, in the order of ``results``, and label_config.xml.

    ``below`` is the name of the pictures' folder. A task's score is the picture's certainty.
    """
    tasks = []
    for result in results:
        height, width = result.size
        whole = {"original_width": width, "original_height": height, "image_rotation": 0}
        ends: dict[str, Any] = {"type": "rectanglelabels", "from_name": "label", "to_name": "image"}
        regions = []
        for number, row in enumerate(result.detections):
            sides = zip(("x", "y", "width", "height"), row["box_xywh"].tolist(), 2 * (width, height), strict=True)
            value = {key: 100 * pixels / side for key, pixels, side in sides} | {"rotation": 0}
            region = {"id": str(number), **ends, **whole, "score": float(row["score"])}
            regions.append(region | {"value": {**value, "rectanglelabels": [detector.names[row["class"]]]}})
        prediction = {"model_version": detector.origin, "score": certainty[result.name], "result": regions}
        address = f"/data/local-files/?d={quote(f'{below}/{result.name}')}"
        tasks.append({"data": {"image": address}, "predictions": [prediction]})
    write_json(folder / "tasks.json", tasks)
    labels = "".join(f"    <Label value={quoteattr(name)}/>\n" for name in detector.names)
    view = f'  <Image name="image" value="$image"/>\n  <RectangleLabels name="label" toName="image">\n{labels}'
    text = f"<View>\n{view}  </RectangleLabels>\n</View>\n"
    (folder / "label_config.xml").write_text(text, encoding="utf-8")
