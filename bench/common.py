"""What the benchmarks share: where programs are, medians, and the machine a result came from."""
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = ROOT / "build/release/bin"
LOCKSTEP = BIN / "lockstep"
PYTORCH = ROOT / ".deps/pytorch"


def require_peers():
    if not (PYTORCH / ".complete").exists():
        sys.exit("bench: PyTorch is not here; run `make bench`, or tools/setup.sh pytorch first (4.7 GB)")


def peer_environment():
    return {**os.environ, "PYTHONPATH": str(PYTORCH), "OMP_NUM_THREADS": "1"}


def last_json(command, **options):
    """Runs a command and returns the last line of its stdout as JSON."""
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, **options)
    return json.loads(done.stdout.strip().splitlines()[-1])


def median(values):
    return statistics.median(values)


def spread(values):
    return f"{min(values):.2f} to {max(values):.2f}"


def machine():
    model = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "?")
    flags = next((line for line in open("/proc/cpuinfo") if line.startswith("flags")), "")
    vectors = "AVX-512" if " avx512f" in flags else "AVX2" if " avx2" in flags else "no AVX2"
    return f"{os.cpu_count()} cores, {model}, {vectors}, Linux {platform.release().split('-')[0]}"


def save(name, result):
    """Keeps a result with the machine it came from, for the documentation to quote."""
    path = ROOT / "bench/results" / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), **result}, indent=2) + "\n")
    print(f"kept in {path.relative_to(ROOT)}")
