"""The trained artifact: a folder with one manifest and a few arrays. Loading one runs no code of its own.

The format, and how to change it, is in docs/bundle-format.md.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import json
import math
import os
import shutil
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.errors import InvalidBundleError, TilewiseError
from tilewise.kernels.arch import Arch
from tilewise.kernels.paged_mqa_logits.spec import SHAPE_FIELDS, Config, Shape
from tilewise.models.bucket_transfer import check_bucket_transfers
from tilewise.models.columns import shape_columns
from tilewise.models.exact import ARRAYS as EXACT_ARRAYS
from tilewise.models.exact import Exact
from tilewise.models.features import (
    BOUNDS,
    FEATURES,
    SHAPE_FEATURES,
    feature_spec_hash,
    features_of,
    floors_us,
    shape_features,
    structure_at,
)
from tilewise.models.forest import Forest
from tilewise.models.guard import Guard
from tilewise.models.masks import Masks
from tilewise.models.regime import Outside, Regime
from tilewise.models.smooth import ARRAYS as LEVEL_ARRAYS
from tilewise.models.smooth import Smooth
from tilewise.models.structure import Structure

FORMAT = "tilewise-bundle"
FORMAT_VERSION = 2
MANIFEST = "manifest.json"
MAX_FILE_BYTES = 256 << 20
MOST_MASKED = 256  # configs whose masks are worked out in one go
MOST_STRUCTURES = 128  # lists of configs whose masks are kept: 5 MB of the shipped model's usual ones, 79 MB at most
MOST_US = 1e12  # stands for a predicted time that is no number
# What reading damaged or hostile data can raise: all of it means that this is no bundle.
_MALFORMED = (
    OSError, KeyError, TypeError, ValueError, IndexError, AttributeError, ArithmeticError, RecursionError, MemoryError,
)  # fmt: skip

_FOREST_ARRAYS: dict[str, str] = {
    "feature": "<i4",
    "threshold": "<f8",
    "left": "<i4",
    "value": "<f8",
    "roots": "<i4",
}
# File name without .npy: dtype and dimensions. Nothing else in the folder is read.
FILES: dict[str, tuple[str, int]] = {
    **{f"rank_{name}": (dtype, 1) for name, dtype in _FOREST_ARRAYS.items()},
    **{f"level_{name}": spec for name, spec in LEVEL_ARRAYS.items()},
    **{f"exact_{name}": spec for name, spec in EXACT_ARRAYS.items()},
}


@dataclass(frozen=True)
class Bundle:
    """A model of one op on one GPU, with the timings it was trained on.

    Predictions have two parts: `level` says how far a shape's best time is above its floor, `rank` how far each config
    is above that best. Both are natural logarithms; rank's is squashed (see `unsquash`), so that the trees spend
    themselves on configs that could win.
    """

    manifest: Mapping[str, Any]
    rank: Forest
    level: Smooth
    exact: Exact
    regime: Regime
    guard: Guard
    arch: Arch

    @property
    def digest(self) -> str:
        """64 hex digits over the contents; not over time, place or machine."""
        return str(self.manifest["digest"])

    @property
    def model_id(self) -> str:
        """The short name that decisions carry: arch and twelve digits of the digest."""
        return f"{self.manifest['arch']}-{self.digest[:12]}"

    @property
    def op(self) -> str:
        """The op that it is for."""
        return str(self.manifest["op"])

    @property
    def toolchain(self) -> Mapping[str, list[str]]:
        """Versions of compiler, runtime and driver that the timings were taken with, by column of the profile."""
        found: Mapping[str, list[str]] = self.manifest["toolchain"]
        return found

    @property
    def kernel_hashes(self) -> Mapping[str, str]:
        """Source hash, by kernel, of what was timed."""
        hashes: Mapping[str, str] = self.manifest["kernel_hashes"]
        return hashes

    @property
    def noise_margin(self) -> float:
        """Two times of this ratio, less 1, are a tie."""
        return float(self.manifest["noise_margin"])

    def margin(self, shape: Shape, outside: Sequence[Outside] | None = None) -> tuple[float | None, str]:
        """The predicted gain over the default, a ratio less 1, that a pick for this shape needs, and a clause that says
        why; None where no prediction is sure enough. `outside` is that of the regime, where it is at hand."""
        return self.guard.margin(self.regime.beyond(shape, outside), self.noise_margin)

    def features(self, shape: Shape, configs: Sequence[Config]) -> npt.NDArray[np.float64]:
        """[len(configs), len(FEATURES)]"""
        return features_of(shape, configs, self.arch)

    def scores(self, shape: Shape, configs: Sequence[Config]) -> npt.NDArray[np.float64]:
        """[len(configs)] squashed log distance from the shape's best, as the rank forest has it; the lowest wins."""
        own = structure_at(shape, configs, self.arch)
        return self._scores(features_of(shape, configs, self.arch, own), own)

    @functools.cached_property
    def masks(self) -> Masks | None:
        """The fast form of `rank`, with a part for each kind of feature; None where it does not fit that form.

        Made when it is first asked for, in milliseconds.
        """
        return Masks.of(self.rank, BOUNDS)

    @functools.cached_property
    def _structures(self) -> dict[Structure, npt.NDArray[Any]]:
        return {}

    def _scores(self, rows: npt.NDArray[np.float64], own: Structure) -> npt.NDArray[np.float64]:
        if self.masks is None or not 0 < len(rows) <= MOST_MASKED:
            return self.rank.predict(rows)
        of_shape, of_structure, of_launch = self.masks.parts
        known = self._structures.get(own)
        if known is None:
            if len(self._structures) >= MOST_STRUCTURES:
                self._structures.clear()
            known = self._structures[own] = of_structure.conjunction(rows)
        return self.masks.sums([of_launch.conjunction(rows), known, of_shape.conjunction(rows[:1])])

    def best_us(self, shape: Shape) -> float:
        """Predicted time of the shape's best config, microseconds; never below `least_us`."""
        numbers = shape_columns(shape)
        floor_us = float(floors_us(numbers, self.arch))
        return self._best_us(floor_us, shape_features(numbers, self.arch))

    def _best_us(self, floor_us: float, features: npt.NDArray[np.float64]) -> float:
        level = float(self.level.predict(features[None])[0])
        return max(floor_us * float(np.exp(level)), self._least_us(floor_us))

    def predict_us(self, shape: Shape, configs: Sequence[Config]) -> npt.NDArray[np.float64]:
        """[len(configs)] predicted times, microseconds.

        None is below `least_us`: where the model goes below it, as it may far from what was measured, all are scaled up
        together, so that their order and their ratios stay.
        """
        if not configs:
            return np.empty(0)
        own = structure_at(shape, configs, self.arch)
        rows = features_of(shape, configs, self.arch, own)
        ratio = unsquash(self._scores(rows, own), self.manifest["rank"]["squash"])
        floor_us = float(floors_us(shape_columns(shape), self.arch))
        times = self._best_us(floor_us, rows[0, : len(SHAPE_FEATURES)]) * np.exp(np.minimum(ratio, 50.0))
        times = np.where(np.isfinite(times), times, MOST_US)  # a bundle's numbers may be finite and still absurd
        return np.asarray(times * max(1.0, self._least_us(floor_us) / times.min(initial=np.inf)))

    def least_us(self, shape: Shape) -> float:
        """No launch of this shape is believed to take less: what the fastest measured launch took, whatever it did, and
        the shape's floor (or what the measured times reached of theirs, should any have been below it)."""
        return self._least_us(float(floors_us(shape_columns(shape), self.arch)))

    def _least_us(self, floor_us: float) -> float:
        launch_us, share = self._limits
        return max(launch_us, share * floor_us)

    @functools.cached_property
    def _limits(self) -> tuple[float, float]:
        """The least measured time, and the least measured time over its shape's floor, at most 1."""
        if not len(self.exact):
            return 0.0, 1.0
        best = np.fmin.reduceat(self.exact.latency_us, self.exact.starts[:-1])
        columns = {name: self.exact.shapes[:, at].astype(np.float64) for at, name in enumerate(SHAPE_FIELDS)}
        return float(best.min()), min(1.0, float((best / floors_us(columns, self.arch)).min()))

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the bundle to `folder`, whole or not at all; a bundle already there is replaced."""
        target = Path(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            for name, data in self._files().items():
                _write(scratch / f"{name}.npy", data)
            _write(scratch / MANIFEST, json.dumps(self.manifest, indent=1, sort_keys=True).encode() + b"\n")
            scratch.chmod(0o755)
            _sync(scratch)
            if target.is_symlink() or (target.exists() and not target.is_dir()):
                target.unlink()
            if target.exists():
                old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
                os.replace(target, old)
                os.replace(scratch, target)
                shutil.rmtree(old)
            else:
                os.replace(scratch, target)
            _sync(target.parent)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return target

    def _files(self) -> dict[str, bytes]:
        return array_files(self.rank, self.level, self.exact)

    @classmethod
    def create(cls, manifest: Mapping[str, Any], rank: Forest, level: Smooth, exact: Exact, arch: Arch) -> Bundle:
        """A bundle from its parts; `manifest` lacks the fields that follow from them."""
        files = array_files(rank, level, exact)
        full = {
            **manifest,
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "feature_spec": {"hash": feature_spec_hash(), "names": list(FEATURES)},
            "rank": {"baseline": rank.baseline, "depth": rank.depth, "squash": SQUASH},
            "level": level.header(),
            "exact": exact.header(),
            "files": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
        }
        full = json.loads(json.dumps(full, allow_nan=False))
        full["digest"] = _digest(full)
        return cls(full, rank, level, exact, Regime.from_dict(full["regime"]), Guard.from_dict(full["guard"]), arch)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Bundle:
        """The bundle in `folder`. Raises InvalidBundleError, saying what is wrong, for anything but a whole, unaltered
        bundle of this format version and feature spec."""
        path = Path(folder)
        try:
            manifest = _read_manifest(path)
            arrays = {name: _read_array(path / f"{name}.npy", manifest["files"][name], name) for name in FILES}
            rank = Forest.from_arrays(
                {name: arrays[f"rank_{name}"] for name in _FOREST_ARRAYS},
                manifest["rank"]["baseline"],
                manifest["rank"]["depth"],
                len(FEATURES),
            )
            level = Smooth.from_arrays(
                {name: arrays[f"level_{name}"] for name in LEVEL_ARRAYS}, manifest["level"], len(SHAPE_FEATURES)
            )
            exact = Exact.from_arrays({name: arrays[f"exact_{name}"] for name in EXACT_ARRAYS}, manifest["exact"])
            _check_manifest(manifest)
            regime = Regime.from_dict(manifest["regime"])
            guard = Guard.from_dict(manifest["guard"])
            arch = Arch(**manifest["arch_facts"])
        except InvalidBundleError as error:
            raise InvalidBundleError(f"bundle {path}: {error}") from error
        except (*_MALFORMED, TilewiseError) as error:
            raise InvalidBundleError(f"bundle {path} is malformed: {type(error).__name__}: {error}") from error
        return cls(manifest, rank, level, exact, regime, guard, arch)


def renew_property_locks() -> None:
    """For a forked child: up to Python 3.11 a cached property has a lock, which another thread may have held."""
    for kind in (Bundle, Forest, Smooth):
        for found in vars(kind).values():
            if isinstance(found, functools.cached_property) and hasattr(found, "lock"):
                found.lock = threading.RLock()


SQUASH = 0.15


def squash(log_ratio: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """What the rank forest is trained on: near the best it is the log ratio itself, far from it its logarithm."""
    return SQUASH * np.log1p(log_ratio / SQUASH)


def unsquash(score: npt.NDArray[np.float64], strength: float | None = None) -> npt.NDArray[np.float64]:
    """The log ratio that a score stands for."""
    strength = SQUASH if strength is None else strength
    return strength * np.expm1(np.minimum(score / strength, 50.0))


def array_files(rank: Forest, level: Smooth, exact: Exact) -> dict[str, bytes]:
    """The bytes of every array file, by name."""
    parts: dict[str, Forest | Smooth | Exact] = {"rank": rank, "level": level, "exact": exact}
    arrays = {f"{part}_{name}": array for part, of in parts.items() for name, array in of.arrays().items()}
    files = {}
    for name, (dtype, _) in FILES.items():
        out = io.BytesIO()
        np.lib.format.write_array(out, np.ascontiguousarray(arrays[name].astype(dtype)), (1, 0), allow_pickle=False)
        files[name] = out.getvalue()
    return files


def _digest(manifest: Mapping[str, Any]) -> str:
    kept = {key: value for key, value in manifest.items() if key != "digest"}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _read_manifest(path: Path) -> dict[str, Any]:
    data = _read(path / MANIFEST)

    def refuse(text: str) -> None:
        raise InvalidBundleError(f"manifest has the number {text}")

    manifest = json.loads(data.decode("utf-8"), parse_constant=refuse)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise InvalidBundleError(f"manifest must be an object of format {FORMAT!r}")
    if manifest.get("format_version") != FORMAT_VERSION:
        raise InvalidBundleError(f"format_version must be {FORMAT_VERSION}, got {manifest.get('format_version')!r}")
    spec = manifest["feature_spec"]["hash"]
    if spec != feature_spec_hash():
        raise InvalidBundleError(f"feature spec must be {feature_spec_hash()}, got {spec!r}: train again")
    if manifest.get("digest") != _digest(manifest):
        raise InvalidBundleError("manifest was altered: its digest does not fit its contents")
    if b"\\u" in data:  # an escape may stand for half a character, which no log or answer could repeat
        try:
            json.dumps(manifest, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise InvalidBundleError("manifest has text that is not Unicode") from error
    return manifest


def _check_manifest(manifest: Mapping[str, Any]) -> None:
    margin = manifest["noise_margin"]
    if type(margin) is not float or not 0.0 <= margin < 1.0 or not math.isfinite(margin):
        raise InvalidBundleError(f"noise_margin must be a float from 0 to 1, got {margin!r}")
    if not all(isinstance(manifest[name], str) for name in ("op", "arch")):
        raise InvalidBundleError("op and arch must be text")
    strength = manifest["rank"]["squash"]
    if type(strength) is not float or not 0.0 < strength < 100.0:
        raise InvalidBundleError(f"rank squash must be a float above 0, got {strength!r}")
    facts = {field.name: field.type for field in dataclasses.fields(Arch)}
    for name, value in manifest["arch_facts"].items():
        if facts.get(name) == "str":
            good = isinstance(value, str)
        else:
            good = type(value) in (int, float) and 1e-9 < value < 1e18
        if not good:
            raise InvalidBundleError(f"arch_facts {name} must be {facts.get(name)} in a sane range, got {value!r}")
    hashes = manifest["kernel_hashes"]
    if not isinstance(hashes, dict) or not all(isinstance(h, str) for h in hashes.values()):
        raise InvalidBundleError(f"kernel_hashes must be an object of texts, got {hashes!r}")
    toolchain = manifest["toolchain"]
    if not isinstance(toolchain, dict) or not all(
        isinstance(found, list) and all(isinstance(text, str) for text in found) for found in toolchain.values()
    ):
        raise InvalidBundleError(f"toolchain must be an object of lists of texts, got {toolchain!r}")
    if not all(isinstance(manifest[name], dict) for name in ("metrics", "data", "training")):
        raise InvalidBundleError("metrics, data and training must be objects")
    check_bucket_transfers(manifest.get("bucket_transfers", {}))
    check_bucket_transfers(manifest["bucket_transfers"])
    if not isinstance(manifest["golden"], list):
        raise InvalidBundleError("golden must be a list")


def _read_array(path: Path, sha256: str, name: str) -> npt.NDArray[Any]:
    data = _read(path)
    if hashlib.sha256(data).hexdigest() != sha256:
        raise InvalidBundleError(f"{path.name} was altered: its sha256 does not fit the manifest")
    try:
        array: npt.NDArray[Any] = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    except Exception as error:  # numpy parses a damaged header as Python, and raises what that raises
        raise InvalidBundleError(f"{path.name} is no array: {type(error).__name__}: {error}") from error
    dtype, dimensions = FILES[name]
    if array.dtype.str != dtype or array.ndim != dimensions:
        raise InvalidBundleError(f"{path.name} must be {dimensions}-d {dtype}, got {array.ndim}-d {array.dtype.str}")
    array.flags.writeable = False
    return array


def _read(path: Path) -> bytes:
    if not path.is_file():
        raise InvalidBundleError(f"{path.name} is missing")
    if path.stat().st_size > MAX_FILE_BYTES:
        raise InvalidBundleError(f"{path.name} must be at most {MAX_FILE_BYTES} bytes")
    return path.read_bytes()


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())


def _sync(folder: Path) -> None:
    """Make renames in a folder last through a power cut, where the system offers that."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)
