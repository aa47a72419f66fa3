"""How does a network leave this project: ONNX and torch.export?"""
