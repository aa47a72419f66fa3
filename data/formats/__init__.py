"""How annotations are written (COCO, VOC, YOLO, CSV), and how sets are drawn or fetched."""
