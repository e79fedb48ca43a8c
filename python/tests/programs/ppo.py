# SPDX-License-Identifier: Apache-2.0
"""PPO: each rank plays its own rollouts, of its own length; advantages are normalised over all ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributions import Categorical
from torch.nn.parallel import DistributedDataParallel


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 24), nn.Tanh())
        self.policy, self.value = nn.Linear(24, 2), nn.Linear(24, 1)

    def forward(self, states):
        hidden = self.body(states)
        return self.policy(hidden), self.value(hidden).squeeze(-1)


@torch.no_grad()
def rollout(model, source, steps):
    """A cart on a line: push left or right; the reward is for being near 0."""
    state, states, actions, rewards = torch.randn(3, generator=source), [], [], []
    for _ in range(steps):
        logits, _ = model.module(state)
        action = int(torch.rand((), generator=source) < logits.softmax(-1)[1])
        states.append(state)
        actions.append(action)
        speed = state[1] + 0.1 * (2 * action - 1)
        state = torch.stack([state[0] + 0.1 * speed, speed, state[0]])
        rewards.append(-state[0].abs())
    returns = [torch.stack([0.9**k * reward for k, reward in enumerate(rewards[t:])]).sum() for t in range(steps)]
    return torch.stack(states), torch.tensor(actions), torch.stack(returns)


def normalised(values):
    sums = torch.stack([values.sum(), (values**2).sum(), torch.tensor(float(len(values)))])
    dist.all_reduce(sums)
    mean = sums[0] / sums[2]
    return (values - mean) / (sums[1] / sums[2] - mean**2 + 1e-8).sqrt()


def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(5)
    model = DistributedDataParallel(Agent())  # lockstep: model = lockstep.DistributedDataParallel(Agent())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)  # lockstep: optimizer = lockstep.Adam(model.parameters(), lr=3e-3)
    source = torch.Generator().manual_seed(500 + dist.get_rank())
    for _ in range(5):
        states, actions, returns = rollout(model, source, 16 + 4 * dist.get_rank())
        logits, values = (each.detach() for each in model.module(states))
        before, advantages = Categorical(logits=logits).log_prob(actions), normalised(returns - values)
        for _ in range(4):
            logits, values = model(states)
            now = Categorical(logits=logits)
            ratio = (now.log_prob(actions) - before).exp()
            gain = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
            loss = -gain + 0.5 * (values - returns).square().mean() - 0.01 * now.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)  # lockstep: lockstep.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    return model.module.state_dict()
