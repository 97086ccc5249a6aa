"""Everything the report says, computed from the files' contents; no files and no HTML here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reap.artifacts.evaluation import DomainScore, Estimate, Evaluation, clustered_mean
from reap.artifacts.plan import Bank, Plan
from reap.artifacts.provenance import Corpus, Provenance
from reap.artifacts.saliency import CRITERIA, Floats, Ints, Saliency
from reap.artifacts.spec import ModelSpec
from reap.errors import ArtifactError
from reap.formatting import Unit, count, decimal, nats, percent, plus_minus, significant
from reap.report.settings import assumption, by_size, in_words, low_bank_rule

RARE = 30
"""An expert that fewer tokens than this chose is called rarely routed."""

DROPPED, LOW, HIGH = 0, 1, 2

BANDS: tuple[tuple[float, str], ...] = (
    (1e-4, "identical"),
    (1e-3, "between “identical” and “very close”"),
    (5e-3, "very close"),
    (1e-2, "between “very close” and “typical 4-bit”"),
    (5e-2, "typical 4-bit"),
    (1e-1, "between “typical 4-bit” and “substantial”"),
    (math.inf, "substantial"),
)
"""Upper end in nats and name of each band of the mean KL divergence."""


def band(kl: float) -> str:
    """The name of the band that a mean KL divergence (nats) falls into."""
    return next(name for limit, name in BANDS if kl < limit or limit == math.inf)


@dataclass(frozen=True)
class InputFile:
    """A file the report was made from, with its sha256 ("" if it was never on disk)."""

    kind: str
    name: str
    sha256: str
    provenance: Provenance


@dataclass(frozen=True)
class Slice:
    """One part of the memory budget; `key` is trunk, router, high, low, state, reserve, slack."""

    key: str
    name: str
    bytes: int


@dataclass(frozen=True)
class LayerFacts:
    """One MoE layer. Masses are shares of the layer's energy; `agreement` is the Jaccard index of
    the two halves' best `kept` experts, None where it says nothing (all kept, or an empty half),
    `chance` about what two random sets of `kept` experts would have."""

    layer: int
    kept: int
    high: int
    low: int
    high_mass: float
    low_mass: float
    agreement: float | None
    chance: float
    never: int
    rare: int

    @property
    def mass(self) -> float:
        return self.high_mass + self.low_mass


@dataclass(frozen=True)
class DomainMass:
    """Share of a domain's energy that the kept experts carry: mean over layers, worst layer."""

    domain: str
    tokens: int
    high: float
    low: float
    worst: float
    worst_layer: int

    @property
    def kept(self) -> float:
        return self.high + self.low


@dataclass(frozen=True)
class Curve:
    """Saliency of one layer's experts, falling, and the share of its sum up to each rank."""

    layer: int
    kept: int
    scores: Floats
    cumulative: Floats


@dataclass(frozen=True)
class ExpertMap:
    """Per layer the experts by falling saliency: id, what the plan does with it, saliency, share
    of tokens; arrays [L, E]. `state` is DROPPED, LOW or HIGH."""

    ids: Ints
    state: Ints
    saliency: Floats
    share: Floats


@dataclass(frozen=True)
class FormatTrial:
    """All experts stored in one low format against dropping down to the same bytes.

    `bytes_share` is the format's part of the source's expert bytes, `low` and `drop` [L] the
    relative squared errors.
    """

    label: str
    bytes_share: float
    low: Floats
    drop: Floats

    @property
    def wins(self) -> int:
        """Layers in which low bits lose less than dropping."""
        return int((self.low < self.drop).sum())

    @property
    def ratio(self) -> float:
        """Median over the layers of drop error by low-bit error."""
        return float(np.median(self.drop / np.maximum(self.low, 1e-300)))

    @property
    def comparison(self) -> str:
        """The ratio in words."""
        if self.ratio < 1e-3:
            return "next to them, dropping costs practically nothing (median)"
        if self.ratio > 1e4:
            return "next to dropping, they cost practically nothing (median)"
        return f"dropping costs {significant(self.ratio, 2)} times as much (median)"


@dataclass(frozen=True)
class Measured:
    """What dropping and low bits cost at the blocks' outputs, as ‖y' − y‖² / ‖y‖².

    drop [L, G] at the grid of kept counts [G]; at_plan [L] interpolated at the plan's counts.
    drop_kl, low_kl [L]: mean KL in nats when one layer alone keeps `kl_kept` experts, or stores all
    of them in the first trial's format; empty if not measured.
    """

    tokens: int
    kept: Ints
    drop: Floats
    at_plan: Floats
    trials: tuple[FormatTrial, ...]
    kl_kept: int
    drop_kl: Floats
    low_kl: Floats


@dataclass(frozen=True)
class Contender:
    """One evaluated checkpoint; `difference` is this plan's KL minus its KL, paired by document,
    None for the plan itself or where the two cannot be compared (`note` says why). `predicted` is
    its plan's predicted damage, if that plan is known and in the same unit; `plain` whether it is
    known to be a plain recipe."""

    label: str
    own: bool
    weight_bytes: int
    expert_bytes: int
    perplexity: Estimate
    kl: Estimate | None
    difference: Estimate | None = None
    note: str = ""
    predicted: float | None = None
    plain: bool = False

    @property
    def comparable(self) -> bool:
        """Whether its divergence can stand in one chart with the plan's."""
        return self.kl is not None and (self.own or self.difference is not None)

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % interval of the difference (1.96 standard errors)."""
        if self.difference is None or not math.isfinite(self.difference.error):
            return None
        half = 1.96 * self.difference.error
        return self.difference.value - half, self.difference.value + half

    @property
    def outcome(self) -> str:
        """What this plan is against the contender, as the interval says."""
        if self.own:
            return ""
        if self.note:
            return self.note
        if self.interval is None:
            return "not decided: too few documents"
        low, high = self.interval
        if low == high == 0:
            return "identical"
        if high < 0:
            return "closer"
        return "further off" if low > 0 else "not clearly different"


@dataclass(frozen=True)
class ReportData:
    """See the module docstring; the template and the charts read nothing else."""

    spec: ModelSpec
    layout: str
    criterion: str
    high_format: str
    low_format: str
    unit: Unit
    verdict: tuple[str, ...]
    notices: tuple[str, ...]
    kept: int
    total: int
    expert_bytes: int
    base_expert_bytes: int
    weight_bytes: int
    budget: int
    slices: tuple[Slice, ...]
    carried_bytes: int
    layers: tuple[LayerFacts, ...]
    map: ExpertMap
    curves: tuple[Curve, ...]
    domains: tuple[DomainMass, ...]
    overlap: Floats
    overlap_top: int
    kept_never: int
    kept_rare: int
    measured: Measured | None
    damage: float
    damage_unit: str
    lower_bound: float | None
    uncounted: str
    recipe: str
    identity: bool
    low_bank_rule: str
    by_size: bool
    dense: tuple[int, ...]
    alternatives: tuple[tuple[str, float], ...]
    scores: tuple[DomainScore, ...]
    ratios: tuple[Estimate | None, ...]
    ratio: Estimate | None
    perplexity: Estimate | None
    base_perplexity: Estimate | None
    mean_kl: Estimate | None
    same_top: Estimate | None
    summary: tuple[tuple[str, Estimate], ...]
    kl_quantiles: tuple[tuple[float, float], ...]
    sequence_length: int
    evaluated_tokens: int
    evaluated_documents: int
    contenders: tuple[Contender, ...]
    calibration: tuple[Corpus, ...]
    evaluation_text: tuple[Corpus, ...]
    files: tuple[InputFile, ...]
    settings: tuple[tuple[str, str], ...]

    @property
    def base_weight_bytes(self) -> int:
        """Bytes of the original's weights that are loaded."""
        return self.spec.weight_bytes

    @property
    def uniform(self) -> float:
        """Experts per layer if the kept ones were spread evenly."""
        return self.kept / len(self.layers)

    @property
    def gap(self) -> float:
        """How far the predicted damage may be above the best possible, as a fraction."""
        if self.lower_bound is None:
            return math.nan
        if self.damage == self.lower_bound:
            return 0.0
        return self.damage / self.lower_bound - 1 if self.lower_bound > 0 else math.nan

    @property
    def rivals_are_plain(self) -> bool:
        others = [c for c in self.contenders if not c.own]
        return all(c.plain for c in others)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What to know before trusting the page: its notices, and which rivals are not compared."""
        left_out = [c for c in self.contenders if not c.own and c.note]
        if left_out and not self.scores:
            return *self.notices, "Nothing is compared: there is no evaluation of this plan."
        return *self.notices, *(f"“{c.label}” is {c.note}." for c in left_out)

    @property
    def predictions(self) -> tuple[Contender, ...]:
        """The comparable checkpoints with a prediction to set against the measurement."""
        return tuple(c for c in self.contenders if c.comparable and c.predicted is not None)

    @property
    def rivals_predict(self) -> bool:
        """Whether another checkpoint has a prediction, comparable or not."""
        return any(c.predicted is not None for c in self.contenders if not c.own)

    @property
    def rank_correlation(self) -> float | None:
        """Spearman's, of predicted damage and measured divergence; None if it says nothing."""
        known = self.predictions
        return spearman(
            [c.predicted for c in known if c.predicted is not None],
            [c.kl.value for c in known if c.kl is not None],
        )

    @property
    def no_stability(self) -> str:
        """Why no layer has an agreement of the halves; "" if one has."""
        if any(layer.agreement is not None for layer in self.layers):
            return ""
        if all(layer.kept == self.spec.num_experts for layer in self.layers):
            return "every expert is kept, so there is no choice that could differ"
        if sum(corpus.documents for corpus in self.calibration) == 1:
            return (
                "the halves are made of whole documents, and the calibration text is a single one"
            )
        return "one half of the calibration text is empty"

    @property
    def has_low(self) -> bool:
        return any(layer.low for layer in self.layers)

    @property
    def has_high(self) -> bool:
        return any(layer.high for layer in self.layers)

    @classmethod
    def build(
        cls,
        saliency: Saliency,
        plan: Plan,
        evaluation: Evaluation | None = None,
        rivals: Sequence[Evaluation] = (),
        files: Sequence[InputFile] = (),
        rival_plans: Sequence[tuple[str, Plan]] = (),
    ) -> ReportData:
        """`rival_plans`: the rivals' plans, each with the sha256 of its file, in any order.

        Raises ArtifactError if saliency and plan are of different models.
        """
        _check_same_model(saliency, plan)
        spec = saliency.spec
        named = plan.settings.get("criterion")
        criterion = named if isinstance(named, str) and named in CRITERIA else "energy"
        scores = saliency.score(criterion)
        energy = saliency.score("energy")
        state = _states(plan)
        layers = _layers(saliency, plan, energy, state)
        domains = _domain_masses(saliency, state)
        top = max(spec.top_k, spec.num_experts // 4)
        routed = saliency.count.sum(axis=(0, 1))
        waterfall = plan.waterfall
        base_bytes = spec.experts_bytes
        unit = Unit.for_bytes(max(waterfall.budget, waterfall.weights, base_bytes))
        scored = evaluation is not None and evaluation.reference is not None
        summary = tuple(evaluation.summary().items()) if evaluation else ()
        figures = dict(summary)
        plans = {sha: other for sha, other in rival_plans if _same_scale(plan, other)}
        contenders = _contenders(evaluation, rivals, plan, plans)
        kept = sum(layer.kept for layer in layers)
        mean_kl = evaluation.mean_kl if evaluation and scored else None
        return cls(
            spec=spec,
            layout=plan.layout,
            criterion=criterion,
            high_format=bank_label(plan.high),
            low_format=bank_label(plan.low),
            unit=unit,
            verdict=_verdict(
                kept,
                spec,
                waterfall.high + waterfall.low,
                base_bytes,
                unit,
                figures,
                mean_kl,
                contenders,
                evaluation,
                identity=plan.settings.get("identity") is True,
            ),
            notices=_notices(saliency, plan, evaluation, files)
            + _unused_plans(plan, rivals, rival_plans),
            kept=kept,
            total=len(layers) * spec.num_experts,
            expert_bytes=waterfall.high + waterfall.low,
            base_expert_bytes=base_bytes,
            weight_bytes=waterfall.weights,
            budget=waterfall.budget,
            slices=_slices(plan),
            carried_bytes=waterfall.carried,
            layers=layers,
            map=_expert_map(saliency, scores, state),
            curves=_curves(layers, scores),
            domains=domains,
            overlap=_overlap(saliency, top),
            overlap_top=top,
            kept_never=int((routed[state != DROPPED] == 0).sum()),
            kept_rare=int(_is_rare(routed[state != DROPPED]).sum()),
            measured=_measured(saliency, plan),
            damage=plan.damage,
            damage_unit=str(plan.settings.get("damage_unit") or ""),
            lower_bound=None if "recipe" in plan.settings else plan.lower_bound,
            uncounted=plan.uncounted,
            recipe=str(plan.settings.get("recipe", "")),
            identity=plan.settings.get("identity") is True,
            low_bank_rule=low_bank_rule(plan),
            by_size=by_size(plan),
            dense=tuple(sorted({*range(spec.num_layers)} - {x.layer for x in spec.moe_layers})),
            alternatives=tuple(sorted(plan.alternatives.items(), key=lambda item: item[1])),
            scores=tuple(evaluation.domain_score(d) for d in evaluation.domains)
            if evaluation
            else (),
            ratios=tuple(_ratio(evaluation, d) if scored else None for d in evaluation.domains)
            if evaluation
            else (),
            ratio=figures.get("Mean PPL(Q)/PPL(base)"),
            perplexity=figures.get("Mean PPL(Q)"),
            base_perplexity=figures.get("Mean PPL(base)"),
            mean_kl=mean_kl,
            same_top=figures.get("Same top p"),
            summary=summary,
            kl_quantiles=_quantiles(evaluation) if evaluation and scored else (),
            sequence_length=evaluation.sequence_length if evaluation else 0,
            evaluated_tokens=sum(d.tokens for d in evaluation.documents) if evaluation else 0,
            evaluated_documents=len(evaluation.documents) if evaluation else 0,
            contenders=contenders,
            calibration=saliency.provenance.corpora,
            evaluation_text=evaluation.provenance.corpora if evaluation else (),
            files=tuple(files),
            settings=in_words(plan, unit),
        )


def bank_label(formats: Bank) -> str:
    """The format of a bank in words; several if its projections differ."""
    labels = dict.fromkeys(fmt.label for fmt in formats.values())
    if len(labels) < 2:
        return next(iter(labels), "")
    return ", ".join(f"{name} {fmt.label}" for name, fmt in formats.items())


def spearman(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Rank correlation, equal values with their mean rank; None below three pairs or if one side
    has only one value."""
    if len(x) < 3:
        return None

    def ranks(values: Sequence[float]) -> Floats:
        _, place, number = np.unique(values, return_inverse=True, return_counts=True)
        return np.asarray((np.cumsum(number) - (number - 1) / 2)[place], dtype=np.float64)

    a, b = (ranks(v) - (len(x) + 1) / 2 for v in (x, y))
    spread = math.sqrt(float((a * a).sum() * (b * b).sum()))
    return float((a * b).sum()) / spread if spread > 0 else None


def _same_scale(plan: Plan, other: Plan) -> bool:
    """Whether the predicted damages of two plans can be compared."""
    a, b = plan.provenance, other.provenance
    scales = [(p.settings.get("damage_unit"), p.settings.get("domains", "sum"))
              for p in (plan, other)]  # fmt: skip
    return (
        a.model_sha256 == b.model_sha256
        and a.inputs.get("saliency") == b.inputs.get("saliency")
        and scales[0] == scales[1]
    )


def _unused_plans(
    plan: Plan, rivals: Sequence[Evaluation], rival_plans: Sequence[tuple[str, Plan]]
) -> tuple[str, ...]:
    measured = {rival.provenance.inputs.get("plan") for rival in rivals}
    unmatched = sum(sha not in measured for sha, _ in rival_plans)
    other = sum(sha in measured and not _same_scale(plan, p) for sha, p in rival_plans)
    notices = []
    if unmatched:
        notices.append(
            f"{unmatched} of the other plans given belong to none of the evaluations, so their "
            "predictions are not shown."
        )
    if other:
        notices.append(
            f"{other} of the other plans given predict damage from another saliency file or in "
            "another unit, so their predictions are not shown."
        )
    return tuple(notices)


def _ratio(evaluation: Evaluation, domain: str) -> Estimate:
    """PPL of the checkpoint by that of the reference, paired by document."""
    documents = [d for d in evaluation.documents if d.domain == domain]
    log_ratio = clustered_mean(
        np.array([d.nll - d.base_nll for d in documents]),
        np.array([d.tokens for d in documents], dtype=np.float64),
    )
    ratio = math.exp(log_ratio.value)
    return Estimate(ratio, ratio * log_ratio.error)


def _check_same_model(saliency: Saliency, plan: Plan) -> None:
    spec = saliency.spec
    hint = "make the plan again from this saliency file"
    ours, theirs = saliency.provenance.model_sha256, plan.provenance.model_sha256
    if ours != theirs:
        raise ArtifactError(
            f"the saliency file is of {saliency.provenance.model} ({ours[:12]}), the plan "
            f"of {plan.provenance.model} ({theirs[:12]}).",
            hint,
        )
    planned = tuple(layer.layer for layer in plan.layers)
    if planned != saliency.layers or plan.num_experts != spec.num_experts:
        raise ArtifactError(
            f"the saliency file has {len(saliency.layers)} MoE layers of {spec.num_experts} "
            f"experts, the plan {len(planned)} of {plan.num_experts}.",
            hint,
        )


def _states(plan: Plan) -> Ints:
    """DROPPED, LOW or HIGH of every expert, [L, E]."""
    state = np.full((len(plan.layers), plan.num_experts), DROPPED, dtype=np.int64)
    for row, layer in zip(state, plan.layers, strict=True):
        row[list(layer.kept[: layer.high])] = HIGH
        row[list(layer.kept[layer.high :])] = LOW
    return state


def _ranking(scores: Floats) -> Ints:
    """Expert ids by falling score, ties by id, [L, E]."""
    return np.asarray(np.argsort(-scores, axis=1, kind="stable"), dtype=np.int64)


def _best(scores: Floats, counts: Sequence[int]) -> NDArray[np.bool_]:
    """Mask [L, E] of the `counts[l]` best experts of each layer."""
    chosen = np.zeros(scores.shape, dtype=bool)
    for row, order, n in zip(chosen, _ranking(scores), counts, strict=True):
        row[order[:n]] = True
    return chosen


def _shares(energy: Floats, chosen: NDArray[np.bool_]) -> Floats:
    """Share of each layer's sum that `chosen` carries, [L]; NaN for a layer without any."""
    total = energy.sum(axis=1)
    part = np.where(chosen, energy, 0).sum(axis=1)
    return np.divide(part, total, out=np.full(len(total), np.nan), where=total > 0)


def _is_rare(routed: Ints) -> NDArray[np.bool_]:
    return np.asarray((routed > 0) & (routed < RARE))


def _layers(saliency: Saliency, plan: Plan, energy: Floats, state: Ints) -> tuple[LayerFacts, ...]:
    counts = [len(layer.kept) for layer in plan.layers]
    halves = [_best(saliency.score("energy", half=half), counts) for half in (0, 1)]
    common = (halves[0] & halves[1]).sum(axis=1)
    union = np.maximum((halves[0] | halves[1]).sum(axis=1), 1)
    seen = (saliency.tokens.sum(axis=1) > 0).all(axis=0)
    routed = saliency.count.sum(axis=(0, 1))
    high, low = (_shares(energy, state == bank) for bank in (HIGH, LOW))
    return tuple(
        LayerFacts(
            layer=layer.layer,
            kept=len(layer.kept),
            high=layer.high,
            low=layer.low,
            high_mass=float(high[i]),
            low_mass=float(low[i]),
            agreement=float(common[i] / union[i])
            if seen[i] and 0 < len(layer.kept) < plan.num_experts
            else None,
            chance=len(layer.kept) / (2 * plan.num_experts - len(layer.kept)),
            never=int((routed[i] == 0).sum()),
            rare=int(_is_rare(routed[i]).sum()),
        )
        for i, layer in enumerate(plan.layers)
    )


def _domain_masses(saliency: Saliency, state: Ints) -> tuple[DomainMass, ...]:
    rows = []
    for index, domain in enumerate(saliency.domains):
        tokens = int(saliency.tokens[:, index].sum(axis=0).max(initial=0))
        energy = saliency.score("energy", domain=domain)
        high, low = (_shares(energy, state == bank) for bank in (HIGH, LOW))
        known = np.isfinite(high)
        if not known.any():
            rows.append(DomainMass(domain, tokens, math.nan, math.nan, math.nan, -1))
            continue
        worst = int(np.nanargmin(high + low))
        rows.append(
            DomainMass(
                domain=domain,
                tokens=tokens,
                high=float(high[known].mean()),
                low=float(low[known].mean()),
                worst=float(high[worst] + low[worst]),
                worst_layer=saliency.layers[worst],
            )
        )
    return tuple(rows)


def _overlap(saliency: Saliency, top: int) -> Floats:
    """Share of one domain's `top` experts that are among another's, mean over layers, [D, D]."""
    counts = [top] * len(saliency.layers)
    best = [_best(saliency.score("energy", domain=d), counts) for d in saliency.domains]
    return np.array([[float((a & b).sum() / a.sum()) for b in best] for a in best])


def _expert_map(saliency: Saliency, scores: Floats, state: Ints) -> ExpertMap:
    ids = _ranking(scores)
    share = saliency.score("frequency")

    def ordered(values: NDArray) -> NDArray:
        return np.take_along_axis(values, ids, axis=1)

    return ExpertMap(ids, ordered(state), ordered(scores), ordered(share))


def _curves(layers: Sequence[LayerFacts], scores: Floats) -> tuple[Curve, ...]:
    """An early, a middle and a late layer (all of them if there are three or fewer)."""
    last = len(layers) - 1
    chosen = sorted({round(last * part) for part in (0.1, 0.5, 0.9)})
    if len(layers) <= 3:
        chosen = list(range(len(layers)))
    curves = []
    for index in chosen:
        falling = np.sort(scores[index])[::-1]
        total = falling.sum()
        running = np.cumsum(falling) / total if total > 0 else np.zeros_like(falling)
        curves.append(Curve(layers[index].layer, layers[index].kept, falling, running))
    return tuple(curves)


def _measured(saliency: Saliency, plan: Plan) -> Measured | None:
    measurement = saliency.measurement
    if measurement is None:
        return None
    spec = saliency.spec
    energy = np.maximum(measurement.output_energy, 1e-300)
    drop = measurement.drop_error / energy[:, None]
    grid = measurement.kept.astype(np.float64)
    whole = float(spec.num_experts)
    # Keeping every expert costs nothing, whether or not the grid says so.
    xs = np.concatenate([grid[::-1], [whole]]) if grid[0] < whole else grid[::-1]

    def at(counts: Floats) -> Floats:
        rows = []
        for layer, n in zip(drop, counts, strict=True):
            ys = np.concatenate([layer[::-1], [0.0]]) if grid[0] < whole else layer[::-1]
            rows.append(float(np.interp(n, xs, ys)))
        return np.array(rows)

    trials = []
    for fmt, low in zip(measurement.formats, measurement.low_error, strict=True):
        shares = np.array(
            [
                spec.expert_bytes(layer, {p.name: fmt for p in layer.projections})
                / spec.expert_bytes(layer)
                for layer in spec.moe_layers
            ]
        )
        equal = np.minimum(shares, 1) * whole
        trials.append(FormatTrial(fmt.label, float(shares.mean()), low / energy, at(equal)))
    return Measured(
        tokens=int(measurement.tokens.max(initial=0)),
        kept=measurement.kept,
        drop=drop,
        at_plan=at(np.array([float(len(layer.kept)) for layer in plan.layers])),
        trials=tuple(trials),
        kl_kept=int(measurement.kl_kept.max(initial=0)),
        drop_kl=measurement.drop_kl,
        low_kl=measurement.low_kl,
    )


def _slices(plan: Plan) -> tuple[Slice, ...]:
    w = plan.waterfall
    parts = (
        Slice("trunk", "Trunk: attention, shared experts, embeddings", w.trunk),
        Slice("router", "Router rows of the kept experts", w.router),
        Slice("high", f"High bank ({bank_label(plan.high)})", w.high),
        Slice("low", f"Low bank ({bank_label(plan.low)})", w.low),
        Slice("state", f"Attention state for {count(w.context)} tokens", w.state),
        Slice("reserve", "Reserve for the system", w.reserve),
        Slice("slack", "Unused", w.slack),
    )
    return tuple(p for p in parts if p.bytes or p.key in ("trunk", "slack"))


def _quantiles(evaluation: Evaluation) -> tuple[tuple[float, float], ...]:
    """(percentage, nats) by rising percentage; "max", "median" and "min" are understood."""
    words = {"max": 100.0, "median": 50.0, "min": 0.0}
    parsed = []
    for key, value in evaluation.kl_quantiles.items():
        try:
            parsed.append((words.get(key) or float(key.rstrip("%")), value))
        except ValueError:
            continue
    return tuple(sorted(parsed))


def _contenders(
    evaluation: Evaluation | None,
    rivals: Sequence[Evaluation],
    plan: Plan,
    rival_plans: Mapping[str, Plan],
) -> tuple[Contender, ...]:
    """The plan's own checkpoint first, then the rivals by rising KL, those not comparable last."""
    others = [
        _contender(rival, evaluation, rival_plans.get(rival.provenance.inputs.get("plan", "")))
        for rival in rivals
    ]
    others.sort(key=lambda c: (not c.comparable, c.kl.value if c.kl else 0.0, c.label))
    own = (_contender(evaluation, None, plan, own=True),) if evaluation else ()
    return own + tuple(others)


def _contender(
    subject: Evaluation, against: Evaluation | None, plan: Plan | None, *, own: bool = False
) -> Contender:
    difference, note = None, ""
    if not own:
        difference, note = _difference(against, subject)
    return Contender(
        label=subject.label,
        own=own,
        weight_bytes=subject.weight_bytes,
        expert_bytes=subject.expert_bytes,
        perplexity=subject.perplexity,
        kl=subject.mean_kl if subject.reference is not None else None,
        difference=difference,
        note=note,
        predicted=plan.damage if plan else None,
        plain="plain" in subject.label.lower() or (plan is not None and "recipe" in plan.settings),
    )


def _difference(ours: Evaluation | None, rival: Evaluation) -> tuple[Estimate | None, str]:
    if ours is None:
        return None, "not evaluated"
    if ours.reference is None or rival.reference is None:
        return None, "not comparable: no reference"
    configs = [e.provenance.inputs.get("reference model") for e in (ours, rival)]
    if ours.reference != rival.reference or (all(configs) and configs[0] != configs[1]):
        return None, "not comparable: another reference"
    if ours.sequence_length != rival.sequence_length:
        return None, "not comparable: another sequence length"
    texts = [{c.domain: c.sha256 for c in e.provenance.corpora} for e in (ours, rival)]
    if all(texts) and texts[0] != texts[1]:
        return None, "not comparable: other documents"
    try:
        return ours.kl_difference(rival), ""
    except ArtifactError:
        return None, "not comparable: other documents"


def _verdict(
    kept: int,
    spec: ModelSpec,
    expert_bytes: int,
    base_bytes: int,
    unit: Unit,
    figures: dict[str, Estimate],
    mean_kl: Estimate | None,
    contenders: Sequence[Contender],
    evaluation: Evaluation | None,
    *,
    identity: bool,
) -> tuple[str, ...]:
    total = len(spec.moe_layers) * spec.num_experts
    share = percent(expert_bytes / base_bytes, 0) if base_bytes else "0 %"
    what = "all" if kept == total else f"{count(kept)} of"
    sentences = [
        f"The plan keeps {what} {count(total)} experts in {share} of their bytes: "
        f"{unit.text(expert_bytes)} instead of {unit.text(base_bytes)}."
    ]
    if identity:
        sentences.append("Nothing needed pruning: the whole model fits as it is.")
    if evaluation is None and identity:
        return tuple(sentences)
    if evaluation is None:
        sentences.append(
            "What that costs has not been measured: there is no evaluation yet, and the predicted "
            "damage below is an estimate, not a result."
        )
        return tuple(sentences)
    base = figures.get("Mean PPL(base)")
    perplexity = figures["Mean PPL(Q)"]
    if base is None or mean_kl is None:
        sentences.append(
            f"Perplexity is {plus_minus(perplexity, 2)}. Without the original model as a reference "
            "this does not say what was lost."
        )
        return tuple(sentences)
    before, after = decimal(base.value, 2), decimal(perplexity.value, 2)
    moves = f"stays at {after}" if before == after else f"goes from {before} to {after}"
    sentences.append(
        f"Perplexity {moves}; "
        f"the mean KL divergence from the original is {nats(mean_kl)} nats, "
        f"{_in_band(mean_kl.value)}."
    )
    if kept < total:
        sentences.append(
            "For scale: good 4-bit quantizations sit at 0.01 to 0.05 nats, models with pruned "
            "experts usually near 0.1."
        )
    compared = [c for c in contenders if c.interval is not None]
    if compared:
        sentences.append(_against(compared))
    return tuple(sentences)


def _against(compared: Sequence[Contender]) -> str:
    """How the plan stands against those measured on the same documents."""
    kind = "plain recipe" if all(c.plain for c in compared) else "other plan"
    total = len(compared)
    parts = []
    for outcome, words in (
        ("closer", "clearly closer to the original than"),
        ("further off", "clearly further off than"),
        ("not clearly different", "not clearly different from"),
        ("identical", "identical in its answers to"),
    ):
        number = sum(c.outcome == outcome for c in compared)
        if number:
            parts.append(f"{words} {f'all {total}' if 1 < number == total else number}")
    best = compared[0]  # they come by rising divergence
    where = f"“{best.label}”, at {nats(best.kl)} nats"
    if total == 1:
        words = parts[0].rpartition(" ")[0]
        return f"It is {words} the one {kind} measured on the same documents, {where}."
    return (
        f"Of {total} {kind}s measured on the same documents, it is {', '.join(parts)}; the best "
        f"of them is {where}."
    )


def _in_band(kl: float) -> str:
    name = band(kl)
    return name if name.startswith("between") else f"in the band “{name}”"


def _notices(
    saliency: Saliency,
    plan: Plan,
    evaluation: Evaluation | None,
    files: Sequence[InputFile],
) -> tuple[str, ...]:
    notices = []
    by_kind = {file.kind: file for file in files}
    known = plan.provenance.inputs.values()
    if known and "saliency" in by_kind and by_kind["saliency"].sha256 not in known:
        notices.append(
            "The plan was not made from this saliency file: its recorded checksum is another one."
        )
    assumed = plan.settings.get("assumed")
    if isinstance(assumed, list) and assumed:
        notices.append(
            "The planner assumed what was not measured: "
            f"{'; '.join(assumption(str(note)) for note in assumed)}."
        )
    warned = plan.settings.get("warnings")
    for warning in warned if isinstance(warned, list) else ():
        notices.append(f"The planner warns: {warning}")
    if plan.waterfall.slack < 0:
        notices.append(f"The plan is over its {'size' if by_size(plan) else 'budget'}.")
    half = saliency.tokens.sum(axis=1).min(axis=1)
    if half.min() == 0:
        single = sum(corpus.documents for corpus in saliency.provenance.corpora) == 1
        why = ", for the text is a single document" if single else ""
        notices.append(
            f"One half of the calibration text is empty{why}, so stability could not be checked."
        )
    if evaluation is not None:
        planned = plan.waterfall.high + plan.waterfall.low
        unnamed = "plan" not in evaluation.provenance.inputs
        if unnamed and abs(evaluation.expert_bytes - planned) > 0.01 * max(planned, 1):
            notices.append(
                f"The evaluated checkpoint holds {count(evaluation.expert_bytes)} bytes of "
                f"experts, the plan {count(planned)}: the evaluation may belong to another plan."
            )
        seen = {corpus.sha256 for corpus in saliency.provenance.corpora}
        leaked = [c.domain for c in evaluation.provenance.corpora if c.sha256 in seen]
        if leaked:
            notices.append(
                f"The evaluation text of {', '.join(leaked)} is also calibration text: those "
                "figures are too good."
            )
    return tuple(notices)
