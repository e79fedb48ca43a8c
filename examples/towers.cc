// SPDX-License-Identifier: Apache-2.0
// Towers from scratch, on two devices of one process: the parameters of a model are copied to each device; for every
// batch: split, a loss per device, backward on each, all-reduce, update. docs/five-systems.md has a picture.
#include <cstdlib>
#include <iostream>
#include <numeric>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

// conv 20@3x3 -> ReLU -> avg-pool 2 -> conv 50@5x5 -> ReLU -> avg-pool 2 -> dense 128 -> ReLU -> dense 10
struct LeNetImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& images) {  // (B, 1, 28, 28) -> (B, 10)
    const auto small = torch::avg_pool2d(first(images).relu(), 2);
    const auto smaller = torch::avg_pool2d(second(small).relu(), 2);
    return output(hidden(smaller.flatten(1)).relu());
  }
  torch::nn::Conv2d first{register_module("first", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 20, 3)))};
  torch::nn::Conv2d second{register_module("second", torch::nn::Conv2d(torch::nn::Conv2dOptions(20, 50, 5)))};
  torch::nn::Linear hidden{register_module("hidden", torch::nn::Linear(800, 128))};
  torch::nn::Linear output{register_module("output", torch::nn::Linear(128, 10))};
};
TORCH_MODULE(LeNet);

int main(int argc, char** argv) {
  const int epochs = argc > 1 ? std::atoi(argv[1]) : 2;
  lockstep::Devices devices({.count = 2});  // cpu:0 and cpu:1: half of the cores each
  const auto task = lockstep::classification_task<LeNet>("lenet");
  torch::manual_seed(1);
  const LeNet lenet;  // a model that exists: every device gets a copy of its parameters
  const auto towers = lockstep::get_params(devices, task, *lenet, {.optimizer = lockstep::SGDOptions{.lr = 0.2}});

  auto loader =
      lockstep::make_loader(lockstep::World::single(), lockstep::FashionMNIST(), {.batch_size = 256, .seed = 1});
  const lockstep::FashionMNIST validation(lockstep::FashionMNIST::kDebianFolder, lockstep::Split::kValidation);

  std::vector<torch::Tensor> tensors{torch::full({3}, 1), torch::full({3}, 2)};  // one on each device
  lockstep::all_reduce(devices, tensors);                                        // now both are their sum
  if (!tensors[0].eq(3).all().item<bool>() || !tensors[1].eq(3).all().item<bool>()) return 1;

  double accuracy = 0;
  for (int epoch = 0; epoch < epochs; ++epoch) {
    const lockstep::Stopwatch watch;
    for (auto& batch : loader.epoch(epoch)) {
      if (epoch > 0) {  // the five calls below in one
        lockstep::train_batch(devices, task, towers, batch, {.algorithm = lockstep::Algorithm::kCentral});
        continue;
      }
      const auto shards = lockstep::split_and_load(batch, devices);
      const auto losses = lockstep::tower_losses(devices, task, towers, shards);
      lockstep::backward(devices, task, losses, shards);
      lockstep::all_reduce_gradients(devices, towers, lockstep::Algorithm::kCentral);  // sum on device 0, copy to all
      lockstep::update(devices, towers);
    }
    accuracy = lockstep::evaluate_accuracy(task, *towers[0].model, validation);
    std::cout << "epoch " << epoch << ": " << watch.seconds() << " s, accuracy " << accuracy << std::endl;
  }

  // PyTorch's DataParallel: the same idea, called like the module.
  std::vector<int64_t> some(1000);
  std::iota(some.begin(), some.end(), 0);
  const auto held_out = validation.make_batch(some);
  lockstep::DataParallel net([] { return LeNet(); }, devices);
  torch::optim::SGD optimizer(net.module().parameters(), 0.1);
  double first_loss = 0, loss = 0;
  for (int step = 0; step < 20; ++step) {
    const auto mean = torch::cross_entropy_loss(net.forward(held_out.data), held_out.target);
    optimizer.zero_grad();
    net.backward(mean);
    optimizer.step();
    (step == 0 ? first_loss : loss) = mean.item<double>();
  }
  std::cout << "DataParallel: loss " << first_loss << " -> " << loss << std::endl;
  return accuracy > 0.6 && loss < first_loss ? 0 : 1;
}
