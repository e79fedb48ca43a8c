# SPDX-License-Identifier: Apache-2.0
"""Computes what the ranks of a job did between two lines of `lockstep jobs`, which cli/jobs.cc describes. A share is
a part of that time, from 0 to 1."""

NS = 1e-9
SHARE_OF = {"own code": "compute", "forward": "compute", "backward": "compute", "loading": "data"}
SHARE_OF |= {"exchange": "exchange", "update": "update"}
SHARES = ("compute", "wait", "exchange", "data", "update", "other")


def up_to_now(rank):
    """Adds to the sums what goes on. The rank may go on between two fields: a time that has not begun yet counts as
    none."""
    phase, peer = rank["phase"], str(rank["waits_for"])
    if rank["phase_since"]:
        rank["in_phase"][phase] += max(0, rank["at"] - rank["phase_since"])
    if rank["wait_since"]:
        waits = max(0, rank["at"] - rank["wait_since"])
        rank["waited"][phase] += waits
        rank["waited_for"][peer] = rank["waited_for"].get(peer, 0) + waits
    return rank


class Rank:
    def __init__(self, now, before=None):
        self.now, self.before = now, before
        self.number, self.pid, self.phase, self.step = (now[key] for key in ("rank", "pid", "phase", "step"))
        self.seconds = (now["at"] - before["at"]) * NS if before else 0
        self.moved = self.grown("moves") != 0 if before else True
        self.shares, self.own_code = self.share_out()
        self.steps_per_second, self.samples_per_second = self.rate("step"), self.rate("samples")
        # Its main thread wanted to run and was not let.
        self.without_core = min(max(self.rate("ns_without_core") * NS, 0), 1)
        self.server = self.served() if "server" in now else None
        self.awaited = 0  # share of the others' time in which they wait for this rank
        self.waits_for = None  # the number of a rank
        in_phase = max(0, now["at"] - now["phase_since"]) * NS if now["phase_since"] else 0
        self.seconds_since_progress = min(in_phase, self.seconds) if before and self.moved else in_phase

    def grown(self, *keys):
        now, before = self.now, self.before or self.now
        for key in keys:
            now, before = now[key], before[key]
        return now - before

    def rate(self, *keys):
        return self.grown(*keys) / self.seconds if self.seconds else 0

    def share_out(self):
        """A wait for ranks of this machine counts as one in whatever phase. Parts may sum up to a little more or
        less than the time."""
        shares, own_code, everything = dict.fromkeys(SHARES, 0), 0, 0
        for phase in self.now["in_phase"]:
            time = max(0, self.grown("in_phase", phase))
            waits = min(max(0, self.grown("waited", phase)), time)
            shares["wait"] += waits
            shares[SHARE_OF.get(phase, "other")] += time - waits
            own_code += time - waits if phase == "own code" else 0
            everything += time
        return {key: time / max(everything, 1) for key, time in shares.items()}, own_code / max(everything, 1)

    def served(self):
        new_server = self.before is not None and "server" not in self.before
        grown = {key: value if new_server else self.grown("server", key) for key, value in self.now["server"].items()}
        requests, in_hand, now = grown["requests"], grown["ns_in_hand"] * NS, self.now["server"]
        return {
            "clients": now["clients"],
            "requests_in_hand": in_hand / self.seconds if self.seconds and requests else now["in_hand"],
            "requests_per_second": requests / self.seconds if self.seconds else 0,
            "seconds_per_request": in_hand / requests if requests else 0,
            "mean_delay": grown["delays"] / grown["gradients"] if grown["gradients"] else 0,
            "most_delay": now["most_delay"],
        }

    @property
    def is_known(self):
        return self.pid != 0

    @property
    def lives(self):
        return self.is_known and self.now["state"] != "" and self.phase != "ended"

    @property
    def is_worker(self):
        return self.lives and not self.server

    @property
    def state(self):
        if not self.is_known or self.phase == "ended":
            return "ended" if self.is_known else "unknown"
        return {"": "died", "T": "stopped", "t": "stopped"}.get(self.now["state"], "running")

    def json(self):
        def own(names):
            return {name: getattr(self, name) for name in names.split()}

        facts = {
            "rank": self.number,
            **own("pid state phase step steps_per_second samples_per_second"),
            "loss": self.now["loss"] if self.now["samples"] else None,
            **own("shares own_code awaited"),
            "waits_for": self.waits_for if self.waits_for is not None or not self.now["wait_since"] else "any",
            **own("without_core seconds_since_progress"),
            **{key: self.now[key] for key in ("memory_bytes", "private_bytes")},
        }
        return facts | (own("server") if self.server else {})


class Job:
    """`before`: the same job's entry in the line before, if there is one; up_to_now() has been at both."""

    def __init__(self, now, time, before=None):
        self.now, self.number = now, now["job"]
        self.seconds = time - now["started_at"] * NS
        then = {rank["pid"]: rank for rank in before["ranks"]} if before else {}
        self.ranks = []
        for rank in now["ranks"]:
            earlier = then.get(rank["pid"]) if rank["pid"] else None
            self.ranks.append(Rank(rank, earlier if earlier and rank["at"] > earlier["at"] else None))
        self.samples_per_second = max((rank.samples_per_second for rank in self.ranks), default=0)
        by_pid = {rank.pid: rank for rank in self.ranks if rank.is_known}
        for rank in self.ranks:
            rank.awaited = self.awaited(rank)
            if rank.now["wait_since"] and rank.now["waits_for"] in by_pid:
                rank.waits_for = by_pid[rank.now["waits_for"]].number

    def awaited(self, rank):
        others = [other for other in self.ranks if other is not rank and other.is_worker and other.before]
        if not others or not rank.is_known:
            return 0

        def share(other):
            before, now = (each["waited_for"].get(str(rank.pid), 0) for each in (other.before, other.now))
            return min(max((now - before) * NS / other.seconds, 0), 1)

        return sum(map(share, others)) / len(others)

    def json(self, verdicts):
        return {
            "job": self.number,
            "name": self.now["name"],
            "command": self.now["command"],
            "seconds": self.seconds,
            **{key: self.now[key] for key in ("world_size", "machines", "machine")},
            "samples_per_second": self.samples_per_second,
            "verdicts": [verdict._asdict() for verdict in verdicts],
            "ranks": [rank.json() for rank in self.ranks],
        }
