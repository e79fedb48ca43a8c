// Every strategy whose devices are threads, one of which is slow, throws or hangs in the middle of a step.
#include <atomic>
#include <filesystem>
#include <thread>

#include "lockstep/deadline.h"
#include "lockstep/error.h"
#include "tests/shm/support.h"
#include "tests/strategies.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using namespace testing;
using namespace std::chrono_literals;

// A layer that does something else first: what, depends on how many samples it is given.
struct SpoiltTanhImpl : torch::nn::Module {
  explicit SpoiltTanhImpl(std::function<void(std::int64_t samples)> spoil) : spoil_(std::move(spoil)) {}
  torch::Tensor forward(const torch::Tensor& x) {
    spoil_(x.size(0));
    return x.tanh();
  }

 private:
  std::function<void(std::int64_t)> spoil_;
};
TORCH_MODULE(SpoiltTanh);

Task spoilt_task(const std::function<void(std::int64_t samples)>& spoil) {
  Task task = small_task();
  task.make_model = [spoil] {
    torch::nn::Sequential net(torch::nn::Linear(6, 8), SpoiltTanh(spoil), torch::nn::Linear(8, 4));
    net->to(torch::kFloat64);
    return net.ptr();
  };
  return task;
}

// A strategy; and the device on which the layer is spoilt, which alone gives it so many samples.
struct Arrangement {
  std::string name;
  StrategyOptions options;
  std::string device = "cpu:2";
  std::int64_t samples = 4;  // of a batch of 10 on three devices
  std::int64_t batch = kBatch;
};

void PrintTo(const Arrangement& arrangement, std::ostream* out) { *out << arrangement.name; }

const SGDOptions kSgd{.lr = 0.1};
const std::vector<Arrangement> kArrangements = {
    {"towers", {.kind = StrategyKind::kTowers, .optimizer = kSgd, .seed = 4, .devices = 3}},
    {"towers_updated_on_the_cpu",
     {.kind = StrategyKind::kTowers,
      .optimizer = kSgd,
      .seed = 4,
      .devices = 3,
      .towers = {.update = UpdatePlace::kCpu}}},
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

class DevicesOf : public ::testing::TestWithParam<Arrangement> {
 protected:
  // What the spoilt device does instead, whenever it is its turn.
  Task task(const std::function<void()>& instead) const {
    return spoilt_task([instead, wanted = GetParam().samples](std::int64_t samples) {
      if (samples == wanted) instead();
    });
  }
  Batch batch(int step) const { return batch_of(step, GetParam().batch); }
};
INSTANTIATE_TEST_SUITE_P(Faults, DevicesOf, ::testing::ValuesIn(kArrangements),
                         [](const auto& test) { return test.param.name; });

TEST_P(DevicesOf, which_one_is_slow_wait_for_it_and_train_as_ever) {
  std::atomic<int> turns{0};
  const auto dawdle = [&turns] {
    ++turns;
    std::this_thread::sleep_for(5ms);
  };
  const Course slow = course_of(task(dawdle), GetParam().options, 4, GetParam().batch);
  EXPECT_EQ(turns, 4);
  expect_same_bits(slow, course_of(task([] {}), GetParam().options, 4, GetParam().batch));
}

TEST_P(DevicesOf, which_one_throws_all_end_with_its_exception_within_a_second) {
  std::atomic<bool> throws{false};
  const Stopwatch watch;
  {
    const auto spoilt = task([&throws] {
      if (throws) throw DataError({.what = "thrown on one device"});
    });
    const auto strategy = make_strategy(World::single(), spoilt, GetParam().options);
    strategy->forward_backward(batch(0));
    strategy->update();
    throws = true;
    EXPECT_TRUE(contains(message_of<DataError>([&] { strategy->forward_backward(batch(1)); }), "thrown on one device"));
    EXPECT_TRUE(
        contains(message_of<UsageError>([&] { strategy->forward_backward(batch(2)); }), "after one of them failed"));
  }
  EXPECT_LT(watch.seconds(), 1.0 * LOCKSTEP_TEST_PATIENCE);
}

std::ptrdiff_t threads_of_this_process() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/task"), {});
}

// What the thread that is left behind uses must still be there when it comes to its end.
TEST_P(DevicesOf, which_one_hangs_name_it_within_the_timeout_and_are_gone_before_it) {
  const auto go_on = std::make_shared<std::atomic<bool>>(false);
  std::thread([] {}).join();  // with the first one a sanitizer starts one of its own
  const std::ptrdiff_t threads_before = threads_of_this_process();
  const auto hang = [go_on] {
    while (!*go_on) std::this_thread::sleep_for(1ms);
  };
  StrategyOptions options = GetParam().options;
  options.timeout = 200ms * LOCKSTEP_TEST_PATIENCE;
  const Stopwatch watch;
  const auto train = [&] { make_strategy(World::single(), task(hang), options)->forward_backward(batch(0)); };
  EXPECT_TRUE(contains(message_of<PeerLost>(train), GetParam().device + " is not done within "));
  EXPECT_GE(watch.seconds(), 0.2 * LOCKSTEP_TEST_PATIENCE);
  EXPECT_LT(watch.seconds(), 1.0 * LOCKSTEP_TEST_PATIENCE);
  *go_on = true;
  const Deadline deadline = Deadline::after(10s);
  while (threads_of_this_process() > threads_before && !deadline.passed()) std::this_thread::yield();
  EXPECT_LE(threads_of_this_process(), threads_before);
}

}  // namespace
}  // namespace lockstep
