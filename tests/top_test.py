#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`lockstep top` and `lockstep trace JOB` beside running jobs, and the live view in a real terminal (tmux).

usage: top_test.py COMMAND RANK_PROBE            made-up ranks: what is said about them, the view, users
       top_test.py --train COMMAND SLOW_LENET    `lockstep train` and a program of one's own

It runs in a process namespace of its own: there are no other jobs, and the kernel ends its own with it.
"""
import contextlib
import json
import os
import pwd
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PATIENCE = 60  # seconds, for what should take a moment
COLUMNS = "rank step samples/s comp wait exch data upd memory age phase for pid loss".split()


def wait_until(what, condition):
    deadline = time.monotonic() + PATIENCE
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline, f"{what} did not happen within {PATIENCE} s"
        time.sleep(0.05)


def looks(command, *options):
    done = subprocess.run([command, "top", "--once", "--json", "--interval", "0.5", *options], capture_output=True, text=True,
                          timeout=PATIENCE, check=True)
    (line,) = done.stdout.splitlines()
    return json.loads(line)["jobs"]


def look_at(command, number):
    """The job of this number; None while there is none."""
    return next((job for job in looks(command) if job["job"] == number), None)


def wait_for_verdict(command, number, kind, ranks=None, also=lambda job: True):
    """The job once something of this kind is said about it, and about these ranks. Between two looks a rank may have started,
    or other tests may have had its core: figures that follow from what the ranks do are a part of the condition (`also`)."""
    last = {}

    def said():
        last["job"] = job = look_at(command, number)
        if not job or job["verdicts"][0]["kind"] != kind or ranks not in (None, job["verdicts"][0]["ranks"]):
            return None
        return also(job) and job
    try:
        return wait_until(kind, said)
    except AssertionError as error:
        raise AssertionError(f"{error}; last seen: {last}") from None


@contextlib.contextmanager
def running(*command, **variables):
    """A job of its own; all of its processes are gone afterwards."""
    job = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
                           env={**os.environ, **variables})
    try:
        yield job
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def launched(command, ranks, *program):
    return running(command, "run", "--nproc-per-node", ranks, "--", *program)


# ---- What is said about jobs

def shows_who_waits(job):
    waiting, slow = job["ranks"][0], job["ranks"][1]
    return (waiting["shares"]["wait"] > 0.4 > 0.1 > slow["shares"]["wait"] and slow["shares"]["compute"] > 0.8 and
            slow["awaited"] > 0.4 and waiting["steps_per_second"] > 5 and waiting["samples_per_second"] > 5 * 32)


def expect_straggler(command, probe):
    with launched(command, 3, probe, "straggle") as job:
        found = wait_for_verdict(command, job.pid, "straggler", [1], shows_who_waits)
        assert found["name"] == Path(probe).name and "straggle" in found["command"], found
        assert found["world_size"] == 3 and [rank["rank"] for rank in found["ranks"]] == [0, 1, 2], found
        slow = found["ranks"][1]
        assert slow["step"] > 0 and slow["loss"] == 0.5 and slow["memory_bytes"] > slow["private_bytes"] > 0, found
        assert slow["seconds_since_progress"] < 5 and slow["state"] == "running", found


def expect_stopped_rank(command, probe):
    with launched(command, 2, probe, "straggle") as job:
        pid = wait_for_verdict(command, job.pid, "straggler", [1])["ranks"][1]["pid"]
        os.kill(pid, signal.SIGSTOP)
        found = wait_for_verdict(command, job.pid, "stopped", [1])
        assert f"kill -CONT {pid}" in found["verdicts"][0]["text"], found
        assert found["ranks"][1]["state"] == "stopped", found
        os.kill(pid, signal.SIGCONT)
        wait_for_verdict(command, job.pid, "straggler")


def expect_circle(command, probe):
    with launched(command, 2, probe, "wait-in-a-circle") as job:
        found = wait_for_verdict(command, job.pid, "circle")
        assert sorted(found["verdicts"][0]["ranks"]) == [0, 1] and [rank["waits_for"] for rank in found["ranks"]] == [1, 0], found


def expect_waits_for_data(command, probe):
    with launched(command, 2, probe, "wait-for-data") as job:
        verdict = wait_for_verdict(command, job.pid, "data", [0, 1])["verdicts"][0]
        assert "--workers " in verdict["text"], verdict


def shows_a_busy_server(job):
    server = job["ranks"][0]["server"]
    return (0.5 < server["requests_in_hand"] < 1.1 and server["requests_per_second"] > 10 and
            0.5 < server["mean_delay"] < 1.5)


def expect_server(command, probe):
    with launched(command, 3, probe, "serve") as job:
        found = wait_for_verdict(command, job.pid, "server", [0], shows_a_busy_server)
        server = found["ranks"][0]["server"]
        assert server["clients"] == 2 and server["most_delay"] == 2 and server["seconds_per_request"] > 0.009, found
        assert "server" not in found["ranks"][1], found


def expect_ranks_without_our_launcher(command, probe, folder):
    """Two ranks of torchrun's variables are one job; a program alone is another. Neither has been told of lockstep. Two more
    ranks of that job are elsewhere."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    steps = [probe, "take-steps", 1000 * PATIENCE]
    with running(*steps, RANK="0", LOCAL_RANK="0", **meeting) as first, running(*steps, RANK="1", LOCAL_RANK="1", **meeting) as second, \
            running(*steps, RANK="") as alone:
        number = min(first.pid, second.pid)

        def all_of_them():
            both = look_at(command, number)
            return both and len(both["ranks"]) == 2 and look_at(command, alone.pid) and both
        found = wait_until("two ranks in a job", all_of_them)
        assert [rank["pid"] for rank in found["ranks"]] == [first.pid, second.pid] and found["world_size"] == 4, found
        assert found["ranks"][1]["step"] >= 0 and found["ranks"][1]["shares"]["compute"] > 0.9, found
        assert look_at(command, alone.pid)["world_size"] == 1
        file = Path(folder, "a-part.json")
        said = trace(command, number, "--output", file, "--seconds", "0.1")
        assert "2 of 4 ranks" in said and "the 2 of 4 ranks that are not on this machine" in said, said
        assert not spans(file)[1]["complete"], said


def expect_programs_without_lockstep(command):
    with launched(command, 2, "sleep", PATIENCE) as job:
        found = wait_for_verdict(command, job.pid, "starting")
        assert [rank["state"] for rank in found["ranks"]] == ["unknown"] * 2, found


def expect_nothing_of_another_user(command, probe):
    """Of nobody's processes neither the page nor, through it, anything else. Root's own jobs are hidden from others alike."""
    assert os.geteuid() == 0, "this test changes users: run it as root"
    nobody = pwd.getpwnam("nobody")

    def become_nobody():
        os.setgroups([])
        os.setgid(nobody.pw_gid)
        os.setuid(nobody.pw_uid)
    with launched(command, 2, probe, "straggle") as job:
        wait_for_verdict(command, job.pid, "straggler")
        seen = subprocess.run([command, "top", "--once", "--interval", "0.1"], capture_output=True, text=True, timeout=PATIENCE,
                              preexec_fn=become_nobody, cwd="/")
        assert seen.returncode == 0 and seen.stdout == "no job of this user is running on this machine\n", seen
        traced = subprocess.run([command, "trace", str(job.pid), "--output", "/tmp/none.json"], capture_output=True, text=True,
                                timeout=PATIENCE, preexec_fn=become_nobody, cwd="/")
        assert traced.returncode == 2 and "another user" in traced.stderr, traced


# ---- Text and terminals

def expect_text(command, probe):
    with launched(command, 2, probe, "straggle") as job:
        wait_for_verdict(command, job.pid, "straggler")
        for width in (40, 80, 200):
            lines = subprocess.run(["env", f"COLUMNS={width}", command, "top", "--once", "--interval", "0.3"], capture_output=True, text=True,
                                   timeout=PATIENCE, check=True).stdout.splitlines()
            assert max(map(len, lines)) <= width, lines
            heading = next(line for line in lines if line.startswith("rank"))
            assert heading.split() == columns_at(width), lines
            assert any(line.split()[0] == "1" for line in lines), lines
    refused = subprocess.run([command, "top"], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=PATIENCE)
    assert refused.returncode == 2 and "--once" in refused.stderr, refused


def columns_at(width):
    dropped = {40: "samples/s exch memory phase for pid loss", 80: "for pid loss", 200: ""}[width].split()
    return [column for column in COLUMNS if column not in dropped]


class Terminal:
    """A tmux server of its own, with a shell in which commands are typed."""

    def __init__(self, folder, columns, lines=24):
        self.tmux = ["tmux", "-f", "/dev/null", "-S", f"{folder}/tmux"]
        self.run("new-session", "-d", "-x", str(columns), "-y", str(lines), "env PS1='ready> ' sh")
        self.run("set-option", "-g", "window-size", "manual")
        wait_until("a shell", lambda: "ready>" in self.text())

    def run(self, *words):
        return subprocess.run([*self.tmux, *words], check=True, capture_output=True, text=True, timeout=PATIENCE).stdout

    def text(self):
        return self.run("capture-pane", "-p")

    def lines(self):
        return self.text().splitlines()

    def press(self, *keys):
        self.run("send-keys", *keys)

    def resize(self, columns, lines=24):
        self.run("resize-window", "-x", str(columns), "-y", str(lines))

    def flags(self):
        """Whether a full-screen program shows, and whether the cursor does."""
        return self.run("display-message", "-p", "#{alternate_on} #{cursor_flag}").split()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.run("kill-server")


def heading_on(terminal):
    return next((line.split() for line in terminal.lines() if line.startswith("rank ")), [])


def expect_live_view(command, probe, folder):
    with launched(command, 3, probe, "straggle") as first, Terminal(folder, 80) as terminal:
        wait_for_verdict(command, first.pid, "straggler")
        terminal.press(f"{command} top --interval 0.2", "Enter")
        wait_until("the view", lambda: heading_on(terminal) == columns_at(80))
        wait_until("a verdict", lambda: "> rank 1 is the straggler" in terminal.text())
        assert terminal.flags() == ["1", "0"], terminal.flags()
        for width in (200, 40, 80):
            terminal.resize(width)
            wait_until(f"the view at {width}", lambda: heading_on(terminal) == columns_at(width))
            assert max(map(len, terminal.lines())) <= width, terminal.text()
            wait_until("the line at the bottom", lambda: terminal.lines()[-1].startswith("q quits"))
        expect_choice_of_jobs(command, probe, terminal, first)
        terminal.press("q")
        wait_until("the shell", lambda: terminal.lines() and terminal.flags() == ["0", "1"])
        terminal.press("echo still $((40 + 2)); stty -a | tr ' ;' '\\n\\n' | grep -x echo", "Enter")
        wait_until("the terminal as it was", lambda: "still 42" in terminal.text() and "echo" in terminal.lines())


def expect_choice_of_jobs(command, probe, terminal, first):
    with launched(command, 1, probe, "wait-for-data") as second:
        def chosen():
            return next((line for line in terminal.lines() if line.startswith("* ")), "")
        wait_until("a list of jobs", lambda: f"job {first.pid}" in chosen())
        for key, number in (("Down", second), ("Tab", first), ("Up", second), ("Up", first), ("Down", second)):
            terminal.press(key)
            wait_until(f"{key}: {number.pid}", lambda: f"* job {number.pid}" in chosen())
        wait_until("the verdict of the other job", lambda: "> rank 0 waits for data" in terminal.text())
    wait_until("the first job again", lambda: not chosen() and "straggler" in terminal.text())


def expect_live_view_without_jobs(command, folder):
    with Terminal(folder, 40) as terminal:
        terminal.press(f"{command} top --interval 0.2", "Enter")
        wait_until("words", lambda: "no job of this user" in " ".join(terminal.lines()))
        terminal.press("q")
        wait_until("the shell", lambda: terminal.flags() == ["0", "1"])


# ---- Traces

def trace(command, *words, code=0):
    done = subprocess.run([command, "trace", *map(str, words)], capture_output=True, text=True, timeout=2 * PATIENCE)
    assert done.returncode == code, done
    return done.stdout + done.stderr


def spans(file):
    content = json.loads(Path(file).read_text())
    ranks = {}
    for event in content["traceEvents"]:
        if event["ph"] == "X":
            ranks.setdefault(event["pid"], []).append(event)
    return ranks, content["otherData"]


def expect_trace(command, probe, folder):
    file = Path(folder, "running.json")
    with launched(command, 3, probe, "straggle") as job:
        wait_for_verdict(command, job.pid, "straggler")
        for length in (0.5, 0.2):  # the second one in the same memory
            said = trace(command, job.pid, "--output", file, "--seconds", length)
            assert "3 ranks" in said, said
            ranks, about = spans(file)
            assert about["complete"] and sorted(ranks) == [0, 1, 2], about
            for events in ranks.values():
                steps = [event for event in events if event["name"].startswith("step ")]
                assert len(steps) >= 3 and all(15_000 < step["dur"] < 5e6 for step in steps), steps
                assert max(event["ts"] + event["dur"] for event in events) < (length + PATIENCE) * 1e6, events
        assert trace(command, Path(probe).name, "--output", Path(folder, "by-name.json"), "--seconds", "0.1")
        assert sorted(Path(folder).glob("*.rank*")) == []
        expect_errors(command, job, folder)


def expect_errors(command, job, folder):
    assert "there is no job 1 " in trace(command, 1, "--output", Path(folder, "x.json"), code=2)
    assert "FILE.json, which Perfetto" in trace(command, job.pid, "--output", Path(folder, "x.txt"), code=2)
    assert "--output FILE" in trace(command, job.pid, code=2)
    pid = look_at(command, job.pid)["ranks"][1]["pid"]
    os.kill(pid, signal.SIGSTOP)
    said = trace(command, job.pid, "--output", Path(folder, "x.json"), "--patience", "0.5", code=1)
    assert "stopped by a signal" in said and "rank 1" in said and not Path(folder, "x.json").exists(), said
    os.kill(pid, signal.SIGCONT)


def expect_trace_of_a_job_that_ends(command, probe, folder):
    """What was recorded until then is there."""
    file = Path(folder, "ended.json")
    with launched(command, 2, probe, "straggle") as job:
        wait_for_verdict(command, job.pid, "straggler")
        tracing = subprocess.Popen([command, "trace", str(job.pid), "--output", str(file), "--seconds", str(PATIENCE)],
                                   stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        rings = [f"/proc/{rank['pid']}/fd" for rank in look_at(command, job.pid)["ranks"]]
        wait_until("rings that are being read", lambda: sum(
            "lockstep-trace" in os.readlink(link) for link in Path(f"/proc/{tracing.pid}/fd").iterdir()) == len(rings))
        os.killpg(job.pid, signal.SIGKILL)
        said = tracing.communicate(timeout=PATIENCE)[1]
        assert tracing.returncode == 0 and "so far" in said, said
    ranks, about = spans(file)
    assert not about["complete"] and sorted(ranks) == [0, 1], about


# ---- Training

TRAINING = ["--data", "synthetic:25600x1x28x28", "--batch-size", "64", "--epochs", "1000", "--threads", "1"]


def expect_training(command, folder):
    with running(command, "train", "--model", "lenet", *TRAINING, "--ranks", "2") as job:
        found = wait_until("steps", lambda: (look_at(command, job.pid) or {"samples_per_second": 0})["samples_per_second"] > 0 and
                           look_at(command, job.pid))
        assert found["name"] == "lockstep train" and "--model lenet" in found["command"], found
        for rank in found["ranks"]:
            assert rank["step"] > 0 and rank["loss"] > 0 and rank["memory_bytes"] > 50e6, rank
            assert abs(sum(rank["shares"].values()) - 1) < 1e-6 and rank["shares"]["compute"] > 0.1, rank
        file = Path(folder, "training.json")
        trace(command, job.pid, "--output", file, "--seconds", "1")
        ranks, about = spans(file)
        assert about["complete"] and sorted(ranks) == [0, 1], about
        for events in ranks.values():
            names = {event["name"] for event in events}
            assert {"forward", "backward", "optimizer step", "barrier 1: gradients", "conv1"} <= names, names
            assert len([event for event in events if event["name"].startswith("step ")]) > 1, names


def expect_a_slow_rank(command, program):
    """It sleeps in its forward: the others wait for it."""
    with running(command, "run", "--nproc-per-node", 3, "--", program, *TRAINING, SLOW_RANK="2") as job:
        wait_for_verdict(command, job.pid, "straggler", [2])


def expect_one_process(command):
    """Without ranks there is no launcher: the program is its own job."""
    with running(command, "train", "--model", "lenet", *TRAINING, "--strategy", "towers", "--ranks", "2") as job:
        found = wait_until("steps", lambda: (look_at(command, job.pid) or {"samples_per_second": 0})["samples_per_second"] > 0 and
                           look_at(command, job.pid))
        assert [rank["pid"] for rank in found["ranks"]] == [job.pid] and found["world_size"] == 1, found


def expect_servers(command):
    with running(command, "train", "--model", "lenet", *TRAINING, "--strategy", "kvstore", "--kvstore", "dist_async", "--ranks", "2") as job:
        def served():
            found = look_at(command, job.pid)
            return found and len(found["ranks"]) == 3 and found["ranks"][0].get("server", {}).get("requests_per_second") and found
        found = wait_until("requests", served)
        server = found["ranks"][0]["server"]
        assert server["clients"] == 2 and server["seconds_per_request"] > 0 and server["most_delay"] >= 0, found
        assert all("server" not in rank for rank in found["ranks"][1:]), found


def test_training(folder, command, program):
    expect_training(command, folder)
    expect_a_slow_rank(command, program)
    expect_one_process(command)
    expect_servers(command)


def test_view(folder, command, probe):
    expect_live_view_without_jobs(command, folder)
    expect_straggler(command, probe)
    expect_stopped_rank(command, probe)
    expect_circle(command, probe)
    expect_waits_for_data(command, probe)
    expect_server(command, probe)
    expect_ranks_without_our_launcher(command, probe, folder)
    expect_programs_without_lockstep(command)
    expect_nothing_of_another_user(command, probe)
    expect_text(command, probe)
    expect_live_view(command, probe, folder)
    expect_trace(command, probe, folder)
    expect_trace_of_a_job_that_ends(command, probe, folder)


def enter_own_namespace():
    if "IN_OWN_NAMESPACE" in os.environ:
        return
    root = [] if os.geteuid() == 0 else ["sudo", "-n", "--preserve-env"]
    unshare = [*root, "unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    os.execvpe(unshare[0], [*unshare, sys.executable, *sys.argv], {**os.environ, "IN_OWN_NAMESPACE": "1"})


def main():
    enter_own_namespace()
    test = test_training if sys.argv[1] == "--train" else test_view
    with tempfile.TemporaryDirectory() as folder:
        test(folder, *(str(Path(path).resolve()) for path in sys.argv[-2:]))


if __name__ == "__main__":
    main()
