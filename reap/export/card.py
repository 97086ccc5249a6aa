"""README.md of an exported checkpoint: plan, provenance and what was measured."""

from __future__ import annotations

import json
from pathlib import Path

from reap.artifacts import Evaluation, Format, ModelSpec, Plan
from reap.artifacts.manifest import renew
from reap.formatting import nats, plus_minus
from reap.models.checkpoint import origin

_START = "<!-- reap:measured -->"
_END = "<!-- /reap:measured -->"
_UNMEASURED = "Not measured yet: run `reap evaluate` on this directory."


def model_card(plan: Plan, spec: ModelSpec, *, layout: str | None = None) -> str:
    """The card in Markdown, with a place for the measurement; `layout` "hf": of `export_hf`."""
    kept = sum(len(layer.kept) for layer in plan.layers)
    total = spec.num_experts * len(plan.layers)
    high = sum(layer.high for layer in plan.layers)
    water = plan.waterfall
    hf = layout == "hf"
    flag = "" if hf or plan.layout == "stock" else " --trust-remote-code"
    lines = [
        "---",
        f"library_name: {'transformers' if hf else 'mlx'}",
        "pipeline_tag: text-generation",
        f"tags: [{'' if hf else 'mlx, '}reap, pruned, mixture-of-experts]",
        # The hub refuses cards whose base model is no repository of it.
        *([f"base_model: {spec.model}"] if "/" in spec.model else []),
        "---",
        "",
        f"# {spec.model}, pruned with reap",
        "",
        f"{kept:,} of {total:,} routed experts are kept, {high:,} of them as {_bank(plan.high)}"
        + (f" and {kept - high:,} as {_bank(plan.low)}" if kept > high else "")
        + f". Layout: {'that of the source, every kept byte as it was' if hf else plan.layout}.",
        "",
        *(["Loads wherever the source does.", ""] if hf else []),
        "```",
        f'mlx_lm.generate --model DIR{flag} --prompt "Hello"',
        "```",
        "",
        "## Plan",
        "",
        "| part | bytes |",
        "|---|---:|",
        *([f"| experts, high bank | {water.high:,} |"] if water.high else []),
        *([f"| experts, low bank | {water.low:,} |"] if water.low else []),
        f"| routers | {water.router:,} |",
        f"| everything else | {water.trunk:,} |",
        f"| **loaded weights** | **{water.weights:,}** |",
        *([f"| carried, not loaded by mlx-lm | {water.carried:,} |"] if water.carried else []),
        "",
        _damage(plan),
        "",
        "## Measured",
        "",
        _START,
        _UNMEASURED,
        _END,
        "",
        "## Provenance",
        "",
        f"- source: {spec.model} {spec.revision}".rstrip(),
        f"- source sha256 (config.json and samples of the weights): `{spec.model_sha256}`",
        f"- reap {plan.provenance.reap_version}, `{plan.provenance.command or 'library call'}`",
    ]
    lines += [f"- {name} sha256: `{digest}`" for name, digest in plan.provenance.inputs.items()]
    lines += [
        f"- calibrated on {corpus.domain}: {corpus.tokens:,} tokens of {corpus.documents} documents"
        for corpus in plan.provenance.corpora
    ]
    return "\n".join(lines) + "\n"


def _bank(formats: dict[str, Format]) -> str:
    labels = list(dict.fromkeys(format.label for format in formats.values()))
    if len(labels) == 1:
        return labels[0]
    return ", ".join(f"{name} {format.label}" for name, format in formats.items())


def _damage(plan: Plan) -> str:
    unit = plan.settings.get("damage_unit", "")
    text = f"Predicted damage {plan.damage:.4g} {unit}".rstrip()
    text += f" ({plan.uncounted} not counted)" if plan.uncounted else ""
    if "recipe" in plan.settings:
        return f"{text}; the plan is the plain recipe {plan.settings['recipe']!r}."
    return f"{text}; no plan under the same constraints is predicted below {plan.lower_bound:.4g}."


def add_measurement(checkpoint: Path, evaluation: Evaluation) -> None:
    """Put an evaluation's figures into the card of a checkpoint that reap wrote."""
    card, config = checkpoint / "README.md", checkpoint / "config.json"
    if not card.exists() or not config.exists():
        return
    compared = evaluation.provenance.inputs.get("reference model")
    made_of = origin(checkpoint, json.loads(config.read_text("utf-8")))
    if compared not in (None, made_of.get("source_model_sha256")):
        return  # the card says "source's" of the figures beside its own
    text = card.read_text(encoding="utf-8")
    if _START not in text or _END not in text:
        return
    before, rest = text.split(_START, 1)
    after = rest.split(_END, 1)[1]
    table = "\n".join([_START, *_measured(evaluation), _END])
    card.write_text(before + table + after, encoding="utf-8")
    renew(checkpoint, card.name)


def _measured(evaluation: Evaluation) -> list[str]:
    compared = evaluation.reference is not None
    head = "| domain | tokens | perplexity ± SE |"
    rule = "|---|---:|---:|"
    if compared:
        head += " source's | KL ± SE, nats | same top token |"
        rule += "---:|---:|---:|"
    lines = [head, rule]
    for domain in evaluation.domains:
        score = evaluation.domain_score(domain)
        row = f"| {domain} | {score.tokens:,} | {plus_minus(score.perplexity, 3)} |"
        if score.base_perplexity and score.kl and score.same_top:
            row += (
                f" {score.base_perplexity.value:.3f} | {nats(score.kl)}"
                f" | {100 * score.same_top.value:.1f} % |"
            )
        lines.append(row)
    if compared:
        kl = evaluation.mean_kl
        lines += ["", f"Mean KL over the domains: {nats(kl)} nats."]
    lines += [
        "",
        f"Sequences of {evaluation.sequence_length} tokens; errors clustered by document.",
    ]
    return lines
