// SPDX-License-Identifier: Apache-2.0
// Distributed data parallel training: four processes without a master, a sampler whose shards never overlap, gradients
// in buckets around a ring, and sub-groups. docs/five-systems.md has a picture.
#include <iostream>
#include <stdexcept>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

void require(bool holds, const char* what) {
  if (!holds) throw std::runtime_error(what);
}

void train(lockstep::World& world) {
  torch::manual_seed(1);  // the same data on every rank; the sampler says which samples are this rank's
  const auto inputs = torch::randn({1000, 16});
  const auto targets = inputs.matmul(torch::randn({16, 1})).tanh();

  torch::manual_seed(2 + world.rank());  // other parameters on every rank, until rank 0's are broadcast
  torch::nn::Sequential net(torch::nn::Linear(16, 32), torch::nn::ReLU(), torch::nn::Linear(32, 1));
  lockstep::SGD optimizer(net->parameters(), {.lr = 0.2});
  lockstep::DistributedDataParallel ddp(world, *net, optimizer, {.algorithm = lockstep::Algorithm::kRing});

  // A batch of 64 does not divide 1000, and 3 ranks would not divide 64: the mean is weighted by samples, and exact.
  lockstep::DistributedSampler sampler(
      {.samples = 1000, .batch_size = 64, .rank = world.rank(), .ranks = world.size(), .seed = 1});
  const auto times_seen = torch::zeros({1000});
  double first_loss = 0;
  for (int epoch = 0; epoch < 12; ++epoch) {
    sampler.set_epoch(epoch);
    for (int64_t step = 0; step < sampler.steps(); ++step) {
      const auto mine = torch::tensor(sampler.part(step));
      const auto loss = torch::mse_loss(net->forward(inputs.index_select(0, mine)), targets.index_select(0, mine));
      ddp.backward(loss, mine.size(0));
      optimizer.step();
      optimizer.zero_grad();
      times_seen.index_add_(0, mine, torch::ones({mine.size(0)}));
      if (epoch == 0 && step == 0) first_loss = ddp.last_batch().mean_loss;
    }
  }
  const double last_loss = ddp.last_batch().mean_loss;
  require(last_loss < first_loss / 3, "the loss did not fall");

  world.all_reduce(times_seen);
  require(times_seen.eq(12).all().item<bool>(), "the shards of an epoch overlap, or leave samples out");

  const auto weights = net->parameters()[0].detach().clone();
  require(torch::equal(world.all_gather(weights), weights.expand({world.size(), -1, -1})), "the replicas differ");

  // Sub-groups: one call makes the worlds of ranks {0, 1} and {2, 3}; another one that of the even ranks.
  const auto half = world.split(world.rank() / 2);
  const auto sum = torch::full({1}, world.rank());
  half->all_reduce(sum);
  require(sum.item<int>() == (world.rank() < 2 ? 0 + 1 : 2 + 3), "the sum over half of the ranks is wrong");
  const auto even = world.group({0, 2});
  require(even.has_value() == (world.rank() % 2 == 0), "a rank is in a group that does not name it");

  if (world.rank() == 0)
    std::cout << world.size() << " processes: loss " << first_loss << " -> " << last_loss << std::endl;
}

int main() try { lockstep::spawn(4, train); } catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 1;
}
