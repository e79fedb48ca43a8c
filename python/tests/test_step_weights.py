# SPDX-License-Identifier: Apache-2.0
"""What the mean gradient is a mean over: ranks, as in PyTorch's DistributedDataParallel, which trains beside it over Gloo;
or samples, or tokens, as in one process with the global batch."""

import unittest
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import lockstep
from ranks import RanksTestCase
from support import expect_error, run_ranks
from test_step import expect_equal, global_batch, loss_of, make_model, parts_of, wrapped

STEPS = 4
FEATURES, CLASSES, IGNORED = 3, 5, -100
LAYOUTS = ({}, {"mean_in_grad": True}, {"share_parameters": False})
TWO_MACHINES = [0, 1]


def numbers(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Recurrent(nn.Module):
    """An LSTM in its default layout, (length, batch, features), or of a packed sequence; a number for each sequence."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.lstm, self.head = nn.LSTM(FEATURES, 4).double(), nn.Linear(4, 1).double()

    def forward(self, x):
        return self.head(self.lstm(x)[1][0][0])


class Tagger(nn.Module):
    """Scores of the classes for each token of (batch, length, features)."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()

    def forward(self, x):
        return self.layers(x)


def labels_of(seed, valid, length):
    """Labels of sequences of this length, of which the first valid[i] tokens of sequence i have one."""
    labels = torch.randint(CLASSES, (len(valid), length), generator=torch.Generator().manual_seed(seed))
    return labels.masked_fill(torch.arange(length) >= torch.tensor(valid).unsqueeze(1), IGNORED)


def cross_entropy(scores, labels, reduction="mean"):
    return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction=reduction)


# Each: a model, and the loss of a step's batch on this rank of the group.


def sequence_first(model, step, rank, group):
    length = (3, 7, 4)[(step + rank) % 3]
    return (model(numbers(10 * step + rank, length, 2, FEATURES)) - 1).square().mean()


def packed(model, step, rank, group):
    lengths = ([5, 3], [4, 4, 1], [6])[(step + rank) % 3]
    x = numbers(10 * step + rank, max(lengths), len(lengths), FEATURES)
    return (model(pack_padded_sequence(x, lengths)) - 1).square().mean()


def masked(model, step, rank, group):
    valid = ([6, 6], [1, 2], [4, 1])[(step + rank) % 3]
    return cross_entropy(model(numbers(10 * step + rank, 2, 6, FEATURES)), labels_of(step, valid, 6))


def summed(model, step, rank, group):
    """Normalised over all ranks by the program, as transformers' Trainer does (average_tokens_across_devices)."""
    valid = ([6, 6, 5], [1], [4, 2])[(step + rank) % 3]
    tokens = torch.tensor(sum(valid))
    dist.all_reduce(tokens, group=group)
    loss = cross_entropy(model(numbers(10 * step + rank, len(valid), 6, FEATURES)), labels_of(step, valid, 6), "sum")
    return loss / tokens * dist.get_world_size(group)


def padded(model, step, rank, group):
    length = (3, 7, 4)[(step + rank) % 3]
    return cross_entropy(model(numbers(10 * step + rank, 2, length, FEATURES)), labels_of(step, [length, 2], length))


def uneven(model, step, rank, group):
    return (model(numbers(10 * step + rank, (4, 1, 0)[(step + rank) % 3], 2, FEATURES)) - 1).square().sum()


BATCHES = (
    (Recurrent, sequence_first), (Recurrent, packed), (Tagger, masked), (Tagger, summed), (Tagger, padded), (Tagger, uneven),
)  # fmt: skip


# ---- What the ranks do


def wrapped_by_torch(net, group):
    return nn.parallel.DistributedDataParallel(net, process_group=group)


def like_torch(group, layouts=LAYOUTS):
    """Two backward() in every other step, the first of them in no_sync()."""
    rank = dist.get_rank(group)

    def trained(net, wrap, optimizer, batch):
        model = wrap(net, optimizer)
        for step in range(STEPS):
            if step % 2:
                with model.no_sync():
                    batch(model, step + STEPS, rank, group).backward()
            batch(model, step, rank, group).backward()
            optimizer.step()
            optimizer.zero_grad()
        return net

    for make, batch in BATCHES:
        theirs = make()
        trained(theirs, lambda net, _: wrapped_by_torch(net, group), torch.optim.AdamW(theirs.parameters(), lr=0.01), batch)
        for wrapping in layouts:
            ours = make()
            wrap = lambda net, optimizer: lockstep.DistributedDataParallel(net, optimizer, process_group=group, **wrapping)
            trained(ours, wrap, lockstep.AdamW(ours.parameters(), lr=0.01), batch)
            expect_equal(ours, theirs, 1e-9)
        ours = make()
        trained(ours, wrap, torch.optim.AdamW(ours.parameters(), lr=0.01), batch)
        expect_equal(ours, theirs, 1e-9)


def joins_like_torch(group, layouts=LAYOUTS):
    """Rank r has r + 1 batches."""
    rank = dist.get_rank(group)

    def train(model, optimizer, **how):
        with model.join(**how):
            for step in range(rank + 1):
                masked(model, step, rank, group).backward()
                optimizer.step()
                optimizer.zero_grad()

    for how in ({}, {"divide_by_initial_world_size": True}, {"divide_by_initial_world_size": False}):
        theirs = Tagger()
        train(wrapped_by_torch(theirs, group), torch.optim.SGD(theirs.parameters(), lr=0.5), **how)
        for wrapping in layouts:
            ours = Tagger()
            optimizer = lockstep.SGD(ours.parameters(), lr=0.5)
            train(lockstep.DistributedDataParallel(ours, optimizer, process_group=group, **wrapping), optimizer, **how)
            expect_equal(ours, theirs)


def joins_and_clips_like_torch(group, layouts=LAYOUTS):
    """A rank that has left the loop clips on as in its last step, also after a validation. PyTorch's ranks do not validate:
    those that have left its loop would wait for a backward() that never comes."""
    rank = dist.get_rank(group)

    def train(model, optimizer, clip, validates=False):
        with model.join():
            for step in range(rank + 1):
                masked(model, step, rank, group).backward()
                clip(model, optimizer)
                optimizer.step()
                optimizer.zero_grad()
            if validates:
                with torch.no_grad():
                    masked(model, step, rank, group)

    in_torch = torch.nn.utils
    ways = (
        (in_torch.clip_grad_norm_, 0.05, lambda model, _: lockstep.clip_grad_norm_(model.parameters(), 0.05)),
        (in_torch.clip_grad_value_, 0.01, lambda model, _: lockstep.clip_grad_value_(model.parameters(), 0.01)),
        (in_torch.clip_grad_norm_, 0.05, lambda _, optimizer: optimizer.clip_grad_norm(0.05)),
    )
    for clip_of_torch, largest, clip in ways:
        theirs = Tagger()
        optimizer = torch.optim.SGD(theirs.parameters(), lr=0.5)
        train(wrapped_by_torch(theirs, group), optimizer, lambda model, _: clip_of_torch(model.parameters(), largest))
        for wrapping in layouts:
            ours = Tagger()
            optimizer = lockstep.SGD(ours.parameters(), lr=0.5)
            model = lockstep.DistributedDataParallel(ours, optimizer, process_group=group, **wrapping)
            train(model, optimizer, clip, validates=True)
            expect_equal(ours, theirs)


def joins_by_samples(group):
    """Those who have left have no samples, however ranks that count alike are divided."""
    rank = dist.get_rank(group)
    alone = make_model()
    plain = torch.optim.SGD(alone.parameters(), lr=0.5)
    for step in range(2):
        loss_of(alone, [tensor[3 * step :] for tensor in global_batch(step)]).backward()
        plain.step()
        plain.zero_grad()
    for wrapping in LAYOUTS:
        net = make_model()
        optimizer = lockstep.SGD(net.parameters(), lr=0.5)
        model = lockstep.DistributedDataParallel(net, optimizer, process_group=group, weights="samples", **wrapping)
        with model.join():
            for step in range(rank + 1):
                loss_of(model, [tensor[3 * rank : 3 * rank + 3] for tensor in global_batch(step)]).backward()
                optimizer.step()
                optimizer.zero_grad()
        expect_equal(net, alone)


TOKENS = (([6, 6, 6], [1]), ([5, 5], [0, 0]))  # with a label in each sequence, of each rank: of two backward()


def by_tokens(group, layouts=LAYOUTS):
    """The mean over all tokens of both backward(), also where a rank has none and its loss is NaN."""
    rank = dist.get_rank(group)
    alone = Tagger()
    plain = torch.optim.SGD(alone.parameters(), lr=0.5)
    nets = [Tagger() for _ in layouts]
    optimizers = [lockstep.SGD(net.parameters(), lr=0.5) for net in nets]
    models = [
        lockstep.DistributedDataParallel(net, optimizer, process_group=group, **wrapping)
        for net, optimizer, wrapping in zip(nets, optimizers, layouts)
    ]
    for step in range(STEPS):
        batches = [
            [(numbers(10 * step + i + j, len(valid), 6, FEATURES), labels_of(step, valid, 6)) for j, valid in enumerate(ranks)]
            for i, ranks in enumerate(TOKENS if step % 2 else reversed(TOKENS))
        ]
        every = [each for ranks in batches for each in ranks]
        total = sum((labels != IGNORED).sum() for _, labels in every)
        (sum(cross_entropy(alone(x), labels, "sum") for x, labels in every) / total).backward()
        plain.step()
        plain.zero_grad()
        for net, model, optimizer in zip(nets, models, optimizers):
            for i, ranks in enumerate(batches):
                x, labels = ranks[rank]
                valid_tokens = int((labels != IGNORED).sum())
                model.samples(valid_tokens)
                loss = cross_entropy(model(x), labels) / len(batches)
                assert loss.isnan() == (valid_tokens == 0)
                if i == 0:
                    with model.no_sync():
                        loss.backward()
                else:
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            expect_equal(net, alone)


def nan_and_synchronised_layers(group):
    """A loss that counts nothing is NaN: it spreads through no layer either."""
    rank = dist.get_rank(group)
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 3), lockstep.SyncBatchNorm(3, process_group=group), nn.Linear(3, 2)).double()
    optimizer = lockstep.SGD(net.parameters(), lr=0.5)
    model = lockstep.DistributedDataParallel(net, optimizer, process_group=group)
    model.samples(0 if rank else 5)
    loss = model(global_batch(rank)[0]).square().mean()
    (loss * float("nan") if rank else loss).backward()
    optimizer.step()
    assert all(parameter.isfinite().all() for parameter in net.parameters())


def said_by_some(group, wrapping, says, text):
    """says: the numbers that each rank gives before each of two backward() of a step; None: it gives none."""
    _, optimizer, model = wrapped(group, **wrapping)
    says = says[dist.get_rank(group)]

    def backward(step):
        loss = loss_of(model, parts_of(global_batch(step), group))
        if says[step] is not None:
            model.samples(says[step])
        loss.backward()

    def train():
        with model.no_sync():
            backward(0)
        backward(1)

    error = expect_error(lockstep.Error, text, train)
    assert "samples(n)" in str(error), error


SAID_BY_SOME = {
    "backward() on rank 0, and not before each backward() on rank 1": [(3, 3), (None, None)],
    "backward() on rank 1, and not before each backward() on rank 0": [(None, None), (0, 0)],
    "backward() on rank 0, 1, and not before each backward() on rank 1": [(3, 3), (3, None)],
    "backward() on rank 0, and not before each backward() on rank 0, 1": [(None, 3), (None, None)],
    "backward() on rank 0, 1, and not before each backward() on rank 0, 1": [(None, 3), (3, None)],
}


def said_changes_from_step_to_step(group):
    """All ranks say it in one step and not in the next; a rank that had nothing in the first is no exception."""
    for wrapping in LAYOUTS:
        net, optimizer, model = wrapped(group, **wrapping)
        for step in range(4):
            if step % 2 == 0:
                model.samples(3 if dist.get_rank(group) == 0 else 0)
            loss_of(model, parts_of(global_batch(step), group)).backward()
            assert model.samples_of_last_batch == (2 if step % 2 else 3)
            optimizer.step()
            optimizer.zero_grad()


def unknown_numbers(group):
    """weights="samples" and inputs that differ in dimension 0: an error, unless samples() gives the number."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = make_model()

        def forward(self, x, offsets):
            return self.net(x)

    def loss(model, weigh=lambda: None):
        x, y = parts_of(global_batch(0), group, [2, 4])
        weigh()
        return nn.functional.mse_loss(model(x, torch.zeros(7)), y)

    alone, net = make_model(), Two()
    optimizer = lockstep.SGD(net.parameters(), lr=0.1)
    model = lockstep.DistributedDataParallel(net, optimizer, process_group=group, weights="samples")
    loss(model, lambda: model.samples((2, 4)[dist.get_rank(group)])).backward()
    optimizer.step()
    loss_of(alone, global_batch(0)).backward()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    expect_equal(net.net, alone)
    optimizer.zero_grad()
    expect_error(lockstep.UsageError, "the number of samples of a batch is not known", loss(model).backward)


def warned(wrapping, warning):
    """Where sizes are alike or numbers are given nothing is said; then it is said once, on rank 0."""
    rank = dist.get_rank()
    uneven_sizes, even_sizes = [1, 5], [3, 3]

    def said(sizes, say=False, **weights):
        net = make_model()
        optimizer = lockstep.SGD(net.parameters(), lr=0.1)
        model = lockstep.DistributedDataParallel(net, optimizer, **weights, **wrapping)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(3):
                batch = parts_of(global_batch(step), None, sizes)
                if say:
                    model.samples(len(batch[0]))
                loss_of(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
        texts = [str(each.message) for each in caught]
        return [text for text in texts if "dimension 0" in text]

    assert not said(even_sizes)
    assert not said(uneven_sizes, say=True)
    assert not said(uneven_sizes, weights="samples")
    texts = said(uneven_sizes)
    assert len(texts) == (1 if rank == 0 else 0), texts
    for part in warning if texts else ():
        assert part in texts[0], (part, texts[0])
    assert not said(uneven_sizes)


WARNING = (
    "dimension 0 of the model's inputs is 1 on rank 0 and 5 on rank 1",
    "Each rank counts 1/2, as in PyTorch",
    "1/6 and 5/6",
    "weights='samples'",
    "model.samples(n)",
    "If it is a length",
)


class Weights(RanksTestCase):
    def test_ranks_count_alike_as_in_pytorch(self):
        self.on_ranks(2, like_torch)
        self.on_ranks(3, like_torch)

    def test_ranks_count_alike_on_two_machines(self):
        self.on_ranks(2, like_torch, [{}], machines=TWO_MACHINES)

    def test_ranks_that_join_clip_as_in_pytorch(self):
        self.on_ranks(3, joins_and_clips_like_torch)

    def test_ranks_join_as_in_pytorch(self):
        self.on_ranks(3, joins_like_torch)
        self.on_ranks(2, joins_like_torch, [{}], machines=TWO_MACHINES)

    def test_ranks_that_count_by_samples_join_without_any(self):
        self.on_ranks(2, joins_by_samples)

    def test_samples_gives_the_mean_over_tokens(self):
        self.on_ranks(2, by_tokens)
        self.on_ranks(2, by_tokens, [{}], machines=TWO_MACHINES)

    def test_a_nan_that_counts_nothing_spreads_through_no_layer(self):
        self.on_ranks(2, nan_and_synchronised_layers)

    def test_samples_on_some_ranks_only_is_an_error_on_all(self):
        for text, says in SAID_BY_SOME.items():
            for wrapping in LAYOUTS:
                with self.subTest(text, **wrapping):
                    self.on_ranks(2, said_by_some, wrapping, says, text)

    def test_samples_may_be_given_in_one_step_and_not_in_the_next(self):
        self.on_ranks(2, said_changes_from_step_to_step)

    def test_a_number_that_weights_asks_for_has_to_be_known(self):
        self.on_ranks(2, unknown_numbers)

    def test_sizes_that_differ_are_said_once(self):
        for wrapping in ({}, {"mean_in_grad": True}):
            run_ranks(2, warned, wrapping, WARNING)
        run_ranks(2, warned, {}, WARNING, machines=TWO_MACHINES)


if __name__ == "__main__":
    unittest.main()
