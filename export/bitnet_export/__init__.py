"""bitnet_export: one packed file from a checkpoint, and back to numpy.

`import bitnet_export` needs numpy alone; torch and safetensors are imported by the functions
that read checkpoints.
"""

from .checkpoint.adapter import export_adapter
from .checkpoint.pack import export_checkpoint
from .checkpoint.repack import repack
from .checkpoint.verify import VerificationError, verify
from .packed.random_model import random_adapter, random_model
from .packed.reader import PackedFile, PackedFormatError

__all__ = [
    "PackedFile",
    "PackedFormatError",
    "VerificationError",
    "export_adapter",
    "export_checkpoint",
    "random_adapter",
    "random_model",
    "repack",
    "verify",
]
