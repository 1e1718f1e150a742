"""What a journal does to a disk, in one place: tests put a disk here that loses, fails and dies."""

import errno
import fcntl
import os
from pathlib import Path


class Files:
    """Handles are file descriptors. Whatever cannot be done is an OSError."""

    def make_folder(self, folder: Path) -> None:
        """With its parents, all of them durable."""
        missing = [place for place in [folder, *folder.parents] if not place.is_dir()]
        folder.mkdir(parents=True, exist_ok=True)
        for place in {*missing, folder}:  # the folder itself too: who made it may have been killed
            self.fsync_folder(place.parent)

    def names(self, folder: Path) -> list[str]:
        return os.listdir(folder)

    def lock(self, path: Path) -> int:
        """A handle that nobody else can get until it is closed or its process ends."""
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(handle)
            message = (
                f"the journal in {path.parent} is open already, here or in another process: close it there"
            )
            raise BlockingIOError(errno.EWOULDBLOCK, message) from error
        except BaseException:
            os.close(handle)
            raise
        return handle

    def open(self, path: Path, flags: int) -> int:
        return os.open(path, flags, 0o666)

    def close(self, handle: int) -> None:
        os.close(handle)

    def size(self, handle: int) -> int:
        return os.fstat(handle).st_size

    def read(self, handle: int, offset: int, size: int) -> bytes:
        """Fewer bytes only where the file ends."""
        parts: list[bytes] = []
        while size > 0 and (part := os.pread(handle, size, offset)):
            parts.append(part)
            offset, size = offset + len(part), size - len(part)
        return b"".join(parts)

    def write(self, handle: int, offset: int, data: bytes | bytearray) -> None:
        rest = memoryview(data)
        while rest:
            written = os.pwrite(handle, rest, offset)
            offset, rest = offset + written, rest[written:]

    def truncate(self, handle: int, size: int) -> None:
        os.ftruncate(handle, size)

    def fsync(self, handle: int) -> None:
        os.fsync(handle)

    def sync_data(self, handle: int) -> None:
        """What was written and where it ends, not when: for bytes that were added, and twice as fast."""
        os.fdatasync(handle)

    def fsync_folder(self, folder: Path) -> None:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)

    def unlink(self, path: Path) -> None:
        os.unlink(path)
