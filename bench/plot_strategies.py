#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Draws what `lockstep bench strategies --json` kept: step time and busiest link over the number of workers, measured
(marks) and by the formulas (dashed lines).

    bench/plot_strategies.py [bench/results/strategies.json [docs/strategies/server-against-ring.svg]]

With Debian's python3 and its python3-matplotlib.
"""
import json
import sys
from pathlib import Path

from common import ROOT, use_svg



def by_strategy(results):
    curves = {}
    for result in results:
        curves.setdefault(result["strategy"], []).append(result)
    return curves


def draw(axes, curves, measured, limit):
    for name, points in curves.items():
        workers = [point["workers"] for point in points]
        line, = axes.plot(workers, [measured(point) for point in points], marker="o", label=name)
        axes.plot(workers, [limit(point) for point in points], linestyle="--", color=line.get_color(), linewidth=1)
    axes.set_xlabel("workers N, a host each")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def main():
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "bench/results/strategies.json"
    target = Path(sys.argv[2]) if len(sys.argv) > 2 else ROOT / "docs/strategies/server-against-ring.svg"
    result = json.loads(source.read_text())
    curves = by_strategy(result["results"])
    rate = result["bytes_per_second"]
    figure, (left, right) = use_svg().subplots(1, 2, figsize=(10, 4), layout="constrained")
    draw(left, curves, lambda point: point["seconds"], lambda point: point["formula"] / rate)
    left.set_ylabel("seconds per step")
    draw(right, curves, lambda point: max(point["sent"], point["received"]) / 1e6, lambda point: point["formula"] / 1e6)
    right.set_ylabel("MB per step, busiest link and direction")
    left.legend()
    gradient = result["gradient_bytes"] / 1e6
    figure.suptitle(f"{result['model']}, {gradient:.2f} MB of gradient, links of {rate * 8 / 1e6:.0f} Mb/s; dashed: the formulas")
    figure.savefig(target, metadata={"Date": None})
    print(f"drawn into {target}")


if __name__ == "__main__":
    main()
