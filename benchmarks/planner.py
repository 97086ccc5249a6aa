"""How long planning takes and how close to the bound it gets, at the size of Kimi-K3.

92 × 896 experts with saliency of the published shape and everything measured, see tests/shapes.py.
Prints a table (with --json one JSON object on stdout): for every budget the default plan and each
layout on its own. `gap` is how far the best layout's damage may be above the optimum; `chosen` is
how much more damage the plan has than the best layout, which "auto" gives up for simplicity.
Exits with 1 if a default plan misses a target. Run it on one core: OPENBLAS_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from shapes import kimi_k3, published_saliency  # noqa: E402

from reap.artifacts import Saliency  # noqa: E402
from reap.planning import PlanSettings, make_plan  # noqa: E402

BUDGETS = (256, 384, 512, 768, 1024)
LAYOUTS = ("auto", "stock", "per-layer", "two-bank")
SECONDS, GAP = 0.5, 1e-3
REPEATS = 3


@dataclass(frozen=True)
class Row:
    """One plan; `seconds` of CPU time, the best of REPEATS."""

    sensitivity: bool
    gigabytes: int
    layout: str
    found: str
    seconds: float
    damage: float
    gap: float
    chosen: float
    fewest: int
    most: int

    @property
    def missed(self) -> bool:
        return self.layout == "auto" and (self.seconds > SECONDS or self.gap > GAP)


def measure(saliency: Saliency, sensitivity: bool, gigabytes: int, layout: str) -> Row:
    settings = PlanSettings(
        budget=gigabytes * 10**9,
        context=32768,
        trunk="4bit" if gigabytes < 300 else "8bit",
        layout=layout,  # type: ignore[arg-type]
    )
    times = []
    for _ in range(REPEATS):
        start = time.process_time()
        plan = make_plan(saliency, settings, provenance=saliency.provenance)
        times.append(time.process_time() - start)
    others = [d for name, d in plan.alternatives.items() if name.startswith("best ")]
    best = min([plan.damage, *others])
    kept = [len(layer.kept) for layer in plan.layers]
    return Row(
        sensitivity=sensitivity,
        gigabytes=gigabytes,
        layout=layout,
        found=plan.layout,
        seconds=min(times),
        damage=plan.damage,
        gap=1 - plan.lower_bound / best,
        chosen=plan.damage / best - 1,
        fewest=min(kept),
        most=max(kept),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows = []
    for sensitivity in (True, False):
        saliency = published_saliency(kimi_k3(), seed=options.seed, sensitivity=sensitivity)
        for gigabytes in BUDGETS:
            rows += [measure(saliency, sensitivity, gigabytes, layout) for layout in LAYOUTS]
    out = sys.stderr if options.json else sys.stdout
    print(
        f"{'KL':3} {'GB':>5} {'layout':9} {'is':9} {'seconds':>7} {'damage':>8} "
        f"{'gap':>8} {'chosen':>8} {'experts':>9}",
        file=out,
    )
    for row in rows:
        print(
            f"{'yes' if row.sensitivity else 'no':3} {row.gigabytes:5} {row.layout:9} "
            f"{row.found:9} {row.seconds:7.3f} {row.damage:8.4g} {row.gap:8.1e} "
            f"{row.chosen:8.1e} {f'{row.fewest}-{row.most}':>9}"
            + ("  MISSED" if row.missed else ""),
            file=out,
        )
    met = not any(row.missed for row in rows)
    if options.json:
        figures = {
            "targets": {"seconds": SECONDS, "gap": GAP},
            "met": met,
            "slowest": max(row.seconds for row in rows if row.layout == "auto"),
            "largest_gap": max(row.gap for row in rows if row.layout == "auto"),
            "rows": [asdict(row) for row in rows],
        }
        print(json.dumps(figures, indent=2))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
