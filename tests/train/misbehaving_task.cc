// SPDX-License-Identifier: Apache-2.0
// A training program that misbehaves on rank 1 or, without ranks, on one device:
//
//   MISBEHAVE=exit|kill|throw|hang   in the tenth call of its middle layer
//   MISBEHAVE=shapes                 there, too: a product of matrices that do not fit
//   MISBEHAVE=other_model            its model differs from the others'
//   MISBEHAVE=stop_in_validation     it is asked to stop, by SIGTERM, in each batch of its first validation
//   LOCKSTEP_TEST_DISK=PIPE          its disk does not answer (tests/held_disk.h)
#include <signal.h>
#include <torch/nn/modules/container/sequential.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <string>

#include "lockstep/lockstep.h"
#include "tests/held_disk.h"

namespace {

bool misbehaves(const std::string& how) {
  const char* told = std::getenv("MISBEHAVE");
  const char* rank = std::getenv("RANK");
  return told != nullptr && how == told && (rank == nullptr || std::string(rank) == "1");
}

// Computes for ever, in code that debuggers can find their way through (MKL's products of matrices are not).
[[noreturn]] void hang() {
  const torch::NoGradGuard no_grad;
  for (torch::Tensor some = torch::ones({64, 64});; some = some.sigmoid()) {
  }
}

struct SpoiltReLUImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) {
    if (++calls == 10) misbehave();
    if (!is_training() && misbehaves("stop_in_validation")) ::raise(SIGTERM);
    return x.relu();
  }

  static void misbehave() {
    if (misbehaves("exit")) ::_exit(3);
    if (misbehaves("kill")) ::raise(SIGKILL);
    if (misbehaves("throw")) throw lockstep::DataError({.what = "thrown on purpose"});
    if (misbehaves("hang")) hang();
    if (misbehaves("shapes")) torch::ones({2, 3}).matmul(torch::ones({2, 3}));
  }

  static inline std::atomic<int> calls{0};  // of all devices
};
TORCH_MODULE(SpoiltReLU);

lockstep::ModulePtr make_model() {
  const int hidden = misbehaves("other_model") ? 17 : 16;
  return torch::nn::Sequential(torch::nn::Linear(784, hidden), SpoiltReLU(), torch::nn::Linear(hidden, 10)).ptr();
}

torch::nn::SequentialImpl& layers_of(torch::nn::Module& model) {
  return dynamic_cast<torch::nn::SequentialImpl&>(model);
}

std::vector<lockstep::Piece> stages(torch::nn::Module& model) {
  auto pieces = lockstep::pieces_of(layers_of(model));
  pieces[0].forward = [first = pieces[0].forward](const lockstep::Tensors& images) {
    return first({images[0].flatten(1)});
  };
  return pieces;
}

}  // namespace

int main(int argc, char** argv) {
  return lockstep::run(argc, argv,
                       {.make_model = make_model,
                        .forward = [](torch::nn::Module& model,
                                      const torch::Tensor& data) { return layers_of(model).forward(data.flatten(1)); },
                        .loss = [](const torch::Tensor& output,
                                   const torch::Tensor& target) { return torch::cross_entropy_loss(output, target); },
                        .correct = [](const torch::Tensor& output,
                                      const torch::Tensor& target) { return output.argmax(1).eq(target).sum(); },
                        .name = "perceptron",
                        .stages = stages});
}
