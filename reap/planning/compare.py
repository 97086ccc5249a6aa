"""What two plans of one model do differently."""

from __future__ import annotations

from dataclasses import dataclass

from reap.artifacts.plan import LayerPlan, Layout, Plan
from reap.errors import ReapError
from reap.planning.size import format_size

Experts = tuple[int, ...]


@dataclass(frozen=True)
class LayerDiff:
    """Experts of one layer, ids rising: kept by one plan only, and kept by both in other banks.

    `raised` are low in the first plan and high in the second, `lowered` the reverse. `jaccard` is
    |A ∩ B| / |A ∪ B| of the kept experts.
    """

    layer: int
    kept: tuple[int, int]
    high: tuple[int, int]
    only_a: Experts
    only_b: Experts
    raised: Experts
    lowered: Experts
    jaccard: float

    @property
    def same(self) -> bool:
        return not (self.only_a or self.only_b or self.raised or self.lowered)


@dataclass(frozen=True)
class PlanDiff:
    """All layers, and of each plan: layout, bytes of the weights, predicted damage and its unit.

    `comparable`: whether the damages are in one unit. `str` is a table of the layers that differ.
    """

    layers: tuple[LayerDiff, ...]
    layout: tuple[Layout, Layout]
    weights: tuple[int, int]
    damage: tuple[float, float]
    unit: tuple[str, str]
    formats: tuple[str, str]

    @property
    def jaccard(self) -> float:
        """Of the kept experts of all layers together."""
        union = sum(layer.kept[0] + len(layer.only_b) for layer in self.layers)
        both = sum(layer.kept[0] - len(layer.only_a) for layer in self.layers)
        return both / union if union else 1.0

    @property
    def comparable(self) -> bool:
        return self.unit[0] == self.unit[1]

    def __str__(self) -> str:
        totals = [sum(getattr(x, name)[side] for x in self.layers) for name, side in _SIDES]
        rows = [
            ("layout", *self.layout, ""),
            ("formats", *self.formats, ""),
            ("weights", *map(format_size, self.weights), _change(*self.weights)),
            ("experts", f"{totals[0]:,}", f"{totals[1]:,}", f"{totals[1] - totals[0]:+,}"),
            ("high bank", f"{totals[2]:,}", f"{totals[3]:,}", f"{totals[3] - totals[2]:+,}"),
            (
                "damage",
                *(f"{value:.4g}" for value in self.damage),
                _change(*self.damage) if self.comparable else "other unit",
            ),
        ]
        text = _table(("", "a", "b", "change"), rows)
        moved = [sum(len(getattr(x, name)) for x in self.layers) for name in ("raised", "lowered")]
        text += (
            f"\n{self.jaccard:.1%} of the experts that either keeps are in both; of those "
            f"{moved[0]:,} move to the high bank and {moved[1]:,} to the low."
        )
        changed = [layer for layer in self.layers if not layer.same]
        if not changed:
            return text + "\nEvery layer keeps the same experts in the same banks."
        header = ("layer", "kept", "high", "only a", "only b", "raised", "lowered", "in both")
        return (
            text
            + "\n"
            + _table(
                header,
                [
                    (
                        str(x.layer),
                        f"{x.kept[0]} → {x.kept[1]}",
                        f"{x.high[0]} → {x.high[1]}",
                        *(str(len(e)) for e in (x.only_a, x.only_b, x.raised, x.lowered)),
                        f"{x.jaccard:.1%}",
                    )
                    for x in changed
                ],
            )
        )


_SIDES = (("kept", 0), ("kept", 1), ("high", 0), ("high", 1))


def diff(a: Plan, b: Plan) -> PlanDiff:
    """Raises ReapError if the plans are of different models."""
    ours, theirs = (
        (p.model_type, p.num_experts, tuple(layer.layer for layer in p.layers)) for p in (a, b)
    )
    if ours != theirs or a.provenance.model_sha256 != b.provenance.model_sha256:
        raise ReapError(
            f"the plans are of different models: {a.provenance.model} "
            f"({a.provenance.model_sha256[:12]}) and {b.provenance.model} "
            f"({b.provenance.model_sha256[:12]}).",
            "compare plans of one model",
        )
    return PlanDiff(
        layers=tuple(_layer(x, y) for x, y in zip(a.layers, b.layers)),
        layout=(a.layout, b.layout),
        weights=(a.waterfall.weights, b.waterfall.weights),
        damage=(a.damage, b.damage),
        unit=(_unit(a), _unit(b)),
        formats=(_formats(a), _formats(b)),
    )


def _layer(a: LayerPlan, b: LayerPlan) -> LayerDiff:
    kept_a, kept_b = set(a.kept), set(b.kept)
    high_a, high_b = set(a.kept[: a.high]), set(b.kept[: b.high])
    both = kept_a & kept_b
    union = kept_a | kept_b
    return LayerDiff(
        layer=a.layer,
        kept=(len(a.kept), len(b.kept)),
        high=(a.high, b.high),
        only_a=tuple(sorted(kept_a - kept_b)),
        only_b=tuple(sorted(kept_b - kept_a)),
        raised=tuple(sorted(both & high_b - high_a)),
        lowered=tuple(sorted(both & high_a - high_b)),
        jaccard=len(both) / len(union) if union else 1.0,
    )


def _unit(plan: Plan) -> str:
    settings = plan.settings
    return f"{settings.get('damage_unit', '')}, domains {settings.get('domains', '')}"


def _formats(plan: Plan) -> str:
    banks = [plan.high] if any(layer.high for layer in plan.layers) else []
    banks += [plan.low] if any(layer.low for layer in plan.layers) else []
    return " + ".join("/".join(dict.fromkeys(f.label for f in bank.values())) for bank in banks)


def _change(a: float, b: float) -> str:
    return f"{(b - a) / a:+.1%}" if a else ""


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Columns aligned, the first to the left and the others to the right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(row: tuple[str, ...]) -> str:
        cells = (c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths)))
        return "  ".join(cells).rstrip()

    return "\n".join(line(row) for row in (header, *rows))
