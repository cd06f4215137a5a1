"""Features, the exported forest against scikit-learn's, and how regret is judged."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn")

import synthetic
import trained

from tilewise.errors import InvalidBundleError, InvalidProfileError
from tilewise.kernels.arch import ARCHS, get_arch
from tilewise.kernels.paged_mqa_logits import spec
from tilewise.kernels.paged_mqa_logits.sm90 import resources
from tilewise.kernels.paged_mqa_logits.spec import Config, Shape, candidates
from tilewise.models import fit as fitting
from tilewise.models.adapt import joined
from tilewise.models.bundle import squash
from tilewise.models.choice import choose, first_best
from tilewise.models.columns import GRID, shape_columns
from tilewise.models.evaluate import evaluate
from tilewise.models.features import (
    FEATURES,
    SHAPE_FEATURES,
    config_features,
    features_of,
    floors_us,
    shape_features,
)
from tilewise.models.fit import examples, fit_level, fit_rank, rank_regressor
from tilewise.models.forest import export
from tilewise.models.guard import CONFIDENCE, FEWEST_TRIALS, Guard, Needed, Trial, beyond_confidence, needed_gain
from tilewise.models.holdout import edge_splits, fold_splits, hold_out, reach_of, trials, value_splits
from tilewise.models.judging import (
    Judged,
    assign_folds,
    figures,
    geomean,
    judging_set,
    noise_margin,
    noise_of,
    typical_noise,
)
from tilewise.models.measurements import measurements
from tilewise.models.regime import Regime
from tilewise.models.smooth import Smooth
from tilewise.models.smooth import export as export_smooth
from tilewise.models.structure import config_columns, derived
from tilewise.models.transfer import transfer


def measured():
    return measurements(trained.columns(trained.rows()), op=trained.OP, arch="h200")


EXTREMES = [
    Shape(1, 1, 8, 64, 1, 1),
    Shape(1, 1, 8, 128, 16, 0),
    Shape(0, 8, 128),
    Shape(spec.MAX_BATCH_SIZE, spec.MAX_NEXT_N, 128, 128, 256, spec.MAX_CONTEXT_LEN),
    Shape(3, 5, 32, 128, 64, 4097, 1),
    Shape(7, 6, 64, 64, 256, 300, 0),
]


@pytest.mark.parametrize("shape", EXTREMES, ids=str)
@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda arch: arch.name)
def test_features_are_finite_numbers_on_the_grid(shape: Shape, arch) -> None:
    bundle = trained.bundle()
    configs = [Config(), Config("v999", 8, 8, "heads", 512, 1 << 30, 16, 8, 8, "balanced", "mfma", "e", "p", 4, 2, 2)]
    rows = type(bundle)(
        bundle.manifest, bundle.rank, bundle.level, bundle.exact, bundle.regime, bundle.guard, arch
    ).features(shape, configs)
    assert rows.shape == (2, len(FEATURES))
    assert np.isfinite(rows).all()
    assert np.array_equal(rows * GRID, np.rint(rows * GRID))


@pytest.mark.parametrize("shape", [s for s in EXTREMES if s.context_tokens], ids=str)
def test_floors_are_the_specs(shape: Shape) -> None:
    # The spec rounds the block table up to whole pages.
    assert math.isclose(
        float(floors_us(shape_columns(shape), trained.ARCH)), spec.floor_us(shape, trained.ARCH), rel_tol=0.02
    )


@pytest.mark.parametrize(
    ("batch_size", "context", "mean", "most"),
    [
        (27, 768, 768, 1),  # 12 tiles a request, 3 a program: every share ends within a request or with it
        (48, 512, 512, 2),  # 8 tiles a request, 3 a program
        (132, 512, 512, 1),  # a request each
        (264, 512, 512, 2),  # two each
        (300, 512, 512, 4),  # 19 tiles each, of requests of 8: the end of one, two whole, and the beginning of one
        (27, 768, 700, 2),  # lengths differ: shares end anywhere
        (1, 64, 64, 1),
    ],
)
def test_requests_that_the_busiest_program_of_a_balanced_schedule_crosses(
    batch_size: int, context: int, mean: int, most: int
) -> None:
    shape = Shape(batch_size, 8, 64, 128, 64, context, mean)
    balanced = Config("sm90", 8, 4, num_stages=4, schedule="balanced", consumers=2, token_split=2, ctas_per_sm=1)
    rows = features_of(shape, [balanced, dataclasses.replace(balanced, schedule="even")], get_arch("h200"))
    found = rows[:, FEATURES.index("log2_most_segments")]
    assert found.tolist() == pytest.approx([math.log2(most), 0.0], abs=1 / GRID)


def test_features_name_each_column_once() -> None:
    assert len(set(FEATURES)) == len(FEATURES)


def test_features_of_one_launch_are_those_of_rows_of_many() -> None:
    shapes = trained.SHAPES[:6]
    pairs = [(shape, config) for shape in shapes for config in candidates(shape, trained.ARCH)]
    numbers = [shape_columns(shape) for shape, _ in pairs]
    columns = {name: np.array([values[name] for values in numbers]) for name in numbers[0]}
    together = np.hstack(
        [
            shape_features(columns, trained.ARCH),
            config_features(columns, config_columns([config for _, config in pairs]), trained.ARCH),
        ]
    )
    for _ in range(2):  # computed, and remembered
        alone = [features_of(shape, candidates(shape, trained.ARCH), trained.ARCH) for shape in shapes]
        assert np.array_equal(np.vstack(alone), together)


def test_the_structure_of_a_config_from_a_damaged_file_is_small() -> None:
    huge = dict.fromkeys(("fuse_n", "dot_n", "consumers", "token_split", "ctas_per_sm"), 1 << 31)
    for kernel in ("sm90", "portable"):
        assert max(derived(Config(kernel=kernel, **huge))) <= 1 << 16


@pytest.mark.parametrize("heads", [16, 32, 64, 128])
def test_structure_is_that_of_the_hopper_kernel(heads: int) -> None:
    names = ("products", "products_ahead", "keeps_weights", "max_even", "log2_most_columns")
    seen = set()
    for next_n in range(1, 9):
        shape = Shape(8, next_n, heads, 128, 64, 4096)
        configs = candidates(shape, trained.ARCH)
        rows = features_of(shape, configs, trained.ARCH)
        found = rows[:, [FEATURES.index(name) for name in names]]
        for config, row in zip(configs, found.tolist(), strict=True):
            if config.kernel != "sm90":
                assert row[1:4] == [0.0, -1.0, -1.0]
                continue
            keeps, most = resources.keeps_weights(shape, config), resources.most_products(config)
            expected = [most, resources.in_flight(shape, config), keeps, resources.max_even(shape, config)]
            assert row[:4] == expected
            assert row[4] == pytest.approx(math.log2(resources.own_tokens(config) * heads), abs=1 / GRID)
            seen.add(tuple(expected[1:]))
    assert len(seen) > 1


def test_features_row_by_row_and_all_at_once_agree() -> None:
    table = measured()
    data = examples(table, trained.ARCH)
    bundle = trained.bundle()
    for shape_id in range(0, len(table.shapes), 7):
        cells = np.arange(table.cells(shape_id).start, table.cells(shape_id).stop)
        rows = data.rank_rows[np.isin(data.cell, cells)]
        configs = [table.configs[at] for at in table.config_id[cells]]
        assert np.array_equal(rows, bundle.features(table.shapes[shape_id], configs))


def test_numpy_picks_what_scikit_learn_picks_over_the_whole_grid() -> None:
    data = examples(measured(), trained.ARCH)
    rank, columns = rank_regressor(data, slice(None), 0)
    scaler, process = fit_level(data, np.arange(len(trained.SHAPES)))
    bundle = trained.bundle()
    assert 0 < len(columns) < len(FEATURES)  # the others have one value in this profile
    theirs = rank.predict(data.rank_rows[:, columns])
    assert np.array_equal(export(rank, columns).predict(data.rank_rows), theirs)
    assert np.array_equal(fit_rank(data, slice(None), 0).predict(data.rank_rows), theirs)
    assert np.allclose(
        export_smooth(scaler, process).predict(data.shape_rows),
        process.predict(scaler.transform(data.shape_rows)),
        atol=1e-4,
    )  # weights are stored to six digits
    unseen = [Shape(b, n, h, 128, 64, c) for b in (2, 7, 33) for n in (1, 3, 8) for h in (32, 64) for c in (300, 9999)]
    grids = {shape: spec.candidates(shape, trained.ARCH) for shape in (*trained.SHAPES, *unseen)}
    rows = [bundle.features(shape, configs) for shape, configs in grids.items()]
    every = rank.predict(np.vstack(rows)[:, columns])
    theirs = np.split(every, np.cumsum([len(r) for r in rows])[:-1])
    for (shape, configs), scores in zip(grids.items(), theirs, strict=True):
        assert np.allclose(bundle.scores(shape, configs), scores, rtol=0.0, atol=1e-12)
        assert first_best(configs, bundle.predict_us(shape, configs)) == first_best(configs, np.exp(scores))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("points", lambda a: a[:-1]),
        ("points", lambda a: a[:, :-1]),
        ("weights", lambda a: a * np.nan),
        ("center", lambda a: a[:-1]),
        ("scale", lambda a: a * 0),
        ("scale", lambda a: a + np.inf),
    ],
)
def test_a_level_whose_arrays_do_not_fit_is_refused(name: str, change) -> None:
    level = trained.bundle().level
    arrays = level.arrays()
    Smooth.from_arrays(arrays, level.header(), len(SHAPE_FEATURES))
    with pytest.raises(InvalidBundleError):
        Smooth.from_arrays({**arrays, name: change(arrays[name])}, level.header(), len(SHAPE_FEATURES))
    for header in (
        {"offset": 1.0, "length": 0.0},
        {"offset": float("nan"), "length": 1.0},
        {"offset": 1, "length": 1.0},
    ):
        with pytest.raises(InvalidBundleError):
            Smooth.from_arrays(arrays, header, len(SHAPE_FEATURES))


# -- the rule of choice


def test_the_default_keeps_its_place_within_the_margin() -> None:
    configs = [Config(split_kv=s) for s in (8, 4, 2)]
    assert choose(configs, np.array([100.5, 100.0, 120.0]), 0, 0.01) == (0, 1)
    assert choose(configs, np.array([102.0, 100.0, 120.0]), 0, 0.01) == (1, 0)
    assert choose(configs, np.array([100.5, 100.0, 120.0]), None, 0.01) == (1, 0)


def test_of_a_predicted_tie_the_first_in_a_fixed_order_is_chosen() -> None:
    alone, fused, even, plain = (
        Config(kernel="sm90", schedule="balanced", fuse_n=2, dot_n=2, consumers=2, token_split=1, ctas_per_sm=1),
        Config(kernel="sm90", schedule="balanced", fuse_n=4, dot_n=2, consumers=2, token_split=1, ctas_per_sm=1),
        Config(kernel="sm90", schedule="even", fuse_n=4, dot_n=4, consumers=3, token_split=1, ctas_per_sm=1),
        Config(fuse_n=2, dot_n=2),
    )
    configs = [plain, alone, even, fused]
    times = np.array([110.0, 100.0, 100.2, 100.3])
    assert choose(configs, times, 0, 0.01, 0.004)[0] == 3, "more tokens fused, then balanced"
    assert choose(configs, times, 0, 0.01, 0.0025)[0] == 2
    assert choose(configs, times, 0, 0.01)[0] == 1, "no tie where none is asked for"
    assert choose(configs, times, 0, 0.10, 0.004)[0] == 0, "the default keeps its place"
    assert choose(configs, np.array([100.25, 100.0, 100.2, 100.3]), 0, 0.001, 0.004)[0] == 2, "not slower than it"
    assert choose(configs, np.array([np.nan, 100.0, 100.2, 100.3]), 0, 0.01, 0.004)[0] == 3
    for turn in range(4):
        turned = np.roll(np.arange(4), turn)
        again = choose([configs[at] for at in turned], times[turned], turned.tolist().index(0), 0.01, 0.004)[0]
        assert turned[again] == 3, "whatever the order of the configs"


def test_ties_go_to_the_first_config_in_order_however_they_are_listed() -> None:
    configs = [Config(split_kv=s) for s in (8, 4, 2)]
    assert first_best(configs, np.array([5.0, 5.0 + 1e-9, 5.0])) == 2
    assert first_best(configs[::-1], np.array([5.0, 5.0, 5.0 - 1e-9])) == 0


def test_a_config_without_a_time_is_never_chosen() -> None:
    configs = [Config(split_kv=s) for s in (8, 4, 2)]
    assert choose(configs, np.array([np.nan, 7.0, np.nan]), 0, 0.01) == (1, None)
    with pytest.raises(ValueError, match="no config has a time"):
        choose(configs, np.full(3, np.nan), 0, 0.01)


# -- cells and judging


def test_a_later_pass_on_another_clock_does_not_move_its_configs_against_the_others() -> None:
    shape = trained.SHAPES[0]
    one, two, three = spec.candidates(shape, trained.ARCH)[:3]
    # The second pass ran at half the clock; the duel, of two configs, at a third of it.
    timed = [
        (one, 0, 8.0), (one, 0, 2.0), (two, 0, 5.0), (three, 0, 6.0), (one, 1, 8.0), (two, 1, 10.0), (three, 1, 12.0),
        (one, 2, 12.0), (two, 2, 15.0),
    ]  # fmt: skip
    rows = [synthetic.synthetic_row(shape, config, pass_index=i, latency_us=us) for config, i, us in timed]
    table = measurements(trained.columns(rows), op=trained.OP, arch="h200")
    at = [[table.configs[c] for c in table.config_id].index(config) for config in (one, two, three)]
    assert table.first_us[at] == pytest.approx([4.0, 5.0, 6.0])
    assert table.second_us[at] == pytest.approx([8.0, 10.0, 12.0])
    assert table.latency_us[at] == pytest.approx([4.0, 5.0, 6.0])


def test_only_shapes_with_every_candidate_timed_twice_are_judged() -> None:
    rows = list(trained.rows())
    first, second = trained.SHAPES[0], trained.SHAPES[1]
    kept = [
        row
        for at, row in enumerate(rows)
        if not (
            (shape_of(row) == first and at == 3)  # one timing of one config is missing
            or (shape_of(row) == second and row["pass_index"] == 1)
        )
    ]
    table = measurements(trained.columns(kept), op=trained.OP, arch="h200")
    judged = {one.shape for one in judging_set(table, trained.ARCH)}
    assert judged == set(trained.SHAPES) - {first, second}


def shape_of(row: dict) -> Shape:
    return Shape(**{name: row[name] for name in spec.SHAPE_FIELDS})


def test_regret_is_taken_from_the_second_pass_of_the_config_that_the_first_calls_best() -> None:
    shape = trained.SHAPES[0]
    rows = []
    for at, config in enumerate(spec.candidates(shape, trained.ARCH)):
        # By the first pass number 1 is best; the second pass is kinder to number 2.
        first, second = {1: (10.0, 12.0), 2: (10.1, 11.0)}.get(at, (20.0, 24.0))
        rows += [
            synthetic.synthetic_row(shape, config, pass_index=i, latency_us=us, latency_p20_us=us, latency_p80_us=us)
            for i, us in enumerate((first, second))
        ]
    table = measurements(trained.columns(rows), op=trained.OP, arch="h200")
    (one,) = judging_set(table, trained.ARCH)
    assert one.reference_us == 12.0
    by_config = {config: at for at, config in enumerate(one.configs)}
    at = [by_config[c] for c in spec.candidates(shape, trained.ARCH)]
    assert figures([one], {one.shape_id: at[0]})["worst_regret"] == pytest.approx(2.0)
    assert figures([one], {one.shape_id: at[2]})["worst_regret"] == 1.0  # no credit for beating the named best
    assert figures([one], {one.shape_id: at[2]})["geomean_against_minimum"] == 1.0
    assert math.isclose(figures([one], {one.shape_id: at[1]})["geomean_against_minimum"], 12 / 11)
    failed = figures([one], {one.shape_id: None})
    assert (failed["failures"], failed["worst_regret"], failed["within_5pct"]) == (1, pytest.approx(2.0), 0.0)


def test_near_duplicates_share_a_fold() -> None:
    twins = [Shape(16, 6, 32, 128, 64, 32768, mean) for mean in (32768, 32000, 9000)] + [
        Shape(16, 6, 32, 128, 64, 33000)
    ]
    shapes = [*trained.SHAPES, *twins]
    for seed in range(5):
        fold = assign_folds(shapes, 7, seed)
        own = fold[shapes.index(Shape(16, 6, 32, 128, 64, 32768))]
        assert {int(f) for f in fold[len(trained.SHAPES) :]} == {int(own)}
        assert set(fold.tolist()) == set(range(7))


def test_noise_is_how_far_two_passes_differ() -> None:
    assert noise_margin(measured()) == pytest.approx(0.001, rel=0.1)  # the synthetic passes differ by 0.1 %
    once = measurements(
        trained.columns([r for r in trained.rows() if r["pass_index"] == 0]), op=trained.OP, arch="h200"
    )
    assert noise_margin(once) == typical_noise(once) == 0.01
    assert 0.001 <= typical_noise(measured()) <= noise_margin(measured())
    noise = noise_of(measured())
    assert noise["pairs"] == len(trained.rows()) / 2
    assert noise["p50"] <= noise["p90"] <= noise["p99"]
    assert noise["drift"] == pytest.approx(0.001, rel=0.1)
    assert noise_of(once) == {"pairs": 0}


def test_evaluation_names_its_figures_and_the_model_beats_the_baselines() -> None:
    columns = trained.columns(trained.rows())
    result = evaluate(columns, op=trained.OP, arch="h200", folds=3, seeds=2, leave_out=("heads", "max_context_len"))
    names = ("geomean_regret", "p90_regret", "worst_regret", "within_2pct", "within_5pct", "worst_against_default")
    left_out = (result["leave_one_heads_out"], result["leave_one_context_out"])
    for part in (result, *result["by_seed"], *left_out, *result["baselines"].values()):
        assert all(isinstance(part[name], float) for name in names)
        assert 1.0 <= part["geomean_regret"] <= part["worst_regret"]
    for part in (result, *left_out):
        assert 0.0 <= part["abstentions"] <= 1.0
        assert 0.0 <= part["predicted_time_median_error"] <= part["predicted_time_p90_error"]
    assert result["judged_shapes"] == len(trained.SHAPES)
    assert result["geomean_regret"] < min(b["geomean_regret"] for b in result["baselines"].values())
    assert result["geomean_regret"] < 1.015
    assert result["geomean_regret"] == pytest.approx(np.mean([one["geomean_regret"] for one in result["by_seed"]]))
    assert result["worst_regret"] == max(one["worst_regret"] for one in result["by_seed"])
    assert result["leave_one_heads_out"]["extrapolated"] == 1.0
    assert result["noise"]["pairs"] == len(trained.rows()) / 2
    again = evaluate(columns, op=trained.OP, arch="h200", folds=3, seeds=2, leave_out=("heads", "max_context_len"))
    assert again == result


def test_a_duel_replaces_the_second_pass_where_one_run_has_both_configs() -> None:
    shape = trained.SHAPES[0]
    offer = candidates(shape, trained.ARCH)[:3]

    def row(at: int, pass_index: int, us: float, run_id: str = "a") -> dict[str, Any]:
        times = {"latency_us": us, "latency_p20_us": us, "latency_p80_us": us}
        return synthetic.synthetic_row(shape, offer[at], pass_index=pass_index, run_id=run_id, **times)

    passes = [row(at, index, us) for index in (0, 1) for at, us in enumerate((100.0, 101.0, 108.0))]

    def judged(*duels: dict[str, Any]) -> Judged:
        table = measurements(trained.columns([*passes, *duels]), op=trained.OP, arch="h200")
        (one,) = judging_set(table, trained.ARCH, lambda _: offer)
        return one

    assert judged().ratio(2, 0) == (pytest.approx(1.08), False)
    apart = judged(row(2, 2, 103.0, "b"), row(0, 2, 100.0, "c"))
    assert apart.ratio(2, 0) == (pytest.approx(1.08), False), "times of two runs were compared"
    one = judged(row(2, 2, 103.0, "b"), row(0, 2, 100.0, "b"), row(2, 2, 106.05, "c"), row(0, 2, 105.0, "c"))
    assert one.ratio(2, 0) == (pytest.approx((1.03 * 1.01) ** 0.5), True)
    assert one.ratio(2, 1) == (pytest.approx(108 / 101), False)
    assert one.ratio(0, 0) == (1.0, False)
    assert (one.best, one.reference_us) == (0, pytest.approx(100.0)), "a duel has to leave the reference alone"
    assert figures([one], {one.shape_id: 2})["worst_regret"] == pytest.approx((1.03 * 1.01) ** 0.5)
    assert figures([one], {one.shape_id: 2}, duels=False)["worst_regret"] == pytest.approx(1.08)


def test_a_duel_of_a_losing_pick_counts_in_the_evaluation() -> None:
    before = evaluate(trained.columns(trained.rows()), op=trained.OP, arch="h200", folds=3, limit=0.0)
    entry = before["beyond"][0]
    assert (before["duelled"], entry["regret"], entry["duelled"]) == (0, before["worst_regret"], False)
    shape = Shape(**entry["shape"])
    time = synthetic.synthetic_us(shape, Config.from_dict(entry["best"]), "h200")
    even = {"latency_us": time, "latency_p20_us": time, "latency_p80_us": time, "run_id": "duel"}
    duel = [
        synthetic.synthetic_row(shape, Config.from_dict(config), pass_index=2, **even) for config in entry["configs"]
    ]
    after = evaluate(trained.columns([*trained.rows(), *duel]), op=trained.OP, arch="h200", folds=3, limit=0.0)
    assert after["duelled"] == 1
    assert entry["shape"] not in [one["shape"] for one in after["beyond"]]
    assert after["second_pass_worst_regret"] >= entry["regret"] * (1 - 1e-9)
    # What a report shows shape by shape comes to the figures above it.
    for found in (before, after):
        regret = [one["regret"] for one in found["by_shape"]]
        assert geomean(np.array(regret)) == pytest.approx(found["geomean_regret"], rel=1e-12)
        assert max(regret) == found["worst_regret"]
        assert max(one["against_default"] for one in found["by_shape"]) == found["worst_against_default"]


def test_held_out_times_do_not_reach_the_prediction() -> None:
    """Spoiling held-out shapes' own times must not change what is predicted for them."""
    table = measured()
    split = fold_splits(table.shapes, 3, 0)[0]
    found = []
    for factor in (1.0, 3.0):
        times = table.latency_us.copy()
        inside = np.isin(table.shape_id, split.held)
        times[inside] *= np.where(np.arange(inside.sum()) % 2, factor, 1.0)
        spoiled = type(table)(**{**table.__dict__, "latency_us": times})
        (one,) = hold_out(spoiled, trained.ARCH, examples(spoiled, trained.ARCH), [split], seed=0)
        found.append({at: (prediction.ratio.tolist(), prediction.best_us) for at, prediction in one.items()})
    assert found[0] == found[1]


def test_splits_hold_out_what_they_say() -> None:
    shapes = trained.SHAPES
    by_value = value_splits(shapes, "next_n")
    assert [{shapes[at].next_n for at in split.held} for split in by_value] == [{1}, {2}, {6}]
    near = [Shape(1, 1, 32, max_context_len=length) for length in (1000, 1024, 1300, 31000, 32000, 40000)]
    held = [{near[at].max_context_len for at in split.held} for split in value_splits(near, "max_context_len")]
    assert held == [{1000, 1024}, {1300}, {31000, 32000}, {40000}]
    for split in (*by_value, *edge_splits(shapes, "batch_size"), *fold_splits(shapes, 4, 0)):
        assert sorted([*split.held, *split.train]) == list(range(len(shapes)))
    assert [{shapes[at].batch_size for at in split.held} for split in edge_splits(shapes, "batch_size")] == [{1}, {64}]
    assert reach_of(6, [1, 2, 3]) == pytest.approx(1.0)


def test_trials_compare_the_pick_with_the_default() -> None:
    table = measured()
    splits = value_splits(table.shapes, "heads")
    found = trials(
        table,
        trained.ARCH,
        splits,
        hold_out(table, trained.ARCH, examples(table, trained.ARCH), splits, seed=0),
        "heads",
    )
    assert sorted(trial.shape_id for trial in found) == list(range(len(table.shapes)))
    for trial in found:
        assert trial.predicted >= 0.0
        assert trial.reach == pytest.approx(1.0)
        shape = table.shapes[trial.shape_id]
        default = synthetic.synthetic_us(shape, spec.default_config(shape, trained.ARCH), "h200")
        least = min(synthetic.synthetic_us(shape, config, "h200") for config in spec.candidates(shape, trained.ARCH))
        assert trial.real <= math.log(default / least) + 1e-3


# -- the gain that is asked for


def some_trials(count: int, losses: dict[float, float]) -> list[Trial]:
    """`count` trials, all gains as predicted but for `losses`, predicted to real."""
    good = [Trial(at, 0.05, 0.05, 1.0) for at in range(count - len(losses))]
    return good + [Trial(1000 + at, predicted, real, 1.0) for at, (predicted, real) in enumerate(losses.items())]


def test_the_gain_asked_for_is_that_above_which_losses_are_rare_enough() -> None:
    assert needed_gain(some_trials(99, {}), 0.01, 0.003).gain == 0.003  # no loss: the least that may be asked for
    one = needed_gain(some_trials(49, {0.03: -0.2}), 0.01, 0.003)
    assert (one.losses, one.shapes) == (0, 49)
    assert math.log1p(one.gain) > 0.03
    assert one.gain == pytest.approx(math.expm1(0.03), abs=2e-4)
    # Of 149 shapes, 2 in 150 may lose at 98 %: the third largest loss counts.
    losses = {0.09: -0.2, 0.08: -0.2, 0.02: -0.2}
    many = needed_gain(some_trials(149, losses), 0.01, 0.003, 0.98)
    assert (many.losses, many.gain) == (2, pytest.approx(math.expm1(0.02), abs=2e-4))
    assert needed_gain(some_trials(149, losses), 0.01, 0.003, 0.99).gain == pytest.approx(math.expm1(0.09), abs=2e-4)
    assert needed_gain(some_trials(99, {0.5: -0.005}), 0.01, 0.003).gain == 0.003  # slower within noise is no loss
    assert needed_gain(some_trials(FEWEST_TRIALS - 1, {}), 0.01, 0.003).gain is None
    assert CONFIDENCE < beyond_confidence("next_n") < beyond_confidence("heads") < 1.0


def test_beyond_what_was_measured_more_is_asked_for_and_far_beyond_nothing_is_sure() -> None:
    guard = Guard(0.99, {"inside": Needed(0.02, 99, 0, 0.0), "heads": Needed(0.05, 99, 0, 1.0)})
    assert Guard.from_dict(guard.to_dict()) == guard
    assert guard.margin({}, 0.01)[0] == 0.02
    assert guard.margin({}, 0.03)[0] == 0.02  # trials have said so
    assert Guard(0.99, {}).margin({}, 0.03)[0] == 0.03  # none has
    assert guard.margin({"heads": 1.0}, 0.01)[0] == 0.05
    for beyond in ({"heads": 1.5}, {"next_n": 0.1}, {"heads": 1.0, "next_n": 0.1}):
        margin, why = guard.margin(beyond, 0.01)
        assert margin is None
        assert "next_n" in why or "heads" in why
    for broken in ({"confidence": 1.5}, {"needed": {"heads": {"gain": -1.0, "shapes": 1, "losses": 0, "reach": 0.0}}}):
        with pytest.raises(InvalidBundleError):
            Guard.from_dict({**guard.to_dict(), **broken})


def test_too_little_to_judge_is_a_typed_error() -> None:
    rows = [row for row in trained.rows() if row["pass_index"] == 0]
    with pytest.raises(InvalidProfileError, match="timed twice, got 0"):
        evaluate(trained.columns(rows), op=trained.OP, arch="h200")


# -- regime and transfer


def test_regime_says_how_a_shape_lies_outside() -> None:
    regime = Regime.of(trained.SHAPES, {})
    assert regime.outside(trained.UNSEEN) == []
    cases = {
        Shape(128, 6, 32, 128, 64, 2048): ("batch_size", "high"),
        Shape(3, 8, 32, 128, 64, 2048): ("next_n", "high"),
        Shape(3, 6, 32, 128, 64, 100): ("max_context_len", "low"),
        Shape(3, 6, 32, 128, 64, 4096, 1000): ("raggedness", "high"),
        Shape(3, 6, 128, 128, 64, 4096): ("heads", "unmeasured"),
        Shape(3, 6, 64, 128, 128, 4096): ("block_kv", "unmeasured"),
    }
    for shape, (dimension, side) in cases.items():
        (one,) = regime.outside(shape)
        assert (one.dimension, one.side) == (dimension, side)
        assert regime.transfer_allowed([one])[0] is False
        assert regime.beyond(shape) == {dimension: one.reach}
    assert Regime.from_dict(regime.to_dict()) == regime
    assert regime.beyond(Shape(3, 6, 32, 128, 64, 4096)) == {}
    # Within the range, and yet a number that was not measured.
    between = Shape(12, 5, 64, 128, 64, 20000)
    assert regime.outside(between) == []
    assert regime.beyond(between) == {"next_n": pytest.approx(math.log2(6 / 5))}
    assert set(regime.beyond(Shape(128, 6, 128, 128, 64, 4096))) == {"heads", "batch_size"}


def test_what_lies_outside_is_said_in_plain_numbers() -> None:
    """For an operator: names of sizes, the value and the range, no exponents, no digits without a meaning."""
    regime = Regime.of([Shape(1, 4, 32), Shape(64, 4, 32, 128, 64, 32768, 7782)], {})
    said = {
        Shape(1 << 20, 4, 32): ["batch_size 1048576 is outside the measured 1 to 64"],
        Shape(8, 6, 32): ["next_n 6 was not measured, only 4"],
        Shape(8, 4, 32, 128, 64, 32768, 1): ["longest over mean context 32768 is outside the measured 1 to 4.2"],
        Shape(8, 4, 32, 128, 64, 32768, 7781): [
            "longest over mean context 4.211284 is outside the measured 1 to 4.210743"
        ],
        Shape(8, 4, 16): ["heads 16 was not measured, only 32"],
    }
    assert {shape: [one.text for one in regime.outside(shape)] for shape in said} == said


def test_the_reason_against_a_transfer_is_a_plain_sentence() -> None:
    base = {"shapes": 9, "reach": 1.0, "worst": 1.05, "geomean": 1.01, "default_worst": 1.2, "default_geomean": 1.02}
    shape = Shape(100, 6, 32, 128, 64, 2048)
    for change, said in (
        ({"worst": 1.509}, "took up to 1.51x the best time when that was tried"),
        ({"geomean": 1.034}, "took 1.034x the best time on average when that was tried, the default 1.020x"),
        ({"reach": 0.19}, "it was not tried how the measured configs do"),
    ):
        regime = Regime.of(trained.SHAPES, {"batch_size high": {**base, **change}})
        text = regime.transfer_allowed(regime.outside(shape))[1]
        assert said in text
        assert "doubling" not in text
        assert "transfer" not in text


def test_a_transfer_is_allowed_only_where_its_loss_was_measured_and_small() -> None:
    good = {"shapes": 9, "reach": 1.0, "worst": 1.05, "geomean": 1.01, "default_worst": 1.2, "default_geomean": 1.02}
    shape = Shape(100, 6, 32, 128, 64, 2048)
    for change, allowed in (
        ({}, True),
        ({"worst": 1.2}, False),
        ({"geomean": 1.03}, False),
        ({"reach": 0.5}, False),
        ({"shapes": 2}, False),
    ):
        regime = Regime.of(trained.SHAPES, {"batch_size high": {**good, **change}})
        assert regime.transfer_allowed(regime.outside(shape))[0] is allowed


def test_a_config_is_carried_over_to_what_is_most_like_it() -> None:
    source, target = Shape(16, 6, 32, 128, 64, 32768), Shape(16, 4, 32, 128, 64, 32768)
    offered = spec.candidates(target, trained.ARCH)
    best = spec.default_config(source, trained.ARCH)
    carried = offered[transfer(best, source, target, offered)]
    assert carried == spec.default_config(target, trained.ARCH)
    for config in offered:
        assert offered[transfer(config, target, target, offered)] == config


def test_what_moves_all_targets_of_a_shape_together_is_taken_off() -> None:
    """Every shape twice: once with half of its configs, and once with all of them and a best that was 0.1 too fast."""
    data = examples(measured(), trained.ARCH)
    half = np.arange(len(data.cell)) % 2 == 0
    rows = ("cell", "shape", "rank_rows", "rank_target", "rank_weight")
    some = dataclasses.replace(data, **{name: getattr(data, name)[half] for name in rows})
    both = joined([some, dataclasses.replace(data, rank_target=data.rank_target + 0.1)])
    plain, moved = (fit_rank(one, slice(None), 0).predict(data.rank_rows) for one in (data, both))
    apart = moved - plain
    near = data.rank_target < 0.1
    # Learnt as they are, the configs of the second half alone are 0.1 slower, and those of both 0.05.
    assert abs(apart[near & half].mean() - apart[near & ~half].mean()) < 0.03


def test_rows_of_two_gpus_in_one_table_keep_their_shapes_apart() -> None:
    data = examples(measured(), trained.ARCH)
    both = joined([data, data])
    count = len(data.shape_rows)
    assert np.array_equal(both.shape, np.concatenate([data.shape, data.shape + count]))
    assert len(both.shape_rows) == 2 * count


def test_far_rows_are_thinned_where_there_are_many_and_keep_their_weight() -> None:
    data = examples(measured(), trained.ARCH)
    times = -(-(fitting.FEW_ROWS + 1) // len(data.cell))
    many = joined([data] * times)
    assert fitting.thinned(data, np.arange(len(data.cell)))[0].tolist() == list(range(len(data.cell)))
    at, weight = fitting.thinned(many, np.arange(len(many.cell)))
    far = many.rank_target > float(squash(np.array(fitting.FAR)))
    assert set(np.flatnonzero(~far)) <= set(at.tolist())
    assert len(at) == (~far).sum() + -(-far.sum() // fitting.FAR_STEP)
    assert weight.sum() == pytest.approx(many.rank_weight.sum(), rel=0.05)
