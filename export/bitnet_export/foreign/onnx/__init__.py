"""A packed file as an ONNX model for onnxruntime and what is built on it (`write_onnx`).

Needs onnx and numpy; onnxruntime only to check what was written.
"""

from .matrices import FORMS
from .report import OnnxReport
from .write import write_onnx

__all__ = ["FORMS", "OnnxReport", "write_onnx"]
