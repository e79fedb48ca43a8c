#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Draws the time of a training step beside PyTorch's DDP, out of bench/results/step*.json, into docs/images/step-time.svg.

With Debian's python3 and its python3-matplotlib.
"""
import json

from common import ROOT, use_svg

NAMES = {
    "mlp": "MLP, 25.1 M",
    "alexnet": "AlexNet, 61 M",
    "gpt": "GPT, 10.8 M",
    "resnet18-32": "ResNet-18, 32×32",
    "lenet": "LeNet",
}
SERIES = {"lockstep": "#1a7f37", "DDP, no exchange": "#8c959f", "DDP over Gloo": "#cf222e"}


def load():
    models, machine = {}, ""
    for name in ("step.json", "step-images.json"):
        result = json.loads((ROOT / "bench/results" / name).read_text())
        models.update(result["models"])
        machine = f"{result['machine']}, {result['ranks']} ranks"
    return models, machine


def main():
    models, machine = load()
    figure, axes = use_svg().subplots(figsize=(8, 3.6), layout="constrained")
    for row, name in enumerate(NAMES):
        peer = models[name]["pytorch"]
        times = (models[name]["lockstep"]["step"], peer["no_sync"], peer["ddp"])
        for offset, (label, colour), seconds in zip((-0.27, 0, 0.27), SERIES.items(), times):
            axes.barh(row + offset, seconds / peer["ddp"], 0.25, color=colour, label=label if row == 0 else None)
            axes.text(seconds / peer["ddp"] + 0.01, row + offset, f"{seconds * 1e3:.0f} ms", va="center", fontsize=8)
    axes.set_yticks(range(len(NAMES)), NAMES.values())
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12)
    axes.set_xlabel(f"time of a step, PyTorch's DDP over Gloo = 1 ({machine})", fontsize=9)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncol=3, frameon=False)
    target = ROOT / "docs/images/step-time.svg"
    figure.savefig(target, metadata={"Date": None})
    print(f"drawn into {target.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
