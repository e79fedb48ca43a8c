# SPDX-License-Identifier: Apache-2.0
"""Says what holds up the ranks of a job, and what to do about it. docs/watching.md says what each verdict means."""

from collections import namedtuple
from math import ceil

from common import human_seconds, named

# Parts of the time
WORTH_SAYING = 0.1
SERVER_IS_BUSY = 0.3  # of its workers' time, which they wait for it
LACKS_CORES = 0.3
MUCH_MORE = 0.25  # others wait for a rank more than it waits itself
SAME_PACE = 0.8  # of the fastest worker's steps a second
# Seconds
WAITS_IN_CIRCLE = 1
STANDS_STILL, SLOW_PHASE = 5, 60
SLOW_PHASES = ("starting", "validating", "saving")

Verdict = namedtuple("Verdict", "kind ranks text")


def verdicts_on(job):
    """The worst first; never none."""
    return (
        list(dead_and_stopped(job)) + list(circle(job))
        or list(stuck(job))
        or list(not_at_the_meeting(job))
        or list(slow(job))
        or [well(job)]
    )


def percent(share):
    return f"{100 * share:.0f} %"


def ranks_named(numbers):
    return ("rank " if len(numbers) == 1 else "ranks ") + named(numbers)


def doing(rank):
    return rank.phase if rank.step < 0 else f"{rank.phase} of step {rank.step}"


def workers_of(job):
    return [rank for rank in job.ranks if rank.is_worker]


# ---- Ranks that do nothing


def dead_and_stopped(job):
    for rank in job.ranks:
        name = f"rank {rank.number}, a server," if rank.server else f"rank {rank.number}"
        if rank.state == "died":
            yield Verdict("died", [rank.number], f"rank {rank.number} has died, in {doing(rank)}")
        if rank.now["state"] == "T":
            yield Verdict("stopped", [rank.number], f"{name} is stopped by a signal; kill -CONT {rank.pid}")
        if rank.now["state"] == "t":
            yield Verdict("stopped", [rank.number], f"{name} is held by a debugger")


def circle(job):
    """Ranks of which each waits for the next one, for a while."""

    def waits_long(rank):
        since = rank.now["wait_since"]
        return since and (rank.now["at"] - since) * 1e-9 > WAITS_IN_CIRCLE and not rank.moved and not rank.server

    living = {rank.pid: rank for rank in job.ranks if rank.lives}
    for start in job.ranks:
        numbers, rank = [], start
        while rank and waits_long(rank) and len(numbers) <= len(job.ranks):
            numbers.append(rank.number)
            rank = living.get(rank.now["waits_for"])
            if rank is start:
                who = "all ranks" if len(numbers) == len(living) else ranks_named(numbers)
                text = f"{who} wait for one another, rank {numbers[0]} for rank {numbers[1 % len(numbers)]} and so on"
                then = "they make different calls; end the job, and look at its order of collectives"
                yield Verdict("circle", numbers, f"{text}: {then}")
                return


def stuck(job):
    alone = sum(rank.lives for rank in job.ranks) == 1
    for rank in job.ranks:
        patience = SLOW_PHASE if rank.phase in SLOW_PHASES else STANDS_STILL
        works = rank.is_worker and not rank.now["wait_since"] and not rank.now["calls_others"]
        awaited = any(other.waits_for == rank.number for other in job.ranks)
        if works and not rank.moved and rank.seconds_since_progress > patience and (alone or awaited):
            text = f"rank {rank.number} has not moved for {human_seconds(rank.seconds_since_progress)}"
            text += f", in {doing(rank)}{'' if alone else ', and others wait for it'}"
            yield Verdict("stuck", [rank.number], f"{text}; gdb -p {rank.pid} shows where it is")


def not_at_the_meeting(job):
    missing = [rank.number for rank in job.ranks if not rank.is_known or (rank.lives and rank.phase == "starting")]
    meeting = [rank.number for rank in job.ranks if rank.lives and rank.phase == "meeting"]
    if len(missing) == len(job.ranks):
        yield Verdict("starting", missing, "no rank has used lockstep yet")
    elif missing and meeting:
        yield Verdict("meeting", missing, f"the others wait at the meeting for {ranks_named(missing)}")
    elif meeting:
        yield Verdict("meeting", meeting, f"at the meeting: {ranks_named(meeting)}")


# ---- Ranks that do it slowly


def slow(job):
    found = list(waits_for_data(job))
    late = found[0].ranks if found else []
    found += [*busy_server(job), *straggler(job, late)]
    return [*(found or lack_of_cores(job)), *slow_exchange(job)]


def workers_for(rank):
    """Returns the number that ends the waiting: w workers, which never rest and leave a share s of waiting, become
    w / (1 - s). Without workers, loading takes s of the step, and is to fit into the rest."""
    share, workers = min(rank.shares["data"], 0.9), max(0, rank.now["loader_workers"])
    return max(workers + 1, ceil((workers or share) / (1 - share)))


def waits_for_data(job):
    ranks = [rank for rank in workers_of(job) if rank.shares["data"] >= WORTH_SAYING]
    if not ranks:
        return
    most, numbers = percent(max(rank.shares["data"] for rank in ranks)), [rank.number for rank in ranks]
    text = f"{ranks_named(numbers)} wait for data: up to {most} of their time"
    if len(ranks) == 1:
        text = f"{ranks_named(numbers)} waits for data: {most} of its time"
        awaited = ranks[0].awaited
        if awaited - ranks[0].shares["wait"] >= WORTH_SAYING:  # else it waits for the others as they do for it
            text += f", and the others wait for it {percent(awaited)} of theirs"
    yield Verdict("data", numbers, f"{text}; --workers {max(map(workers_for, ranks))}")


def worker_that_holds_up_others(job):
    """Workers that wait for servers alike: it is the servers. One that waits much less than the others holds them
    up, if all make as many steps: with asynchronous servers nobody waits for it."""
    workers = sorted(workers_of(job), key=lambda worker: worker.shares["wait"])
    if len(workers) < 2 or workers[-1].shares["wait"] - workers[0].shares["wait"] <= SERVER_IS_BUSY:
        return None
    asynchronous = any(rank.server and rank.server["most_delay"] > 0 for rank in job.ranks)
    paces = [worker.steps_per_second for worker in workers]
    return None if asynchronous and min(paces) < SAME_PACE * max(paces) else workers[0]


def busy_server(job):
    servers = [rank for rank in job.ranks if rank.server]
    server = max(servers, key=lambda rank: rank.awaited, default=None)
    if not server or server.awaited < SERVER_IS_BUSY:
        return
    if worker := worker_that_holds_up_others(job):
        yield named_straggler(job, worker, max(each.shares["wait"] for each in workers_of(job)))
    else:
        text = f"rank {server.number} is a server for which the workers wait {percent(server.awaited)} of their time"
        yield Verdict("server", [server.number], f"{text}; --servers {len(servers) + 1}")


def straggler(job, late):
    rank = max(workers_of(job), key=lambda worker: worker.awaited, default=None)
    if not rank or rank.number in late or rank.awaited < WORTH_SAYING:
        return
    if rank.shares["wait"] < max(rank.awaited / 2, rank.awaited - MUCH_MORE):
        yield named_straggler(job, rank, rank.awaited)


def named_straggler(job, rank, awaited):
    text = f"rank {rank.number} is the straggler: the others wait for it {percent(awaited)} of their time"
    return Verdict("straggler", [rank.number], f"{text}; {reason(job, rank)}")


REASONS = {
    "compute": ("computes", "compare its cores and its part of the batch with the others'"),
    "other": ("validates or saves", "do that less often"),
    "exchange": ("exchanges", "its link may be slow"),
    "update": ("updates", "compare its cores with the others'"),
    "own_code": ("runs the program's own code", "look what it does there, such as loading or logging"),
}


def reason(job, rank):
    """Says what it does more than the others do."""
    if rank.without_core >= WORTH_SAYING:
        return f"it gets no core {percent(rank.without_core)} of its time: see what else runs on its cores"
    others = [other for other in workers_of(job) if other is not rank]

    def share(each, key):
        return each.own_code if key == "own_code" else each.shares[key]

    means = {key: sum(share(other, key) for other in others) / max(1, len(others)) for key in REASONS}
    surplus = {key: share(rank, key) - means[key] for key in REASONS}
    most = max(("compute", "other", "exchange", "update"), key=surplus.get)
    if most == "compute" and surplus["own_code"] > surplus["compute"] / 2:
        most = "own_code"
    does, then = REASONS[most]
    return f"it {does} {percent(share(rank, most))} of its time, the others {percent(means[most])}: {then}"


def lack_of_cores(job):
    ranks = [rank for rank in workers_of(job) if rank.without_core >= LACKS_CORES]
    if ranks:
        numbers, most = [rank.number for rank in ranks], percent(max(rank.without_core for rank in ranks))
        gets = f"gets no core {most} of its time" if len(ranks) == 1 else f"get no core up to {most} of their time"
        then = "fewer ranks or --threads, or see what else runs on these cores"
        yield Verdict("cores", numbers, f"{ranks_named(numbers)} {gets}: {then}")


def slow_exchange(job):
    most = max(rank.shares["exchange"] for rank in job.ranks)
    if job.now["machines"] > 1 and most >= SERVER_IS_BUSY:
        text = f"exchanging gradients between machines takes up to {percent(most)} of the time"
        yield Verdict("exchange", [], f"{text}; a larger --batch-size, --compression fp16, or --strategy averaging")


def well(job):
    workers = workers_of(job)
    if not workers:
        return Verdict("ended", [], "all ranks have ended")
    compute, wait, own_code = (
        sum(shares) / len(workers)
        for shares in zip(*((rank.shares["compute"], rank.shares["wait"], rank.own_code) for rank in workers))
    )
    text = f"no rank holds up the others; {percent(compute)} of the time is computing"
    if own_code >= WORTH_SAYING:
        text += f", {percent(own_code)} in the program's own code (loading, too, unless lockstep's Loader does it)"
    if wait >= WORTH_SAYING:
        text += f", {percent(wait)} waiting for one another in turn"
    return Verdict("fine", [], text)
