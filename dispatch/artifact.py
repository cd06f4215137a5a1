"""A bundle as one file, as the service hands it out: a zip without compression, the same bytes each time."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import IO

from tilewise.errors import InvalidBundleError
from tilewise.models.bundle import FILES, MANIFEST, MAX_FILE_BYTES

MEDIA_TYPE = "application/zip"
NAMES = (MANIFEST, *(f"{name}.npy" for name in FILES))
_EPOCH = (1980, 1, 1, 0, 0, 0)
_CHUNK = 1 << 20


def pack(folder: Path) -> bytes:
    """The files of a stored bundle, in a fixed order and with no dates. Raises OSError where one is missing."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name in NAMES:
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, (folder / name).read_bytes())
    return out.getvalue()


def unpack(source: IO[bytes], folder: Path) -> None:
    """Write a bundle's files, and no others, to `folder`. What they hold is for Bundle.load to judge.

    Raises InvalidBundleError for anything but the zip that `pack` makes: no name in it is taken for a path, and what is
    not compressed cannot unpack to more than was sent.
    """
    try:
        with zipfile.ZipFile(source) as archive:
            entries = {entry.filename: entry for entry in archive.infolist()}
            if sorted(entries) != sorted(NAMES) or len(archive.infolist()) != len(NAMES):
                raise InvalidBundleError(f"artifact must hold the {len(NAMES)} files of a bundle, got {len(entries)}")
            for name in NAMES:
                entry = entries[name]
                if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > MAX_FILE_BYTES:
                    raise InvalidBundleError(f"artifact: {name} must be stored, with at most {MAX_FILE_BYTES} bytes")
                with archive.open(entry) as inner, (folder / name).open("wb") as out:
                    while chunk := inner.read(_CHUNK):
                        out.write(chunk)
    except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, RuntimeError) as error:
        if isinstance(error, InvalidBundleError):
            raise
        raise InvalidBundleError(f"artifact is no zip that can be read: {error}") from error
