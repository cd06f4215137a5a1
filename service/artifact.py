"""A bundle as one file: a zip, not compressed, whose bytes follow from the bundle alone."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

from tilewise.models.bundle import FILES, MANIFEST

MEDIA_TYPE = "application/zip"
_EPOCH = (1980, 1, 1, 0, 0, 0)


def pack(folder: Path) -> bytes:
    """The files of a stored bundle, in a fixed order and with no dates. Raises OSError where one is missing."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name in (MANIFEST, *(f"{name}.npy" for name in FILES)):
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, (folder / name).read_bytes())
    return out.getvalue()
