"""A packed file as an ONNX model for onnxruntime and programs built on it (`write_onnx`).

Needs onnx and numpy; onnxruntime only to check the result.
"""

from .matrices import FORMS
from .report import OnnxReport
from .write import write_onnx

__all__ = ["FORMS", "OnnxReport", "write_onnx"]
