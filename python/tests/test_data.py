# SPDX-License-Identifier: Apache-2.0
"""Readers, DataLoader and Sampler on small files made here:  python3 -m unittest discover -s python/tests"""

import base64
import gzip
import io
import os
import signal
import struct
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import unittest
import warnings
import zlib
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

import lockstep
from lockstep import data
from support import run_ranks


def expect(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def expect_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


# 16 x 16 pixels, grey: column x has the value 12 x. Base 85.
JPEG = (
    "|JeWF01!$>Nk#wx0RR9200961|JwjV00RO70|EjA0|NsD0|NvF2n7WM1O*BQ2L=cX3JeSj3JVJj4iXRz4iOFu3lJ6%5fc;@6%`B*7Z?^47!ni}6#u{g"
    "3kU!Z01yEI5di<h02KfM0RR910000000000000092>-+Y7Z3mg0RR91000000000000007M1lX>00;pA002J#hLTg@fF!5D{{Tr(f&h}A5C7Q"
)


def random_bytes(*shape, seed=1):
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def all_of(dataset):
    """Its samples in order, out of a DataLoader."""
    ((samples, targets),) = data.DataLoader(dataset, batch_size=len(dataset))
    return samples, targets


def numbers(size):
    """A dataset whose sample i is i."""
    return data.TensorDataset(torch.arange(size).reshape(-1, 1), torch.arange(size))


def targets_of(batches):
    return [target.tolist() for _, target in batches]


def flat(lists):
    return [one for some in lists for one in some]


# ---- Files


def write_idx(path, array, compress=False):
    header = struct.pack(">BBBB", 0, 0, 8, array.dim()) + struct.pack(f">{array.dim()}I", *array.shape)
    with gzip.open(path, "wb") if compress else open(path, "wb") as file:
        file.write(header + array.numpy().tobytes())


def write_mnist(folder, images, labels, part="train", compress=False):
    folder.mkdir(parents=True, exist_ok=True)
    end = ".gz" if compress else ""
    write_idx(folder / f"{part}-images-idx3-ubyte{end}", images, compress)
    write_idx(folder / f"{part}-labels-idx1-ubyte{end}", labels, compress)


def write_png(path, image):
    """image: (3, H, W) bytes."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    _, height, width = image.shape
    rows = b"".join(b"\0" + row.numpy().tobytes() for row in image.permute(1, 2, 0).contiguous())
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))


def write_shard(path, files):
    """A tar of these bytes by their names."""
    with tarfile.open(path, "w") as shard:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            shard.addfile(member, io.BytesIO(content))


def write_images(folder, count=6, size=8):
    """PNG files of two classes, whose images are returned in the dataset's order."""
    images = random_bytes(count, 3, size, size)
    for i, image in enumerate(images):
        write_png(folder / ("cat" if i < count // 2 else "dog") / f"{i}.png", image)
    return images


def scaled(images, mean=0.0, deviation=1.0):
    mean, deviation = (torch.tensor(values).reshape(-1, 1, 1) for values in (mean, deviation))
    return (images.float() / 255 - mean) / deviation


PHOTOGRAPHS = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])


class WithFolder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)


class Readers(WithFolder):
    def test_mnist_and_fashion_mnist_give_the_normalised_images(self):
        images, labels = random_bytes(5, 28, 28), torch.tensor([3, 0, 9, 9, 1], dtype=torch.uint8)
        write_mnist(self.folder, images, labels)
        write_mnist(self.folder, images.flip(0), labels.flip(0), part="t10k", compress=True)
        for reader, mean, deviation in ((data.FashionMNIST, 0.2860, 0.3530), (data.MNIST, 0.1307, 0.3081)):
            with self.subTest(reader=reader.__name__):
                expected = scaled(images.unsqueeze(1), mean, deviation)
                samples, targets = all_of(reader(self.folder))
                expect_close(samples, expected)
                expect(targets, labels.long())
                samples, targets = all_of(reader(self.folder, train=False))
                expect_close(samples, expected.flip(0))
                expect(targets, labels.flip(0).long())

    def test_fashion_mnist_is_found_where_torchvision_leaves_it(self):
        write_mnist(self.folder / "FashionMNIST/raw", random_bytes(2, 28, 28), torch.zeros(2, dtype=torch.uint8))
        self.assertEqual(len(data.FashionMNIST(self.folder)), 2)

    def test_cifar_gives_the_images_of_the_binary_version(self):
        images = random_bytes(20, 3, 32, 32)
        labels = torch.arange(20) % 10
        records = [bytes([label]) + image.numpy().tobytes() for label, image in zip(labels.tolist(), images)]
        (self.folder / "cifar-10-batches-bin").mkdir()
        for part in range(5):
            (self.folder / f"cifar-10-batches-bin/data_batch_{part + 1}.bin").write_bytes(b"".join(records[4 * part : 4 * part + 4]))
        samples, targets = all_of(data.CIFAR10(self.folder, transform="normalise:0:1"))
        expect_close(samples, scaled(images))
        expect(targets, labels)
        (self.folder / "test.bin").write_bytes(b"".join(b"\7" + record for record in records))
        samples, targets = all_of(data.CIFAR100(self.folder, train=False, transform="normalise:0:1"))
        expect_close(samples, scaled(images))
        expect(targets, labels)

    def test_image_folder_gives_the_images_and_numbers_classes_by_name(self):
        images = write_images(self.folder)
        dataset = data.ImageFolder(self.folder)
        self.assertEqual(dataset.classes, ["cat", "dog"])
        self.assertEqual(dataset.class_to_idx, {"cat": 0, "dog": 1})
        samples, targets = all_of(dataset)
        expect_close(samples, scaled(images, *PHOTOGRAPHS))
        expect(targets, torch.tensor([0, 0, 0, 1, 1, 1]))
        expect(all_of(data.ImageFolder(self.folder, classes=["dog", "cat"]))[1], torch.tensor([0, 0, 0, 1, 1, 1]))

    def test_jpeg_files_give_their_pixels_in_a_folder_or_a_shard(self):
        (self.folder / "in/a").mkdir(parents=True)
        (self.folder / "in/a/0.jpg").write_bytes(base64.b85decode(JPEG))
        write_shard(self.folder / "0.tar", {"0.cls": b"0", "0.jpg": base64.b85decode(JPEG)})
        samples, _ = all_of(data.ImageFolder(self.folder / "in", transform="normalise:0:1"))
        self.assertEqual(samples.shape, (1, 3, 16, 16))
        expect(samples, all_of(data.WebDataset(self.folder / "0.tar", transform="normalise:0:1"))[0])
        self.assertLess((samples - torch.arange(16) * 12 / 255).abs().max(), 0.02)

    def test_shards_give_arrays(self):
        rows = torch.randn(7, 2, 3)
        files = {}
        for i, row in enumerate(rows):
            np.save(file := io.BytesIO(), row.numpy())
            files.update({f"{i}.cls": str(6 - i).encode(), f"{i}.npy": file.getvalue()})
        write_shard(self.folder / "rows.tar", files)
        samples, targets = all_of(data.WebDataset(self.folder / "rows.tar"))
        expect(targets, torch.arange(6, -1, -1))
        expect(samples, rows)

    def test_shards_of_tarfile_give_its_images_in_each_format(self):
        images = write_images(self.folder / "in")
        files = [self.folder / f"in/{'cat' if i < 3 else 'dog'}/{i}.png" for i in range(6)]
        for format in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
            for shard in range(2):
                with tarfile.open(self.folder / f"train-{shard:03}.tar", "w", format=format) as tar:
                    for i in range(3 * shard, 3 * shard + 3):
                        key = f"{'d' * 90}/{'n' * (90 if format == tarfile.USTAR_FORMAT else 140)}{i}"
                        tar.add(files[i], f"{key}.png")
                        member = tarfile.TarInfo(f"{key}.cls")
                        member.size = 1
                        tar.addfile(member, io.BytesIO(str(shard).encode()))
            with self.subTest(format=format):
                samples, targets = all_of(data.WebDataset(self.folder / "train-{000..001}.tar"))
                expect_close(samples, scaled(images, *PHOTOGRAPHS))
                expect(targets, torch.tensor([0, 0, 0, 1, 1, 1]))
        with tarfile.open(self.folder / "train-001.tar", "w:gz") as tar:
            tar.add(files[0], "0.png")
        self.assertRaisesRegex(lockstep.DataError, "gunzip", data.WebDataset, self.folder / "train-{000..001}.tar")

    def test_arrays_give_rows_or_images(self):
        rows, classes = np.random.default_rng(1).normal(size=(5, 3)), np.arange(5)
        images = random_bytes(5, 2, 4, 6)
        samples, targets = all_of(data.TensorDataset(rows, classes))
        expect(samples, torch.from_numpy(rows).float())
        expect(targets, torch.arange(5))
        expect(all_of(data.TensorDataset(rows, rows[:, 0]))[1], torch.from_numpy(rows[:, 0]).float())
        one_hot = data.TensorDataset(images, classes, transform="one-hot,resize:2", classes=7)
        samples, targets = all_of(one_hot)
        self.assertEqual((samples.shape, targets.shape), ((5, 2, 2, 2), (5, 7)))

    def test_tokens_give_blocks_and_the_same_shifted_by_one(self):
        (self.folder / "t").write_bytes(bytes(range(21)))
        samples, targets = all_of(data.TokenDataset(self.folder / "t", block=5))
        expect(samples, torch.arange(20).reshape(4, 5))
        expect(targets, torch.arange(1, 21).reshape(4, 5))
        (self.folder / "t16").write_bytes(np.arange(1000, 1011, dtype="<u2").tobytes())
        expect(all_of(data.TokenDataset(self.folder / "t16", block=10, bits=16))[0], torch.arange(1000, 1010).reshape(1, 10))

    def test_open_dataset_takes_the_names_of_the_command_line(self):
        train, validation = data.open_dataset("synthetic:20x1x4x4?val=0.25", transform="crop:1")
        self.assertEqual((len(train), len(validation)), (15, 5))
        (self.folder / "t").write_bytes(bytes(100))
        self.assertIsNone(data.open_dataset("text?block=10", self.folder / "t")[1])

    def test_samples_and_ranges(self):
        dataset = numbers(10)
        expect(dataset[3], (torch.tensor([3]), torch.tensor(3)))
        expect(dataset[-1][1], torch.tensor(9))
        expect(all_of(dataset[2:5])[1], torch.tensor([2, 3, 4]))
        self.assertEqual(len(list(dataset)), 10)
        self.assertRaisesRegex(lockstep.UsageError, "step 2", lambda: dataset[::2])

    def test_every_public_name_is_documented(self):
        for name in data.__all__:
            self.assertTrue(getattr(data, name).__doc__, name)


class BadInput(WithFolder):
    def test_a_damaged_file_is_an_error_with_its_parts(self):
        write_mnist(self.folder, random_bytes(3, 28, 28), torch.zeros(3, dtype=torch.uint8))
        images = self.folder / "train-images-idx3-ubyte"
        images.write_bytes(images.read_bytes()[:1000])
        with self.assertRaises(lockstep.DataError) as caught:
            data.FashionMNIST(self.folder)
        self.assertIsInstance(caught.exception, lockstep.Error)
        for part in ("train-images-idx3-ubyte: truncated", "here: ", "likely: ", "next: "):
            self.assertIn(part, str(caught.exception))
        self.assertRaises(lockstep.DataError, data.CIFAR10, self.folder)

    def test_arguments_that_make_no_sense_are_usage_errors(self):
        dataset = numbers(10)
        for name, call in {
            "batch_size=0": lambda: data.DataLoader(dataset, batch_size=0),
            "both batch_size and global_batch_size": lambda: data.DataLoader(dataset, 2, global_batch_size=4),
            "workers=-1": lambda: data.DataLoader(dataset, num_workers=-1),
            "prefetch=0": lambda: data.DataLoader(dataset, prefetch=0),
            "timeout=": lambda: data.DataLoader(dataset, timeout=float("inf")),
            "3 weights for 10 samples": lambda: data.DataLoader(dataset, weights=[1, 2, 3]),
            "weight of sample 0": lambda: iter(data.DataLoader(dataset, weights=[-1] * 10)),
            "rank=3 with world_size=3": lambda: data.DataLoader(dataset, rank=3, world_size=3),
            "rank=3 with world_size=None": lambda: data.Sampler(dataset, rank=3),
            "smaller than the number of ranks": lambda: iter(data.DataLoader(dataset, global_batch_size=2, rank=0, world_size=3)),
            "lockstep.Sampler": lambda: data.DataLoader([1, 2, 3]),
            "no such transform": lambda: data.TensorDataset(random_bytes(3, 4, 4), [0, 1, 2], transform="blur"),
            "transform is for images": lambda: data.TensorDataset([1.0], [1], transform="flip"),
            "torchvision": lambda: data.TensorDataset(random_bytes(3, 4, 4), [0, 1, 2], transform=len),
            "continue at sample 11": lambda: data.Sampler(dataset).set_epoch(0, 11),
        }.items():
            with self.subTest(name), self.assertRaisesRegex(lockstep.UsageError, name):
                call()

    def test_a_bad_sample_is_raised_in_place_of_its_batch_or_skipped(self):
        write_images(self.folder, count=6)
        (self.folder / "dog/4.png").write_bytes(b"\x89PNG\r\n\x1a\n and no more")
        for workers in (0, 2):
            with self.subTest(workers=workers):
                batches = iter(data.DataLoader(data.ImageFolder(self.folder), batch_size=2, num_workers=workers))
                self.assertEqual([next(batches)[1].tolist() for _ in range(2)], [[0, 0], [0, 1]])
                with self.assertRaisesRegex(lockstep.DataError, "(?s)sample 4.*dog/4.png"):
                    next(batches)
                self.assertEqual(list(batches), [])
                loader = data.DataLoader(data.ImageFolder(self.folder), batch_size=2, num_workers=workers, skip_bad=1)
                self.assertEqual(targets_of(loader), [[0, 0], [0, 1], [1]])
                self.assertEqual(loader.statistics()["skipped"], 1)


# ---- Loader


def loader_of(size, rank=0, ranks=1, **options):
    return data.DataLoader(numbers(size), rank=rank, world_size=ranks, **options)


def global_batches(size, ranks, **options):
    """The batches of all ranks together."""
    parts = [targets_of(loader_of(size, rank, ranks, **options)) for rank in range(ranks)]
    return [flat(batch) for batch in zip(*parts, strict=True)]


def check_ranks_of_the_job():
    loader = data.DataLoader(numbers(50), batch_size=5, shuffle=True)
    mine = flat(targets_of(loader))
    sampled = list(data.Sampler(50))
    for own in (mine, sampled):
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, own)
        assert sorted(flat(gathered)) == list(range(50)), gathered


class Ranks(unittest.TestCase):
    def test_all_ranks_together_see_every_sample_once(self):
        for ranks in (1, 2, 3, 4, 7):
            for size, batch_size in ((53, 3), (7, 1), (5, 2)):
                with self.subTest(ranks=ranks, size=size):
                    batches = global_batches(size, ranks, batch_size=batch_size, shuffle=True, seed=3)
                    self.assertEqual(sorted(flat(batches)), list(range(size)))
                    self.assertTrue(all(len(batch) == batch_size * ranks for batch in batches[:-1]))

    def test_the_global_batches_are_the_same_for_any_number_of_ranks(self):
        one = global_batches(53, 1, global_batch_size=12, shuffle=True)
        for ranks in (2, 3, 4, 7):
            self.assertEqual(global_batches(53, ranks, global_batch_size=12, shuffle=True), one)

    def test_ranks_are_those_of_the_process_group(self):
        run_ranks(2, check_ranks_of_the_job, backend="gloo")

    def test_ranks_are_those_of_the_launcher(self):
        launcher = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
        with mock.patch.dict(os.environ, {**launcher, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}):
            self.assertEqual(targets_of(data.DataLoader(numbers(6), batch_size=2)), [[2, 3], [5]])
        with mock.patch.dict(os.environ, {"RANK": "1"}), self.assertRaisesRegex(lockstep.Error, "WORLD_SIZE"):
            len(data.DataLoader(numbers(6)))

    def test_a_spawned_process_without_a_process_group_is_warned(self):
        with mock.patch("multiprocessing.parent_process", lambda: self):
            self.assertWarnsRegex(UserWarning, "loads all samples", len, data.DataLoader(numbers(6)))

    def test_ranks_that_change_after_the_first_use_are_an_error(self):
        loader = data.DataLoader(numbers(6))
        self.assertEqual(len(loader), 6)
        with mock.patch.object(data, "_rank_and_size", lambda *_: (1, 2)):
            with self.assertRaisesRegex(lockstep.UsageError, "was rank 0 of 1 and is now rank 1 of 2"):
                iter(loader)

    def test_without_the_last_batch_or_with_empty_parts_of_it(self):
        self.assertEqual(global_batches(10, 2, batch_size=2, drop_last=True), [[0, 1, 2, 3], [4, 5, 6, 7]])
        self.assertEqual(len(loader_of(10, 0, 2, batch_size=2)), 3)
        self.assertEqual(len(loader_of(10, 0, 2, batch_size=2, drop_last=True)), 2)
        batches = list(loader_of(9, 0, 2, batch_size=2))
        self.assertEqual((len(batches), batches[-1][0].shape), (3, (0, 1)))


class Epochs(unittest.TestCase):
    def test_each_epoch_has_its_own_order_which_set_epoch_repeats(self):
        loader = loader_of(40, batch_size=40, shuffle=True)
        first, second = targets_of(loader), targets_of(loader)
        self.assertNotEqual(first, second)
        self.assertEqual(sorted(first[0]), list(range(40)))
        self.assertEqual(loader.epoch, 2)
        loader.set_epoch(1)
        self.assertEqual(targets_of(loader), second)
        self.assertNotEqual(targets_of(loader_of(40, batch_size=40, shuffle=True, seed=1)), first)

    def test_an_epoch_that_was_left_early_begins_again(self):
        loader = loader_of(40, batch_size=10, shuffle=True)
        first = next(iter(loader))[1].tolist()
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a look at one batch does not warn
            batches = iter(loader)
        self.assertEqual(next(batches)[1].tolist(), first)
        next(batches)
        with self.assertWarnsRegex(UserWarning, "left after 20 of 40 samples"):
            self.assertEqual(targets_of(loader)[0], first)
        next(iter(loader))
        loader.set_epoch(1)
        self.assertEqual(loader.state_dict()["samples"], 0)

    def test_a_second_loop_ends_the_first(self):
        loader = loader_of(40, batch_size=10)
        batches = iter(loader)
        next(batches)
        self.assertEqual(len(list(loader)), 4)
        self.assertRaisesRegex(lockstep.UsageError, "another epoch of this DataLoader", next, batches)

    def test_weights_draw_with_replacement(self):
        drawn = flat(targets_of(loader_of(40, batch_size=7, weights=[0] * 38 + [1, 3])))
        self.assertEqual((len(drawn), set(drawn)), (40, {38, 39}))

    def test_batches_that_are_kept_do_not_change(self):
        loader = loader_of(1000, batch_size=10, prefetch=1)
        kept = list(loader)
        list(loader)
        self.assertEqual(flat(targets_of(kept)), list(range(1000)))
        expect(torch.cat([samples for samples, _ in kept])[:, 0], torch.arange(1000))

    def test_leaving_an_epoch_ends_its_threads(self):
        before = len(os.listdir("/proc/self/task"))
        batches = iter(loader_of(4000, num_workers=3))
        next(batches)
        self.assertEqual(len(os.listdir("/proc/self/task")), before + 3)
        batches.close()
        deadline = time.monotonic() + 60  # a joined thread is in /proc for a moment
        while len(os.listdir("/proc/self/task")) > before and time.monotonic() < deadline:
            time.sleep(0.01)
        self.assertEqual(len(os.listdir("/proc/self/task")), before)


class Resuming(unittest.TestCase):
    def test_gives_exactly_the_rest_with_other_ranks_batches_and_workers(self):
        whole = flat(global_batches(103, 1, batch_size=1, shuffle=True, seed=7))
        for stop in (0, 1, 4, 6):
            loaders = [loader_of(103, rank, 2, batch_size=8, shuffle=True, seed=7) for rank in range(2)]
            batches = [iter(loader) for loader in loaders]
            seen = flat([next(one)[1].tolist() for _ in range(stop) for one in batches])
            states = [loader.state_dict() for loader in loaders]
            self.assertEqual(states[0], states[1])
            rest = []
            for rank in range(3):
                loader = loader_of(103, rank, 3, batch_size=5, shuffle=True, seed=7, num_workers=2 * rank)
                loader.load_state_dict(states[0])
                loader.set_epoch(states[0]["epoch"])  # as a training loop does; the position stays
                rest.append(targets_of(loader))
                self.assertEqual(loader.epoch, 1)
            self.assertEqual(seen + flat([flat(parts) for parts in zip(*rest, strict=True)]), whole)

    def test_after_the_last_batch_nothing_is_left_of_the_epoch(self):
        loader = loader_of(20, batch_size=10, shuffle=True)
        for _ in loader:
            state = loader.state_dict()
        second = targets_of(loader)
        loader = loader_of(20, batch_size=10, shuffle=True)
        loader.load_state_dict(state)
        self.assertEqual(targets_of(loader), [])
        self.assertEqual(targets_of(loader), second)

    def test_a_state_of_something_else_is_refused(self):
        state = loader_of(20, shuffle=True).state_dict()
        for other in (loader_of(21, shuffle=True), loader_of(20), loader_of(20, shuffle=True, seed=1)):
            with self.assertRaisesRegex(lockstep.UsageError, "the state was saved with"):
                other.load_state_dict(state)
        mine = loader_of(20, shuffle=True)
        for wrong in ({}, {**state, "samples": 21}, {**state, "epoch": -1}):
            self.assertRaises(lockstep.UsageError, mine.load_state_dict, wrong)
        self.assertEqual(mine.state_dict(), state)

    def test_augmentation_is_the_same_after_a_resume(self):
        dataset = data.TensorDataset(random_bytes(30, 3, 8, 8), torch.arange(30), transform="crop:2,flip,jitter:0.3,mixup:0.4")
        whole = list(data.DataLoader(dataset, batch_size=10, shuffle=True))
        loader = data.DataLoader(dataset, batch_size=10, shuffle=True, num_workers=3)
        loader.load_state_dict({**loader.state_dict(), "samples": 10})
        expect(list(loader), whole[1:])


# ---- Processes, threads, signals


def threads():
    return len(os.listdir("/proc/self/task"))


class Processes(WithFolder):
    def test_ctrl_c_ends_a_wait_while_a_worker_loads(self):
        """One batch takes seconds. Another thread of Python sends the signal, so it ran during the wait."""
        write_png(self.folder / "a/0.png", random_bytes(3, 1500, 1500))
        for i in range(1, 60):
            os.link(self.folder / "a/0.png", self.folder / f"a/{i}.png")
        loader = data.DataLoader(data.ImageFolder(self.folder, transform="resize:8"), batch_size=60)
        before = threads()

        def interrupt():
            while threads() < before + 2:  # this one, and the worker
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)

        sender = threading.Thread(target=interrupt)
        sender.start()
        with self.assertRaises(KeyboardInterrupt):
            next(iter(loader))
            sender.join()
        sender.join()
        self.assertEqual(loader.statistics()["batches"], 0, "the batch was waited for")
        deadline = time.monotonic() + 120
        while threads() > before and time.monotonic() < deadline:
            time.sleep(0.05)

    def test_a_forked_child_starts_over_and_does_not_hang(self):
        loader = loader_of(400, batch_size=10, num_workers=2)
        batches = iter(loader)
        next(batches)
        kept = next(batches)
        child = os.fork()
        if child == 0:
            try:
                try:
                    next(batches)
                except lockstep.UsageError as error:
                    ended = "in another process" in str(error)
                del kept, batches
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    fresh = flat(targets_of(loader)) == list(range(400))
                os._exit(0 if ended and fresh else 3)
            finally:
                os._exit(4)
        deadline = time.monotonic() + 60
        while (status := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        if status[0] == 0:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        self.assertEqual(status, (child, 0))
        self.assertEqual(flat(targets_of(batches)), list(range(20, 400)))

    def test_workers_of_torch_take_a_dataset_and_the_sampler(self):
        images = write_images(self.folder)
        dataset = data.ImageFolder(self.folder, transform="normalise:0:1")
        alive = iter(data.DataLoader(dataset, num_workers=2))
        next(alive)  # so that threads are there when torch forks
        loader = torch.utils.data.DataLoader(dataset, batch_size=4, sampler=data.Sampler(dataset, shuffle=False), num_workers=2)
        expect_close(torch.cat([samples for samples, _ in loader]), scaled(images))
        self.assertEqual(len(list(alive)), 5)

    def test_python_ends_cleanly_within_an_epoch(self):
        code = """
import torch, lockstep
loader = lockstep.DataLoader(lockstep.data.TensorDataset(torch.zeros(5000, 100), torch.zeros(5000)), num_workers=3)
batches = iter(loader)
next(batches)
kept = [loader, batches]
kept.append(kept)
"""
        done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, timeout=120)
        self.assertEqual((done.returncode, done.stderr), (0, ""))


# ---- Sampler


class Samplers(unittest.TestCase):
    def test_gives_the_global_batches_of_the_data_loader(self):
        for ranks, batch_size in ((1, 4), (2, 5), (3, 1), (4, 3)):
            expected = global_batches(53, ranks, batch_size=batch_size, shuffle=True, seed=9)
            own = [list(data.Sampler(53, seed=9, rank=rank, world_size=ranks)) for rank in range(ranks)]
            for step, batch in enumerate(expected):
                parts = [indices[step * batch_size : (step + 1) * batch_size] for indices in own]
                self.assertEqual(sorted(flat(parts)), sorted(batch))

    def test_lengths_are_those_of_what_it_gives(self):
        for size in (1, 5, 53, 56):
            for drop_last in (False, True):
                samplers = [data.Sampler(size, drop_last=drop_last, rank=rank, world_size=7) for rank in range(7)]
                found = [list(sampler) for sampler in samplers]
                self.assertEqual([len(sampler) for sampler in samplers], [len(indices) for indices in found])
                self.assertEqual(len(set(flat(found))), size // 7 * 7 if drop_last else size)

    def test_continues_within_an_epoch_with_another_number_of_ranks(self):
        whole = list(data.Sampler(50, rank=0, world_size=1))
        first = [list(data.Sampler(50, rank=rank, world_size=2))[:8] for rank in range(2)]
        rest = []
        for rank in range(3):
            sampler = data.Sampler(50, rank=rank, world_size=3)
            sampler.set_epoch(0, first_sample=16)
            mine = list(sampler)
            self.assertEqual(len(sampler), len(mine))
            rest += mine
        self.assertEqual(sorted(flat(first) + rest), list(range(50)))
        self.assertEqual(set(flat(first)), set(whole[:16]))

    def test_set_epoch_changes_the_order_and_its_absence_warns(self):
        sampler = data.Sampler(numbers(50))
        first = list(sampler)
        with self.assertWarnsRegex(UserWarning, "set_epoch"):
            self.assertEqual(list(sampler), first)
        sampler.set_epoch(1)
        self.assertNotEqual(list(sampler), first)
        self.assertEqual(list(data.Sampler(5, shuffle=False)), list(range(5)))


if __name__ == "__main__":
    unittest.main()
