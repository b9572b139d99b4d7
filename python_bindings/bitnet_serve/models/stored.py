"""The prefix cache in a folder: texts that are kept are there when a model comes back, whether it was unloaded,
or the server ended or was killed.

    FOLDER/salt                   of the hashes that stand for API keys
    FOLDER/MODEL.texts/*.session  as Session.save writes them; the note says whose they are

What is there may have been changed by anyone who could: a file that is no session of the model is dropped. So the
folder has to be one that was made here, or empty: what others keep in theirs is not to be lost.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bitnet_runtime.errors import BitnetError, ClosedError, InvalidParameterError, ModelTooLargeError
from bitnet_runtime.model import Model
from bitnet_runtime.sessions.session import Session

SALT = 16  # bytes
ROUNDS = 100_000  # of the hash of a key: who reads the folder should not find the key

log = logging.getLogger("bitnet_serve")


class Folder:
    """A folder for the texts of all models. most: bytes of its files; the least recently used leave."""

    def __init__(self, path: Path, most: int, keys: Sequence[str]) -> None:
        """keys: that requests may have; texts of others stay unread. Raises InvalidParameterError, OSError."""
        if path.exists() and not path.is_dir():
            raise InvalidParameterError(
                f"--cache-dir {path} is no folder; name one, or one that is to be made", "cache_dir"
            )
        try:
            path.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise InvalidParameterError(
                f"--cache-dir {path} cannot be made: {error.strerror}; name one where you may write", "cache_dir"
            ) from None
        if not (path / "salt").is_file() and any(path.iterdir()):
            raise InvalidParameterError(
                f"--cache-dir {path} has files of others, and what is in a cache is deleted in time; name one that "
                "is empty, or does not exist", "cache_dir",
            )  # fmt: skip
        facts = path.stat()
        if facts.st_mode & 0o077 or facts.st_uid != os.geteuid():
            raise InvalidParameterError(
                f"--cache-dir {path} can be seen by other users, and will hold what was asked; chmod 700 it, or name a "
                "folder that does not exist", "cache_dir",
            )  # fmt: skip
        self._path, self._most = path, most
        self.lock = threading.Lock()  # one model writes at a time: others' files that are not whole are not left ones
        self._held = self._hold()
        try:
            salt = self._salt()
        except OSError as error:  # the disk is full; of a descriptor no error names the file
            self.close()
            raise OSError(error.errno, error.strerror, str(path / "salt")) from None
        who: list[bytes | None] = [None, *(key.encode() for key in keys)]
        self._tags = {each: b"" if each is None else _hashed(each, salt) for each in who}

    def close(self) -> None:
        """Another server may have it."""
        os.close(self._held)

    def _hold(self) -> int:
        """No other server has it until this one ends: it would delete files that are being written."""
        import fcntl  # Windows lacks it

        held = os.open(self._path / "salt", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(held)
            if not isinstance(error, BlockingIOError):
                raise
            raise InvalidParameterError(
                f"--cache-dir {self._path} is another server's, which still runs; name a folder for this one",
                "cache_dir",
            ) from None
        return held

    def of(self, name: str) -> Shelved:
        """The part of a model."""
        folder = self._path / f"{name}.texts"  # a name may be "", "..", or "salt"
        folder.mkdir(mode=0o700, exist_ok=True)
        return Shelved(self, folder, self._tags)

    def prune(self) -> None:
        for partial, _ in _files(self._path, "*.texts/.*"):  # of a server that was killed as it wrote
            partial.unlink(missing_ok=True)
        files = _files(self._path, "*.texts/*.session")
        total = sum(size for _, size in files)
        for file, size in files:
            if total <= self._most:
                return
            total -= size
            file.unlink(missing_ok=True)

    def _salt(self) -> bytes:
        found = os.pread(self._held, SALT, 0)
        if len(found) < SALT:
            found = secrets.token_bytes(SALT)
            os.pwrite(self._held, found, 0)
        return found


class Shelved:
    """The texts of a model, while it is not loaded."""

    def __init__(self, all: Folder, folder: Path, tags: dict[bytes | None, bytes]) -> None:
        self._all, self._folder, self._tags = all, folder, tags
        self._there: set[Path] = set()  # or were, of texts that are kept

    def read(self, model: Model) -> Iterator[tuple[Session, bytes | None]]:
        """The sessions and whose they are, the least recently used first."""
        if not model.has_text:
            return
        with model.session(n_ctx=1) as other:
            kv_type = other.kv_type
        whose = {tag: who for who, tag in self._tags.items()}
        for file, _ in _files(self._folder, "*.session"):
            try:
                session = model.load_session(file)
            except ModelTooLargeError:  # it may fit another time
                return
            except (BitnetError, OSError) as error:
                log.warning("%r was dropped: %s", str(file), str(error).replace("\n", " "))
                file.unlink(missing_ok=True)
                continue
            if session.note not in whose or (session.n_ctx, session.kv_type) != (model.n_ctx, kv_type):
                session.close()
                continue
            self._there.add(file)
            yield session, whose[session.note]

    def write(self, kept: Sequence[tuple[Session, object]]) -> None:
        """These sessions, and whose they are, the latest last, in place of those that are there. Each is written once,
        also where the folder had no room for it. Those that are closed meanwhile are left out."""
        with self._all.lock:
            try:
                files, now = set(), time.time_ns()
                for i, (session, who) in enumerate(kept):
                    if (who is None or isinstance(who, bytes)) and who in self._tags:
                        with contextlib.suppress(ClosedError):
                            files.add(self._write(session, self._tags[who], now + i))
                for file in self._there - files:
                    file.unlink(missing_ok=True)
                self._there = files
                self._all.prune()
            except (OSError, MemoryError) as error:  # a text is copied to be written
                why = getattr(error, "strerror", None) or str(error) or "there is no memory for a copy"
                log.warning("texts could not be kept in %r: %s", str(self._folder), why)

    def _write(self, session: Session, tag: bytes, time_ns: int) -> Path:
        digest = hashlib.blake2b(tag + repr((session.adapter, session.tokens)).encode(), digest_size=16).hexdigest()
        file = self._folder / f"{digest}.session"
        if file not in self._there:
            session.save(file, tag)
            file.chmod(0o600)  # wherever it may be copied to
            self._there.add(file)
            self._all.prune()
        with contextlib.suppress(FileNotFoundError):  # there was no room
            os.utime(file, ns=(time_ns, time_ns))  # the clock of a file system may stand still between two of them
        return file


def _files(folder: Path, pattern: str) -> list[tuple[Path, int]]:
    """With their bytes, the least recently used first. A folder of such a name is left alone."""
    found = []
    for file in folder.glob(pattern):
        with contextlib.suppress(OSError):  # it may be removed meanwhile
            facts = file.lstat()
            if not stat.S_ISDIR(facts.st_mode):
                found.append((facts.st_mtime_ns, file, facts.st_size))
    return [(file, size) for _, file, size in sorted(found)]


def _hashed(key: bytes, salt: bytes) -> bytes:
    return hashlib.pbkdf2_hmac("sha256", key, salt, ROUNDS)
