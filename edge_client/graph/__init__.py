"""What ONNX graphs say: fields, axes, and whether a graph may be opened."""
