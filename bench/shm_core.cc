// bench/shm_core.cc: what the shared-memory core reaches on this machine: all_reduce over sizes, ranks and kinds of
// memory, beside what copying memory costs in the same run.
//
//   shm_core [--ranks 2,4,8] [--max-bytes 268435456] [--algorithm direct|central|ring|tree]
//            [--staging-bytes N]
//
// Every figure is the median over rounds of the slowest rank's time per call. Ranks are processes, each on its
// own share of the cores.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "lockstep/base/cores.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/collective/shm/rendezvous.h"

namespace {

using namespace lockstep;
using namespace lockstep::shm;

struct Settings {
  std::vector<int> ranks{2, 4, 8};
  std::size_t max_bytes = std::size_t{256} << 20;
  Algorithm algorithm = Algorithm::kDirect;
  Options options{};
};

constexpr int kRounds = 9;

double slowest(Group& group, double seconds) {
  group.all_reduce({.input = &seconds, .output = &seconds, .count = 1, .dtype = DType::kFloat64, .op = ReduceOp::kMax});
  return seconds;
}

int repeats_for(std::size_t bytes, int ranks) {
  const std::size_t most = ranks > 2 ? 200 : 2000;
  return static_cast<int>(std::clamp<std::size_t>((std::size_t{64} << 20) / std::max<std::size_t>(bytes, 1), 1, most));
}

// Seconds per call, median of the rounds.
double measure(Group& group, int repeats, const std::function<void()>& call) {
  std::vector<double> rounds;
  call();
  for (int round = 0; round < kRounds; ++round) {
    group.barrier();
    const Stopwatch watch;
    for (int i = 0; i < repeats; ++i) call();
    rounds.push_back(slowest(group, watch.seconds() / repeats));
  }
  std::nth_element(rounds.begin(), rounds.begin() + kRounds / 2, rounds.end());
  return rounds[kRounds / 2];
}

void fill(void* data, std::size_t bytes) {
  auto* const floats = static_cast<float*>(data);
  std::fill_n(floats, bytes / sizeof(float), 1e-3F);
}

// The limit to compare with: every rank copies that many bytes at once. In place, an all_reduce between two moves as
// much: K/2 of two arrays in, and out again.
double copy_seconds(Group& group, const std::byte* from, std::byte* to, std::size_t bytes) {
  return measure(group, repeats_for(bytes, group.size()), [=] { std::memcpy(to, from, bytes); });
}

void print_row(Group& group, std::size_t bytes, double arena, double ordinary, double copy) {
  if (group.rank() != 0) return;
  const double gigabytes = static_cast<double>(bytes) / 1e9;
  std::printf("%12zu %12.2f %9.2f %12.2f %9.2f %12.2f %8.0f%%\n", bytes, arena * 1e6, gigabytes / arena, ordinary * 1e6,
              gigabytes / ordinary, copy * 1e6, 100 * copy / arena);
  std::fflush(stdout);
}

void print_head(Group& group, double barrier) {
  if (group.rank() != 0) return;
  std::printf("\n%d ranks, float32 sum in place; barrier %.2f us\n", group.size(), barrier * 1e6);
  std::printf("%12s %12s %9s %12s %9s %12s %9s\n", "bytes", "arena us", "GB/s", "ordinary us", "GB/s", "memcpy us",
              "of limit");
}

void bench_ranks(Group& group, const Settings& settings) {
  Memory arena = group.allocate(settings.max_bytes);
  std::vector<std::byte> ordinary(settings.max_bytes);
  print_head(group, measure(group, group.size() > 2 ? 200 : 5000, [&] { group.barrier(); }));
  for (std::size_t bytes = 4; bytes <= settings.max_bytes; bytes *= 4) {
    fill(arena.data(), bytes);
    fill(ordinary.data(), bytes);
    const int repeats = repeats_for(bytes, group.size());
    const auto reduce_in = [&](std::byte* data) {
      return measure(group, repeats, [&, data] {
        group.all_reduce({.input = data,
                          .output = data,
                          .count = bytes / 4,
                          .op = ReduceOp::kMean,
                          .algorithm = settings.algorithm});
      });
    };
    const double in_arena = reduce_in(arena.data());
    const double in_ordinary = reduce_in(ordinary.data());
    print_row(group, bytes, in_arena, in_ordinary, copy_seconds(group, ordinary.data(), arena.data(), bytes));
  }
}

int run_rank(Host& host, int rank, int size, const Settings& settings) {
  try {
    const Deadline deadline = Deadline::after(std::chrono::seconds(30));
    pin_this_thread(cores_of_rank(usable_cores(), rank, size));
    Group group = rank == 0 ? host.connect(deadline) : join_host(host.address(), rank, size, deadline);
    bench_ranks(group, settings);
    group.leave();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}

int bench_processes(int size, const Settings& settings) {
  Host host(size, settings.options);
  for (int rank = 0; rank < size; ++rank)
    if (::fork() == 0) ::_exit(run_rank(host, rank, size, settings));
  int worst = 0;
  for (int status = 0; ::wait(&status) > 0;) worst = std::max(worst, WEXITSTATUS(status));
  return worst;
}

Algorithm algorithm_named(const std::string& name) {
  for (const Algorithm one : {Algorithm::kDirect, Algorithm::kCentral, Algorithm::kRing, Algorithm::kTree})
    if (to_string(one) == name) return one;
  throw UsageError({.what = "no algorithm " + name, .next = "direct, central, ring or tree"});
}

Settings parse(int argc, char** argv) {
  Settings settings;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    if (name == "--max-bytes") settings.max_bytes = std::stoull(argv[i + 1]);
    if (name == "--staging-bytes") settings.options.staging_bytes = std::stoull(argv[i + 1]);
    if (name == "--algorithm") settings.algorithm = algorithm_named(argv[i + 1]);
    if (name != "--ranks") continue;
    settings.ranks.clear();
    for (const std::string& ranks : split(argv[i + 1], ',')) settings.ranks.push_back(std::stoi(ranks));
  }
  return settings;
}

}  // namespace

int main(int argc, char** argv) {
  const Settings settings = parse(argc, argv);
  int worst = 0;
  for (const int ranks : settings.ranks) worst = std::max(worst, bench_processes(ranks, settings));
  return worst;
}
