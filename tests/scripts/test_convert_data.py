"""Typical CSV files, from the command line to the boxes that a training reads."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from pycocotools.coco import COCO

from conf.entry import compose
from conf.programs import run
from conf.schema import TrainConfig
from conf.schema_tools import ConvertDataConfig
from data import open_annotations
from scripts.convert_data import convert

RECT = '"{""name"":""rect"",""x"":10,""y"":20,""width"":30,""height"":15}"'
POLYGON = '"{""name"":""polygon"",""all_points_x"":[10,40,25],""all_points_y"":[20,22,35]}"'
VIA = "filename,file_size,file_attributes,region_count,region_id,region_shape_attributes,region_attributes\n"
OPEN_IMAGES = (
    "ImageID,Source,LabelName,Confidence,XMin,XMax,YMin,YMax,IsOccluded,IsTruncated,IsGroupOf,IsDepiction,IsInside\n"
)
# In each, a.jpg (80 x 60) has a cat at x 10..40, y 20..35; sub/b.png (50 x 40) a dog at x 5..25,
# y 4..14.
FILES = {
    "torchvision": "path,x1,y1,x2,y2,class\na.jpg,10,20,40,35,cat\nsub/b.png,5,4,25,14,dog\n",
    "keras-retinanet": "/home/me/a.jpg,10,20,40,35,cat\nb.png,5,4,25,14,dog\n",
    "keras-retinanet, first image empty": "sub/c.png,,,,,\na.jpg,10,20,40,35,cat\nb.png,5,4,25,14,dog\n",
    "tensorflow": "filename,width,height,class,xmin,ymin,xmax,ymax\na.jpg,80,60,cat,10,20,40,35\n"
    "b.png,50,40,dog,5,4,25,14\n",
    "fractions": "filename,class,xmin,ymin,xmax,ymax\na.jpg,cat,.125,0.3333333333333333,.5,0.5833333333333334\n"
    "b.png,dog,.1,.1,.5,.35\n",
    "open images": OPEN_IMAGES + "a,xclick,cat,1,.125,.5,0.3333333333333333,0.5833333333333334,0,0,0,0,0\n"
    "b,xclick,dog,1,.1,.5,.1,.35,0,0,0,0,0\n",
    "windows": "\ufefffilename;class;xmin;ymin;xmax;ymax\r\nC:\\data\\a.jpg;cat;10;20;40;35\r\n"
    "sub\\b.png;dog;5;4;25;14\r\n",
    "tabs": "image\tlabel\tx_min\ty_min\tx_max\ty_max\na\tcat\t10\t20\t40\t35\nb\tdog\t5\t4\t25\t14\n",
    "x, y, width, height": "image_name,label,x,y,width,height\na.jpg,cat,10,20,30,15\nb.png,dog,5,4,20,10\n",
    "makesense": "label_name,bbox_x,bbox_y,bbox_width,bbox_height,image_name,image_width,image_height\n"
    "cat,10,20,30,15,a.jpg,80,60\ndog,5,4,20,10,b.png,50,40\n",
    "gtsrb": "Width;Height;Roi.X1;Roi.Y1;Roi.X2;Roi.Y2;ClassId;Path\n"
    "80;60;10;20;40;35;cat;a.jpg\n50;40;5;4;25;14;dog;b.png\n",
    "kaggle": 'image_id,width,height,bbox,source,class\na,80,60,"[10.0, 20.0, 30.0, 15.0]",x,cat\n'
    'b,50,40,"[5.0, 4.0, 20.0, 10.0]",x,dog\n',
    "via": VIA + f'a.jpg,1,"{{}}",1,0,{RECT},"{{""kind"":""cat""}}"\n'
    f'b.png,1,"{{}}",1,0,{RECT.replace("10", "5").replace("20", "4").replace("30", "20").replace("15", "10")},'
    '"{""kind"":{""dog"":true}}"\n',
    "via polygon": VIA.replace("filename", "#filename") + f'a.jpg,1,"{{}}",1,0,{POLYGON},"{{""kind"":""cat""}}"\n'
    'b.png,1,"{}",1,0,"{""name"":""ellipse"",""cx"":15,""cy"":9,""rx"":10,""ry"":5}","{""kind"":""dog""}"\n',
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my pictures" / "sub").mkdir(parents=True)
    for name, size in (("a.jpg", (80, 60)), ("sub/b.png", (50, 40)), ("sub/c.png", (30, 30))):
        Image.new("RGB", size).save(tmp_path / "my pictures" / name)
    return tmp_path


def converted(folder: Path, text: str, *overrides: str) -> COCO:
    (folder / "in.csv").write_text(text, encoding="utf-8")
    convert(
        compose(
            "convert_data", ConvertDataConfig, ["csv=in.csv", "images='my pictures'", "out=new/set.json", *overrides]
        )
    )
    return COCO("new/set.json")


@pytest.mark.parametrize("kind", FILES)
def test_usual_files(kind: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    coco = converted(folder, FILES[kind])
    expected = {"a.jpg": ("cat", [10, 20, 30, 15], (80, 60)), "sub/b.png": ("dog", [5, 4, 20, 10], (50, 40))}
    for image in coco.loadImgs(coco.getImgIds()):
        found = coco.loadAnns(coco.getAnnIds(imgIds=[image["id"]]))
        if image["file_name"] == "sub/c.png":
            assert not found and "empty" in kind
            continue
        name, box, size = expected.pop(image["file_name"])
        (record,) = found
        assert coco.loadCats([record["category_id"]])[0]["name"] == name
        assert record["bbox"] == pytest.approx(box) and (image["width"], image["height"]) == size
        assert record["area"] == pytest.approx(box[2] * box[3]) and record["iscrowd"] == 0
    assert not expected and [c["name"] for c in coco.loadCats(coco.getCatIds())] == ["cat", "dog"]
    command = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("python train.py"))
    config = compose("train", TrainConfig, [*shlex.split(command)[2:], "data.index_dir=index"]).data
    annotations = open_annotations(replace(config, split=None), "train")
    assert annotations.names == ["cat", "dog"] and sorted(annotations.boxes_xywh[:, 2].tolist()) == pytest.approx(
        [20, 30]
    )


def test_one_class_crowds_names_and_empty_images(folder: Path) -> None:
    coco = converted(folder, "image_id,width,height,bbox\na,80,60,\"[1, 2, 3, 4]\"\n", "empty=true")  # fmt: skip
    assert [image["file_name"] for image in coco.dataset["images"]] == ["a.jpg", "sub/b.png", "sub/c.png"]
    assert coco.dataset["categories"] == [{"id": 1, "name": "object"}] and coco.getAnnIds() == [2], "its row"
    Path("new/set.json").unlink()
    (folder / "labels.csv").write_text("/m/1,Dog\n/m/7,Bird\n/m/2,Cat\n")
    text = OPEN_IMAGES + "a,x,/m/2,1,.1,.2,.3,.4,0,0,1,0,0\na,x,/m/1,1,.1,.2,.3,.4,0,0,0,0,0\n"
    coco = converted(folder, text, "names=labels.csv")
    assert coco.dataset["categories"] == [{"id": 1, "name": "Dog"}, {"id": 2, "name": "Cat"}]
    assert [(r["category_id"], r["iscrowd"]) for r in coco.dataset["annotations"]] == [(2, 1), (1, 0)]
    for names, content in (("order.csv", "dog,0\ncat,1\n"), ("obj.names", "dog\ncat\n")):
        Path("new/set.json").unlink()
        (folder / names).write_text(content)
        coco = converted(folder, FILES["torchvision"], f"names={names}")
        assert [category["name"] for category in coco.dataset["categories"]] == ["dog", "cat"]
    Path("new/set.json").unlink()
    coco = converted(folder, 'image,bbox,class\na,"10 20 40 35",10\nb,5 4 25 14,9\n', "corners_in_bbox=true")
    assert coco.dataset["annotations"][0]["bbox"] == [10, 20, 30, 15]
    assert [category["name"] for category in coco.dataset["categories"]] == ["9", "10"], "numbers by their value"


HEAD = "filename,width,height,class,xmin,ymin,xmax,ymax\na.jpg,80,60,cat,10,20,40,35\n"
WRONG = {
    HEAD + "a.jpg,80,60,cat,10,20,forty,35\n": r"in\.csv:3 has the box '10,20,forty,35' instead of four numbers",
    HEAD + "a.jpg,80,60,cat,10,20,,35\n": r"in\.csv:3 has the box '10,20,,35' instead of four numbers",
    HEAD + "a.jpg,80,60,cat,10,20\n": r"in\.csv:3 has 6 columns instead of 8",
    HEAD + "a.jpg,80,60,,10,20,40,35\n": r"in\.csv:3 has a box and no class",
    HEAD + ",80,60,cat,10,20,40,35\n": r"in\.csv:3 names no image",
    HEAD + "\n\nA.JPG,80,60,cat,10,20,40,35\n": r"in\.csv:5 names A\.JPG, which is not in .*, but there is a\.jpg",
    HEAD + "x.jpg,80,60,cat,10,20,40,35\n": r"in\.csv:3 names x\.jpg, which is not in .*\. fix: images=",
    HEAD + "a.jpg,80,60,cat,40,20,10,35\n": r"in\.csv:3 has a box without area, -30 x 15",
    HEAD + "a.jpg,80,60,cat,10,nan,40,35\n": r"in\.csv:3 has a box that is not finite",
    HEAD + "a.jpg,80,60,cat,100,20,140,35\n": r"in\.csv:3 has a box outside a\.jpg of 80 x 60 pixels",
    HEAD + "b.png,80,60,cat,10,20,40,35\n": r"in\.csv:3 gives sub/b\.png 80 x 60 pixels, but the file has 50 x 40",
    HEAD + "a.jpg,wide,60,cat,10,20,40,35\n": r"in\.csv:3 has an image of 'wide' x '60' pixels",
    "filename,class\na.jpg,cat\n": r"in\.csv has no column of the box among",
    "class,x1,y1,x2,y2\ncat,1,2,3,4\n": r"in\.csv has no column of the image among",
    "no columns\n": r"in\.csv has no columns in its first line",
    "": r"in\.csv has no columns in its first line",
    'image,bbox\na,"[1, 2, 3]"\n': r"in\.csv:2 has the box '1,2,3' instead of four numbers",
    VIA + 'a.jpg,1,"{}",1,0,"{",""\n': r"in\.csv:2 holds '{' instead of JSON",
    VIA + 'a.jpg,1,"{}",1,0,"{""name"":""point"",""cx"":1,""cy"":2}","{}"\n': r"in\.csv:2 has the region .* no box",
    VIA + 'a.jpg,1,"{}",1,0,"[1]","{}"\n': r"in\.csv:2 holds '\[1\]' instead of a JSON object",
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_rows_are_named(
    text: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:

    (folder / "in.csv").write_text(text)
    monkeypatch.setattr(sys, "argv", ["convert_data", "csv=in.csv", "images='my pictures'", "out=set.json"])
    with pytest.raises(SystemExit) as ended:
        run("convert_data")
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert ended.value.code == 2 and re.search(WRONG[text], line) and "fix: " in line, line
    assert not (folder / "set.json").exists()


def test_what_is_not_there_or_in_the_way(folder: Path) -> None:
    for overrides, said in (
        (["images=nowhere"], r"images=nowhere is not a folder"),
        (["csv=nowhere.csv"], r"csv=nowhere\.csv cannot be read"),
        (["names=nowhere.names"], r"nowhere\.names cannot be read"),
        (["out=in.csv"], r"out=in\.csv exists"),
    ):
        with pytest.raises(ValueError, match=said):
            converted(folder, FILES["torchvision"], *overrides)
    (folder / "my pictures" / "a.png").write_bytes((folder / "my pictures" / "sub" / "b.png").read_bytes())
    with pytest.raises(ValueError, match=r"in\.csv:2 names a, which may be a\.jpg and a\.png\. fix: give its folder"):
        converted(folder, "image,label,x1,y1,x2,y2\na,cat,1,2,3,4\n")
