"""Folders for the results of runs: on a path, or at a URI that one of pyarrow's file systems serves."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass

from pyarrow import NativeFile, fs

from raypipe.errors import ConfigError

Location = str | os.PathLike[str]

_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")
_PARTIAL = ".partial"
# Here an object appears under its name once it is complete; a rename would be a copy.
_OBJECT_STORES = {"s3", "gcs", "abfs"}


@dataclass(frozen=True)
class Storage:
    """A folder, which need not exist yet; actors on other nodes may be sent one.

    Attributes:
        name: What users know it by: an absolute path or a URI.
        path: The folder as the file system names it.
    """

    name: str
    filesystem: fs.FileSystem
    path: str

    @classmethod
    def at(cls, location: Location, *, key: str = "run.storage_path") -> Storage:
        """Return the folder at a path or URI; `key` names the configured value in messages.

        Raises:
            ConfigError: No file system serves the URI.
        """
        name = os.fspath(location)
        if not _URI.match(name):
            path = os.path.abspath(name)
            return cls(path, fs.LocalFileSystem(), path)
        try:
            filesystem, path = fs.FileSystem.from_uri(name)
            if not path.strip("/"):
                raise ValueError("it names no bucket and no folder")
        # The last one is what pyarrow raises where it was built without the file system.
        except (OSError, ValueError, NotImplementedError) as error:
            raise ConfigError(
                f"{key} {name!r}: pyarrow has no file system for this URI ({_first_line(error)}); "
                "use a path, or s3://, gs://, abfs://, hdfs:// or file:// with what pyarrow.fs needs for it"
            ) from None
        if isinstance(filesystem, fs.LocalFileSystem):
            return cls(path, filesystem, path)
        return cls(name.rstrip("/"), filesystem, path.rstrip("/"))

    @property
    def is_local(self) -> bool:
        """Whether this is a folder of the machine's own file tree, network mounts included."""
        return isinstance(self.filesystem, fs.LocalFileSystem)

    def __truediv__(self, name: str) -> Storage:
        base, question, options = self.name.partition("?") if not self.is_local else (self.name, "", "")
        return Storage(f"{base}/{name}{question}{options}", self.filesystem, f"{self.path}/{name}" if self.path else name)

    @property
    def parent(self) -> Storage:
        """The folder that it is in."""
        base, question, options = self.name.partition("?") if not self.is_local else (self.name, "", "")
        return Storage(f"{base.rpartition('/')[0]}{question}{options}", self.filesystem, self.path.rpartition("/")[0])

    def make(self) -> None:
        """Make the folder and those above it, if they are missing; raises `OSError`."""
        self.filesystem.create_dir(self.path, recursive=True)

    def names(self) -> list[str]:
        """Return the sorted names of files and folders in it, nothing where it is missing; raises `OSError`."""
        return sorted(info.base_name for info in self._infos())

    def folders(self) -> list[Storage]:
        """Return the folders in it by name; raises `OSError`."""
        return [self / info.base_name for info in self._infos() if info.type is fs.FileType.Directory]

    def _infos(self) -> list[fs.FileInfo]:
        infos: list[fs.FileInfo] = self.filesystem.get_file_info(fs.FileSelector(self.path, allow_not_found=True))
        return sorted(infos, key=lambda info: info.base_name)

    def size(self, name: str) -> int | None:
        """Return the bytes of a file, `None` if there is no such file; raises `OSError`."""
        info = self.filesystem.get_file_info(self._file(name))
        return info.size if info.type is fs.FileType.File else None

    def changed_s(self, name: str) -> float:
        """Return when a file was last written, in seconds by the clock of whoever keeps it; raises `OSError`."""
        info = self.filesystem.get_file_info(self._file(name))
        if info.mtime_ns is None:
            raise FileNotFoundError(f"{self.name}/{name}")
        return float(info.mtime_ns) / 1e9

    def reading(self, name: str) -> NativeFile:
        """Open a file for reading, as a context manager; raises `OSError`."""
        return self.filesystem.open_input_file(self._file(name))

    def read(self, name: str) -> bytes:
        """Return the content of a file; raises `OSError`."""
        with self.reading(name) as file:
            content: bytes = file.read()
        return content

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[NativeFile]:
        """Yield a stream into a new file, which has its name only when the block has ended well.

        On a path it is then on the disk, too; `sync` makes sure of the name. Raises `OSError`.
        """
        target = self._file(name)
        if self.filesystem.type_name in _OBJECT_STORES:
            with self.filesystem.open_output_stream(target) as stream:
                yield stream
            return
        partial = f"{target}.{secrets.token_hex(4)}{_PARTIAL}"  # of its own: another process may write a file of the same name
        try:
            with self.filesystem.open_output_stream(partial) as stream:
                yield stream
            if self.is_local:
                _flush(partial)
            elif self.size(name) is not None:  # unlike that of a path, their rename may refuse to replace a file
                self.filesystem.delete_file(target)
            self.filesystem.move(partial, target)
        except BaseException:
            with contextlib.suppress(OSError):
                self.filesystem.delete_file(partial)
            raise

    def write(self, name: str, content: bytes) -> None:
        """Write or replace a file as a whole; raises `OSError`."""
        with self.writing(name) as stream:
            stream.write(content)

    def sync(self) -> None:
        """Return once the names of the files in the folder would outlive a power cut, as far as the file system lets one ask for it."""
        if self.is_local:
            _flush(self.path)

    def remove(self, name: str) -> None:
        """Remove a file; raises `OSError`."""
        self.filesystem.delete_file(self._file(name))

    def remove_all(self) -> None:
        """Remove the folder with what is in it; raises `OSError`."""
        self.filesystem.delete_dir(self.path)

    def _file(self, name: str) -> str:
        return f"{self.path}/{name}" if self.path else name


def _flush(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
