"""Which bundle serves: published versions under the user's folder, else the shipped one.

<home>/models/<op>/<arch>/versions/<digest>/ holds bundles, and the file `current` beside them names the one in force,
with the ones before it on the lines below. Pointer and bundles are replaced whole, so that a reader sees one or the
other.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat as modes
import tempfile
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

from tilewise.data.home import home_dir
from tilewise.errors import InvalidBundleError
from tilewise.models.bundle import MANIFEST, Bundle
from tilewise.models.golden import verify

POINTER = "current"
MAX_HISTORY = 100
MAX_POINTER_BYTES = 64 << 10
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9_-]+")

_log = logging.getLogger("tilewise")

Home = str | os.PathLike[str] | None


def current(op: str, arch: str, home: Home = None) -> Path:
    """The folder of the bundle in force. It may not exist, where none is shipped.

    Where the pointer or the folder that it names is missing, unreadable or none, that is the shipped one, with a
    warning.
    """
    try:
        found = published(op, arch, home)
        if found is None:
            return shipped(op, arch)
        if (found / MANIFEST).is_file():
            return found
        problem = f"the published bundle {found} has no {MANIFEST}"
    except (InvalidBundleError, OSError) as error:  # OSError: a folder that may not be looked into
        problem = str(error)
    folder = shipped(op, arch)
    _log.warning("%s: the shipped one stands in", problem)
    return folder


def published(op: str, arch: str, home: Home = None) -> Path | None:
    """The folder that the pointer names, usable or not; None where nothing was published.

    Raises InvalidBundleError for a pointer that is none.
    """
    lines = _read_pointer(op, arch, home)
    return _folder(op, arch, home) / "versions" / lines[0] if lines else None


def shipped(op: str, arch: str) -> Path:
    """The folder of the bundle that came with the package, whether or not there is one."""
    _folder(op, arch, None)  # checks the names
    return Path(str(resources.files("tilewise"))) / "models" / "fitted" / op / arch


def stamp(op: str, arch: str, home: Home = None) -> tuple[int, ...]:
    """Changes whenever another bundle may have come into force; costs two calls of stat."""
    parts: list[int] = []
    for path in (_folder(op, arch, home) / POINTER, shipped(op, arch) / MANIFEST):
        try:
            found = path.stat()
            parts += [found.st_mtime_ns, found.st_ino, found.st_size]
        except OSError:
            parts += [0, 0, 0]
    return tuple(parts)


def history(op: str, arch: str, home: Home = None) -> list[str]:
    """Digests that were in force, the present one first; empty where nothing usable was published."""
    _folder(op, arch, home)  # checks the names
    try:
        return _read_pointer(op, arch, home)
    except InvalidBundleError:
        return []


def load_version(folder: Path, op: str, arch: str) -> Bundle:
    """A stored version, checked as a whole. Raises InvalidBundleError where it is not what its folder says it is."""
    bundle = Bundle.load(folder)
    if (bundle.op, bundle.arch.name) != (op, arch):
        raise InvalidBundleError(f"bundle {folder} is for {bundle.op} on {bundle.arch.name}, not {op} on {arch}")
    if _DIGEST.fullmatch(folder.name) and bundle.digest != folder.name:
        raise InvalidBundleError(f"bundle {folder} has digest {bundle.digest}, not that of its folder")
    verify(bundle)
    return bundle


def publish(bundle: Bundle, home: Home = None) -> Path:
    """Store a bundle and put it in force; a damaged copy of it that is already stored is replaced.

    Raises InvalidBundleError, and leaves in force what was, if it fails its own check before or after it was stored.
    """
    op, arch = bundle.op, bundle.arch.name
    folder = _folder(op, arch, home)
    with _lock(folder):
        target = _store(bundle, folder)
        _point(folder, [bundle.digest, *history(op, arch, home)])
    return target


def store(bundle: Bundle, home: Home = None) -> Path:
    """Store a bundle as a version that can be promoted; what is in force stays so. Raises as `publish` does."""
    folder = _folder(bundle.op, bundle.arch.name, home)
    with _lock(folder):
        return _store(bundle, folder)


def _store(bundle: Bundle, folder: Path) -> Path:
    verify(bundle)
    op, arch = bundle.op, bundle.arch.name
    target = folder / "versions" / bundle.digest
    try:
        load_version(target, op, arch)
    except InvalidBundleError:
        bundle.save(target)
        load_version(target, op, arch)
    return target


def promote(op: str, arch: str, digest: str, home: Home = None) -> Path:
    """Put a stored version in force, named by its digest or the first digits of it."""
    folder = _folder(op, arch, home)
    with _lock(folder):
        stored = sorted(path for path in (folder / "versions").glob("*") if _DIGEST.fullmatch(path.name))
        found = [path for path in stored if path.name.startswith(digest)] if len(digest) >= 6 else []
        if len(found) != 1:
            known = ", ".join(path.name[:12] for path in stored) or "none"
            raise InvalidBundleError(f"version must name one of {known} by at least 6 digits, got {digest!r}")
        load_version(found[0], op, arch)
        _point(folder, [found[0].name, *history(op, arch, home)])
    return found[0]


def rollback(op: str, arch: str, home: Home = None) -> Path:
    """Put the version before the present one in force again; after the first one, the shipped bundle.

    A version that cannot be used is passed over with a warning that names it, and forgotten. Raises InvalidBundleError,
    and changes nothing, where there is nothing to go back to.
    """
    folder = _folder(op, arch, home)
    with _lock(folder):
        lines = _read_pointer(op, arch, home)
        if not lines:
            raise InvalidBundleError(f"nothing to roll back: no version of {op} on {arch} was published")
        passed_over = []
        for at, digest in enumerate(lines[1:], start=1):
            try:
                if digest == lines[0]:
                    continue
                load_version(folder / "versions" / digest, op, arch)
            except InvalidBundleError as error:
                passed_over.append(f"version {digest[:12]} cannot be used and was passed over ({error})")
                continue
            _point(folder, lines[at:])
            break
        else:
            if shipped(op, arch).is_dir():
                load_version(shipped(op, arch), op, arch)
            elif passed_over:
                raise InvalidBundleError(f"nothing to roll back to, nothing was changed: {'; '.join(passed_over)}")
            _point(folder, [])
        for text in dict.fromkeys(passed_over):
            _log.warning("%s", text)
    return current(op, arch, home)


def _read_pointer(op: str, arch: str, home: Home) -> list[str]:
    """The digests in the pointer file, none where there is no such file; InvalidBundleError for anything else in it."""
    path = _folder(op, arch, home) / POINTER
    try:
        found = path.stat()
        if not modes.S_ISREG(found.st_mode) or found.st_size > MAX_POINTER_BYTES:  # a pipe would be waited for
            raise InvalidBundleError(f"{path} must be a file of at most {MAX_POINTER_BYTES} bytes")
        with path.open("rb") as file:
            lines = file.read(MAX_POINTER_BYTES).decode("ascii").split()
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidBundleError(f"{path} cannot be read: {error}") from error
    wrong = next((line for line in lines if not _DIGEST.fullmatch(line)), None)
    if wrong is not None:
        raise InvalidBundleError(f"{path} must hold digests of 64 hex digits, got {wrong[:80]!r}")
    return lines


def _folder(op: str, arch: str, home: Home) -> Path:
    for name in (op, arch):
        if not _NAME.fullmatch(name):
            raise InvalidBundleError(f"op and arch must be letters, digits, '_' and '-', got {name!r}")
    return home_dir(home) / "models" / op / arch


def _point(folder: Path, lines: list[str]) -> None:
    """Replace the pointer file; a version that is named twice in a row counts once."""
    kept = [line for at, line in enumerate(lines) if at == 0 or line != lines[at - 1]][:MAX_HISTORY]
    handle, name = tempfile.mkstemp(prefix=f".{POINTER}.", dir=folder)
    try:
        with os.fdopen(handle, "w", encoding="ascii") as out:
            out.write("".join(f"{line}\n" for line in kept))
            out.flush()
            os.fsync(out.fileno())
        Path(name).chmod(0o644)
        os.replace(name, folder / POINTER)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """One writer at a time, across processes where the system has file locks."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as handle, contextlib.ExitStack() as stack:
        try:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX)
            # Closing alone does not unlock where a child that was forked meanwhile has the file, too.
            stack.callback(fcntl.flock, handle, fcntl.LOCK_UN)
        except (ImportError, OSError):
            pass
        yield
