"""Files of models, ONNX and PyTorch's, into Relax; what is refused of them, and why."""
