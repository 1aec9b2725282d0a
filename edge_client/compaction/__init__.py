"""From a device's mask to its own small model: which graph edits, which proof, which file.

Needs onnx and onnxruntime, which the rounds do not: imported only at the end of a federation.
"""
