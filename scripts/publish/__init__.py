"""Write a trained network to a folder that is ready for a model hub.

    python -m scripts.publish ckpt=runs/coco/<date_time> out=my-detector license=apache-2.0
    python predict.py ckpt=my-detector source=pictures

The folder holds the weights (safetensors), the network (.cfg), class names, settings, a model card
with the figures of the run, and proof.json if the run has one. `Detector("my-detector")` and
`ckpt=my-detector` open it. Nothing is uploaded: the command for that is printed.
"""
