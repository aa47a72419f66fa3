"""How good are the detections: COCO's figures, operating points, result files, and the time they take?"""
