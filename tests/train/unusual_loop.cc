// SPDX-License-Identifier: Apache-2.0
// A training loop of a user's own with an unusual habit, named by HABIT:
//
//   global          the module lies in a global variable until the process ends
//   all_global      so do the optimizer, DistributedDataParallel and the World
//   fork            rank 1 forks a child, which evaluates the model, then returns from main
//   fork_collective the child also calls all_reduce() and backward()
//   fork_parallel   before the fork operators run on several threads
//   write_parameter rank 1 writes an element of a shared parameter, through a pointer, before backward()
//   write_gradient  rank 1 writes an element of a gradient between backward() and step()
//   write_allowed   all ranks write the same values in write_parameters()
//   separate        the ranks have parameters of their own
//   separate_write  the same, and rank 1 writes an element of one of them
//   threads         three ranks are threads of each process
//   threads_write   the same, and the second writes an element of a parameter
//   stop            rank 1 is asked to stop, by SIGTERM, in its fourth step; exits with 7 if all leave after that step
//   threads_stop    the same, of three ranks that are threads
#include <signal.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <iostream>
#include <optional>
#include <string>
#include <string_view>

#include "lockstep/lockstep.h"

namespace {

std::string_view habit() {
  const char* told = std::getenv("HABIT");
  return told != nullptr ? told : "";
}

torch::nn::Sequential make_net() {
  return torch::nn::Sequential(torch::nn::Linear(256, 64), torch::nn::ReLU(), torch::nn::Linear(64, 10));
}

struct Training {
  explicit Training(torch::nn::Sequential trained, lockstep::World its_world = lockstep::World::from_env())
      : world(std::move(its_world)), net(std::move(trained)) {}

  torch::Tensor loss() { return net->forward(torch::ones({8, 256})).square().mean(); }

  // Leaves the last gradients where they are.
  void steps(int count) {
    for (int step = 0; step < count; ++step) {
      optimizer.zero_grad();
      ddp.backward(loss(), 8);
      if (habit() == "write_gradient" && world.rank() == 1) write_element_of(last_parameter().mutable_grad());
      optimizer.step();
    }
  }

  torch::Tensor last_parameter() { return net->parameters().back(); }  // "2.bias", of 10 elements

  static void write_element_of(const torch::Tensor& tensor) { tensor.data_ptr<float>()[3] = 7; }

  lockstep::World world;
  torch::nn::Sequential net;
  lockstep::SGD optimizer{net->parameters(), {.lr = 0.1, .momentum = 0.9}};
  lockstep::DistributedDataParallel ddp{world, *net, optimizer, {.share_parameters = !habit().starts_with("separate")}};
};

torch::nn::Sequential global_net = make_net();
std::optional<Training> global_training;

template <class Call>
bool is_refused(const Call& call) {
  try {
    call();
  } catch (const lockstep::UsageError& error) {
    return std::string_view(error.what()).find("forked child") != std::string_view::npos;
  }
  return false;
}

void run_on_threads() { static_cast<void>(torch::ones({4 << 20}).exp().sum().item<float>()); }

// What the child does between fork() and its return from main: 0 if all went as it should.
int in_child(Training& training) {
  ::alarm(60);  // instead of a wait for ever
  if (habit() == "fork_parallel") {
    at::set_num_threads(1);  // the child has no OpenMP threads, and libgomp would wait for them
    run_on_threads();
  }
  {
    const torch::NoGradGuard no_grad;
    if (!training.loss().isfinite().item<bool>()) return 2;
  }
  if (habit() == "fork_collective") {
    torch::Tensor ones = torch::ones({4});
    if (!is_refused([&] { training.world.all_reduce(ones); })) return 3;
    if (!is_refused([&] { training.ddp.backward(training.loss(), 8); })) return 4;
  }
  return 0;
}

void write_by_hand(Training& training) {
  const bool writes = habit() == "write_parameter" || habit() == "separate_write" || habit() == "threads_write";
  if (writes && training.world.rank() == 1) Training::write_element_of(training.last_parameter());
  if (habit() == "write_allowed")
    training.ddp.write_parameters([&] { Training::write_element_of(training.last_parameter()); });
}

// The number of the step after which it was left.
int train_until_stopped(Training& training) {
  constexpr int kSteps = 20;
  lockstep::catch_stop_signals();
  for (int step = 0; step < kSteps; ++step) {
    if (step == 3 && training.world.rank() == 1) ::raise(SIGTERM);
    training.steps(1);
    if (lockstep::stop_requested()) return step;
  }
  return kSteps;
}

int train(Training& training) {
  if (habit().ends_with("stop")) return train_until_stopped(training) == 3 ? 7 : 1;
  training.steps(5);
  if (habit().starts_with("fork") && training.world.rank() == 1) {
    if (habit() == "fork_parallel") {
      at::set_num_threads(2);
      run_on_threads();
    }
    const pid_t child = ::fork();
    if (child == 0) return in_child(training);
    training.steps(5);
    int status = 0;
    ::waitpid(child, &status, 0);
    if (status != 0) std::cout << "the child ended with status " << status << std::endl;
    training.steps(5);
  } else {
    training.steps(5);
    write_by_hand(training);
    training.steps(5);
  }
  std::cout << "trained" << std::endl;
  return 0;
}

int train_on_threads() {
  std::array<int, 3> codes{};
  lockstep::run_ranks(3, [&codes](lockstep::World& world) {
    Training training(make_net(), world);
    codes[static_cast<size_t>(world.rank())] = train(training);
  });
  return *std::ranges::max_element(codes) == *std::ranges::min_element(codes) ? codes[0] : 1;
}

}  // namespace

int main() {
  if (habit().starts_with("threads")) return train_on_threads();
  if (habit() == "all_global") return train(global_training.emplace(make_net()));
  Training training(habit() == "global" ? global_net : make_net());
  return train(training);
}
