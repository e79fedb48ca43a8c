# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: where programs are, how the systems take turns, medians, and the machine of a result."""
import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = ROOT / "build/release/bin"
LOCKSTEP = BIN / "lockstep"


def require_peers(target, *names):
    for name in names:
        if not (ROOT / ".deps" / name / ".complete").exists():
            sys.exit(f"bench: {name} is not here; run tools/setup.sh {target} first")


def python_with(package, **variables):
    """The environment in which python3 finds one of the packages in .deps/, before others."""
    paths = [str(ROOT / ".deps" / package), os.environ.get("PYTHONPATH")]
    return {**os.environ, "PYTHONPATH": ":".join(filter(None, paths)), **variables}


def run_peer(script, *arguments, package="pytorch", threads="1", **options):
    """Runs bench/peers/SCRIPT with that many OpenMP threads (None: as many as it likes) and returns the last line of its stdout as JSON."""
    command = [sys.executable, ROOT / "bench/peers" / script, *map(str, arguments)]
    environment = python_with(package, **({"OMP_NUM_THREADS": threads} if threads else {}))
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, env=environment, **options)
    return json.loads(done.stdout.strip().splitlines()[-1])


def run_mxnet(workers, script, *arguments):
    """A scheduler, a server and workers that run bench/peers/SCRIPT, as MXNet's documentation starts them by hand. Returns the
    line of JSON that one of them prints."""
    variables = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(random.randrange(20000, 30000)),
                 "DMLC_NUM_SERVER": "1", "DMLC_NUM_WORKER": str(workers), "DMLC_INTERFACE": "lo", "OMP_NUM_THREADS": "1"}
    helper = [sys.executable, "-c", "import mxnet"]
    worker = [sys.executable, ROOT / "bench/peers" / script, *map(str, arguments)]
    roles = [("scheduler", helper), ("server", helper)] + [("worker", worker)] * workers
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                                env=python_with("mxnet", DMLC_ROLE=role, **variables)) for role, command in roles]
    try:
        outputs = [process.communicate(timeout=1200)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return next(json.loads(line) for output in outputs for line in output.splitlines() if line[:1] in ("{", "["))


def train(*options, command=(LOCKSTEP, "train"), **variables):
    """Runs `lockstep train`, or another program with its options, and returns the events that it wrote to --metrics."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics.jsonl"
        subprocess.run([*command, *map(str, options), "--quiet", "--metrics", metrics], check=True,
                       env={**os.environ, **variables})
        return [json.loads(line) for line in metrics.read_text().splitlines()]


def descendants(pid):
    try:
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return children + [further for child in children for further in descendants(child)]


def rounds(usual):
    """The first argument, if there is one."""
    return int(sys.argv[1]) if len(sys.argv) > 1 else usual


def seconds_until(text, command, environment=None):
    """From the start of a command to its first line on stdout with this text."""
    start = time.perf_counter()
    with subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                          env=environment) as job:
        for line in job.stdout:
            if text in line:
                return time.perf_counter() - start
    raise RuntimeError(f"{' '.join(map(str, command))} never said {text}")


def take_turns(count, runs):
    """Calls every function of `runs` once in each of `count` rounds; the results of each by its name."""
    found = {name: [] for name in runs}
    for _ in range(count):
        for name, run in runs.items():
            found[name].append(run())
    return found


def median(values):
    return statistics.median(values)


def spread(values):
    return f"{min(values):.2f} to {max(values):.2f}"


def machine():
    model = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "?")
    flags = next((line for line in open("/proc/cpuinfo") if line.startswith("flags")), "")
    vectors = "AVX-512" if " avx512f" in flags else "AVX2" if " avx2" in flags else "no AVX2"
    return f"{os.cpu_count()} cores, {model}, {vectors}, Linux {platform.release().split('-')[0]}"


def parser_for(name, text, cases, rounds):
    """The options of a benchmark with several cases."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(cases), metavar="CASE", help=", ".join(cases))
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--steps", type=int, default=10, help="of each system in a round")
    parser.add_argument("--save", action="store_true", help=f"keep these cases in bench/results/{name}.json")
    return parser


def path_of(name):
    return ROOT / "bench/results" / f"{name}.json"


def save_cases(name, cases, **about):
    """Keeps these cases beside the others that the file has. Those of another machine than the file's say theirs."""
    file = json.loads(path_of(name).read_text()) if path_of(name).exists() else {"cases": {}}
    kept = {each: case for each, case in file["cases"].items() if each not in cases}
    first = file["machine"] if kept else machine()
    own = {} if first == machine() else {"machine": machine()}
    save(name, {**about, "machine": first, "cases": {**kept, **{each: {**case, **own} for each, case in cases.items()}}})


def save(name, result):
    """Keeps a result with the machine it came from, for the documentation to quote."""
    path = path_of(name)
    path.write_text(json.dumps({"machine": machine(), **result}, indent=2) + "\n")
    print(f"kept in {path.relative_to(ROOT)}")
