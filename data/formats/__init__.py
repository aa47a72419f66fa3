"""How are annotations written (COCO, Pascal VOC, YOLO, CSV), and how are sets drawn or fetched?"""
