#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`lockstep compare slow-links`, ddp without encryption, and PyTorch's DistributedDataParallel over Gloo, which never encrypts: in
turn over the same kind of links, in one table for each rate. As root: hosts are network namespaces. Without PyTorch
(tools/setup.sh pytorch) the peer is left out.

    bench/slow_links.py                                       10.8 M parameters, with the time to the same loss
    bench/slow_links.py --model gpt2 --batch-size 4 --block 64 --steps 8 --every 4    124 M parameters, ms per step

Trains on the sources and pages of this repository.
"""
import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools/runs"))

from summary import summary  # noqa: E402
from training import Network  # noqa: E402

del sys.path[0], sys.modules["common"]  # that of tools/runs

from common import LOCKSTEP, ROOT, machine, python_with, save_cases  # noqa: E402

HOSTS, EACH, WARM_UP = 2, 2, 3
IN_CLEAR = "ddp in clear"
DEADLINE = 3600  # seconds of a run, as of lockstep compare
FEW_STEPS = 200  # a loss after fewer says nothing


def text_of_repository(file):
    names = subprocess.run(["git", "ls-files", "*.cc", "*.h", "*.py", "*.md"], cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True)
    file.write_bytes(b"".join((ROOT / name).read_bytes() for name in sorted(names.stdout.splitlines())))
    return file


def has_torch():
    return subprocess.run([sys.executable, "-c", "import torch"], env=python_with("pytorch"), stderr=subprocess.DEVNULL).returncode == 0


def compare(options, strategies, rate, seed, text, folder, **variables):
    """Returns the settings and the runs of a comparison, whose folders are below `folder`."""
    command = [LOCKSTEP, "compare", "slow-links", "--links", "shaped", "--rate", rate, "--seeds", seed, "--output", folder]
    command += ["--model", options.model, "--data", f"text:{text}?block={options.block}", "--batch-size", options.batch_size]
    command += ["--steps", options.steps, "--target-loss", options.target_loss]
    command += ["--strategies", strategies] if strategies else []
    command += ["--vary", f"average-every={options.every}"] if options.every else []
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, text=True, env={**os.environ, **variables})
    if done.returncode:
        sys.exit(f"slow_links: lockstep compare ended with {done.returncode}:\n{done.stdout}")
    about = json.loads((folder / "comparison.json").read_text())
    return about["settings"], [{**run, "folder": str(folder / run["folder"])} for run in about["runs"]]


def busiest(before, after, steps):
    directions = zip(*([now - then for then, now in zip(*host)] for host in zip(before, after)))
    return {name: max(values) / steps for name, values in zip(("sent", "received"), directions)}


def peer(options, rate, seed, text, folder):
    """A run as comparison.json has them."""
    folder.mkdir(parents=True)
    network = Network(HOSTS, rate)
    arguments = [options.model, text, options.block, options.batch_size, options.steps, seed, folder / "metrics.jsonl"]
    script = [sys.executable, ROOT / "bench/peers/slow_link_ddp.py", *arguments]
    started = []
    deadline = threading.Timer(DEADLINE, lambda: [process.kill() for process in started])
    deadline.start()
    try:
        for rank in range(HOSTS * EACH):
            host, local_rank = divmod(rank, EACH)
            place = {"RANK": rank, "WORLD_SIZE": HOSTS * EACH, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": EACH,
                     "MASTER_ADDR": network.address(0), "MASTER_PORT": 29500, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": 1}
            environment = python_with("pytorch", **{name: str(value) for name, value in place.items()})
            command = network.hosts[host].command(*map(str, script))
            started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        if started[0].stdout.readline().strip() != "warm":
            sys.exit("slow_links: PyTorch's rank 0 did not get warm")
        before = network.bytes()
        failed = [process.wait() for process in started]
        if any(failed):
            sys.exit(f"slow_links: PyTorch's ranks ended with {failed}")
        link = busiest(before, network.bytes(), options.steps - WARM_UP)
    finally:
        deadline.cancel()
        for process in started:
            process.kill()
            process.wait()
        network.end()
    varied = {"average_every": options.every} if options.every else {}
    return {"name": f"pytorch-{seed}", "group": "PyTorch DDP, Gloo", "contender": "pytorch", "strategy": "pytorch", "devices": HOSTS * EACH,
            "seed": seed, "varied": varied, "folder": str(folder), "state": "finished", "busiest_link_bytes_per_step": link}


def measure(options, rate, folder, text):
    """Returns the table of a rate."""
    cases = []
    for seed in range(1, options.rounds + 1):
        settings, runs = compare(options, options.strategies, rate, seed, text, folder / f"{rate:g}-{seed}", LOCKSTEP_INSECURE_NETWORK="0")
        _, clear = compare(options, "ddp", rate, seed, text, folder / f"{rate:g}-{seed}-clear", LOCKSTEP_INSECURE_NETWORK="1")
        cases += runs + [{**run, "group": IN_CLEAR, "contender": IN_CLEAR} for run in clear]
        if has_torch():
            cases.append(peer(options, rate, seed, text, folder / f"{rate:g}-{seed}-pytorch"))
    groups = list(dict.fromkeys(case["group"] for case in cases))
    return summary(settings, machine(), Path("/"), sorted(cases, key=lambda case: groups.index(case["group"])))


def rows_of(table):
    """By the contender's name: what the last part of a table says, with medians as numbers."""
    (_, *heads), _, *rows = [line[2:-2].split(" | ") for line in table.rpartition("\nHosts of ")[2].splitlines() if line.startswith("| ")]
    values = {re.sub(rf"-{HOSTS * EACH}(-.*)?$", "", name): cells for name, *cells in rows}
    return {name: {head: float(cell.split(" ±")[0]) if re.fullmatch(r"[\d.]+( ±[\d.]+)?", cell) else cell
                   for head, cell in zip(heads, cells)} for name, cells in values.items()}


def keep(model, rate, table, steps):
    rows = rows_of(table)
    for row in rows.values() if steps < FEW_STEPS else []:
        del row["s to loss"]
    save_cases("slow_links", {f"{model}, {rate:g}": {"arguments": sys.argv[1:], "table": table, "rows": rows}})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rates", type=lambda text: [float(rate) for rate in text.split(",")], default=[1000.0, 100.0], help="Mb/s [1000,100]")
    add("--rounds", type=int, default=1, help="each with another seed")
    add("--model", default="gpt-char")
    add("--batch-size", type=int, default=8)
    add("--block", type=int, default=128)
    add("--steps", type=int, default=320)
    add("--strategies", default="", help="of lockstep compare; all by default")
    add("--every", default="", help="batches between averages, in place of 32")
    add("--target-loss", type=float, default=0)
    add("--save", action="store_true", help="keep the tables in bench/results/slow_links.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        text = text_of_repository(Path(folder) / "text")
        for rate in options.rates:
            table = measure(options, rate, Path(folder), text)
            print(table, flush=True)
            if options.save:
                keep(options.model, rate, table, options.steps)


if __name__ == "__main__":
    main()
