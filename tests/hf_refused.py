"""Modified Hugging Face folders that have to be refused."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file, save_file

from bitnet_export.convert.incoming import open_source, pack_source
from bitnet_export.foreign.source import SourceError


def refused(folder, message, error=SourceError):
    """Assert that converting raises this error, and leaves nothing behind."""
    before = sorted(folder.parent.iterdir())
    with pytest.raises(error, match=message), open_source(folder) as source:
        pack_source(source, folder.parent / "out.bitnet")
    assert sorted(folder.parent.iterdir()) == before


def edit(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
