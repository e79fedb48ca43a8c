// SPDX-License-Identifier: Apache-2.0
// A training loop that survives the loss of its ranks: `lockstep run --nproc-per-node 2 --max-restarts 3 -- ./surviving_loop`.
// Kill one of them while it trains: the result is the same, bit for bit.
#include <iomanip>
#include <iostream>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

int main() {
  return lockstep::recover([] {
    torch::manual_seed(1);
    auto world = lockstep::World::from_env();
    torch::nn::Sequential net(torch::nn::Flatten(), torch::nn::Linear(784, 64), torch::nn::ReLU(),
                              torch::nn::Linear(64, 10));
    net->to(world.device());
    lockstep::SGD optimizer(net->parameters(), {.lr = 0.1, .momentum = 0.9, .nesterov = true});
    lockstep::DistributedDataParallel ddp(world, *net, optimizer);
    auto loader = lockstep::make_loader(world, lockstep::FashionMNIST(), {.batch_size = 256, .seed = 1});
    lockstep::Recovery recovery(ddp, optimizer, loader);
    for (auto epoch = recovery.epoch(); epoch < 2; ++epoch) {
      for (auto& batch : recovery.batches(epoch)) {
        auto loss = torch::nn::functional::cross_entropy(net->forward(batch.data), batch.target);
        ddp.backward(loss, batch.size());
        optimizer.step();
        optimizer.zero_grad();
        recovery.step();
      }
      if (world.rank() == 0)
        std::cout << "epoch " << epoch << " loss " << std::setprecision(9) << ddp.last_batch().mean_loss << std::endl;
    }
    return 0;
  });
}
