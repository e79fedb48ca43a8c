# SPDX-License-Identifier: Apache-2.0
"""The strategies and the experiments that `lockstep compare` knows, as tables, and the runs that follow from them. A
new experiment is a new row."""

from dataclasses import dataclass, field
from itertools import product

from common import UsageError


def all_reduced(workers, servers):
    """Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms" (2009): the least there is."""
    return 2 * (workers - 1) / workers


def served(workers, servers):
    """Li et al., "Scaling distributed machine learning with the parameter server" (OSDI 2014): each worker sends its
    gradient and receives the weights; a server has its share of the keys. With more servers than workers a
    worker's own link is the busiest."""
    return max(1, workers / servers)


@dataclass
class Contender:
    """One strategy under the name that it has on the command line and in tables."""

    strategy: str  # of lockstep train
    options: dict = field(default_factory=dict)
    most_devices: int = 1000
    servers: int = 0  # ranks beside the devices; only over hosts
    busiest: object = None  # (workers, servers) -> bytes of the busiest link in a step and direction, in gradients
    formula: str = ""


@dataclass
class Experiment:
    description: str
    cases: list  # (contender, {option: values}); every combination is trained
    across: str = "devices"  # what its plots are drawn against: also "contender", or the key of an option
    all_counts: bool = False  # of devices: 1, 2, … up to all cores
    devices: tuple = ()  # in place of all cores
    model: str = "lenet"
    data: str = "auto"
    batch_size: int = 256
    batch_per_device: int = 0
    budget: dict = field(default_factory=lambda: {"epochs": 2})
    over_hosts: bool = False  # a host for each worker and server
    ranks_per_host: int = 1
    train: tuple = ()  # options of lockstep train, unless others are given after --


def servers(count):
    return Contender(
        "kvstore",
        {"kvstore": "dist_sync", "servers": str(count), "split-above": "10000"},
        servers=count,
        busiest=served,
        formula=f"max(1, N/{count}) * K" if count > 1 else "N * K",
    )


def averaged(**options):
    return Contender("averaging", {"average-every": "32"} | {name.replace("_", "-"): options[name] for name in options})


DILOCO = {"outer_lr": "0.7", "outer_momentum": "0.9"}
KVSTORES = "local local_update_cpu local_allreduce_cpu local_allreduce_device dist_sync dist_async dist_bounded".split()
CONTENDERS = {
    "single": Contender("single", most_devices=1),
    "ddp": Contender("ddp", busiest=all_reduced, formula="2(N-1)/N * K"),
    "ddp-ring": Contender("ddp", {"algorithm": "ring"}, busiest=all_reduced, formula="2(N-1)/N * K"),
    **{f"ddp-{kind}": Contender("ddp", {"compression": kind}) for kind in ("bf16", "powersgd", "topk")},
    "towers": Contender("towers"),
    "data_parallel": Contender("data_parallel"),
    "averaging": Contender("averaging"),
    "local-sgd": averaged(),
    "diloco": averaged(**DILOCO),
    "streaming-diloco": averaged(**DILOCO, average_parts="4", average_delay="2", average_in="int8"),
    "pipeline": Contender("pipeline"),  # as many stages as devices
    "pipeline-2": Contender("pipeline", {"stages": "2"}),  # and copies of it
    **{f"servers-{count}": servers(count) for count in (1, 2, 4)},
    **{f"kvstore-{kind}": Contender("kvstore", {"kvstore": kind}) for kind in KVSTORES},
}


def as_they_are(names):
    return [(name, {}) for name in names.split()]


STRATEGIES = as_they_are(
    "single ddp towers data_parallel kvstore-local kvstore-dist_sync kvstore-dist_async averaging pipeline-2"
)
EXPERIMENTS = {
    "strategies": Experiment(
        "all strategies on one device and on all cores (what is compared without EXPERIMENT)", STRATEGIES
    ),
    "scaling": Experiment("every strategy on 1, 2, 3 ... devices", STRATEGIES, all_counts=True),
    "server-vs-ring": Experiment(
        "parameter servers against rings, over hosts with slow links; as root: in network namespaces",
        as_they_are("ddp ddp-ring servers-1 servers-2 servers-4"),
        devices=range(1, 9),
        model="mlp",
        data="synthetic",
        batch_per_device=4,
        budget={"steps": 11},
        over_hosts=True,
    ),
    "slow-links": Experiment(
        "what to send over a slow link between two hosts of two ranks; as root: in network namespaces",
        as_they_are("ddp ddp-bf16 ddp-powersgd ddp-topk local-sgd diloco streaming-diloco"),
        across="contender",
        devices=(4,),
        model="gpt-char",
        data="synthetic",
        batch_size=8,
        budget={"steps": 320},
        over_hosts=True,
        ranks_per_host=2,
        train=("--optimizer", "adamw", "--lr", "0.001"),
    ),
    "batch-and-rate": Experiment(
        "how the learning rate grows with the batch",
        [("ddp", {"batch-size": ["64", "256", "1024", "4096"], "lr-scaling": ["none", "sqrt", "linear"]})],
        across="batch_size",
    ),
    "average-every": Experiment(
        "averaging after every h batches",
        [("single", {}), ("averaging", {"average-every": ["1", "2", "4", "8", "16", "32", "64"]})],
        across="average_every",
    ),
    "staleness": Experiment(
        "servers that let gradients be late, by at most s updates",
        [
            *as_they_are("single kvstore-dist_sync"),
            ("kvstore-dist_bounded", {"staleness": ["0", "1", "2", "4", "8"]}),
            ("kvstore-dist_async", {}),
        ],
        across="staleness",
    ),
    "bubble": Experiment(
        "pipelines: stages x micro-batches, ResNet-50 in up to 10",
        [("single", {}), ("pipeline", {"micro-batches": ["1", "2", "4", "8", "16"]})],
        across="micro_batches",
        devices=(2, 5, 10),
        model="resnet50",
        data="synthetic",
        batch_size=16,
        budget={"steps": 5},
    ),
    "kvstore-kinds": Experiment(
        "every kind of kvstore, with small weights (Inception) and large ones (AlexNet)",
        [(name, {"model": ["inception", "alexnet"]}) for name in ("single", *(f"kvstore-{kind}" for kind in KVSTORES))],
        across="contender",
        data="synthetic",
        batch_size=8,
        budget={"steps": 8},
    ),
}


def require_named(table, name, what):
    if name not in table:
        raise UsageError(f"lockstep compare knows no {what} '{name}'", next=f"give one of {', '.join(table)}")


# ---- The runs of a comparison, whose settings are those of comparison.json


@dataclass
class Run:
    case: str  # a name of CONTENDERS
    varied: dict  # what the experiment varies, or --vary
    devices: int
    seed: int
    number: int = 0  # in the order of the tables

    @property
    def contender(self):
        return CONTENDERS[self.case]

    @property
    def group(self):
        """The name without the seed."""
        varied = "".join(f"-{option.replace('-', '_')}={value}" for option, value in sorted(self.varied.items()))
        return f"{self.case}-{self.devices}{varied}".replace("/", "_")

    @property
    def name(self):
        """Names its folder, too: averaging-2-average_every=8-seed1"""
        return f"{self.group}-seed{self.seed}"

    def can_be(self):
        stages = int((self.contender.options | self.varied).get("stages", 1))
        cut = self.contender.strategy == "pipeline" and (
            self.devices < 2 or (stages > 0 and self.devices % stages != 0)
        )
        return not cut and self.devices <= self.contender.most_devices

    def arguments(self, settings):
        """Returns those of lockstep train, without the files that it writes. A run that does not end by epochs has
        more of them than it can make."""
        batch = settings["batch_per_device"] * self.devices or settings["batch_size"]
        batch = max(1, int(self.varied.get("batch-size", batch)))
        options = {name: settings[name] for name in ("model", "data", "threads")}
        options |= {"batch-size": batch, "strategy": self.contender.strategy, "seed": self.seed}
        if self.contender.most_devices > 1 and settings["links"] == "none":
            options["ranks"] = self.devices
        options |= self.contender.options | self.varied
        steps = ["--max-steps", settings["steps"]] if settings["steps"] else []
        budget = ["--epochs", settings["epochs"] or 1000000, *steps]
        words = [word for option, value in sorted(options.items()) for word in (f"--{option}", value)]
        return [*map(str, words + budget), *settings["train"], "--quiet"]


def planned(settings):
    """Every run, in the order of the tables. A combination that can't be is left out: `single` on two devices, more
    stages than devices."""
    experiment = dict(EXPERIMENTS[settings["experiment"]].cases)
    cases = [(name, dict(experiment.get(name, {}))) for name in settings["strategies"] or experiment]
    for option, values in sorted(settings["vary"].items()):
        varying = [varied for _, varied in cases if option in varied]
        for varied in varying or [varied for _, varied in cases]:  # what varies nowhere is varied everywhere
            varied[option] = values
    runs = [
        Run(name, dict(zip(varied, values)), devices, seed)
        for name, varied in cases
        for values in product(*varied.values())
        for devices in ([1] if CONTENDERS[name].most_devices == 1 else settings["devices"])
        for seed in settings["seeds"]
    ]
    runs = [run for run in runs if run.can_be()]
    names = [run.name for run in runs]
    for number, run in enumerate(runs):
        run.number = number
        if names.count(run.name) > 1:
            raise UsageError(
                f"run {run.name} is asked for twice",
                likely="a seed, a strategy, a number of devices or a value of --vary is given twice",
                next="give it once: repeats are other --seeds",
            )
    if not runs:
        raise UsageError(
            "there is nothing to run",
            likely="the strategies can't be trained on these numbers of devices: single takes 1, a pipeline at least 2",
            next="give other --strategies or --devices",
        )
    return runs
