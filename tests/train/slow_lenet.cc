// SPDX-License-Identifier: Apache-2.0
// LeNet with every option of `lockstep train`. SLOW_RANK=R: steps of rank R take three times as long: it sleeps.
#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>

#include "lockstep/lockstep.h"

namespace {

using Clock = std::chrono::steady_clock;

bool is_slow() {
  const char* slow = std::getenv("SLOW_RANK");
  const char* rank = std::getenv("RANK");
  return slow != nullptr && rank != nullptr && std::string(slow) == rank;
}

// From one forward to the next, without its own sleep: a step.
void dawdle() {
  static Clock::time_point woke = Clock::now();
  std::this_thread::sleep_for(2 * (Clock::now() - woke));
  woke = Clock::now();
}

}  // namespace

int main(int argc, char** argv) {
  lockstep::Task task = lockstep::model_task("lenet");
  task.forward = [forward = task.forward](torch::nn::Module& model, const torch::Tensor& data) {
    if (is_slow()) dawdle();
    return forward(model, data);
  };
  return lockstep::run(argc, argv, task);
}
