"""How is a network exported to ONNX and torch.export?"""
