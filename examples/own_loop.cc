// SPDX-License-Identifier: Apache-2.0
// A training loop of your own. `lockstep run --nproc-per-node 2 -- ./own_loop` trains it on two ranks.
#include <iostream>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

int main() {
  auto world = lockstep::World::from_env();
  torch::nn::Sequential net(torch::nn::Flatten(), torch::nn::Linear(784, 64), torch::nn::ReLU(),
                            torch::nn::Linear(64, 10));
  net->to(world.device());
  lockstep::SGD optimizer(net->parameters(), {.lr = 0.1, .momentum = 0.9, .nesterov = true});
  lockstep::DistributedDataParallel ddp(world, *net, optimizer);
  auto loader = lockstep::make_loader(world, lockstep::FashionMNIST(), {.batch_size = 256, .seed = 1});
  for (int epoch = 0; epoch < 2; ++epoch) {
    for (auto& batch : loader.epoch(epoch)) {
      auto loss = torch::nn::functional::cross_entropy(net->forward(batch.data), batch.target);
      ddp.backward(loss, batch.size());
      optimizer.step();
      optimizer.zero_grad();
    }
    if (world.rank() == 0) std::cout << "epoch " << epoch << " loss " << ddp.last_batch().mean_loss << std::endl;
  }
}
