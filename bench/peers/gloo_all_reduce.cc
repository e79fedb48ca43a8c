// c10d's Gloo from C++, as `lockstep run --nproc-per-node 2 -- gloo_all_reduce MAX_BYTES`: a line "bytes seconds" per size,
// median of the rounds of the slowest rank.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include <ATen/Parallel.h>

#include "lockstep/base/deadline.h"
#include "lockstep/collective/c10d_transport.h"
#include "lockstep/collective/rendezvous.h"

namespace {

using namespace lockstep;

constexpr int kRounds = 9;

void all_reduce(Transport& gloo, const torch::Tensor& tensor, ReduceOp op = ReduceOp::kSum) {
  gloo.run({.operation = Operation::kAllReduce, .input = tensor, .output = tensor, .op = op});
}

double slowest(Transport& gloo, double seconds) {
  const torch::Tensor tensor = torch::full({1}, seconds, torch::kFloat64);
  all_reduce(gloo, tensor, ReduceOp::kMax);
  return tensor.item<double>();
}

double measure(Transport& gloo, const torch::Tensor& tensor) {
  const int repeats = static_cast<int>(std::clamp<std::int64_t>((4 << 20) / (4 * tensor.numel()), 1, 50));
  std::vector<double> rounds;
  for (int round = 0; round <= kRounds; ++round) {
    tensor.fill_(1e-3);
    slowest(gloo, 0);
    const Stopwatch watch;
    for (int i = 0; i < repeats; ++i) all_reduce(gloo, tensor);
    const double seconds = slowest(gloo, watch.seconds() / repeats);
    if (round > 0) rounds.push_back(seconds);  // the first warms up
  }
  std::nth_element(rounds.begin(), rounds.begin() + kRounds / 2, rounds.end());
  return rounds[kRounds / 2];
}

}  // namespace

int main(int, char** argv) {
  at::set_num_threads(1);
  const JobEnvironment job = read_job_environment();
  const auto timeout = std::chrono::minutes(1);
  const auto gloo = make_gloo(connect_store(job, timeout), {.rank = job.rank, .size = job.world_size});
  const std::int64_t max_bytes = std::atoll(argv[1]);
  for (std::int64_t bytes = 4; bytes <= max_bytes; bytes *= 4) {
    const double seconds = measure(*gloo, torch::empty({bytes / 4}));
    if (job.rank == 0) std::printf("%lld %.9f\n", static_cast<long long>(bytes), seconds);
  }
}
