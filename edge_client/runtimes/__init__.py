"""The two engines that run files, each opened in one place: `onnx` (ONNX Runtime) and `executorch`.

Training, measuring, artifacts and the export all open their models here, so that each file is checked alike.
"""
