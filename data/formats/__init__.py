"""How are annotations written: COCO, Pascal VOC, YOLO, drawn shapes, and where are they downloaded?"""
