# SPDX-License-Identifier: Apache-2.0
"""Data for training: lockstep's readers, its DataLoader, and its sampler for PyTorch's DataLoader.

    train = lockstep.data.ImageFolder("photos/train", transform="random-resized-crop:224,flip")
    loader = lockstep.DataLoader(train, batch_size=32, shuffle=True, num_workers=2)
    for images, labels in loader:
        ...

Reading, decoding and transforms run in C++ threads, without Python. Every rank of the job gets its own part of each global
batch, and all ranks together see every sample once per epoch. A Dataset written in Python stays with PyTorch's DataLoader:

    loader = torch.utils.data.DataLoader(dataset, batch_size=32, sampler=lockstep.Sampler(dataset))

Rank and world size are those of torch.distributed where it is initialised, else those that the launcher set (lockstep run,
torchrun, srun, mpirun), else rank 0 of 1.

transform: what happens to images on the way into a batch, as a text with commas between its parts, the same as `lockstep train
--augment` takes. docs/data.md lists them: resize, crop, center-crop, random-resized-crop, flip, jitter, mixup, one-hot, normalise.
Images are normalised as each dataset says, unless the text says something else; normalise:0:1 leaves values in [0, 1]. Other
than on the command line, validation data gets no transform but the one you give it.

Errors: lockstep.DataError (a file that is missing or damaged; names file and sample), lockstep.UsageError (arguments).
"""

import os
import pathlib
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed
import torch.utils.data

from lockstep._C import data as _native
from lockstep._C import usage_error as _refuse
from lockstep._worlds import warn_of_lone_process

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "DataLoader",
    "Dataset",
    "FashionMNIST",
    "ImageFolder",
    "MNIST",
    "Sampler",
    "TensorDataset",
    "TokenDataset",
    "WebDataset",
    "open_dataset",
]

Batch = tuple[torch.Tensor, torch.Tensor]
_Path = str | os.PathLike


# ---- Datasets


class Dataset(torch.utils.data.Dataset):
    """Samples that lockstep reads. The classes below open them.

    len(dataset) is the number of samples; dataset[i] is sample i as (data, target), for a look at it; dataset[a:b] is a Dataset of
    that range, which shares memory and files. Safe to use from several threads and in forked processes.
    """

    def __init__(self, native):
        self._native = native

    @property
    def name(self) -> str:
        return self._native.name()

    def __len__(self) -> int:
        return len(self._native)

    def __getitem__(self, index: int | slice) -> "Batch | Dataset":
        """Sample or range. Random transforms are those of seed 0 and epoch 0. Blocks for the disk."""
        if isinstance(index, slice):
            begin, end, step = index.indices(len(self))
            if step != 1:
                _refuse(f"a range of a dataset with step {step}", next="give a range without a step")
            return Dataset(self._native.part(begin, end))
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        data, target = self._native.batch([index % len(self)])
        return data[0], target[0]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name}, {len(self)} samples)"


def _text(transform):
    if isinstance(transform, str):
        return transform
    _refuse(
        f"transform={transform!r} is not a text",
        likely="transforms of torchvision, which work on Python's images",
        next="write them as docs/data.md says, such as 'random-resized-crop:224,flip'; "
        "or keep PyTorch's DataLoader, with lockstep.Sampler",
    )


class _SplitImages(Dataset):
    """Images that were published in two parts. They are in root, or in a folder of it where torchvision leaves them."""

    _kind: str  # of lockstep train --data
    _inside: str

    def __init__(self, root: _Path, train: bool = True, transform: str = ""):
        inside = pathlib.Path(root, self._inside)
        super().__init__(_native.split_images(self._kind, inside if inside.is_dir() else root, train, _text(transform)))


class FashionMNIST(_SplitImages):
    """60,000 or 10,000 images of clothes, 10 classes. A batch's data is (B, 1, 28, 28) float32, its target (B) int64.

    root holds {train,t10k}-{images-idx3,labels-idx1}-ubyte, plain or .gz, or FashionMNIST/raw as torchvision leaves it. The
    default is where Debian's dataset-fashion-mnist puts them. The bytes are kept in memory.
    """

    _kind, _inside = "fashion-mnist", "FashionMNIST/raw"

    def __init__(self, root: _Path = "/usr/share/datasets/fashion-mnist", train: bool = True, transform: str = ""):
        super().__init__(root, train, transform)


class MNIST(_SplitImages):
    """MNIST or a relative with 10 classes; as FashionMNIST, but root has no default. torchvision's MNIST/raw is found too."""

    _kind, _inside = "mnist", "MNIST/raw"


class CIFAR10(_SplitImages):
    """50,000 or 10,000 colour images, 10 classes. A batch's data is (B, 3, 32, 32) float32, its target (B) int64.

    root holds the binary version of the dataset (data_batch_1.bin, ...), or its folder cifar-10-batches-bin.
    """

    _kind, _inside = "cifar-10", "cifar-10-batches-bin"


class CIFAR100(_SplitImages):
    """As CIFAR10, with 100 classes: the fine labels of train.bin and test.bin, in root or its folder cifar-100-binary."""

    _kind, _inside = "cifar-100", "cifar-100-binary"


class ImageFolder(Dataset):
    """root/CLASS/NAME.jpg, .jpeg or .png, also in folders below CLASS. Classes are numbered by name, as torchvision does.

    A batch's data is (B, 3, H, W) float32, its target (B) int64. Images are read each time. Where they differ in size, transform
    must bring them to one. classes: the names in their order, where they must agree with another folder's.
    """

    def __init__(self, root: _Path, transform: str = "", classes: Sequence[str] = ()):
        native, self.classes = _native.image_folder(root, _text(transform), list(classes))
        super().__init__(native)

    @property
    def class_to_idx(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.classes)}


class WebDataset(Dataset):
    """Shards of WebDataset: root/train where there is one, else root; or several files, "train-{000..012}.tar".

    A sample is an image (.jpg, .jpeg, .png) or array (.npy), and its target (.cls). Images get transform and a batch as of
    ImageFolder; arrays become (B, ...) as of TensorDataset. Shuffling visits the shards in random order and shuffles windows of
    16,384 samples. Checksums that `lockstep data pack` wrote are compared at each read.
    """

    def __init__(self, root: _Path, transform: str = ""):
        super().__init__(_native.open("webdataset", os.fspath(root), _text(transform))[0])


class TensorDataset(Dataset):
    """Rows of tensors or NumPy arrays: data (N, ...), target (N, ...). Shares memory on the CPU: don't change it.

    A batch has floating-point numbers and bytes as float32, other whole numbers as int64; bytes in targets become int64 too.
    Bytes with 3 or 4 dimensions, (N, H, W) or (N, C, H, W), with whole numbers as targets are images: they are scaled to [0, 1]
    and get transform; classes is then the number of classes, by default the largest target + 1.
    """

    def __init__(self, data: Any, target: Any, transform: str = "", classes: int | None = None, name: str = "tensors"):
        data, target = (torch.as_tensor(values, device="cpu").detach() for values in (data, target))
        super().__init__(_native.tensors(name, data, target, classes or 0, _text(transform)))


class TokenDataset(Dataset):
    """A file of tokens, for models that predict the next one. data and target: (B, block) int64, target one token further on.

    bits=8: every byte is a token; 16 or 32: little-endian numbers, as tokenisers write them. vocabulary: tokens must be below it
    (0: 256 for bytes, else not checked). skip and leave: shares of the file to leave out at its beginning and at its end, such as
    leave=0.1 for training and skip=0.9 for validation. The file is read batch by batch and may be larger than memory.
    """

    def __init__(self, path: _Path, block: int = 128, bits: int = 8, vocabulary: int = 0, skip: float = 0.0, leave: float = 0.0):
        super().__init__(_native.tokens(path, block, bits, vocabulary, skip, leave))


def open_dataset(data: str, folder: _Path = "", transform: str = "") -> tuple[Dataset, Dataset | None]:
    """Training and validation data by the name that `lockstep train --data` takes, KIND[:PATH][?OPTION=VALUE&...].

    folder is the path where data has none. Here, as on the command line, transform is for training; validation images get the same
    sizes without random choices. The second result is None where there is no validation data.
    """
    train, validation = _native.open(data, os.fspath(folder), _text(transform))
    return Dataset(train), Dataset(validation) if validation else None


# ---- Ranks


def _rank_and_size():
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    rank, world_size = _native.rank_of_job()
    warn_of_lone_process(world_size, "loads all samples", next=", or give rank= and world_size=", stacklevel=5)
    return rank, world_size


class _Ranks:
    """Rank and world size, of the job unless given. Read when first needed; an error when they are others later."""

    def __init__(self, rank, world_size):
        if (rank is None) != (world_size is None) or rank is not None and not 0 <= rank < world_size:
            _refuse(f"{rank=} with {world_size=}", next="give both, the rank below world_size; or neither: they are those of the job")
        self._given = None if rank is None else (rank, world_size)
        self._found = None

    def get(self):
        now = self._given or _rank_and_size()
        if self._found not in (None, now):
            _refuse(
                "this was rank {} of {} and is now rank {} of {}".format(*self._found, *now),
                likely="torch.distributed.init_process_group() was called after the first use",
                next="use it (also its len()) after init_process_group(), or give rank= and world_size=",
            )
        self._found = now
        return now


# ---- Loader


class DataLoader:
    """This rank's batches of one epoch after another, loaded by C++ threads: yields (data, target) tensors.

    batch_size counts the samples of one rank, as PyTorch's does; global_batch_size, given instead, those of all ranks together. The
    last global batch takes what is left, unless drop_last; each rank's part differs by at most one sample, and may be empty: (0, ...).

    shuffle, seed   an order per epoch, the same for any number of ranks; weights: draws with replacement, one weight per sample
    num_workers     threads that load (1); 0: the calling thread does
    prefetch        batches that may be ready (4); they and the batches that you keep bound the memory
    skip_bad        unreadable samples that may be left out per epoch and rank (0); one more raises DataError
    timeout         seconds for one batch (300); after that DataError names the batch
    device          where the tensors go; copies to a GPU run beside the step

    Epochs: iter() begins one, and the next iter() after its end begins the next. One that was left early begins again, in the same
    order: call set_epoch() to go on. All ranks must agree on the epoch. A loader has one epoch under way: a second iter() ends the
    first, whose iterator then raises UsageError.

    Blocks: only next() on the iterator, until its batch is ready, with other Python threads running; Ctrl-C ends it. Leaving
    an epoch waits for the batches that the workers are making. Raises what reading raised: DataError. Nothing is sent.
    In a forked child the loader starts over; an iterator that the parent began raises UsageError there.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int | None = None,
        *,
        global_batch_size: int | None = None,
        shuffle: bool = False,
        drop_last: bool = False,
        weights: Sequence[float] | None = None,
        device: str | torch.device = "cpu",
        rank: int | None = None,
        world_size: int | None = None,
        **options: Any,
    ):
        if not isinstance(dataset, Dataset):
            _refuse(
                f"a dataset of lockstep.data is needed, not a {type(dataset).__name__}",
                likely="one written in Python",
                next="torch.utils.data.DataLoader(dataset, batch_size=..., sampler=lockstep.Sampler(dataset))",
            )
        if batch_size is not None and global_batch_size is not None:
            _refuse("both batch_size and global_batch_size are given", next="give one: of a rank, or of all ranks together")
        if weights is not None and shuffle:
            _refuse("both shuffle and weights are given", next="leave shuffle out: weighted draws are in random order")
        if batch_size is None and global_batch_size is None:
            batch_size = 1
        given = global_batch_size if batch_size is None else batch_size
        weights = None if weights is None else [float(weight) for weight in weights]
        self._options = _native.LoaderOptions(dataset._native, given, shuffle, weights, **options)
        self.dataset, self.batch_size, self.drop_last = dataset, batch_size, drop_last
        self._global_batch_size = global_batch_size
        self._device = torch.empty(0, device=device).device  # "cuda" is the current one
        self._ranks = _Ranks(rank, world_size)
        self._order = "weighted" if weights is not None else "shuffled" if shuffle else "sequential"
        self._epoch, self._samples = 0, 0  # where the epoch under way stands, or the next one begins
        self._begun = False  # an epoch was begun at that place and left early
        self._current = None  # the iterator of the epoch under way
        self._loader, self._pid = None, None

    @property
    def epoch(self) -> int:
        """The epoch under way, or the one that iter() begins."""
        return self._epoch

    @property
    def global_batch_size(self) -> int:
        """Samples of a batch over all ranks."""
        return self._global_batch_size or self.batch_size * self._ranks.get()[1]

    def __len__(self) -> int:
        """Batches of a whole epoch, the same on every rank."""
        return self._batches(len(self.dataset))

    def set_epoch(self, epoch: int) -> None:
        """iter() begins this epoch next. After load_state_dict(), naming the epoch that was loaded keeps its position."""
        if epoch != self._epoch or self._begun:
            self._epoch, self._samples, self._begun = epoch, 0, False

    def state_dict(self) -> dict[str, Any]:
        """The loader's place: the same on every rank after the same number of batches. Batches loaded ahead don't count."""
        return {
            "epoch": self._epoch,
            "samples": self._samples,
            "dataset_size": len(self.dataset),
            "seed": self._options.seed,
            "order": self._order,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """iter() then gives the rest of that epoch, no sample twice and none left out.

        Number of ranks, batch size and workers may be others than they were. Raises UsageError, and changes nothing, where another
        dataset, seed or order would continue with other samples.
        """
        for name, mine in self.state_dict().items():
            if name not in state or name not in ("epoch", "samples") and state[name] != mine:
                _refuse(
                    f"the state was saved with {name} {state.get(name)}, this loader has {mine}",
                    likely="another dataset or other arguments than in the run that saved it",
                    next="make the loader as it was made then, or start the epoch again with set_epoch()",
                )
        if state["epoch"] < 0 or not 0 <= state["samples"] <= len(self.dataset):
            _refuse(f"no such place: sample {state['samples']} of epoch {state['epoch']}", likely="a damaged checkpoint")
        self._current = None
        self._epoch, self._samples, self._begun = state["epoch"], state["samples"], False

    def statistics(self) -> dict[str, float]:
        """The seconds that loading took on this rank since the first epoch, summed over batches and workers.

        wait: the training thread waited; read, assemble, copy, room: workers read and decoded, transformed, copied, waited for a free
        place. Also batches, samples, skipped (bad samples), and mean_queued: batches that were ready when one was taken.
        """
        return self._loader.statistics() if self._loader else {}

    def __iter__(self) -> Iterator[Batch]:
        if self._begun:
            self._begin_again()
        loader = self._native_loader()
        self._current = object()
        self._begun = False
        loader.start(self._epoch, self._samples)
        return self._batches_of_epoch(loader, self._current)

    def _begin_again(self):
        if self._order != "sequential" and self._samples > self.global_batch_size:
            warnings.warn(
                f"epoch {self._epoch} was left after {self._samples} of {len(self.dataset)} samples and begins again in the same "
                "order; call set_epoch() before each epoch to go on to the next",
                stacklevel=3,
            )
        self._samples = 0

    def _native_loader(self):
        rank, size = self._ranks.get()
        if self._loader is None or self._pid != os.getpid():
            self._options.batch_size = self.global_batch_size
            self._loader = _native.Loader(self.dataset._native, rank, size, self._options, self._device)
            self._pid = os.getpid()
            weakref.finalize(self, self._loader.stop)  # at the latest when Python ends: threads must not outlive it
        return self._loader

    def _batches(self, samples):
        return samples // self.global_batch_size if self.drop_last else -(-samples // self.global_batch_size)

    def _batches_of_epoch(self, loader, mine):
        epoch, first = self._epoch, self._samples
        try:
            for batch in range(self._batches(len(self.dataset) - first)):
                self._require_current(mine)
                data_and_target = loader.next()
                self._samples = min(first + (batch + 1) * self.global_batch_size, len(self.dataset))
                self._begun = True
                yield data_and_target
            self._require_current(mine)
            self._epoch, self._samples, self._begun = epoch + 1, 0, False
        finally:
            if self._current is mine:
                loader.stop()

    def _require_current(self, mine):
        if self._pid != os.getpid():
            _refuse(
                "this epoch was begun in another process",
                likely="a fork after iter()",
                next="call iter() on the DataLoader in the process that takes the batches",
            )
        if self._current is not mine:
            _refuse(
                "another epoch of this DataLoader has begun since",
                likely="two loops over one DataLoader, or load_state_dict() within one",
                next="give each loop a DataLoader of its own",
            )


# ---- Sampler


class Sampler(torch.utils.data.Sampler):
    """This rank's samples of an epoch, for PyTorch's DataLoader: DataLoader(dataset, batch_size=..., sampler=Sampler(dataset)).

    The order is that of lockstep.DataLoader with the same seed, and is dealt to the ranks one sample at a time: the batches of all ranks
    together hold the same samples for any number of ranks, and all ranks together see each sample once. Nothing is repeated to
    fill up, as torch's DistributedSampler does: ranks may differ by one sample, and so by one batch. drop_last leaves the last
    few samples out instead, so that all ranks have the same number; else use join() where ranks may differ by a batch.

    Call set_epoch() before each epoch. Nothing is sent.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ):
        """dataset: anything with a len(), or that number itself."""
        self._size = dataset if isinstance(dataset, int) else len(dataset)
        self._shuffle, self._seed, self._drop_last = shuffle, seed, drop_last
        self._ranks = _Ranks(rank, world_size)
        self._epoch, self._first = 0, 0
        self._epochs_drawn = 0  # since set_epoch()

    def set_epoch(self, epoch: int, first_sample: int = 0) -> None:
        """iter() gives this epoch from now on, without its first samples: those that all ranks together have had already."""
        if not 0 <= first_sample <= self._size:
            _refuse(f"an epoch of {self._size} samples can't continue at sample {first_sample}", likely="another dataset")
        self._epoch, self._first, self._epochs_drawn = epoch, first_sample, 0

    def __len__(self) -> int:
        """This rank's samples of the epoch."""
        rank, size = self._ranks.get()
        blocks, rest = divmod(self._size - self._first, size)
        return blocks if self._drop_last else blocks + (rank + 1) * rest // size - rank * rest // size

    def __iter__(self) -> Iterator[int]:
        rank, size = self._ranks.get()
        if self._shuffle and self._epochs_drawn == 1:
            warnings.warn("Sampler.set_epoch() was not called: this epoch has the order of the last one", stacklevel=2)
        self._epochs_drawn += 1
        mine = _native.samples_of_rank(self._size, rank, size, self._seed, self._shuffle, self._epoch, self._first)
        return iter(mine[: len(self)])
