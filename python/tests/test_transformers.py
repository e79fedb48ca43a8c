# SPDX-License-Identifier: Apache-2.0
"""lockstep.transformers.Trainer on two ranks against transformers.Trainer over gloo, with torch's optimizers, on the same data."""

import copy
import functools
import os
import tempfile
import unittest

import torch
import torch.distributed as dist
import transformers
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, PrinterCallback, TrainingArguments

import lockstep
from lockstep.transformers import Trainer
from support import expect_error, expect_import_error, run_ranks

VOCABULARY = 60
STEPS = 6


def sentences(count, seed):
    """With 8 of the tokens, which a model learns at once. Some have few labels: the mean over ranks is not that over tokens."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(8, (count, 24), generator=generator)
    ignored = torch.randint(20, (count, 1), generator=generator)
    return [{"input_ids": row, "labels": row.masked_fill(torch.arange(24) < first, -100)} for row, first in zip(rows, ignored)]


def bert():
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, max_position_embeddings=32, **sizes))


def gpt2():
    torch.manual_seed(1)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=2, n_head=2, **ends))


def make(kind, model, folder, **options):
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, OMP_NUM_THREADS="1")
    transformers.logging.set_verbosity_error()
    defaults = {"max_steps": STEPS, "per_device_train_batch_size": 4, "learning_rate": 2e-3, "logging_steps": 1, "seed": 3}
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "use_cpu": True, "ddp_backend": "gloo"}
    arguments = TrainingArguments(folder, **{**defaults, **quiet, **copy.deepcopy(options)})  # it takes things out of them
    trainer = kind(model, arguments, train_dataset=sentences(60, seed=1), eval_dataset=sentences(8, seed=2))
    trainer.remove_callback(PrinterCallback)
    return trainer


# By name: the model, the Trainer's options, the tolerance.
CASES = {
    "BERT": (bert, {"weight_decay": 0.1, "warmup_steps": 2}, 2e-4),
    "BERT in bfloat16": (bert, {"bf16": True}, 0.1),
    "BERT with SGD": (bert, {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0}, 2e-4),
    "GPT2": (gpt2, {"optim": "adamw_torch"}, 2e-4),
    "GPT2, two clipped batches a step": (gpt2, {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1}, 2e-4),
    "GPT2, synchronised in each": (
        gpt2,
        {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True, "num_steps": 2}}},
        2e-4,
    ),
    "GPT2, checkpointed": (gpt2, {"activation_checkpointing": True}, 2e-4),
    "GPT2 with Adafactor": (gpt2, {"optim": "adafactor", "learning_rate": 1e-4}, 2e-4),
}
OURS = {"BERT with SGD": lockstep.SGD, "GPT2 with Adafactor": transformers.Adafactor}


def printed(trainer):
    names = ("loss", "grad_norm", "learning_rate", "eval_loss")
    return [[line[name] for name in names if name in line] for line in trainer.state.log_history]


def state_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def train(kind, name, folder):
    make_model, options, _ = CASES[name]
    trainer = make(kind, make_model(), folder, **options, eval_strategy="steps", eval_steps=3)
    trainer.train()
    return trainer


def reference(folder):
    assert dist.get_backend() == "gloo"
    for name in CASES:
        trainer = train(transformers.Trainer, name, folder)
        if dist.get_rank() == 0:
            torch.save((printed(trainer), state_of(trainer.model)), os.path.join(folder, name))


def train_each_case(folder):
    for name, (make_model, _, tolerance) in CASES.items():
        losses, state = torch.load(os.path.join(folder, name))
        assert losses[-3][0] < losses[0][0], f"{name} learns nothing: {losses}"
        trainer = train(Trainer, name, folder)
        kind = OURS.get(name, lockstep.AdamW)
        assert type(trainer.optimizer.optimizer) is kind, f"{name}: {trainer.optimizer.optimizer}"
        assert trainer.model_wrapped.mean_in_grad == (kind is transformers.Adafactor), name
        close = functools.partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance, msg=lambda text: f"{name}: {text}")
        for ours, theirs in zip(printed(trainer), losses, strict=True):
            close(ours, theirs)
        close(dict(trainer.model.state_dict()), state)
        expect_same_on_ranks(trainer.model)


def expect_same_on_ranks(model):
    mine = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    others = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(others, mine)
    for each in others:
        torch.testing.assert_close(each, mine, rtol=0, atol=0)


def resume(folder):
    """From a checkpoint in a new Trainer, and in one that has trained; with the best model at the end; then what was saved."""
    saving = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True}
    whole = make(Trainer, gpt2(), folder, **saving)
    whole.train()
    expected = state_of(whole.model)
    path = os.path.join(folder, "checkpoint-3")
    for trainer in (make(Trainer, gpt2(), folder, **saving), whole):
        trainer.train(resume_from_checkpoint=path)
        torch.testing.assert_close(dict(trainer.model.state_dict()), expected, rtol=0, atol=0)

    whole.save_model(os.path.join(folder, "saved"))
    dist.barrier()
    loaded = GPT2LMHeadModel.from_pretrained(os.path.join(folder, "saved"))
    torch.testing.assert_close(dict(loaded.state_dict()), expected, rtol=0, atol=0)

    theirs = make(transformers.Trainer, gpt2(), folder)
    theirs.train(resume_from_checkpoint=path)  # torch's optimizer goes on with what lockstep's has saved
    torch.testing.assert_close(dict(theirs.model.state_dict()), state_at_end(folder), rtol=0, atol=2e-4)


def state_at_end(folder):
    return state_of(GPT2LMHeadModel.from_pretrained(os.path.join(folder, f"checkpoint-{STEPS}")))


def one_after_another(folder):
    first = make(Trainer, gpt2(), folder)
    before = first.evaluate()["eval_loss"]
    first.train()
    expect_same_on_ranks(first.model)  # transformers.Trainer trains each rank alone after evaluate()
    assert type(first.model_wrapped) is lockstep.DistributedDataParallel
    first.train()
    assert first.evaluate()["eval_loss"] < before
    again = make(Trainer, first.model, folder, bf16=True)
    again.train()
    expect_same_on_ranks(again.model)
    expect_error(lockstep.UsageError, "prepared again", first.train)


def each_way(folder):
    rank, size = dist.get_rank(), dist.get_world_size()
    reference(folder)
    dist.destroy_process_group()
    dist.init_process_group("lockstep", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    train_each_case(folder)
    resume(os.path.join(folder, "checkpoints"))
    one_after_another(folder)


class Transformers(unittest.TestCase):
    def test_trains_and_resumes_as_transformers_does_over_gloo(self):
        with tempfile.TemporaryDirectory() as folder:
            run_ranks(2, each_way, folder, backend="gloo")

    def test_names_what_is_not_there(self):
        expect_import_error("lockstep.transformers", "sys.modules['transformers'] = None", "transformers")


if __name__ == "__main__":
    unittest.main()
