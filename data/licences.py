"""Under which licence public data sets are, where the project knows it. Imports no torch."""

BCCD = "MIT (github.com/Shenggan/BCCD_Dataset)"
DRAWN = "drawn by this program, Apache-2.0"
LICENCES = {  # by data.name
    "coco": "annotations CC BY 4.0; the pictures have licences of their own (cocodataset.org, terms of use)",
    "bccd": BCCD,
    "bccd_voc": BCCD,
    "shapes": DRAWN,
    "signs": DRAWN,
}
