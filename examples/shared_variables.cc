// SPDX-License-Identifier: Apache-2.0
// Towers with shared variables: the model is built once per tower, all towers use the same variables on the CPU, their
// gradients are combined at one point, and one Adam applies them once. docs/five-systems.md has a picture.
#include <cmath>
#include <iostream>
#include <stdexcept>

#include <lockstep/lockstep.h>
#include <torch/types.h>

namespace {

void require(bool holds, const char* what) {
  if (!holds) throw std::runtime_error(what);
}

struct Trained {
  double first_loss = 0, last_loss = 0;
  torch::Tensor weight;
};

Trained train(int count) {
  torch::manual_seed(1);
  const auto images = torch::randn({400, 20});
  const lockstep::Batch batch{images, images.matmul(torch::randn({20, 5})).argmax(1)};

  // What suits a batch of 100 is 0.001: the square root of four times as many samples gives 0.002.
  const double rate = lockstep::scaled_learning_rate(0.001, lockstep::LrScaling::kSqrt, batch.size(), 100);
  require(std::abs(rate - 0.002) < 1e-12, "the learning rate does not grow with the square root of the batch");

  lockstep::Devices devices({.count = count});
  const auto task = lockstep::classification_task<lockstep::MLP>(
      "mlp", lockstep::MLPOptions{.inputs = 20, .hidden = {32}, .outputs = 5});
  const auto towers =
      lockstep::share_variables(devices, task, {.optimizer = lockstep::AdamOptions{.lr = rate}, .seed = 1});
  for (const auto& tower : towers)
    require(tower.model->parameters()[0].is_alias_of(towers[0].model->parameters()[0]),
            "a tower has its own variables");

  Trained result;
  for (int step = 0; step < 200; ++step) {
    const auto shards = lockstep::split_and_load(batch, devices);  // the input, split over the towers
    const auto losses = lockstep::tower_losses(devices, task, towers, shards);
    lockstep::backward(devices, task, losses, shards);
    lockstep::combine_gradients(towers);  // the synchronisation point
    towers[0].optimizer->step();          // applies them, once

    result.last_loss = 0;
    for (size_t i = 0; i < losses.size(); ++i)
      result.last_loss += losses[i].item<double>() * static_cast<double>(shards[i].size()) / 400;
    if (step == 0) result.first_loss = result.last_loss;
  }
  result.weight = towers[0].model->parameters()[0].detach().clone();
  return result;
}

}  // namespace

int main() try {
  const Trained one = train(1), three = train(3);  // 400 = 134 + 133 + 133: the mean is weighted by samples
  std::cout << "three towers: loss " << three.first_loss << " -> " << three.last_loss << std::endl;
  require(three.last_loss < three.first_loss / 2, "the loss did not fall");
  require(torch::allclose(one.weight, three.weight, 1e-3, 1e-3), "three towers learn something else than one");
} catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 1;
}
