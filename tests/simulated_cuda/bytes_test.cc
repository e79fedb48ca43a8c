// SPDX-License-Identifier: Apache-2.0
// The bytes that a step of each strategy moves, formula by formula as docs/design/gpus.md has them.
#include <gtest/gtest.h>

#include <map>
#include <mutex>

#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "tests/simulated_cuda/gpu_strategies.h"

namespace lockstep {
namespace {

using namespace testing;

// Of one device, in one step.
struct Bytes {
  int64_t up = 0, down = 0;  // between host and device
  int64_t out = 0;           // to other devices
  int64_t staged = 0;        // to other devices, by the driver over the host
  bool operator==(const Bytes&) const = default;
};
void PrintTo(const Bytes& bytes, std::ostream* out) {
  *out << bytes.up << " up, " << bytes.down << " down, " << bytes.out << " out, " << bytes.staged << " staged";
}

Bytes bytes_of(int device) {
  const SimulatedCudaCounters counters = counted(device);
  return {static_cast<int64_t>(counters.host_to_device), static_cast<int64_t>(counters.device_to_host),
          static_cast<int64_t>(counters.device_to_device), static_cast<int64_t>(counters.staged)};
}

// ---- Devices of one process. N devices, K bytes of gradients, b samples

constexpr int64_t kK = kModelBytes, kNumber = 8;

int64_t batch_bytes(int64_t samples) { return samples * (kWidth * 8 + kNumber); }

// Devices that take the sum from this one on its way down the tree.
int64_t children(int device, int devices) {
  int64_t count = 0;
  for (int distance = 1; distance < devices; distance *= 2)
    if (device % (2 * distance) == 0 && device + distance < devices) ++count;
  return count;
}

int64_t sent_to_devices(const std::string& name, int device, int devices) {
  const int64_t n = devices, outputs = kSamples / n * kWidth * 8;
  const int64_t through_device_0 = device == 0 ? (n - 1) * kK : kK;
  if (n == 1 || name.ends_with("cpu")) return 0;
  if (name == "towers_direct" || name == "towers_ring") return 2 * (n - 1) * kK / n;
  if (name == "towers_tree") return (device == 0 ? 0 : kK) + children(device, devices) * kK;
  if (name == "data_parallel") return through_device_0 + (device == 0 ? (n - 1) * outputs : outputs);
  return through_device_0;
}

Bytes expected(const std::string& name, int device, int devices) {
  const bool over_host = name.ends_with("cpu");
  Bytes bytes{.up = batch_bytes(kSamples / devices), .down = kNumber, .out = sent_to_devices(name, device, devices)};
  if (over_host) bytes.up += kK, bytes.down += kK;
  if (name == "data_parallel" && device == 0) bytes.up += kSamples * kNumber;  // all targets
  if (name == "data_parallel" && device > 0) bytes.down = 0;                   // the loss is device 0's
  return bytes;
}

class BytesOfDevices : public ::testing::TestWithParam<GpuArrangement> {
 protected:
  // Makes two steps, the second of which is counted.
  void train(int devices) const {
    const auto strategy = strategy_on_gpus(GetParam().options, devices);
    train_step(*strategy);
    simulated_cuda_reset_counters();
    train_step(*strategy);
  }
};
INSTANTIATE_TEST_SUITE_P(Strategies, BytesOfDevices, ::testing::ValuesIn(arrangements_of_replicas()),
                         [](const auto& test) { return test.param.name; });

TEST_P(BytesOfDevices, are_those_of_the_formulas) {
  for (const int devices : {1, 2, 3, 4}) {
    train(devices);
    for (int device = 0; device < devices; ++device)
      EXPECT_EQ(bytes_of(device), expected(GetParam().name, device, devices)) << device << " of " << devices;
  }
}

// A replica's parameters are one block. Beside it each device gets data and target, and gives its loss.
TEST(CopiesOfDevices, in_averaging_are_one_for_each_model_that_moves) {
  for (const int devices : {1, 2, 3, 4}) {
    const auto strategy =
        strategy_on_gpus({.kind = StrategyKind::kAveraging, .optimizer = SGDOptions{.lr = 0.1}, .seed = 4}, devices);
    train_step(*strategy);
    simulated_cuda_reset_counters();
    train_step(*strategy);
    EXPECT_EQ(counted().copies, to_size(2 * (devices - 1) + 3 * devices)) << devices;
  }
}

// What went from peer to peer goes up and down. Outputs of data_parallel are copied by libtorch, which leaves the way to the driver.
TEST_P(BytesOfDevices, without_peer_access_go_over_the_host) {
  for (const int peer : {0, 2}) simulated_cuda_peer_access(1, peer, 0), simulated_cuda_peer_access(peer, 1, 0);
  simulated_cuda_peer_access(0, 2, 0), simulated_cuda_peer_access(2, 0, 0);
  train(3);
  for (const int one : {0, 1, 2})
    for (const int other : {0, 1, 2})
      if (one != other) simulated_cuda_peer_access(one, other, 1);
  Bytes sum, formula;
  for (int device = 0; device < 3; ++device) {
    const Bytes moved = bytes_of(device), with_access = expected(GetParam().name, device, 3);
    sum = {sum.up + moved.up, sum.down + moved.down, sum.out + moved.out, sum.staged + moved.staged};
    formula.up += with_access.up + with_access.out;
    formula.down += with_access.down + with_access.out;
  }
  formula.staged = GetParam().name == "data_parallel" ? 2 * (kSamples * kWidth * 8 * 2 / 3) : 0;
  formula.up -= formula.staged, formula.down -= formula.staged;
  EXPECT_EQ(sum, formula);
}

// ---- Stages of one process

constexpr int64_t kActivations = kSamples * kHidden * 8;  // between the first linear layer and the second

std::map<int, Bytes> bytes_of_stages(int devices, StrategyOptions options) {
  options.kind = StrategyKind::kPipeline;
  options.optimizer = SGDOptions{.lr = 0.1};
  options.pipeline = {.stages = "0-1,2-2", .micro_batches = 3};
  const auto strategy = strategy_on_gpus(options, devices);
  train_step(*strategy);
  simulated_cuda_reset_counters();
  train_step(*strategy);
  std::map<int, Bytes> all;
  for (int device = 0; device < devices; ++device) all[device] = bytes_of(device);
  return all;
}

// The first stage gets the data, the last one the targets; it gives the loss of each micro-batch.
TEST(BytesOfStages, in_one_process_are_activations_and_their_gradients) {
  EXPECT_EQ(bytes_of_stages(2, {.seed = 4}),
            (std::map<int, Bytes>{{0, {.up = kSamples * kWidth * 8, .out = kActivations}},
                                  {1, {.up = kSamples * kNumber, .down = 3 * kNumber, .out = kActivations}}}));
}

TEST(BytesOfStages, with_clipping_are_a_norm_of_each_besides) {
  const auto plain = bytes_of_stages(2, {.seed = 4});
  for (auto [device, bytes] : bytes_of_stages(2, {.clipping = {.max_norm = 1}, .seed = 4})) {
    bytes.down -= kNumber;
    EXPECT_EQ(bytes, plain.at(device)) << device;
  }
}

// Replicas of a stage give their gradients to the first one, and get its parameters.
TEST(BytesOfStages, with_replicas_are_gradients_and_parameters_besides) {
  constexpr int64_t kFirst = 8 * (kWidth * kHidden + kHidden), kLast = kK - kFirst;
  for (const auto& [device, bytes] : bytes_of_stages(4, {.seed = 4})) {
    const Bytes first{.up = kSamples / 2 * kWidth * 8, .out = kActivations / 2 + kFirst};
    const Bytes last{.up = kSamples / 2 * kNumber, .down = 3 * kNumber, .out = kActivations / 2 + kLast};
    EXPECT_EQ(bytes, device % 2 == 0 ? first : last) << device;
  }
}

// ---- A rank for each GPU

struct BytesOfRank {
  Bytes bytes;
  int64_t exchanged = 0;  // given to collectives and messages
};

// In a step whose batch is on the GPU already. By rank.
std::map<int, BytesOfRank> bytes_between_ranks(int ranks, const StrategyOptions& options) {
  std::map<int, BytesOfRank> all;
  std::mutex mutex;
  run_ranks_on_gpus(ranks, [&](World& world) {
    const auto strategy = make_strategy(world, even_task(), options);
    const Batch whole = even_batch(), mine = part_of(whole, strategy->ranks(world).data);
    const Batch batch{mine.data.to(world.device()), mine.target.to(world.device())};
    train_step(*strategy, batch);
    train_step(*strategy, batch);
    world.barrier();
    if (world.rank() == 0) simulated_cuda_reset_counters();
    world.barrier();
    train_step(*strategy, batch);
    const std::lock_guard lock(mutex);
    all[world.rank()] = {bytes_of(world.rank()), static_cast<int64_t>(counted(world.rank()).collectives)};
  });
  return all;
}

// The numbers that are summed in an exchange beside a bucket: samples, ranks that count and that stop, the loss; calls and two
// halves of a hash, each with its square; and two for each rank.
int64_t totals(int ranks) { return 4 + 3 * 2 + 2 * ranks; }

// A bucket has the gradients and a number for each of the four tensors. Each rank then gives its slice of the parameters.
TEST(BytesOfRanks, in_ddp_are_gradients_and_some_numbers) {
  for (const int ranks : {2, 3, 4})
    for (const auto& [rank, each] : bytes_between_ranks(ranks, {.optimizer = SGDOptions{.lr = 0.1}, .seed = 4})) {
      EXPECT_EQ(each.exchanged, kK + kK / ranks + (4 + totals(ranks)) * kNumber) << rank << " of " << ranks;
      EXPECT_EQ(each.bytes, (Bytes{.up = totals(ranks) * kNumber, .down = totals(ranks) * kNumber}))
          << rank << " of " << ranks;
    }
}

// Clipping by norm needs a norm for each part of a tensor that lies in one slice: 4 tensors that the slices cut in ranks - 1 places
// at most.
TEST(BytesOfRanks, in_ddp_with_clipping_are_norms_besides) {
  for (const int ranks : {2, 3, 4})
    for (const auto& [rank, each] :
         bytes_between_ranks(ranks, {.optimizer = SGDOptions{.lr = 0.1}, .clipping = {.max_norm = 1}, .seed = 4})) {
      EXPECT_EQ(each.exchanged, kK + kK / ranks + (4 + totals(ranks) + 4 + ranks - 1) * kNumber)
          << rank << " of " << ranks;
      EXPECT_EQ(each.bytes, (Bytes{.up = totals(ranks) * kNumber, .down = (totals(ranks) + 1) * kNumber}))
          << rank << " of " << ranks;
    }
}

// Without slices each rank gives the gradients only.
TEST(BytesOfRanks, in_ddp_with_separate_parameters_are_gradients_and_some_numbers) {
  for (const auto& [rank, each] :
       bytes_between_ranks(3, {.optimizer = SGDOptions{.lr = 0.1}, .seed = 4, .ddp = {.share_parameters = false}})) {
    EXPECT_EQ(each.exchanged, kK + (4 + totals(3)) * kNumber) << rank;
    EXPECT_EQ(each.bytes, (Bytes{.up = totals(3) * kNumber, .down = totals(3) * kNumber})) << rank;
  }
}

// Activations forward, their gradients back; the last stage has the loss of each micro-batch.
TEST(BytesOfRanks, in_a_pipeline_are_activations_and_their_gradients) {
  const auto all = bytes_between_ranks(2, {.kind = StrategyKind::kPipeline,
                                           .optimizer = SGDOptions{.lr = 0.1},
                                           .seed = 4,
                                           .pipeline = {.stages = "0-1,2-2", .micro_batches = 3}});
  for (const auto& [rank, each] : all) {
    EXPECT_EQ(each.exchanged, kSamples * kHidden * 8) << rank;
    EXPECT_EQ(each.bytes, (Bytes{.down = rank == 1 ? 3 * kNumber : 0})) << rank;
  }
}

// ---- Processes whose GPUs exchange over the host: ranks on the CPU, each with one GPU

std::map<int, Bytes> bytes_over_hosts(int ranks, int servers, StrategyOptions options) {
  options.seed = 4;
  options.optimizer = SGDOptions{.lr = 0.1};
  std::map<int, Bytes> all;
  std::mutex mutex;
  run_ranks(ranks, [&](World& world) {
    StrategyOptions mine = options;
    const int gpu = world.rank() - servers;
    if (gpu >= 0) mine.places = {{.device = {torch::kCUDA, static_cast<c10::DeviceIndex>(gpu)}}};
    const auto strategy = make_strategy(world, even_task(), mine);
    const World share = strategy->ranks(world).data;
    const auto step = [&] { train_step(*strategy, part_of(even_batch(), *strategy, share)); };
    step();
    world.barrier();
    if (world.rank() == 0) simulated_cuda_reset_counters();
    world.barrier();
    step();
    const std::lock_guard lock(mutex);
    if (gpu >= 0) all[gpu] = bytes_of(gpu);
  });
  return all;
}

TEST(BytesOverHosts, of_averaging_are_the_model_up_and_down) {
  for (const auto& [gpu, bytes] : bytes_over_hosts(2, 0, {.kind = StrategyKind::kAveraging}))
    EXPECT_EQ(bytes, (Bytes{.up = batch_bytes(kSamples / 2) + kK, .down = kNumber + kK})) << gpu;
}

TEST(BytesOverHosts, of_servers_are_gradients_down_and_weights_up) {
  const StrategyOptions dist_sync{.kind = StrategyKind::kKVStore, .kvstore = {.kind = KVStoreKind::kDistSync}};
  for (const auto& [gpu, bytes] : bytes_over_hosts(3, 1, dist_sync))
    EXPECT_EQ(bytes, (Bytes{.up = batch_bytes(kSamples / 2) + kK, .down = kNumber + kK})) << gpu;
}

}  // namespace
}  // namespace lockstep
