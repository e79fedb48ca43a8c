# SPDX-License-Identifier: Apache-2.0
"""A GAN: two models, two optimizers; the discriminator is a part of the generator's loss."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel as DDP  # lockstep: from lockstep import DistributedDataParallel as DDP
from torch.optim import Adam  # lockstep: from lockstep import Adam

NOISE, SIZE, BATCH = 4, 2, 16


def layers(*widths):
    parts = []
    for before, after in zip(widths, widths[1:]):
        parts += [nn.Linear(before, after), nn.LeakyReLU(0.2)]
    return nn.Sequential(*parts[:-1])


def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(2)
    generator, discriminator = DDP(layers(NOISE, 24, 24, SIZE)), DDP(layers(SIZE, 24, 24, 1))
    of_generator = Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    of_discriminator = Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    source = torch.Generator().manual_seed(200 + dist.get_rank())
    true, false = torch.ones(BATCH, 1), torch.zeros(BATCH, 1)
    for _ in range(20):
        angles = 6.3 * torch.rand(BATCH, generator=source)
        real = torch.stack([angles.cos(), angles.sin()], 1)
        made = generator(torch.randn(BATCH, NOISE, generator=source))

        of_discriminator.zero_grad()
        scores = discriminator(torch.cat([real, made.detach()]))
        binary_cross_entropy_with_logits(scores, torch.cat([true, false])).backward()
        of_discriminator.step()

        of_generator.zero_grad()
        binary_cross_entropy_with_logits(discriminator(made), true).backward()
        of_generator.step()
    states = {"generator": generator, "discriminator": discriminator}
    return {f"{name}.{key}": value for name, model in states.items() for key, value in model.module.state_dict().items()}
