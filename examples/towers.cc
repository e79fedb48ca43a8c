// SPDX-License-Identifier: Apache-2.0
// Data parallel training on two devices, step by step: LeNet, a copy of its parameters on each device, and for every
// batch: split, a loss per device, backward on each, all-reduce, update.
#include <cstdlib>
#include <iostream>
#include <numeric>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

int main(int argc, char** argv) {
  const int epochs = argc > 1 ? std::atoi(argv[1]) : 2;
  lockstep::Devices devices({.count = 2});  // cpu:0 and cpu:1: half of the cores each
  const auto lenet = lockstep::model_task("lenet");
  const auto towers = lockstep::get_params(devices, lenet, {.optimizer = lockstep::SGDOptions{.lr = 0.2}, .seed = 1});

  auto world = lockstep::World::single();
  auto loader = lockstep::make_loader(world, lockstep::FashionMNIST(), {.batch_size = 256, .seed = 1});
  const lockstep::FashionMNIST validation(lockstep::FashionMNIST::kDebianFolder, lockstep::Split::kValidation);
  std::vector<std::int64_t> some(1000);
  std::iota(some.begin(), some.end(), 0);
  const auto held_out = validation.make_batch(some);

  for (int epoch = 0; epoch < epochs; ++epoch) {
    const lockstep::Stopwatch watch;
    for (auto& batch : loader.epoch(epoch)) {
      const auto shards = lockstep::split_and_load(batch, devices);
      const auto losses = lockstep::tower_losses(devices, lenet, towers, shards);
      lockstep::backward(devices, losses, shards);
      lockstep::all_reduce_gradients(devices, towers);
      lockstep::update(devices, towers);
    }
    const torch::NoGradGuard no_grad;  // accuracy with device 0's parameters
    const auto right = lenet.correct(towers[0].forward(lenet, held_out.data), held_out.target).item<double>();
    std::cout << "epoch " << epoch << ": " << watch.seconds() << " s, accuracy " << right / 1000 << std::endl;
  }
}
