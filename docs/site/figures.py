#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the figures of README.md and docs/ out of bench/results.

  docs/site/figures.py            writes them
  docs/site/figures.py --check    fails where a page says something else; one of the tests

A table follows a line <!--NAME-->; its corner has the unit, the machine and the turns. A sentence is found by its words.
A path is a file of bench/results and keys, with `*` for all, `key=value,...` for an element of a list, `a or b` for the least
that is there, `a / b` and `a + b`. A missing key is an error, but `key?` leaves a cell empty. Empty columns and rows are left out.
"""
import functools
import json
import re
import sys
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
PAGE = "docs/benchmarks.md"
IN_A_SENTENCE = r"\d(?:[\d.,]*\d)?(?: to \d[\d.]*\d)?"


# ---- how a figure is shown

def plain(value, factor=1):
    """With two digits, three after a leading 1.0, or whole."""
    if isinstance(value, str):
        return value
    value = (median(value) if isinstance(value, list) else value) * factor
    if isinstance(value, int) or value >= 100:
        return f"{value if value < 10_000 else float(f'{value:.3g}'):,.0f}"
    return f"{value:#.{3 if f'{value:e}'.startswith('1.0') else 2}g}".rstrip(".")


def longer(ratio):
    return f"{100 * ratio - 100:+.1f}"


def span(ratios, digits=2):
    return f"{min(ratios):.{digits}f} to {max(ratios):.{digits}f}"


ms, us, percent = (functools.partial(plain, factor=factor) for factor in (1e3, 1e6, 100))
hundredths, thousandths, tenths = "{:.2f}".format, "{:.3f}".format, functools.partial(span, digits=1)


# ---- tables: unit, start of the paths, columns, rows. A column's place goes into the {} of a path. A row's path that begins with /
# is whole. Rows and columns may say how their figures are shown; a row may have several.

MODELS = {"MLP, 32": "mlp", "AlexNet, 8": "alexnet", "GPT, 8": "gpt", "ResNet-18, 64": "resnet18-32", "LeNet, 256": "lenet"}
SYSTEMS = {name: name for name in ("one process", "DDP over Gloo", "lockstep")}
LARGE = {"MLP, 25 M parameters, 32": ("mlp > {} > seconds", ms), "AlexNet, 61 M, 8": ("alexnet > {} > seconds", ms),
         "BERT base, 110 M, 8×128 tokens": ("bert > {} > seconds", ms), "GPT, 11 M, 8×128": ("gpt > {} > seconds", ms)}
ORIGINALS = {"`kvstore local`, MXNet 1.9.1 `device`": ("lockstep kvstore local", "MXNet device"),
             "`kvstore dist_sync`, MXNet": ("lockstep kvstore dist_sync", "MXNet dist_sync"),
             "`kvstore dist_async`, MXNet": ("lockstep kvstore dist_async", "MXNet dist_async"),
             "`towers`, TensorFlow 2.21 MirroredStrategy": ("lockstep towers", "TensorFlow MirroredStrategy"),
             "`ddp`, DDP over Gloo": ("lockstep ddp", "PyTorch DDP, Gloo")}
SLOW = {"DDP over Gloo": "PyTorch DDP, Gloo", "`ddp`": "ddp", "`ddp` in clear": "ddp in clear", "bfloat16": "ddp-bf16",
        "PowerSGD": "ddp-powersgd", "top-k": "ddp-topk", "local SGD": "local-sgd", "DiLoCo": "diloco", "DiLoCo in the background": "streaming-diloco"}
ONE_PROCESS = "pytorch > one_process_channels_last{0} or one_process_contiguous{0}"
TABLES = {
    "step": ("ms", "step > models > {} > ", {**MODELS, "policy, 128": "policy"}, {
        "lockstep, two ranks": ("lockstep > step", ms), "lockstep in one process": ("lockstep > one_process", ms),
        "DDP over Gloo": ("pytorch > ddp", ms), "no exchange": ("pytorch > no_sync", ms),
        "PyTorch in one process": (ONE_PROCESS.format(""), ms),
        "with a malloc that keeps memory": (ONE_PROCESS.format("_kept"), ms),
        "PyTorch's fastest / lockstep's": "speed_up_over_best"}),
    "tables": ("", "tables > tables > {} > ", {"digits": "digits", "wine": "wine", "cancer": "breast_cancer", "diabetes": "diabetes",
                                               "Fashion-MNIST": "fashion_mnist"}, {
        system.strip("?"): [f"{system} > seconds", (f"{system} > figure", thousandths), f"{system} > lines"]
        for system in ("lockstep", "scikit-learn?", "PyTorch")}),
    "recovery": ("", "recovery > runs > {} > * > ", {
        "lockstep, `--max-restarts`": "lockstep", "torchft 0.2.0": "torchft", "torchrun, a checkpoint every 50 steps": "torchrun"}, {
        "seconds": "seconds", "repeated steps": "repeated", "goodput, %": ("goodput", percent)}),
    "originals": ("ms", "originals > ", {"MLP": "mlp-wide", "LeNet": "lenet"}, {
        name: [(f"{{}} > {run}", ms) for run in runs] for name, runs in ORIGINALS.items()}),
    "collectives": ("", "collectives > seconds > 2 ranks > {} > ", {
        "lockstep": "lockstep", "Gloo": "Gloo", "Open MPI 5.0.11": "Open MPI", "MPICH 5.0.2": "MPICH",
        "oneCCL 2022.2": "oneCCL?"}, {
        "4 KB, µs": ("all_reduce:4096:float32:arena:direct or all_reduce:4096:float32:ordinary:direct", us),
        "64 MiB, ms": ("all_reduce:67108864:float32:arena:direct or all_reduce:67108864:float32:ordinary:direct", ms),
        "1 MiB of ordinary memory, ms": ("all_reduce:1048576:float32:ordinary:direct", ms)}),
    "hosts": ("Gloo / lockstep", "hosts > setups > ", {
        "64 KB": "65536 > ratio", "256 KB": "262144 > ratio", "1 MB": "1048576 > ratio", "3.6 MB": "3600000 > ratio",
        "25 MB": "25000000 > ratio", "link, %": ("25000000 > bound / lockstep", percent),
        "encrypted, %": ("25000000 > encrypted / lockstep", longer)}, {
        f"{operation}, {hosts}×{ranks}": f"hosts={hosts},ranks_per_host={ranks} > cases > operation={operation},bytes={{}}"
        for hosts, ranks in ((4, 1), (2, 2)) for operation in ("all_reduce", "reduce_scatter", "all_gather", "broadcast")}),
    "memory": ("MiB", "memory > cases > {} > mebibytes > ", {
        "MLP": "mlp", "MLP, AdamW": "mlp-adamw", "AlexNet, EPYC": "alexnet", "GPT": "gpt", "GPT, AdamW": "gpt-adamw", "BERT, AdamW, EPYC": "bert"}, {
        "lockstep, C++": "lockstep_cpp? > steady", "lockstep, Python": "lockstep > steady",
        "PyTorch in one process": "one_process > steady", "which keeps its gradients": "one_process_kept? > steady",
        "DDP over Gloo": "ddp_gloo > steady"}),
    "start": ("s", "what_waits > cases > start > ", {"one process": "one process", "two ranks": "two ranks"}, {
        "`lockstep train`": "lockstep train, {0}", "lockstep in Python": "lockstep in Python, {0} or lockstep run and Python, {0}",
        "PyTorch, torchrun with DDP": "PyTorch, {0} or torchrun and DDP, {0}"}),
    "waits": ("% longer", "what_waits > cases > ", {"LeNet": "lenet", "MLP": "mlp-wide"}, {
        **{name: (f"{{}}, steps > ratios > {name}", longer) for name in ("checkpoint", "metrics", "top", "trace")},
        "tunnel": ("{}, tunnel, 1000 Mb/s > ratios > tunnel", longer)}),
    "slow": ("ms/s to loss/MB", "slow_links > cases > {} > ", {
        "10.8 M, 1 Gb/s": "gpt-char, 1000 > rows", "100 Mb/s": "gpt-char, 100 > rows",
        "124 M, 1 Gb/s": "gpt2, 1000 > rows", "124 M, 100 Mb/s": "gpt2, 100 > rows"}, {
        name: [f"{run}? > mean step ms", f"{run}? > s to loss?", f"{run}? > link MB/step"] for name, run in SLOW.items()}),
    "python": ("ms", "python_step > cases > {} > ", {name.split(",")[0]: model for name, model in MODELS.items()}, {
        "lockstep": ("seconds > lockstep", ms), "DDP over Gloo": ("seconds > ddp_gloo", ms),
        "DDP over [lockstep's backend](design/c10d-backend.md)": ("seconds > ddp_lockstep", ms)}),
    "adamw": ("ms", "one_machine > cases > ", SYSTEMS, LARGE),
    "clipped": ("ms", "one_machine > cases > ", {**SYSTEMS, "`lockstep.clip_grad_norm_`": "lockstep.clip_grad_norm_"}, {
        **LARGE, "LeNet, 256": ("lenet > {} > seconds", ms),
        "BERT, Xeon, AVX-512": ("/one_machine_avx512 > cases > bert > {} > seconds", ms)}),
}

# ---- sentences: page, words, the figures in them

KEPT = "step > models > mlp > pytorch > one_process_contiguous"
HOSTS_8 = "hosts > setups > hosts=8,ranks_per_host=1 > cases > operation=all_reduce,bytes=3600000 > bound / "
ADAMW, BERT = "one_machine > cases > * > ", "one_machine_avx512 > cases > bert > one process / "
COLLECTIVES = "collectives > seconds > 2 ranks > lockstep / Open MPI > "
SENTENCES = [
    (PAGE, "exchange and update take {} µs", ("step > models > policy > lockstep > update + wait", us)),
    (PAGE, "lockstep {} s, DDP over Gloo {} s, or {} s with channels_last", "lenet > seconds_per_epoch > lockstep",
     "lenet > seconds_per_epoch > PyTorch DDP", "lenet > seconds_per_epoch > PyTorch DDP, channels_last"),
    (PAGE, "all-reduce is done {} s after the start; torchrun and Python need {} s",
     "startup > seconds > lockstep run", "startup > seconds > torchrun"),
    (PAGE, "up to {} times as fast (`scatter`), in `send` and `receive` {} times",
     COLLECTIVES + "scatter:4:float32:ordinary:direct", COLLECTIVES + "send_receive:4:float32:ordinary:direct"),
    (PAGE, "AlexNet takes {} times one process that keeps its gradients, BERT {}: {} and {} times one",
     *(f"memory > cases > {case} > mebibytes > lockstep / {other} > steady"
       for other in ("one_process_kept", "one_process") for case in ("alexnet", "bert"))),
    (PAGE, "reaches {} % in clear, {} % encrypted, Gloo {} %", (HOSTS_8 + "lockstep", percent),
     (HOSTS_8 + "encrypted", percent), (HOSTS_8 + "gloo", percent)),
    (PAGE, "lockstep makes {} Fashion-MNIST images/s, in shuffled, normalised batches of 256, DataLoader {}",
     "data > lockstep, 1 worker", "data > DataLoader, in process"),
    (PAGE, "two cores make {} images/s, with torchvision and DataLoader {}", "data > lockstep, 2 workers",
     "data > torchvision and DataLoader, 2 workers"),
    ("docs/cpu-training.md", "step takes [{} ms, not {}]", (KEPT + "_kept", ms), (KEPT, ms)),
    ("docs/cpu-training.md", "lockstep is {} × as fast ({} with", (ADAMW + "one process / lockstep > seconds", span),
     (ADAMW + "one process / lockstep.clip_grad_norm_ > seconds", span)),
    ("docs/cpu-training.md", "BERT is {} × as fast, {} with", (BERT + "lockstep > seconds", hundredths),
     (BERT + "lockstep.clip_grad_norm_ > seconds", hundredths)),
    ("README.md", "lockstep needs {} times the memory of one process, and {} times DDP's",
     (ADAMW + "lockstep / one process > mib_at_rest", tenths), (ADAMW + "lockstep / DDP over Gloo > mib_at_rest", tenths)),
]


# ---- looking up and writing

@functools.cache
def results(file):
    path = ROOT / f"bench/results/{file}.json"
    return json.loads(path.read_text()) if path.exists() else sys.exit(f"there is no bench/results/{file}.json")


def find(node, keys, path):
    if not keys:
        return median(node) if isinstance(node, list) else node["median"] if isinstance(node, dict) else node
    key, *rest = keys
    if key == "*":
        return [find(child, rest, path) for child in (node.values() if isinstance(node, dict) else node)]
    if there := [each for each in key.split(" or ") if each in node and each != key]:
        return min(find(node, [each, *rest], path) for each in there)
    if " + " in key:
        return sum(find(node, [each, *rest], path) for each in key.split(" + "))
    if " / " in key:
        part, whole = (find(node, [each, *rest], path) for each in key.split(" / "))
        return part / whole
    if isinstance(node, list):
        wanted = dict(pair.split("=") for pair in key.split(","))
        node = {key: each for each in node if all(str(each[name]) == value for name, value in wanted.items())}
    name = key.removesuffix("?")
    if name not in node:
        return None if name != key else sys.exit(f"bench/results/{path.replace(' > ', '.json has no ', 1)}: {key} is missing")
    return find(node[name], rest, path)


def figure(path, show=plain):
    file, *keys = path.split(" > ")
    value = find(results(file), keys, path)
    return "" if value is None else show(value)


def as_pair(text_or_pair):
    return text_or_pair if isinstance(text_or_pair, tuple) else (text_or_pair, plain)


def corner(unit, file):
    about = results(file)
    _, processor, vectors, *_ = about["machine"].split(", ")
    turns = about.get("turns") or about.get("rounds")
    said = [unit, re.sub(r"Intel|AMD|Processor|\(R\)", "", processor).strip(), vectors, f"{turns} turns" if turns else ""]
    return ", ".join(filter(None, said))


def table(name):
    unit, start, columns, rows = TABLES.get(name) or sys.exit(f"figures.py knows no table {name}")
    lines = [[corner(unit, start.split(" > ")[0]), *columns]]
    for title, row in rows.items():
        line = [title]
        for column in columns.values():
            place, of_column = as_pair(column)
            shown = []
            for path, of_row in map(as_pair, row if isinstance(row, list) else [row]):
                whole = path[1:] if path.startswith("/") else start + path
                shown.append(figure(whole.format(place), of_row if of_column is plain else of_column))
            line.append("/".join(filter(None, shown)))
        lines += [line] if any(line[1:]) else []
    lines = [*zip(*[column for column in zip(*lines) if any(column[1:])])]
    head, *body = [f"| {' | '.join(line)} |\n" for line in lines]
    return head + "|" + "---|" * len(lines[0]) + "\n" + "".join(body)


def written(page, text):
    """The page with the figures of today."""
    text = re.sub(r"(<!--(\w+)-->\n)(?:\|.*\n)*", lambda found: found[1] + table(found[2]), text)
    for _, words, *figures in (sentence for sentence in SENTENCES if sentence[0] == page):
        pattern = IN_A_SENTENCE.join(map(re.escape, words.split("{}")))
        text, count = re.subn(pattern, words.format(*(figure(*as_pair(each)) for each in figures)), text)
        if count != 1:
            sys.exit(f"{page} has {count} times: {words}")
    if page == PAGE and (unmarked := re.search(r"(?m)(?<!-->\n)^\|.*(?=\n\| ?---)", text)):
        sys.exit(f"{page} has a table that this program does not write: {unmarked[0]}")
    return text


def main():
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        page, before = str(path.relative_to(ROOT)), path.read_text()
        after = written(page, before)
        if after == before:
            continue
        if "--check" in sys.argv:
            new = "\n".join(line for line in after.splitlines() if line not in before.splitlines())
            sys.exit(f"{page} is not what docs/site/figures.py writes from bench/results; run it. New are:\n{new}")
        path.write_text(after)
        print(f"written: {page}")


if __name__ == "__main__":
    main()
