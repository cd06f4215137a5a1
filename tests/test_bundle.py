"""The trained artifact: same rows, same bytes; whole or refused; nothing in it is code."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn")

import synthetic
import trained
from forked import fork

from tilewise.errors import InvalidBundleError, InvalidProfileError, UnsupportedError
from tilewise.kernels.paged_mqa_logits.spec import candidates
from tilewise.kernels.registry import kernel_source_hash
from tilewise.models import registry
from tilewise.models.bundle import FILES, MANIFEST, Bundle, _digest, squash, unsquash
from tilewise.models.features import feature_spec_hash
from tilewise.models.forest import Forest
from tilewise.models.golden import verify
from tilewise.models.latency import train


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return trained.bundle().save(tmp_path / "bundle")


def rewrite(folder: Path, change: Any) -> None:
    """Change the manifest as someone would who knows how its digest is made."""
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    manifest["digest"] = _digest(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))


def test_training_twice_in_any_row_order_gives_the_same_bundle(tmp_path: Path) -> None:
    rows = list(trained.rows())
    random.Random(3).shuffle(rows)
    again = train(trained.columns(rows), op=trained.OP, arch="h200", folds=0)
    assert again.digest == trained.bundle().digest
    one, two = trained.bundle().save(tmp_path / "a"), again.save(tmp_path / "b")
    assert {p.name: p.read_bytes() for p in one.iterdir()} == {p.name: p.read_bytes() for p in two.iterdir()}


def test_other_rows_or_another_seed_give_another_digest() -> None:
    rows = [dict(row) for row in trained.rows()]
    rows[0]["latency_us"] *= 1.5
    digests = {
        trained.bundle().digest,
        train(trained.columns(rows), op=trained.OP, arch="h200", folds=0).digest,
        train(trained.columns(trained.rows()), op=trained.OP, arch="h200", folds=0, seed=1).digest,
    }
    assert len(digests) == 3


def test_what_is_loaded_is_what_was_saved(folder: Path) -> None:
    loaded, made = Bundle.load(folder), trained.bundle()
    assert loaded.digest == made.digest
    assert loaded.manifest == made.manifest
    configs = list(made.exact.times(0))
    assert np.array_equal(loaded.predict_us(trained.UNSEEN, configs), made.predict_us(trained.UNSEEN, configs))
    assert len(loaded.exact) == len(trained.SHAPES)
    verify(loaded)


def test_the_manifest_says_where_it_is_from() -> None:
    manifest = trained.bundle().manifest
    timed = {row["kernel"] for row in trained.rows()}
    assert "portable" in timed
    assert manifest["kernel_hashes"] == {kernel: kernel_source_hash(kernel) for kernel in timed}
    assert manifest["feature_spec"]["hash"] == feature_spec_hash()
    assert manifest["data"]["rows"] == len(trained.rows())
    assert manifest["data"]["shapes"] == len(trained.SHAPES)
    assert len(manifest["golden"]) >= 20
    assert set(manifest["files"]) == set(FILES)


def test_saving_over_a_bundle_replaces_it_and_leaves_nothing_behind(folder: Path) -> None:
    (folder / "stray").write_text("x")
    trained.bundle().save(folder)
    assert {path.name for path in folder.iterdir()} == {MANIFEST, *(f"{name}.npy" for name in FILES)}
    assert [path.name for path in folder.parent.iterdir()] == ["bundle"]


@pytest.mark.parametrize(
    "text", ["", "null", "[]", "{}", "{", "\x00\x01", '{"format": "tilewise-bundle"}', '{"format": NaN}', "[" * 100_000]
)
def test_a_manifest_that_is_none_is_refused(folder: Path, text: str) -> None:
    (folder / MANIFEST).write_text(text)
    with pytest.raises(InvalidBundleError, match="bundle"):
        Bundle.load(folder)


def test_a_manifest_that_is_not_utf8_is_refused(folder: Path) -> None:
    (folder / MANIFEST).write_bytes(b"\xff\xfe{}")
    with pytest.raises(InvalidBundleError):
        Bundle.load(folder)


@pytest.mark.parametrize("name", [MANIFEST, *(f"{name}.npy" for name in FILES)])
def test_every_file_must_be_there_whole_and_unaltered(folder: Path, name: str) -> None:
    data = (folder / name).read_bytes()
    for damaged in (data[: len(data) // 2], data[:-2], b"", data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]):
        (folder / name).write_bytes(damaged)
        with pytest.raises(InvalidBundleError):
            Bundle.load(folder)
    (folder / name).unlink()
    with pytest.raises(InvalidBundleError, match="missing"):
        Bundle.load(folder)


def test_a_folder_that_is_not_there_or_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "none", tmp_path / "file"):
        with pytest.raises(InvalidBundleError):
            Bundle.load(path)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("format", "other", "format"),
        ("format_version", 1, "format_version must be 2, got 1"),
        ("format_version", "2", "format_version"),
        ("feature_spec", {"hash": "0" * 16}, "feature spec"),
        ("noise_margin", -0.1, "noise_margin"),
        ("noise_margin", "0.1", "noise_margin"),
        ("kernel_hashes", [], "kernel_hashes"),
        ("golden", {}, "golden"),
        ("rank", {}, "malformed"),
        ("level", {}, "malformed"),
        ("files", {}, "malformed"),
        ("regime", {"groups": [{}], "transfers": {}}, "malformed"),
        ("arch_facts", {"name": "h200"}, "malformed"),
        ("exact", {"words": []}, "malformed"),
        ("metrics", {"source": "\ud800"}, "not Unicode"),
        ("metrics", {"\udfff": "x"}, "not Unicode"),
    ],
)
def test_a_field_of_another_form_is_refused_even_with_a_fitting_digest(
    folder: Path, key: str, value: Any, said: str
) -> None:
    rewrite(folder, lambda manifest: manifest.update({key: value}))
    with pytest.raises(InvalidBundleError, match=said):
        Bundle.load(folder)


def test_an_edited_manifest_is_refused(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["noise_margin"] = 0.5
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(InvalidBundleError, match="altered"):
        Bundle.load(folder)


def test_a_golden_pick_that_no_longer_holds_is_found(folder: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        manifest["golden"][0]["predicted_us"] *= 1.01

    rewrite(folder, change)
    with pytest.raises(InvalidBundleError, match="golden"):
        verify(Bundle.load(folder))


def test_no_file_of_a_bundle_is_unpickled(folder: Path, tmp_path: Path) -> None:
    trap = tmp_path / "ran"

    class Trap:
        def __reduce__(self) -> Any:
            return open, (str(trap), "w")

    payload = pickle.dumps(Trap())
    array = np.array([Trap()], dtype=object)
    for name in FILES:
        copy = tmp_path / name
        shutil.copytree(folder, copy)
        for write in (
            lambda path: path.write_bytes(payload),
            lambda path: np.save(path, array, allow_pickle=True),
        ):
            path = copy / f"{name}.npy"
            write(path)
            import hashlib

            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            rewrite(copy, lambda manifest, name=name, digest=digest: manifest["files"].update({name: digest}))
            with pytest.raises(InvalidBundleError):
                Bundle.load(copy)
    assert not trap.exists()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("left", lambda a: a * 0),  # a cycle
        ("left", lambda a: a + len(a)),  # beyond the table
        ("feature", lambda a: a + 10_000),
        ("feature", lambda a: a - 10_000),
        ("roots", lambda a: a - 1),
        ("roots", lambda a: a[:0]),
        ("threshold", lambda a: a * np.nan),
        ("value", lambda a: a + np.inf),
        ("value", lambda a: a[:-1]),
    ],
)
def test_a_forest_that_could_not_be_walked_is_refused(name: str, change: Any) -> None:
    forest = trained.bundle().rank
    with pytest.raises(InvalidBundleError):
        Forest.from_arrays({**forest.arrays(), name: change(forest.arrays()[name])}, forest.baseline, forest.depth, 99)


def test_squash_keeps_the_order_and_can_be_undone() -> None:
    ratio = np.linspace(0.0, 4.0, 500)
    assert (np.diff(squash(ratio)) > 0).all()
    assert np.allclose(unsquash(squash(ratio)), ratio)


def test_a_kill_while_saving_leaves_the_old_bundle_or_the_new(folder: Path) -> None:
    code = f"""
import os
from tilewise.models import bundle
found = bundle.Bundle.load({str(folder)!r})
real = bundle._write
def dying(path, data):
    if path.name == "exact_starts.npy":
        os._exit(9)
    real(path, data)
bundle._write = dying
found.save({str(folder)!r})
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 9
    assert Bundle.load(folder).digest == trained.bundle().digest


# -- versions


def other_bundle() -> Bundle:
    return train(trained.columns(trained.rows()[:400]), op=trained.OP, arch="h200", folds=0, seed=5)


def test_publish_promote_and_rollback(tmp_path: Path) -> None:
    one, two = trained.bundle(), other_bundle()
    shipped = registry.current(trained.OP, "h200", tmp_path)
    assert shipped == registry.shipped(trained.OP, "h200")
    stamps = [registry.stamp(trained.OP, "h200", tmp_path)]
    for bundle in (one, two):
        path = registry.publish(bundle, tmp_path)
        assert registry.current(trained.OP, "h200", tmp_path) == path
        assert Bundle.load(path).digest == bundle.digest
        stamps.append(registry.stamp(trained.OP, "h200", tmp_path))
    assert len(set(stamps)) == 3
    assert registry.history(trained.OP, "h200", tmp_path) == [two.digest, one.digest]
    assert registry.rollback(trained.OP, "h200", tmp_path).name == one.digest
    assert registry.rollback(trained.OP, "h200", tmp_path) == shipped
    with pytest.raises(InvalidBundleError, match="nothing to roll back"):
        registry.rollback(trained.OP, "h200", tmp_path)
    assert registry.promote(trained.OP, "h200", two.digest[:12], tmp_path).name == two.digest
    for wrong in ("", "abc", "0" * 12, "../" * 5):
        with pytest.raises(InvalidBundleError, match="version must name one of"):
            registry.promote(trained.OP, "h200", wrong, tmp_path)


def test_publishing_at_once_loses_no_version_and_tears_no_file(tmp_path: Path) -> None:
    made = [trained.bundle(), other_bundle()]
    seen: list[str] = []
    with ThreadPoolExecutor(6) as pool:
        for _ in range(5):
            done = [pool.submit(registry.publish, made[at % 2], tmp_path) for at in range(6)]
            while not all(one.done() for one in done):
                path = registry.current(trained.OP, "h200", tmp_path)
                if path.parent.name == "versions":
                    seen.append(Bundle.load(path).digest)
            for one in done:
                one.result()
    folder = tmp_path / "models" / trained.OP / "h200"
    assert {path.name for path in (folder / "versions").iterdir()} == {bundle.digest for bundle in made}
    assert set(registry.history(trained.OP, "h200", tmp_path)) == {bundle.digest for bundle in made}
    assert set(seen) <= {bundle.digest for bundle in made}
    assert {path.name for path in folder.iterdir()} == {"versions", registry.POINTER, ".lock"}


DAMAGES: dict[str, Any] = {
    "array cut short": lambda path: (path / "rank_value.npy").write_bytes((path / "rank_value.npy").read_bytes()[:99]),
    "array gone": lambda path: (path / "exact_starts.npy").unlink(),
    "manifest of another": lambda path: rewrite(path, lambda manifest: manifest.update({"noise_margin": 0.5})),
    "manifest gone": lambda path: (path / MANIFEST).unlink(),
    "empty": lambda path: [file.unlink() for file in path.iterdir()],
    "gone": shutil.rmtree,
    "a file": lambda path: (shutil.rmtree(path), path.write_text("x")),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_publishing_again_mends_a_damaged_copy(tmp_path: Path, kind: str) -> None:
    bundle = trained.bundle()
    path = registry.publish(bundle, tmp_path)
    DAMAGES[kind](path)
    with pytest.raises(InvalidBundleError):
        registry.load_version(path, trained.OP, "h200")
    assert registry.publish(bundle, tmp_path) == path == registry.current(trained.OP, "h200", tmp_path)
    assert Bundle.load(path).digest == bundle.digest
    assert [found.name for found in path.parent.iterdir()] == [bundle.digest]


def test_a_child_forked_during_a_publication_does_not_keep_others_from_publishing(tmp_path: Path) -> None:
    ended, end = os.pipe()
    with registry._lock(tmp_path / "models" / trained.OP / "h200"):
        child = fork()
        if child == 0:
            os.close(end)
            os.read(ended, 1)
            os._exit(0)
    registry.publish(trained.bundle(), tmp_path)  # while the child goes on
    os.close(end)
    assert os.waitpid(child, 0)[1] == 0


def test_publishing_again_leaves_a_good_copy_alone(tmp_path: Path) -> None:
    path = registry.publish(trained.bundle(), tmp_path)
    before = (path / MANIFEST).stat()
    registry.publish(trained.bundle(), tmp_path)
    after = (path / MANIFEST).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


@pytest.mark.parametrize("kind", DAMAGES)
def test_rolling_back_passes_over_a_damaged_version_and_names_it(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = trained.bundle(), other_bundle()
    first = registry.publish(one, tmp_path)
    middle = registry.publish(two, tmp_path)
    registry.publish(one, tmp_path)
    DAMAGES[kind](middle)
    assert registry.rollback(trained.OP, "h200", tmp_path) == registry.shipped(trained.OP, "h200")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert two.digest[:12] in caplog.text
    assert registry.history(trained.OP, "h200", tmp_path) == []
    registry._point(first.parent.parent, [two.digest, one.digest])  # the one in force may be damaged, too
    assert registry.rollback(trained.OP, "h200", tmp_path) == first
    registry._point(first.parent.parent, [one.digest, two.digest, "0" * 64, one.digest])
    with pytest.raises(InvalidBundleError, match=r"version must name|missing|altered|digest"):
        registry.promote(trained.OP, "h200", two.digest[:12], tmp_path)
    assert registry.history(trained.OP, "h200", tmp_path)[0] == one.digest


def test_a_rollback_that_leads_nowhere_changes_nothing(tmp_path: Path) -> None:
    """Without a shipped bundle behind them, damaged versions are nothing to go back to."""
    rows = synthetic.synthetic_rows([trained.SHAPES[0]], arch="mi355x")
    first, second = (train(trained.columns(rows), op=trained.OP, arch="mi355x", folds=0, seed=seed) for seed in (0, 1))
    path = registry.publish(first, tmp_path)
    now = registry.publish(second, tmp_path)
    (path / "rank_value.npy").unlink()
    before = registry.history(trained.OP, "mi355x", tmp_path)
    with pytest.raises(InvalidBundleError, match=rf"nothing was changed: version {first.digest[:12]} .*is missing"):
        registry.rollback(trained.OP, "mi355x", tmp_path)
    assert registry.history(trained.OP, "mi355x", tmp_path) == before
    assert registry.current(trained.OP, "mi355x", tmp_path) == now
    (path.parent.parent / registry.POINTER).write_text("garbage")
    with pytest.raises(InvalidBundleError, match="must hold digests of 64 hex digits, got 'garbage'"):
        registry.rollback(trained.OP, "mi355x", tmp_path)


@pytest.mark.parametrize("text", ["", "nonsense\n", "0" * 64 + "\n", "../../x\n", "\x00"])
def test_a_broken_pointer_is_a_miss_and_is_replaced(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "models" / trained.OP / "h200"
    folder.mkdir(parents=True)
    (folder / registry.POINTER).write_text(text)
    assert registry.current(trained.OP, "h200", tmp_path) == registry.shipped(trained.OP, "h200")
    assert len(caplog.records) == (1 if text else 0)  # an empty one is what rolling back to the shipped bundle leaves
    path = registry.publish(trained.bundle(), tmp_path)
    assert registry.current(trained.OP, "h200", tmp_path) == path


def test_op_and_arch_cannot_leave_the_folder(tmp_path: Path) -> None:
    for op, arch in (("..", "h200"), ("a/b", "h200"), (trained.OP, "../x"), ("", "h200")):
        with pytest.raises(InvalidBundleError):
            registry.current(op, arch, tmp_path)


# -- training


def test_rows_that_cannot_be_used_are_left_out_by_name() -> None:
    rows = [dict(row) for row in trained.rows()[:600]]
    rows[0]["kernel"] = "v999"
    rows[1]["kernel_hash"] = "stale"
    rows[2]["arch"] = "mi355x"
    rows[3]["cache_state"] = "warm"
    rows[4]["op"] = "other"
    dropped = train(trained.columns(rows), op=trained.OP, arch="h200", folds=0).manifest["data"]["dropped"]
    assert dropped == {
        "op is not paged_mqa_logits": 1,
        "arch is not h200": 1,
        "not a cold graph replay": 1,
        "unknown kernel v999": 1,
        "stale source of kernel portable": 1,
    }


def test_no_usable_row_is_a_typed_error() -> None:
    rows = [{**row, "kernel": "v999"} for row in trained.rows()[:10]]
    with pytest.raises(InvalidProfileError, match=r"no usable timing.*v999"):
        train(trained.columns(rows), op=trained.OP, arch="h200")
    with pytest.raises(UnsupportedError, match="arch"):
        train(trained.columns(trained.rows()), op=trained.OP, arch="nonsense")


def forge(folder: Path, name: str, data: bytes) -> None:
    """Replace a file of the bundle, with hashes and digest that fit."""
    (folder / name).write_bytes(data)

    def take_up(manifest: dict[str, Any]) -> None:
        manifest["files"][name.removesuffix(".npy")] = hashlib.sha256(data).hexdigest()

    rewrite(folder, take_up)


@pytest.mark.parametrize("header", [b"{'descr': (", b"  {'descr'\n", b"'''", b"{", b"\xff\xfe", b"[" * 60])
def test_an_array_whose_header_is_no_header_is_refused(header: bytes, folder: Path) -> None:
    forge(folder, "rank_feature.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    with pytest.raises(InvalidBundleError, match=r"rank_feature.npy is no array"):
        Bundle.load(folder)


@pytest.mark.parametrize("value", [None, "x", [], [[]], True, 0, -1, 1e300, 5e-324, float(1 << 70)])
@pytest.mark.parametrize("name", ["compute_units", "bandwidth_tbps", "fp8_tflops", "shared_memory_bytes"])
def test_arch_facts_are_sane_numbers(name: str, value: Any, folder: Path) -> None:
    rewrite(folder, lambda manifest: manifest["arch_facts"].update({name: value}))
    with pytest.raises(InvalidBundleError, match=f"arch_facts {name} must be"):
        Bundle.load(folder)


def test_a_measured_shape_that_is_none_is_refused(folder: Path) -> None:
    shapes = np.load(folder / "exact_shapes.npy")
    shapes[0, 0] = -1
    data = io.BytesIO()
    np.save(data, shapes)
    forge(folder, "exact_shapes.npy", data.getvalue())
    with pytest.raises(InvalidBundleError, match="batch_size must be"):
        Bundle.load(folder)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
def test_absurd_numbers_of_a_bundle_give_a_finite_time(folder: Path) -> None:
    weights = np.load(folder / "level_weights.npy")
    weights[:] = 1e308
    data = io.BytesIO()
    np.save(data, weights)
    forge(folder, "level_weights.npy", data.getvalue())
    times = Bundle.load(folder).predict_us(trained.UNSEEN, candidates(trained.UNSEEN, trained.ARCH))
    assert np.isfinite(times).all()
