// SPDX-License-Identifier: Apache-2.0
// A model of your own with every option of `lockstep train`: `./own_task --ranks 2 --epochs 2`, `./own_task --help`.
#include <lockstep/lockstep.h>

struct PerceptronImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& images) { return output(hidden(images.flatten(1)).relu()); }
  torch::nn::Linear hidden{register_module("hidden", torch::nn::Linear(784, 64))};
  torch::nn::Linear output{register_module("output", torch::nn::Linear(64, 10))};
};
TORCH_MODULE(Perceptron);

int main(int argc, char** argv) {
  return lockstep::run(argc, argv, lockstep::classification_task<Perceptron>("perceptron"));
}
