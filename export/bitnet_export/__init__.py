"""bitnet_export: one packed file from a checkpoint, and back to numpy.

`import bitnet_export` needs numpy alone; torch and safetensors are imported by the functions
that read checkpoints.
"""

from .pack import export_checkpoint
from .random_model import random_model
from .reader import PackedFile, PackedFormatError
from .records import Key, Record, expected_tensors
from .repack import Repacked, repack
from .report import Report
from .verify import VerificationError, verify
from .writer import Encoded, write_packed

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
    "export_checkpoint",
    "random_model",
    "repack",
    "verify",
    "write_packed",
]
