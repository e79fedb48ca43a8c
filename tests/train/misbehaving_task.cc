// A training program that a test can spoil: MISBEHAVE=exit|kill|other_model, on rank 1.
#include <signal.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "lockstep/lockstep.h"

namespace {

bool misbehaves(const std::string& how) {
  const char* told = std::getenv("MISBEHAVE");
  const char* rank = std::getenv("RANK");
  return told != nullptr && rank != nullptr && how == told && std::string(rank) == "1";
}

torch::Tensor forward(torch::nn::Module& model, const torch::Tensor& data) {
  if (misbehaves("exit")) ::_exit(3);
  if (misbehaves("kill")) ::raise(SIGKILL);
  return dynamic_cast<torch::nn::SequentialImpl&>(model).forward(data.flatten(1));
}

lockstep::ModulePtr make_model() {
  const int hidden = misbehaves("other_model") ? 17 : 16;
  return torch::nn::Sequential(torch::nn::Linear(784, hidden), torch::nn::ReLU(), torch::nn::Linear(hidden, 10)).ptr();
}

}  // namespace

int main(int argc, char** argv) {
  return lockstep::run(argc, argv,
                       {.make_model = make_model,
                        .forward = forward,
                        .loss = [](const torch::Tensor& output, const torch::Tensor& target) {
                          return torch::cross_entropy_loss(output, target);
                        },
                        .correct = [](const torch::Tensor& output,
                                      const torch::Tensor& target) { return output.argmax(1).eq(target).sum(); },
                        .name = "perceptron"});
}
