"""bitnet_export: one packed file from a checkpoint, and back to numpy.

`import bitnet_export` needs numpy alone; torch and safetensors are imported by the functions
that read checkpoints.
"""

from .checkpoint.adapter import export_adapter
from .checkpoint.findings import Report
from .checkpoint.pack import export_checkpoint
from .checkpoint.repack import Repacked, repack
from .checkpoint.verify import VerificationError, verify
from .packed.random_model import random_adapter, random_model
from .packed.reader import PackedFile, PackedFormatError
from .packed.records import Key, Record, expected_tensors
from .packed.writer import Encoded, write_packed

__all__ = [
    "Encoded",
    "Key",
    "PackedFile",
    "PackedFormatError",
    "Record",
    "Repacked",
    "Report",
    "VerificationError",
    "expected_tensors",
    "export_adapter",
    "export_checkpoint",
    "random_adapter",
    "random_model",
    "repack",
    "verify",
    "write_packed",
]
