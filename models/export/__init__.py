"""How a network is exported to ONNX and torch.export."""
