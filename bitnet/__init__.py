"""bitnet: train ternary (BitNet b1.58) transformers. docs/train-python.md shows how.

Names are imported on first use, because the command line reads options without torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bitnet.bitlinear import BitLinear as BitLinear
    from bitnet.config import ModelConfig as ModelConfig
    from bitnet.model.transformer import Transformer as Transformer
    from bitnet.presets import PRESETS as PRESETS
    from bitnet.setup.python import fit as fit
    from bitnet.setup.python import load as load
    from bitnet.setup.python import save as save

__all__ = ["PRESETS", "BitLinear", "ModelConfig", "Transformer", "fit", "load", "save"]


def __getattr__(name: str) -> Any:
    home: Any
    try:
        if name == "BitLinear":
            import bitnet.bitlinear as home
        elif name == "ModelConfig":
            import bitnet.config as home
        elif name == "PRESETS":
            import bitnet.presets as home
        elif name == "Transformer":
            import bitnet.model.transformer as home
        elif name in __all__:
            import bitnet.setup.python as home
        else:
            raise AttributeError(f"module 'bitnet' has no attribute {name!r}, expected one of {', '.join(__all__)}")
    except ModuleNotFoundError as error:
        said = f"{error}; training needs: pip install 'bitnet-edge[train]'"
        raise ModuleNotFoundError(said, name=error.name) from None
    return getattr(home, name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
