// SPDX-License-Identifier: Apache-2.0
// Makes one step, or one all-reduce, of two ranks between hops_begin() and hops_end(), where tests/hops.py looks on.
#include <string>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

extern "C" {
[[gnu::noinline]] void hops_begin() { asm volatile(""); }
[[gnu::noinline]] void hops_end() { asm volatile(""); }
}

namespace {

template <class Body>
void walk(const Body& body) {
  for (int warm_up = 0; warm_up < 3; ++warm_up) body();
  hops_begin();
  body();
  hops_end();
}

void walk_step(lockstep::World& world) {
  torch::nn::Sequential net(torch::nn::Linear(128, 128), torch::nn::ReLU(), torch::nn::Linear(128, 10));
  lockstep::SGD optimizer(net->parameters(), {.lr = 0.1});
  lockstep::DistributedDataParallel ddp(world, *net, optimizer);
  const torch::Tensor data = torch::randn({32, 128});
  const torch::Tensor target = torch::randint(10, {32}, torch::kInt64);
  walk([&] {
    const torch::Tensor loss = torch::nn::functional::cross_entropy(net->forward(data), target);
    ddp.backward(loss, data.size(0));
    optimizer.step();
    optimizer.zero_grad();
  });
}

void walk_all_reduce(lockstep::World& world) {
  const torch::Tensor tensor = torch::ones({1 << 18});  // 1 MiB of ordinary memory
  walk([&] { world.all_reduce(tensor); });
}

}  // namespace

int main(int, char** arguments) {
  auto world = lockstep::World::from_env();
  std::string(arguments[1]) == "step" ? walk_step(world) : walk_all_reduce(world);
  world.barrier();
}
