"""How to serve: the options of a server, and their defaults. Needs only the standard library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Options:
    """How to serve."""

    host: str = "127.0.0.1"
    port: int = 8080  # 0: any that is free
    unix: Path | None = None  # a socket in place of host and port
    api_keys: Sequence[str] = ()
    allow_hosts: Sequence[str] = ()
    cors_origins: Sequence[str] = ()
    parallel: int = 16  # answers of a model that are computed together
    queue: int = 64  # requests that may wait
    grace: float = 30  # seconds that answers get to end after SIGTERM
    max_body: int = 0  # bytes; 0: as the models need
    max_cache: int = 0  # bytes of the texts of all models; 0: what is free
    models_memory: int = 0  # bytes of the files of models that are loaded; 0: three quarters of what is free
    cache_dir: Path | None = None  # for texts that are kept while a model is not loaded
    cache_dir_size: int = 1_000_000_000  # bytes
    log_requests: bool = False  # a line for each answer on standard error
    reuse: bool = True  # computed beginnings of texts; never between API keys
