// SPDX-License-Identifier: Apache-2.0
#include "bench/data/measure.h"

#include <fcntl.h>
#include <unistd.h>

#include <cmath>
#include <fstream>

#include <ATen/Parallel.h>

#include "bench/harness.h"
#include "lockstep/base/file.h"
#include "lockstep/data/images/encoded_image.h"
#include "lockstep/data/loader/random.h"
#include "lockstep/data/packed/packed_records.h"
#include "lockstep/datasets.h"
#include "lockstep/deadline.h"
#include "lockstep/error.h"
#include "lockstep/loader.h"
#include "lockstep/models.h"
#include "lockstep/sampler.h"
#include "lockstep/strategy.h"

namespace lockstep::bench {
namespace {

constexpr std::int64_t kBatch = 256;

double resident_bytes() {
  std::ifstream file("/proc/self/statm");
  double all = 0;
  double resident = 0;
  file >> all >> resident;
  return resident * static_cast<double>(::sysconf(_SC_PAGESIZE));
}

double run_epoch(Loader& loader, std::int64_t epoch) {
  const Stopwatch watch;
  std::int64_t samples = 0;
  for (const Batch& batch : loader.epoch(epoch)) samples += batch.size();
  return static_cast<double>(samples) / watch.seconds();
}

// Waves with noise: about as many bytes as a photograph of this size has.
std::vector<std::uint8_t> photograph(std::int64_t height, std::int64_t width, std::int64_t index) {
  SampleRandom random(7, index);
  const double down = random.uniform(0.01, 0.1);
  const double across = random.uniform(0.01, 0.1);
  std::vector<std::uint8_t> pixels;
  for (std::int64_t y = 0; y < height; ++y)
    for (std::int64_t x = 0; x < width; ++x)
      for (int c = 0; c < 3; ++c)
        pixels.push_back(static_cast<std::uint8_t>(
            110 + 80 * std::sin(down * static_cast<double>(y) + across * static_cast<double>(x) + c) + random() % 24));
  return pixels;
}

template <class Visit>
void for_each_shard(const std::filesystem::path& folder, Visit&& visit) {
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const UniqueFd fd(::open(entry.path().c_str(), O_RDONLY | O_CLOEXEC));
    if (!fd) throw system_error("open", entry.path());
    visit(fd.get());
  }
}

void drop_from_page_cache(const std::filesystem::path& folder) {
  for_each_shard(folder, [](int fd) { ::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED); });
}

// One block of steps; seconds per step.
template <class NextBatch>
double block_of_steps(Strategy& strategy, int steps, NextBatch&& next_batch) {
  const Stopwatch watch;
  for (int step = 0; step < steps; ++step) {
    strategy.forward_backward(next_batch());
    strategy.update();
  }
  return watch.seconds() / steps;
}

StepSeconds measure_rank(World& world, int blocks) {
  constexpr int kSteps = 20;
  at::set_num_threads(1);
  const auto strategy = make_strategy(world, classification_task<LeNet>("lenet"),
                                      {.kind = StrategyKind::kDdp, .optimizer = SGDOptions{.lr = 0.01}});
  Loader loader = make_loader(world, FashionMNIST(), {.batch_size = kBatch, .seed = 1});
  std::vector<double> loaded;
  std::vector<double> repeated;
  Batch kept;
  for (int block = 0; block <= blocks; ++block) {
    auto batch = loader.epoch(block).begin();
    if (block == 0) kept = {(*batch).data.clone(), (*batch).target.clone()};
    const double with_loading = block_of_steps(*strategy, kSteps, [&]() -> Batch& { return *++batch; });
    const double without = block_of_steps(*strategy, kSteps, [&]() -> Batch& { return kept; });
    if (block == 0) continue;  // warms up
    loaded.push_back(with_loading);
    repeated.push_back(without);
  }
  return {median(loaded), median(repeated)};
}

}  // namespace

std::vector<double> epoch_rates(const std::shared_ptr<const Dataset>& dataset, int workers, int epochs,
                                std::int64_t batch_size) {
  Loader loader(World::single(), dataset, {.batch_size = batch_size, .seed = 1, .workers = workers, .prefetch = 4});
  run_epoch(loader, 0);
  std::vector<double> rates;
  for (int epoch = 1; epoch <= epochs; ++epoch) rates.push_back(run_epoch(loader, epoch));
  return rates;
}

std::vector<double> memory_after_epochs(const std::shared_ptr<const Dataset>& dataset, int workers, int epochs) {
  Loader loader(World::single(), dataset, {.batch_size = kBatch, .seed = 1, .workers = workers});
  std::vector<double> bytes;
  for (int epoch = 0; epoch < epochs; ++epoch) {
    run_epoch(loader, epoch);
    bytes.push_back(resident_bytes());
  }
  return bytes;
}

void write_photographs(const std::filesystem::path& folder, int count) {
  constexpr std::int64_t kHeight = 375;
  constexpr std::int64_t kWidth = 500;
  for (int i = 0; i < count; ++i) {
    const auto in = folder / (i % 2 == 0 ? "even" : "odd");
    std::filesystem::create_directories(in);
    const auto file = encode_jpeg(photograph(kHeight, kWidth, i).data(), kHeight, kWidth, 90);
    std::ofstream out(in / (std::to_string(i) + ".jpg"), std::ios::binary);
    out.write(reinterpret_cast<const char*>(file.data()), static_cast<std::streamsize>(file.size()));
    if (!out) throw system_error("write", in);
  }
}

void write_records(const std::filesystem::path& folder, std::uint64_t bytes) {
  std::vector<std::uint8_t> payload(std::size_t{112} << 10);
  RecordWriter writer(folder);
  for (std::uint64_t i = 0; i * payload.size() < bytes; ++i) {
    SampleRandom random(3, static_cast<std::int64_t>(i));
    for (std::uint8_t& byte : payload) byte = static_cast<std::uint8_t>(random());
    writer.add({.target = 0, .encoded = true, .payload = payload});
  }
  writer.finish({.name = "records", .classes = 1});
}

double record_rate(const std::filesystem::path& folder, bool cold, std::uint64_t seed) {
  constexpr std::int64_t kWindow = 1024;
  constexpr std::int64_t kAhead = 64;
  if (cold) drop_from_page_cache(folder);
  const Stopwatch watch;
  const RecordReader records(folder);
  const auto order = window_order(records.shard_sizes(), kWindow)->draw(seed, 0);
  std::uint64_t bytes = 0;
  const auto part = [&](std::int64_t begin) {
    const std::int64_t end = std::min(begin + kAhead, records.size());
    std::vector<std::int64_t> batch(std::max<std::int64_t>(end - begin, 0));
    order(begin, batch);
    return batch;
  };
  for (std::int64_t begin = 0; begin < records.size(); begin += kAhead) {
    records.will_read(part(begin + kAhead));
    for (const std::int64_t index : part(begin)) bytes += records.read(index).payload.size();
  }
  return static_cast<double>(bytes) / watch.seconds();
}

double file_rate(const std::filesystem::path& folder, bool cold) {
  if (cold) drop_from_page_cache(folder);
  std::vector<char> buffer(std::size_t{1} << 20);
  double bytes = 0;
  const Stopwatch watch;
  for_each_shard(folder, [&](int fd) {
    for (;;) {
      const ssize_t got = ::read(fd, buffer.data(), buffer.size());
      if (got <= 0) return;
      bytes += static_cast<double>(got);
    }
  });
  return bytes / watch.seconds();
}

StepSeconds lenet_step(int ranks, int blocks) {
  StepSeconds found{};
  run_ranks(ranks, [&](World& world) {
    const StepSeconds mine = measure_rank(world, blocks);
    if (world.rank() == 0) found = mine;
  });
  return found;
}

}  // namespace lockstep::bench
