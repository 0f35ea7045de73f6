"""Files of one kind in a folder of bounded size, which several processes may write at once."""

import contextlib
import os
import re
import tempfile
import time
from pathlib import Path

_PART_OF_A_KILLED_PROCESS_S = 24 * 3600.0


class BoundedFolder:
    """A folder whose least recently used files are removed first.

    Args:
        folder: The folder, which is created for the first file.
        names: The names of its files. The folder may hold others, which are never removed.
        part: How names of files begin that are being written.
        most_bytes: The maximal size of its files together.
    """

    def __init__(self, folder: Path, names: re.Pattern[str], part: str, most_bytes: int):
        self.folder, self.most_bytes = folder, most_bytes
        self._names, self._part = names, part

    def write(self, name: str, data: bytes) -> None:
        """Writes a file, completely or not at all, and removes others for which no space is left.

        Args:
            name: Its name.
            data: Its content.

        Raises:
            OSError: If it cannot be written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        file, part = tempfile.mkstemp(dir=self.folder, prefix=self._part)
        try:
            with os.fdopen(file, "wb") as opened:
                opened.write(data)
            os.replace(part, self.folder / name)
        except BaseException:
            os.unlink(part)
            raise
        self._shrink()

    def used(self, name: str) -> None:
        """Notes that a file was used now.

        Args:
            name: Its name.
        """
        with contextlib.suppress(OSError):  # a folder that others may only read
            os.utime(self.folder / name)

    def _shrink(self) -> None:
        found = []
        forgotten = (time.time() - _PART_OF_A_KILLED_PROCESS_S) * 1e9
        for path in self.folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another process may have removed it
                status = path.stat()
                if path.name.startswith(self._part) and status.st_mtime_ns < forgotten:
                    path.unlink()
                if self._names.fullmatch(path.name):
                    found.append((status.st_mtime_ns, status.st_size, path))
        left = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if left <= self.most_bytes:
                return
            path.unlink(missing_ok=True)
            left -= size
