// SPDX-License-Identifier: Apache-2.0
// lockstep-bench: `lockstep bench NAME`: finds the benchmark. Each one has a file of its name in bench/.
#include <array>
#include <iomanip>

#include "bench/harness.h"
#include "lockstep/base/command_line.h"
#include "lockstep/base/names.h"
#include "lockstep/train/end_process.h"

namespace lockstep::bench {
namespace {

struct Benchmark {
  std::string_view name;
  std::string_view description;
  int (*function)(int argc, const char* const* argv);
};

constexpr auto kBenchmarks = std::to_array<Benchmark>({
    {"collectives", "every collective against Gloo, Open MPI and MPICH", bench_collectives},
    {"step", "a data-parallel training step against PyTorch's", bench_step},
    {"scaling", "a training step on more and more cores, beside PyTorch in one process", bench_scaling},
    {"data", "loading against PyTorch's DataLoader and torchvision", bench_data},
    {"hosts", "collectives over several hosts against Gloo; needs root", bench_hosts},
    {"memory", "memory of a pipeline's stages against its minimum", bench_memory},
    {"plan", "forecasts of lockstep plan against measurements", bench_plan},
});

int print_help() {
  std::cout << "usage: lockstep bench NAME [OPTIONS]      (lockstep bench NAME --help says more)\n\n";
  for (const Benchmark& benchmark : kBenchmarks)
    std::cout << "  " << std::left << std::setw(13) << benchmark.name << benchmark.description << '\n';
  return 0;
}

int run(int argc, const char* const* argv) {
  const std::string_view name = argc > 1 ? argv[1] : "--help";
  if (name == "--help" || name == "-h") return print_help();
  return row_named(kBenchmarks, name, "lockstep bench").function(argc - 1, argv + 1);
}

}  // namespace
}  // namespace lockstep::bench

int main(int argc, char** argv) {
  return lockstep::end_process_with(lockstep::guarded([&] { return lockstep::bench::run(argc, argv); }));
}
