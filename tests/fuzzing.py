"""Damaged and hostile profile files and bundles, made up at random: what reads them answers, or refuses by name."""

from __future__ import annotations

import csv
import functools
import hashlib
import io
import json
import random
import resource
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import synthetic

from tilewise.data.store import import_file, write_rows
from tilewise.dispatch.artifact import pack, unpack
from tilewise.dispatch.selector import Selector
from tilewise.errors import InvalidBundleError, InvalidProfileError
from tilewise.kernels.paged_mqa_logits.spec import Shape
from tilewise.models import registry
from tilewise.models.bundle import FILES, Bundle
from tilewise.models.golden import verify

ARCH = "h100"
MOST_MIB = 1024  # that all of it may take
ROWS = synthetic.synthetic_rows(synthetic.SHAPES[:1], arch=ARCH)[:6]
STRANGE: tuple[Any, ...] = (
    None, True, -1, 0, 1 << 31, 1 << 63, 1 << 70, 0.5, 1e308, float("nan"), float("inf"), -0.0, "", "x", "\0", "NaN",
    "../..",
    "a" * 70_000, "\ud800", [], {}, [1], {"a": 1}, "correct", "h100",
    "2026-13-40T00:00:00Z",
)  # fmt: skip
BYTES = (
    b"\0",
    b"\xff",
    b'"',
    b"{",
    b"}",
    b",",
    b"\n",
    b"\r",
    b"PAR1",
    b"-",
    b"9" * 40,
    b"[" * 300,
    b"null",
    b"\xed\xa0\x80",
)


def profile_input(rng: random.Random) -> bytes:
    """One profile file, more or less."""
    rows = [dict(row) for row in rng.choices(ROWS, k=rng.randint(1, 4))]
    for _ in range(rng.randint(0, 3)):
        row = rng.choice(rows)
        name = rng.choice(list(row))
        what = rng.random()
        if what < 0.7:
            row[name] = rng.choice(STRANGE)
        elif what < 0.85:
            del row[name]
        else:
            row[str(rng.choice(STRANGE))] = row[name]
    form = rng.random()
    if form < 0.4:
        data = "\n".join(json.dumps(row) for row in rows).encode("utf-8", "surrogatepass")
    elif form < 0.6:
        out = io.StringIO()
        writer = csv.DictWriter(out, list(rows[0]), extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
        data = out.getvalue().encode("utf-8", "surrogatepass")
    else:
        data = _parquet()
    return damaged(data, rng) if rng.random() < 0.7 else data


def damaged(data: bytes, rng: random.Random) -> bytes:
    """The bytes with some of them changed, lost, moved, repeated or added."""
    for _ in range(rng.randint(1, 4)):
        if not data:
            return data
        at = rng.randrange(len(data))
        end = min(len(data), at + rng.choice((1, 1, 4, 64, 4096)))
        data = rng.choice(
            (
                lambda d=data, a=at: d[:a] + bytes([d[a] ^ (1 << rng.randrange(8))]) + d[a + 1 :],
                lambda d=data, a=at: d[:a],
                lambda d=data, a=at, e=end: d[:a] + d[e:],
                lambda d=data, a=at, e=end: d[:e] + d[a:e] + d[e:],
                lambda d=data, a=at: d[:a] + rng.choice(BYTES) + d[a:],
            )
        )()
    return data


@functools.cache
def _parquet() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        write_rows(ROWS, Path(folder) / "rows.parquet")
        return (Path(folder) / "rows.parquet").read_bytes()


@functools.cache
def _bundle() -> tuple[dict[str, Any], dict[str, bytes], bytes]:
    """(manifest, array files, artifact) of a good bundle."""
    with tempfile.TemporaryDirectory() as home:
        synthetic.publish_synthetic(Path(home), shapes=synthetic.SHAPES[:2], arch=ARCH)
        folder = registry.current(synthetic.OP, ARCH, home)
        files = {name: (folder / f"{name}.npy").read_bytes() for name in FILES}
        return json.loads((folder / "manifest.json").read_text()), files, pack(folder)


def bundle_input(rng: random.Random, folder: Path) -> None:
    """One bundle in `folder`, more or less; most have the hashes that their contents should have."""
    manifest, files, artifact = _bundle()
    if rng.random() < 0.2:
        unpack(io.BytesIO(damaged(artifact, rng)), folder)
        return
    manifest, files = json.loads(json.dumps(manifest)), dict(files)
    for _ in range(rng.randint(1, 3)):
        if rng.random() < 0.5:
            _strange_value(manifest, rng)
        else:
            name = rng.choice(list(files))
            files[name] = damaged(files[name], rng) if rng.random() < 0.3 else _strange_array(files[name], rng)
    if rng.random() < 0.95:
        named = manifest.get("files")
        if isinstance(named, dict):
            named |= {name: hashlib.sha256(data).hexdigest() for name, data in files.items() if name in named}
        kept = {key: value for key, value in manifest.items() if key != "digest"}
        text = json.dumps(kept, sort_keys=True, separators=(",", ":"))
        manifest["digest"] = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    for name, data in files.items():
        (folder / f"{name}.npy").write_bytes(data)


def _strange_value(value: Any, rng: random.Random) -> None:
    """Change one value somewhere in nested dicts and lists."""
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not keys:
            return
        key = rng.choice(keys)
        if isinstance(value[key], (dict, list)) and value[key] and rng.random() < 0.9:
            value = value[key]
            continue
        if rng.random() < 0.2:
            del value[key]
        else:
            value[key] = rng.choice(STRANGE)
        return


def _strange_array(data: bytes, rng: random.Random) -> bytes:
    try:
        array = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False).copy()
    except Exception:  # it was damaged before
        return data
    if array.size:
        flat = array.reshape(-1)
        values = (0, -1, 1, 1 << 30) if array.dtype.kind == "i" else (0.0, -1.0, 1e300, float("nan"), float("inf"))
        flat[rng.randrange(flat.size)] = rng.choice(values)
    if rng.random() < 0.2:
        array = array[: rng.randrange(len(array) + 1)]
    out = io.BytesIO()
    np.lib.format.write_array(out, np.ascontiguousarray(array), (1, 0), allow_pickle=False)
    return out.getvalue()


def fuzz(inputs: int, seed: int) -> Counter[str]:
    """Read so many inputs, half of each kind; how each was taken. All but an answer or a typed refusal is raised."""
    rng = random.Random(seed)
    outcomes: Counter[str] = Counter()
    _bundle()
    shape = Shape(4, 2, 32)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tempfile.TemporaryDirectory(prefix="tilewise-fuzz-") as name:
        home, file, folder = Path(name) / "home", Path(name) / "profile", Path(name) / "bundle"
        for number in range(inputs):
            where = f"input {number} of seed {seed}"
            if number % 2:
                file.write_bytes(profile_input(rng))
                try:
                    report = import_file(file, home)
                    outcomes["profile taken" if report.accepted else "profile without a good row"] += 1
                except InvalidProfileError:
                    outcomes["profile refused"] += 1
                except Exception as error:
                    raise AssertionError(f"{where}: {type(error).__name__}: {error!s:.300}") from error
            else:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                try:
                    bundle_input(rng, folder)
                    verify(Bundle.load(folder))
                    selector = Selector(ARCH, bundle_dir=folder)
                    selector.select(shape)
                    selector.rank(shape)
                    outcomes["bundle taken"] += 1
                except InvalidBundleError:
                    outcomes["bundle refused"] += 1
                except Exception as error:
                    raise AssertionError(f"{where}: {type(error).__name__}: {error!s:.300}") from error
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown_mib < MOST_MIB, f"memory grew by {grown_mib:.0f} MiB"
    return outcomes
