// SPDX-License-Identifier: Apache-2.0
// Every strategy whose devices are threads, while one of them is slow, throws or hangs in the middle of a step.
#include <atomic>
#include <filesystem>
#include <thread>

#include "lockstep/deadline.h"
#include "lockstep/devices.h"
#include "lockstep/error.h"
#include "tests/shm/support.h"
#include "tests/strategies.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using namespace testing;
using namespace std::chrono_literals;

// A layer that first calls `fault` with the number of its samples, by which a test recognises the device.
struct FaultyTanhImpl : torch::nn::Module {
  explicit FaultyTanhImpl(std::function<void(int64_t samples)> fault) : fault_(std::move(fault)) {}
  torch::Tensor forward(const torch::Tensor& x) {
    fault_(x.size(0));
    return x.tanh();
  }

 private:
  std::function<void(int64_t)> fault_;
};
TORCH_MODULE(FaultyTanh);

Task faulty_task(const std::function<void(int64_t samples)>& fault) {
  Task task = small_task();
  task.make_model = [fault] {
    torch::nn::Sequential net(torch::nn::Linear(6, 8), FaultyTanh(fault), torch::nn::Linear(8, 4));
    net->to(torch::kFloat64);
    return net.ptr();
  };
  return task;
}

// A strategy, and the device that has the fault: the only one whose layer gets `samples` samples.
struct Arrangement {
  std::string name;
  StrategyOptions options;
  std::string device = "cpu:2";
  int64_t samples = 4;  // of a batch of 10 on three devices
  int64_t batch = kBatch;
};

void PrintTo(const Arrangement& arrangement, std::ostream* out) { *out << arrangement.name; }

const SGDOptions kSgd{.lr = 0.1};
const std::vector<Arrangement> kArrangements = {
    {"towers", {.kind = StrategyKind::kTowers, .optimizer = kSgd, .seed = 4, .devices = 3}},
    {"towers_updated_on_the_cpu",
     {.kind = StrategyKind::kTowers, .optimizer = kSgd, .seed = 4, .devices = 3, .towers = {.update = UpdateOn::kCpu}}},
    {"data_parallel", {.kind = StrategyKind::kDataParallel, .optimizer = kSgd, .seed = 4, .devices = 3}},
    {"averaging",
     {.kind = StrategyKind::kAveraging, .optimizer = kSgd, .seed = 4, .devices = 3, .averaging = {.every = 2}}},
    {"kvstore_update_cpu",
     {.kind = StrategyKind::kKVStore,
      .optimizer = kSgd,
      .seed = 4,
      .devices = 3,
      .kvstore = {.kind = KVStoreKind::kLocalUpdateCpu}}},
    {"kvstore_allreduce_cpu",
     {.kind = StrategyKind::kKVStore,
      .optimizer = kSgd,
      .seed = 4,
      .devices = 3,
      .kvstore = {.kind = KVStoreKind::kLocalAllReduceCpu}}},
    {"pipeline",
     {.kind = StrategyKind::kPipeline,
      .optimizer = kSgd,
      .seed = 4,
      .devices = 3,
      .pipeline = {.stages = "0-0,1-1,2-2", .micro_batches = 1}},
     "cpu:1",
     kBatch},
    {"pipeline_of_replicas",
     {.kind = StrategyKind::kPipeline,
      .optimizer = kSgd,
      .seed = 4,
      .devices = 4,
      .pipeline = {.stages = "0-0,1-2", .micro_batches = 1}},
     "cpu:3",
     6,
     11},
};

class StrategyDevices : public ::testing::TestWithParam<Arrangement> {
 protected:
  // The faulty device calls `fault` in every forward.
  Task task(const std::function<void()>& fault) const {
    return faulty_task([fault, wanted = GetParam().samples](int64_t samples) {
      if (samples == wanted) fault();
    });
  }
  Batch batch(int step) const { return batch_of(step, GetParam().batch); }
};
INSTANTIATE_TEST_SUITE_P(Faults, StrategyDevices, ::testing::ValuesIn(kArrangements),
                         [](const auto& test) { return test.param.name; });

TEST_P(StrategyDevices, wait_for_a_slow_one) {
  std::atomic<int> turns{0};
  const auto dawdle = [&turns] {
    ++turns;
    std::this_thread::sleep_for(5ms);
  };
  const Course slow = course_of(task(dawdle), GetParam().options, 4, GetParam().batch);
  EXPECT_EQ(turns, 4);
  expect_same_bits(slow, course_of(task([] {}), GetParam().options, 4, GetParam().batch));
}

TEST_P(StrategyDevices, end_with_the_exception_of_one) {
  std::atomic<bool> throws{false};
  const Stopwatch watch;
  {
    const auto faulty = task([&throws] {
      if (throws) throw DataError({.what = "thrown on one device"});
    });
    const auto strategy = make_strategy(World::single(), faulty, GetParam().options);
    strategy->forward_backward(batch(0));
    strategy->update();
    throws = true;
    EXPECT_TRUE(contains(message_of<DataError>([&] { strategy->forward_backward(batch(1)); }), "thrown on one device"));
    EXPECT_TRUE(
        contains(message_of<UsageError>([&] { strategy->forward_backward(batch(2)); }), "after one of them failed"));
  }
  EXPECT_LT(watch.seconds(), testing::kAtOnce);
}

ptrdiff_t threads_of_this_process() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/task"), {});
}

// The thread that is left behind outlives the strategy: what it uses must still be there when its function returns.
TEST_P(StrategyDevices, name_the_one_that_hangs) {
  const auto go_on = std::make_shared<std::atomic<bool>>(false);
  std::thread([] {}).join();  // with the first thread, a sanitizer starts one of its own
  const ptrdiff_t threads_before = threads_of_this_process();
  const auto hang = [go_on] {
    while (!*go_on) std::this_thread::sleep_for(1ms);
  };
  StrategyOptions options = GetParam().options;
  options.timeout = 200ms * LOCKSTEP_TEST_PATIENCE;
  const Stopwatch watch;
  const auto train = [&] { make_strategy(World::single(), task(hang), options)->forward_backward(batch(0)); };
  EXPECT_TRUE(contains(message_of<PeerLost>(train), GetParam().device + " is not done within "));
  EXPECT_GE(watch.seconds(), 0.2 * LOCKSTEP_TEST_PATIENCE);
  EXPECT_LT(watch.seconds(), testing::kAtOnce);
  EXPECT_EQ(Devices::left_behind(), 1);
  *go_on = true;
  const Deadline deadline = Deadline::after(10s);
  while (threads_of_this_process() > threads_before && !deadline.passed()) std::this_thread::yield();
  EXPECT_LE(threads_of_this_process(), threads_before);
  EXPECT_EQ(Devices::left_behind(), 0);
}

}  // namespace
}  // namespace lockstep
