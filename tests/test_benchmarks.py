"""The tables that benchmarks make of what they measure, and that every rival has no more bytes."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr

from reap.artifacts import Plan, Saliency
from reap.artifacts.evaluation import DocumentScore, Evaluation
from reap.artifacts.provenance import Provenance
from reap.planning import PlanSettings, plain_plan

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import common  # noqa: E402
import domains  # noqa: E402
import plain_recipes  # noqa: E402
from plain_recipes import RANDOM, Row  # noqa: E402

REPORTS = ROOT / "reports" / "tiny-k3"


@pytest.fixture(scope="module")
def saliency() -> Saliency:
    return Saliency.load(REPORTS / "saliency.safetensors")


def row(share: float, plan: str, kl: float, above: tuple[float, float, float] | None) -> Row:
    return Row(
        share=share,
        plan=plan,
        kept=100,
        weights=900,
        size=1000,
        expert_bytes=800,
        predicted=2 * kl,
        kl=kl,
        kl_error=0.001,
        perplexity=10.0,
        above=above,
        checkpoint=hash((share, plan)),
    )


def rows() -> list[Row]:
    return [
        row(0.5, "reap", 0.02, None),
        row(0.5, "low", 0.05, (0.03, 0.028, 0.032)),
        row(0.5, f"{RANDOM}, seed 0", 0.3, (0.28, 0.26, 0.3)),
        row(0.5, f"{RANDOM}, seed 1", 0.4, (0.38, 0.35, 0.41)),
        row(0.3, "reap", 0.06, None),
        row(0.3, "low", 0.05, (-0.01, -0.02, 0.001)),
        row(0.3, f"{RANDOM}, seed 0", 0.5, (0.44, 0.4, 0.48)),
        row(0.3, f"{RANDOM}, seed 1", 0.7, (0.64, 0.6, 0.68)),
    ]


@pytest.mark.parametrize("share", plain_recipes.SHARES)
def test_every_plan_fits_and_has_a_prediction(saliency: Saliency, share: float) -> None:
    made = plain_recipes.plans(saliency, share, "0" * 64)

    for label, plan in made.items():
        assert plan.waterfall.weights <= common.size_at(saliency.spec, share), label
        assert plan.damage > 0 and plan.settings["damage_unit"] == "nats", label
    assert len(made) == 1 + len(plain_recipes.LABELS) + len(plain_recipes.RANDOM_SEEDS)


def test_predictions_are_the_measured_divergences_where_there_are_any(saliency: Saliency) -> None:
    """All experts in the low bank, and half of them gone, were measured layer by layer."""
    measured = saliency.measurement
    assert measured is not None
    size = common.size_at(saliency.spec, 1.0)
    origin = common.provenance(saliency, "0" * 64, "")
    half = int(measured.kl_kept[0])

    low = plain_plan(saliency, PlanSettings(size=size), recipe="low", provenance=origin)
    settings = PlanSettings(size=common.size_at(saliency.spec, (half + 0.5) / 64))
    dropped = plain_plan(saliency, settings, recipe="energy", provenance=origin)

    assert {len(layer.kept) for layer in dropped.layers} == {half}
    assert low.damage == pytest.approx(np.maximum(measured.low_kl, 1e-7).sum())
    # The curve is smoothed to fall with every expert, which changes the sixth digit.
    assert dropped.damage == pytest.approx(np.maximum(measured.drop_kl, 1e-7).sum(), rel=1e-4)


def test_same_checkpoint_ignores_order_within_a_bank(saliency: Saliency) -> None:
    plan = plain_recipes.plans(saliency, 0.3, "0" * 64)["reap"]

    def changed(**values: object) -> Plan:
        at = next(i for i, layer in enumerate(plan.layers) if layer.high > 1 and layer.low)
        layers = list(plan.layers)
        layers[at] = replace(layers[at], **values)  # type: ignore[arg-type]
        return replace(plan, layers=tuple(layers), damage=0.0)

    layer = next(layer for layer in plan.layers if layer.high > 1 and layer.low)
    turned = (layer.kept[1], layer.kept[0], *layer.kept[2:])

    assert common.same_checkpoint(changed(kept=turned)) == common.same_checkpoint(plan)
    for other in (changed(kept=layer.kept[:-1]), changed(high=layer.high - 1)):
        assert common.same_checkpoint(other) != common.same_checkpoint(plan)


@pytest.mark.parametrize(
    ("above", "word"),
    [
        ((0.01, 0.002, 0.018), "lowest"),
        ((0.01, -0.002, 0.022), "within noise"),
        ((-0.01, -0.022, 0.002), "within noise"),
        ((-0.01, -0.018, -0.002), "beaten"),
    ],
)
def test_verdict_is_by_the_interval(above: tuple[float, float, float], word: str) -> None:
    table = [
        row(0.5, "reap", 0.1, None),
        row(0.5, "a", 0.1 + above[0], above),
        row(0.5, "b", 0.9, (0.8, 0.7, 0.9)),
    ]

    (verdict,) = plain_recipes.verdicts(table)

    assert (verdict.word, verdict.rival, verdict.above) == (word, "a", above)


def test_a_rival_that_is_not_the_lowest_can_beat_the_default_plan() -> None:
    """The lowest rival's interval may be wide where another's is not."""
    table = [
        row(0.5, "reap", 0.1, None),
        row(0.5, "lowest", 0.05, (-0.05, -0.2, 0.1)),
        row(0.5, "sure", 0.08, (-0.02, -0.03, -0.01)),
    ]

    assert [v.word for v in plain_recipes.verdicts(table)] == ["beaten"]


def test_rank_correlation_is_of_different_checkpoints() -> None:
    table = [
        replace(one, predicted=p, checkpoint=number)
        for number, (one, p) in enumerate(zip(rows(), [1, 3, 2, 5, 4, 6, 8, 7]))
    ]
    again = [*table, replace(table[3], share=0.3)]

    found, count = plain_recipes.rank_correlation(again)

    expected = spearmanr([r.predicted for r in table], [r.kl for r in table]).statistic
    assert (found, count) == (pytest.approx(expected), 8)
    assert plain_recipes.rank_correlation(again, 0.3)[1] == 5


def test_overview_has_a_column_for_each_size_and_the_lowest_in_bold() -> None:
    assert plain_recipes.overview(rows()) == "\n".join(
        [
            "| plan | 50% | 30% |",
            "|---|---:|---:|",
            "| **reap**, the default plan | **0.0200 ± 0.0010** | 0.0600 ± 0.0010 |",
            "| low | 0.0500 ± 0.0010 | **0.0500 ± 0.0010** |",
            f"| {RANDOM}, 2 seeds | 0.3000 to 0.4000 | 0.5000 to 0.7000 |",
        ]
    )


def test_summary_counts_the_verdicts() -> None:
    assert plain_recipes.summary(rows()).startswith(
        "The default plan's KL is clearly the lowest at 1 of 2 sizes, "
        "within noise of the lowest at 1 of 2 sizes (95 %"
    )


def test_details_show_the_range_of_the_seeds() -> None:
    lines = plain_recipes.details(rows()).splitlines()

    (seeds,) = [line for line in lines if line.startswith(f"| 50% | {RANDOM}")]
    assert "| 0.6 to 0.8 | 0.3000 to 0.4000 | +0.3300 (+0.2600 to +0.4100) |" in seeds
    assert len(lines) == 2 + 2 * 3


def test_between_keeps_what_is_around() -> None:
    page = "a\n<!-- x -->\nold\n<!-- /x -->\nb"

    assert common.between(page, "x", "new") == "a\n<!-- x -->\nnew\n<!-- /x -->\nb"
    for broken in ("a", page + page, "<!-- /x --> <!-- x -->"):
        with pytest.raises(ValueError, match="<!-- x -->"):
            common.between(broken, "x", "new")


def test_pages_have_the_sections_that_are_written() -> None:
    for page, names in (
        (common.README, ["plain recipes"]),
        (common.RESULTS, ["summary", "verdicts", "plans", "domains"]),
    ):
        for name in names:
            common.between(page.read_text(encoding="utf-8"), name, "")


def evaluation(label: str, kl: dict[str, list[float]]) -> Evaluation:
    """One token in each document."""
    return Evaluation(
        provenance=Provenance("0", "", "m", "", "", {}),
        checkpoint="c",
        reference="r",
        label=label,
        sequence_length=8,
        weight_bytes=1,
        expert_bytes=1,
        base_expert_bytes=1,
        documents=tuple(
            DocumentScore(domain, tokens=1, nll=1.0, nll_squared=1.0, kl=value)
            for domain, values in kl.items()
            for value in values
        ),
        kl_quantiles={},
    )


def test_margins_are_paired_by_document() -> None:
    """The documents differ by far more than the plans do."""
    found = {
        "x": evaluation("x", {"x": [1.0, 100.0], "y": [2.0, 4.0], "z": [1.0, 1.0]}),
        "y": evaluation("y", {"x": [1.5, 100.5], "y": [3.0, 5.0], "z": [1.0, 1.0]}),
        "z": evaluation("z", {"x": [3.5, 102.5], "y": [4.0, 6.0], "z": [1.0, 1.0]}),
        domains.ALL: evaluation("", {"x": [0.0, 0.0], "y": [0.0, 0.0], "z": [0.0, 0.0]}),
    }

    crossed = domains.crossed(found)

    x, y, z = crossed.margins
    assert (x.domain, x.rival) == ("x", "y")
    assert x.lowest == pytest.approx((0.5, 0.5, 0.5)) and x.mean == pytest.approx((1.5, 1.5, 1.5))
    assert y.lowest == pytest.approx((-1, -1, -1)) and y.mean == pytest.approx((0, 0, 0))
    assert z.lowest == pytest.approx((0, 0, 0))
    lines = crossed.markdown().splitlines()
    assert lines[2].startswith("| x | **50.5000 ± ") and lines[3].startswith("| y | 51.0000 ± ")
    assert lines[5].startswith(f"| {domains.ALL} | 0.0000")
    assert "mean of the other domains' plans for 1 of 3 domains" in crossed.summary()
    assert "the lowest of them for 1; for 1 the lowest" in crossed.summary()


def test_committed_tables_are_the_committed_numbers() -> None:
    file = REPORTS / "table.json"
    if not file.exists():
        pytest.skip("`make reports` has not been run yet")
    data = json.loads(file.read_text(encoding="utf-8"))
    table = [
        Row(**{**entry, "above": tuple(entry["above"]) if entry["above"] else None})
        for entry in data["rows"]
    ]

    assert (
        json.loads(json.dumps([asdict(verdict) for verdict in plain_recipes.verdicts(table)]))
        == (data["verdicts"])
    )
    readme = common.README.read_text(encoding="utf-8")
    results = common.RESULTS.read_text(encoding="utf-8")
    assert plain_recipes.overview(table) in readme and plain_recipes.summary(table) in readme
    assert plain_recipes.details(table) in results and plain_recipes.judgement(table) in results
