// SPDX-License-Identifier: Apache-2.0
// A prototype, no part of lockstep: two ranks divide an MLP's layers instead of copying their gradients (Krizhevsky, "One weird trick
// for parallelizing convolutional neural networks", 2014). docs/design/fused-step.md has what it measured.
//
//   large_layers_once [rounds] [rows of a tile; 0: all that a rank has]
//
// `one process` is PyTorch's own, with a thread on each core and the fused SGD; also with a malloc that keeps freed memory. `layers
// once` is two processes of one thread, each with half the batch and half the outputs of every layer. They exchange activations in
// shared memory: each rank computes its outputs for all samples. So in the whole machine a weight is read once forward and once
// backward, and its gradient is made once, by the rank that updates it: with whole layers 9 K bytes move where data parallelism
// moves 14 K; with tiles that stay in the second-level cache 5 K.
//
// Each system runs in new processes in each round. Times are medians of a round's steps, from the samples to the updated weights.
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <thread>

#include <ATen/Parallel.h>

#include "bench/limits.h"
#include "bench/prototypes/mlp.h"
#include "lockstep/memory.h"

namespace lockstep::prototypes {
namespace {

constexpr int kRanks = 2, kWarmup = 2, kSteps = 15;

// ---- Processes and what they share

[[noreturn]] void fail(const char* what) {
  std::perror(what);
  std::exit(1);
}

// Zeros, which processes forked later share.
void* shared_memory(size_t bytes) {
  void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) fail("mmap");
  return memory;
}

Tensor shared_tensor(torch::IntArrayRef sizes, torch::ScalarType type = torch::kFloat32) {
  const auto bytes = static_cast<size_t>(c10::multiply_integers(sizes)) * c10::elementSize(type);
  return torch::from_blob(shared_memory(bytes), sizes, type);
}

// Forks so many processes and waits for them. They end with this one, which ends when one of them fails.
void in_processes(int count, const std::function<void(int)>& work) {
  for (int i = 0; i < count; ++i) {
    const pid_t child = ::fork();
    if (child < 0) fail("fork");
    if (child > 0) continue;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    work(i);
    ::_exit(0);
  }
  for (int i = 0; i < count; ++i) {
    int status = 0;
    if (::wait(&status) < 0) fail("wait");
    if (status == 0) continue;
    std::fprintf(stderr, "a process failed: status %d\n", status);
    std::exit(1);
  }
}

// Pins this thread to one of the cores that it may use.
void pin(int index) {
  cpu_set_t usable, one;
  if (::sched_getaffinity(0, sizeof(usable), &usable) != 0) fail("sched_getaffinity");
  for (size_t core = 0; core < CPU_SETSIZE; ++core) {
    if (!CPU_ISSET(core, &usable) || index-- > 0) continue;
    CPU_ZERO(&one);
    CPU_SET(core, &one);
    if (::sched_setaffinity(0, sizeof(one), &one) != 0) fail("sched_setaffinity");
    return;
  }
}

struct Meeting {
  struct alignas(64) Arrivals {
    std::atomic<int64_t> number;
  };
  std::array<Arrivals, kRanks> of_ranks;

  void arrive_and_wait(int rank) {
    const int64_t mine = ++of_ranks[static_cast<size_t>(rank)].number;
    for (const Arrivals& other : of_ranks)
      while (other.number < mine) std::this_thread::yield();
  }
};

struct Shared {
  Meeting& meeting = *static_cast<Meeting*>(shared_memory(sizeof(Meeting)));
  std::vector<Tensor> activations, sums;  // of all samples; sums: (rank, sample, input of the layer), of a rank's rows
  Tensor target = shared_tensor({kBatch}, torch::kInt64);

  Shared() {
    for (const int64_t width : kWidths) {
      activations.push_back(shared_tensor({kBatch, width}));
      sums.push_back(shared_tensor({kRanks, kBatch, width}));
    }
  }
};

// ---- A rank

class Rank {
 public:
  Rank(Shared& shared, int rank, int64_t rows) : shared_(shared), rank_(rank), rows_(rows), model_(make_model()) {
    for (auto* list : {&model_.weights, &model_.weight_momenta, &model_.biases, &model_.bias_momenta})
      for (Tensor& each : *list) each = own(each, 0).clone();
    int64_t largest = 0;
    for (const Tensor& weight : model_.weights) {
      const int64_t tile = rows_ > 0 ? std::min(rows_, weight.size(0)) : weight.size(0);
      largest = std::max(largest, tile * weight.size(1));
    }
    gradient_ = torch::empty({largest});
  }

  // data, target: of the whole batch, of which a rank takes its samples.
  double step(const Tensor& data, const Tensor& target) {
    const torch::NoGradGuard no_grad;
    own(shared_.activations[0], 0).copy_(own(data, 0));
    own(shared_.target, 0).copy_(own(target, 0));
    shared_.meeting.arrive_and_wait(rank_);
    forward();
    double loss = 0;
    Tensor gradient = own(loss_gradient(shared_.activations.back(), shared_.target, loss), 1);
    for (size_t i = model_.weights.size(); i-- > 0;) {
      update(model_.biases[i], model_.bias_momenta[i], gradient.sum(0));
      backward_and_update(i, gradient);
      shared_.meeting.arrive_and_wait(rank_);  // after the last layer: nobody reads this step's activations any more
      if (i > 0) gradient = own(shared_.sums[i], 2).sum(0).mul_(own(shared_.activations[i], 1) > 0);
    }
    return loss;
  }

 private:
  // This rank's part of a dimension.
  Tensor own(const Tensor& all, int64_t dimension) const {
    const int64_t share = all.size(dimension) / kRanks;
    return all.narrow(dimension, rank_ * share, share);
  }

  void forward() {
    for (size_t i = 0; i < model_.weights.size(); ++i) {
      Tensor mine = own(shared_.activations[i + 1], 1);
      at::addmm_out(mine, model_.biases[i], shared_.activations[i], model_.weights[i].t());
      if (i + 1 < model_.weights.size()) mine.relu_();
      shared_.meeting.arrive_and_wait(rank_);
    }
  }

  // gradient: (B, own outputs) of the layer. Writes this rank's sum for the layer's input, of which the first has no use.
  void backward_and_update(size_t i, const Tensor& gradient) {
    const Tensor &weight = model_.weights[i], &momentum = model_.weight_momenta[i];
    Tensor sum = shared_.sums[i].select(0, rank_);
    const Tensor outputs_first = gradient.t().contiguous();
    const int64_t last = weight.size(0), most = rows_ > 0 ? rows_ : last;
    for (int64_t row = 0; row < last; row += most) {
      const int64_t rows = std::min(most, last - row);
      const Tensor tile = weight.narrow(0, row, rows), outer = outputs_first.narrow(0, row, rows);
      if (i > 0) at::addmm_out(sum, sum, outer.t(), tile, /*beta=*/row == 0 ? 0 : 1);
      Tensor made = gradient_.narrow(0, 0, rows * weight.size(1)).view({rows, weight.size(1)});
      at::mm_out(made, outer, shared_.activations[i]);
      update(tile, momentum.narrow(0, row, rows), made);
    }
  }

  Shared& shared_;
  const int rank_;
  const int64_t rows_;
  Model model_;      // own outputs
  Tensor gradient_;  // of a tile, then of the next
};

// ---- Measuring

struct Run {
  double milliseconds;
  std::array<double, kWarmup + kSteps> losses;
};

struct Limits {
  double triad, sgemm, operations;
};

template <class System>
Run measure(System& system) {
  const auto [data, target] = make_samples();
  Run run{};
  std::vector<double> times;
  for (double& loss : run.losses) {
    const Stopwatch watch;
    loss = system.step(data, target);
    times.push_back(watch.seconds() * 1e3);
  }
  times.erase(times.begin(), times.begin() + kWarmup);
  std::ranges::nth_element(times, times.begin() + kSteps / 2);
  run.milliseconds = times[kSteps / 2];
  return run;
}

Limits measure_limits() {
  at::set_num_threads(kRanks);
  OneProcess one;
  const auto [data, target] = make_samples();
  Limits limits{.triad = best_speed(bench::Triad()), .sgemm = best_speed(bench::Sgemm())};
  const bench::OperationCount count;
  one.step(data, target);
  limits.operations = count.operations();
  return limits;
}

// NaN, if one is.
double larger(double one, double other) { return one >= other || std::isnan(one) ? one : other; }

double largest_difference(const Run& left, const Run& right) {
  double largest = 0;
  for (size_t i = 0; i < left.losses.size(); ++i) largest = larger(largest, std::abs(left.losses[i] - right.losses[i]));
  return largest;
}

// Returns the largest difference of a loss. No thread of torch has started in this process: those that it forks start theirs.
double compare(int rounds, int64_t rows) {
  Shared shared;
  auto* const limits = static_cast<Limits*>(shared_memory(sizeof(Limits)));
  auto* const runs = static_cast<Run*>(shared_memory(3 * sizeof(Run)));
  Run &one = runs[0], &kept = runs[1], &once = runs[2];
  const auto run_one = [&](Run& run) {
    at::set_num_threads(kRanks);
    OneProcess system;
    run = measure(system);
  };
  in_processes(1, [&](int) { *limits = measure_limits(); });
  const double k = bytes_of_weights();
  std::printf(
      "%d cores; triad %.1f GB/s, sgemm %.0f GFLOP/s; K = %.1f MB takes %.1f ms; %.2f GFLOP of a step: %.1f ms\n",
      kRanks, limits->triad / 1e9, limits->sgemm / 1e9, k / 1e6, k / limits->triad * 1e3, limits->operations / 1e9,
      limits->operations / limits->sgemm * 1e3);
  std::vector<double> ratios;
  double worst = 0;
  for (int round = 0; round < rounds; ++round) {
    in_processes(1, [&](int) { run_one(one); });
    in_processes(1, [&](int) {
      keep_freed_memory();
      run_one(kept);
    });
    in_processes(kRanks, [&](int index) {
      pin(index);
      at::set_num_threads(1);
      keep_freed_memory();
      Rank rank(shared, index, rows);
      const Run mine = measure(rank);
      if (index == 0) once = mine;
    });
    worst = larger(worst, larger(largest_difference(one, once), largest_difference(kept, once)));
    ratios.push_back(kept.milliseconds / once.milliseconds);
    std::printf("round %d: one process %.1f ms, keeping memory %.1f ms, layers once %.1f ms: %.2f x, %.2f x\n", round,
                one.milliseconds, kept.milliseconds, once.milliseconds, one.milliseconds / once.milliseconds,
                ratios.back());
    std::fflush(stdout);
  }
  std::ranges::sort(ratios);
  std::printf(
      "median %.2f x of one process that keeps memory; losses from %.4f to %.4f, the largest difference: %.1e\n",
      ratios[ratios.size() / 2], once.losses.front(), once.losses.back(), worst);
  return worst;
}

}  // namespace
}  // namespace lockstep::prototypes

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::max(1, std::atoi(argv[1])) : 5;
  const int64_t rows = argc > 2 ? std::atoi(argv[2]) : 0;
  constexpr double kTolerance = 1e-4;
  return lockstep::prototypes::compare(rounds, rows) <= kTolerance ? 0 : 1;
}
