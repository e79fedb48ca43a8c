// SPDX-License-Identifier: Apache-2.0
#include "lockstep/loader.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <numeric>
#include <random>
#include <set>
#include <thread>

#include "lockstep/base/to_size.h"
#include "lockstep/data/loader/batch_memory.h"
#include "lockstep/data/loader/prefetch.h"
#include "lockstep/datasets.h"
#include "lockstep/deadline.h"
#include "lockstep/stop_all.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using testing::contains;
using testing::message_of;
using testing::rounds;

using Order = std::vector<int64_t>;

// Sample i is the number i. Bad ones throw; assemble() takes memory from the loader.
class Numbers : public AssembledDataset {
 public:
  explicit Numbers(int64_t size, std::vector<int64_t> bad = {}) : size_(size), bad_(std::move(bad)) {}
  std::string name() const override { return "numbers"; }
  int64_t size() const override { return size_; }
  Batch assemble(const BatchRequest& request) const override {
    const auto count = static_cast<int64_t>(request.indices.size());
    Batch batch{allocate_for_batch(request.memory, {count, 1000}, torch::kFloat32),
                allocate_for_batch(request.memory, {count}, torch::kInt64)};
    for (int64_t i = 0; i < count; ++i) {
      const int64_t index = request.indices[to_size(i)];
      if (std::find(bad_.begin(), bad_.end(), index) != bad_.end())
        throw DataError({.what = "sample " + std::to_string(index) + " is bad", .here = "numbers.bin"});
      std::fill_n(batch.data.data_ptr<float>() + i * 1000, 1000, static_cast<float>(index));
      batch.target.data_ptr<int64_t>()[i] = index;
    }
    return batch;
  }

 private:
  int64_t size_;
  std::vector<int64_t> bad_;
};

Order samples_of(const Batch& batch) {
  const auto* first = batch.target.const_data_ptr<int64_t>();
  return {first, first + batch.size()};
}

// The samples of all ranks from `from` on, at most `steps` batches of each; the position after that.
struct Part {
  Order order;
  LoaderPosition end;
};
Part run_part(int ranks, const std::shared_ptr<const Dataset>& dataset, const LoaderOptions& options,
              const LoaderPosition& from, int64_t steps) {
  std::mutex mutex;
  std::vector<std::vector<Order>> batches(to_size(ranks));
  Part part{.end = from};
  run_ranks(ranks, [&](World& world) {
    Loader loader(world, dataset, options);
    std::vector<Order> mine;
    if (steps > 0)
      for (const Batch& batch : loader.resume(from)) {
        mine.push_back(samples_of(batch));
        if (static_cast<int64_t>(mine.size()) == steps) break;
      }
    const std::lock_guard lock(mutex);
    if (!mine.empty()) part.end = loader.position();
    batches[to_size(world.rank())] = std::move(mine);
  });
  for (size_t step = 0; step < batches[0].size(); ++step)
    for (const auto& of_rank : batches)
      part.order.insert(part.order.end(), of_rank.at(step).begin(), of_rank.at(step).end());
  return part;
}

constexpr int64_t kAll = 1 << 20;  // steps

LoaderOptions random_options(std::mt19937& random) {
  return {.batch_size = 7 + static_cast<int64_t>(random() % 20),
          .workers = static_cast<int>(random() % 4),
          .prefetch = 1 + static_cast<int>(random() % 5)};
}

TEST(Loader, gives_every_sample_once_in_the_same_order_for_any_ranks_and_workers) {
  std::mt19937 random(17);
  for (int round = 25 + rounds("LOCKSTEP_FUZZ_ROUNDS", 0) / 20; round > 0; --round) {
    const auto samples = static_cast<int64_t>(1 + random() % 400);
    LoaderOptions options = random_options(random);
    options.seed = random();
    const LoaderPosition start{.epoch = static_cast<int64_t>(random() % 9)};
    const auto dataset = std::make_shared<Numbers>(samples);
    const Order uninterrupted = run_part(1, dataset, options, start, kAll).order;
    ASSERT_EQ(std::ssize(uninterrupted), samples);

    Order order;
    LoaderPosition position = start;
    while (position.samples < samples) {
      LoaderOptions now = random_options(random);
      now.seed = options.seed;
      const auto ranks = static_cast<int>(1 + random() % 7);
      const Part part = run_part(ranks, dataset, now, position, 1 + static_cast<int64_t>(random() % 8));
      order.insert(order.end(), part.order.begin(), part.order.end());
      position = part.end;
    }
    ASSERT_EQ(order, uninterrupted);
    std::sort(order.begin(), order.end());
    for (int64_t i = 0; i < samples; ++i) ASSERT_EQ(order[to_size(i)], i);
  }
}

TEST(Loader, resumes_in_the_middle_of_an_epoch) {
  Loader loader = make_loader(World::single(), Numbers(10), {.batch_size = 3, .seed = 2});
  std::vector<Order> all;
  for (const Batch& batch : loader.epoch(1)) all.push_back(samples_of(batch));
  ASSERT_EQ(all.size(), 4U);
  EXPECT_EQ(all.back().size(), 1U);
  size_t step = 2;
  for (const Batch& batch : loader.epoch(1, 2)) EXPECT_EQ(samples_of(batch), all[step++]);
  EXPECT_EQ(step, 4U);
}

// A stream of 0, 1, ... length - 1 in epoch 0; later ones begin with 1000, 2000, ...
std::shared_ptr<const Dataset> counting(int64_t samples, int64_t length) {
  return std::make_shared<IterableDataset>("counting", samples, [length](int64_t epoch) {
    return [length, epoch, next = int64_t{0}]() mutable -> std::optional<Batch> {
      if (next == length) return std::nullopt;
      return Batch{torch::zeros({3}), torch::tensor(1000 * epoch + next++)};
    };
  });
}

Order numbers_from(int64_t first, int64_t count) {
  Order numbers(to_size(count));
  std::iota(numbers.begin(), numbers.end(), first);
  return numbers;
}

TEST(IterableDataset, gives_every_sample_once_on_any_ranks_and_workers) {
  for (const int ranks : {1, 2, 3})
    for (const int workers : {0, 1, 3}) {
      const auto dataset = counting(40, 45);
      const LoaderOptions options{.batch_size = 7, .workers = workers};
      for (const int64_t epoch : {0, 1})
        EXPECT_EQ(run_part(ranks, dataset, options, {.epoch = epoch}, kAll).order, numbers_from(1000 * epoch, 40));
    }
}

TEST(IterableDataset, resumes_in_the_middle_of_an_epoch) {
  const Part first = run_part(2, counting(40, 40), {.batch_size = 6}, {.epoch = 1}, 3);
  EXPECT_EQ(first.order, numbers_from(1000, 18));
  EXPECT_EQ(run_part(3, counting(40, 40), {.batch_size = 5, .workers = 2}, first.end, kAll).order,
            numbers_from(1018, 22));
}

TEST(IterableDataset, refuses_a_stream_that_is_too_short_and_another_order) {
  const auto error_of = [](int64_t length, const LoaderOptions& options) {
    Loader loader(World::single(), counting(20, length), options);
    try {
      for (const Batch& batch : loader.epoch(0)) EXPECT_EQ(batch.size(), 5);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_TRUE(contains(error_of(12, {.batch_size = 5}), "counting ended after 12 of 20 samples"));
  EXPECT_TRUE(contains(error_of(20, {.batch_size = 5, .order = random_order(20)}), "leave the order to the stream"));
  EXPECT_THROW(counting(0, 20), UsageError);
}

// 20 samples, of which sample 7 is bad; counts the streams that are opened.
std::shared_ptr<const Dataset> with_a_bad_one(std::atomic<int>& opened) {
  return std::make_shared<IterableDataset>("faulty", 20, [&opened](int64_t) {
    ++opened;
    return [next = int64_t{0}]() mutable -> std::optional<Batch> {
      if (next++ == 7) throw DataError({.what = "sample 7 is bad"});
      return Batch{torch::zeros({3}), torch::tensor(next - 1)};
    };
  });
}

TEST(IterableDataset, goes_on_behind_a_bad_sample) {
  for (const int workers : {0, 2}) {
    std::atomic<int> opened = 0;
    Loader loader(World::single(), with_a_bad_one(opened), {.batch_size = 5, .workers = workers, .skip_bad = 1});
    Order order;
    for (const Batch& batch : loader.epoch(0)) std::ranges::copy(samples_of(batch), std::back_inserter(order));
    Order expected = numbers_from(0, 20);
    std::erase(expected, 7);
    EXPECT_EQ(order, expected);
    EXPECT_EQ(loader.statistics().skipped, 1);
    EXPECT_LE(opened, std::max(1, workers) + 1);  // the batch is read again from its first sample on
  }
}

TEST(IterableDataset, never_skips_the_end_of_a_stream) {
  Loader loader(World::single(), counting(20, 18), {.batch_size = 5, .skip_bad = 20});
  const std::string message = message_of<UsageError>([&] {
    for (const Batch& batch : loader.epoch(0)) EXPECT_EQ(batch.size(), 5);
  });
  EXPECT_TRUE(contains(message, "counting ended after 18 of 20 samples"));
}

TEST(IterableDataset, opens_one_stream_for_all_batches_without_samples_and_one_for_each_reader) {
  std::atomic<int> opened = 0;
  const auto dataset = with_a_bad_one(opened);
  for (int64_t epoch = 0; epoch < 3; ++epoch)
    EXPECT_EQ(dataset->assemble({.indices = {}, .epoch = epoch}).data.sizes(), (std::vector<int64_t>{0, 3}));
  EXPECT_EQ(opened, 1);
  for (int64_t i = 0; i < 6; ++i)
    for (int reader = 0; reader < 2; ++reader) {
      EXPECT_EQ(dataset->make_batch({}).size(), 0);
      EXPECT_EQ(samples_of(dataset->make_batch(std::span(&i, 1))), Order{i});
    }
  EXPECT_EQ(opened, 3);
}

TEST(IterableDataset, refuses_an_open_that_returns_no_stream) {
  const IterableDataset none("none", 20, [](int64_t) { return IterableDataset::Stream(); });
  EXPECT_TRUE(
      contains(message_of<UsageError>([&] { none.make_batch({}); }), "open() of none returned an empty function"));
}

TEST(Loader, never_writes_into_a_batch_that_is_still_held) {
  Loader loader = make_loader(World::single(), Numbers(200), {.batch_size = 4, .workers = 3, .prefetch = 2});
  std::vector<Batch> kept;
  std::vector<torch::Tensor> views;  // keep the memory as well as the tensor itself would
  for (Batch& batch : loader.epoch(0)) {
    if (kept.size() % 2 == 0) views.push_back(batch.data.slice(1, 0, 1));
    kept.push_back(batch);
  }
  for (const Batch& batch : kept)
    EXPECT_TRUE(torch::equal(batch.data, batch.target.to(torch::kFloat32).unsqueeze(1).expand({4, 1000})));
  for (size_t i = 0; i < views.size(); ++i)
    EXPECT_TRUE(torch::equal(views[i].squeeze(1), kept[2 * i].target.to(torch::kFloat32)));
}

TEST(Loader, reuses_the_memory_of_released_batches) {
  Loader loader = make_loader(World::single(), Numbers(4000), {.batch_size = 4, .workers = 2, .prefetch = 3});
  std::set<const void*> places;
  for (Batch& batch : loader.epoch(0)) places.insert(batch.data.data_ptr());
  EXPECT_LE(places.size(), 3U + 2U + 2U);
}

TEST(BatchMemory, outlives_its_pool_and_gives_no_block_out_twice) {
  torch::Tensor first;
  {
    const auto memory = std::make_shared<BatchMemory>(2, /*pinned=*/false);
    first = memory->allocate({16}, torch::kFloat32);
    const torch::Tensor second = memory->allocate({16}, torch::kFloat32);
    EXPECT_NE(first.data_ptr(), second.data_ptr());
  }
  first.fill_(3);
  EXPECT_EQ(first.sum().item<float>(), 48);
}

// Counts how many batches were made and not taken yet.
class Slow : public Numbers {
 public:
  Slow() : Numbers(100) {}
  Batch assemble(const BatchRequest& request) const override {
    ++made;
    return Numbers::assemble(request);
  }
  mutable std::atomic<int> made = 0;
};

TEST(Loader, loads_at_most_prefetch_batches_ahead) {
  const auto dataset = std::make_shared<Slow>();
  Loader loader(World::single(), dataset, {.batch_size = 1, .workers = 2, .prefetch = 5});
  int taken = 0;
  for (const Batch& batch : loader.epoch(0)) {
    EXPECT_EQ(batch.size(), 1);
    ++taken;
    EXPECT_LE(dataset->made, taken + 5);
  }
  EXPECT_EQ(dataset->made, 100);
}

TEST(Loader, ends_an_epoch_in_the_middle_and_starts_another) {
  Loader loader = make_loader(World::single(), Numbers(1000), {.batch_size = 1, .workers = 3, .prefetch = 8});
  for (int epoch = 0; epoch < 50; ++epoch)
    for (const Batch& batch : loader.epoch(epoch)) {
      EXPECT_EQ(batch.size(), 1);
      break;
    }
}

TEST(Loader, rethrows_a_workers_exception_in_the_loop) {
  for (const int workers : {0, 1, 3}) {
    Loader loader =
        make_loader(World::single(), Numbers(20, {13}), {.batch_size = 4, .shuffle = false, .workers = workers});
    int64_t batches = 0;
    const std::string message = message_of<DataError>([&] {
      for (const Batch& batch : loader.epoch(0)) batches += batch.size() / 4;
    });
    EXPECT_EQ(batches, 3);
    EXPECT_TRUE(contains(message, "sample 13 is bad"));
    EXPECT_TRUE(contains(message, "numbers.bin"));
  }
}

TEST(Loader, skips_bad_samples_up_to_a_limit_and_counts_them) {
  for (const int workers : {0, 2}) {
    const LoaderOptions options{.batch_size = 4, .shuffle = false, .workers = workers, .skip_bad = 5};
    Loader loader = make_loader(World::single(), Numbers(12, {0, 4, 5, 6, 7}), options);
    std::vector<Order> batches;
    for (const Batch& batch : loader.epoch(0)) batches.push_back(samples_of(batch));
    EXPECT_EQ(batches, (std::vector<Order>{{1, 2, 3}, {}, {8, 9, 10, 11}}));
    EXPECT_EQ(loader.statistics().skipped, 5);
    EXPECT_EQ(loader.statistics().samples, 7);
  }
  Loader strict =
      make_loader(World::single(), Numbers(12, {0, 4, 5}), {.batch_size = 4, .shuffle = false, .skip_bad = 2});
  const std::string message = message_of<DataError>([&] {
    for (const Batch& batch : strict.epoch(0)) EXPECT_LE(batch.size(), 4);
  });
  EXPECT_TRUE(contains(message, "3 bad samples in this epoch, 2 may be skipped; the last one: sample 5 is bad"));
}

// Loads nothing while `stuck` is locked.
class Stuck : public Numbers {
 public:
  Stuck() : Numbers(4) {}
  Batch assemble(const BatchRequest& request) const override {
    const std::lock_guard lock(stuck);
    return Numbers::assemble(request);
  }
  mutable std::mutex stuck;
};

TEST(Loader, throws_when_no_batch_comes_within_the_timeout) {
  const auto dataset = std::make_shared<Stuck>();
  Loader loader(World::single(), dataset, {.batch_size = 2, .timeout = std::chrono::milliseconds(50)});
  std::unique_lock lock(dataset->stuck);
  const std::string message = message_of<DataError>([&] { loader.epoch(0).begin(); });
  EXPECT_TRUE(contains(message, "no batch after"));
}

TEST(Loader, ends_a_wait_with_what_while_waiting_throws) {
  const auto dataset = std::make_shared<Stuck>();
  Loader loader(World::single(), dataset,
                {.batch_size = 2, .while_waiting = [] { throw UsageError({.what = "Ctrl-C"}); }});
  std::unique_lock lock(dataset->stuck);
  EXPECT_THROW(loader.epoch(0).begin(), UsageError);
  EXPECT_EQ(loader.position().samples, 0);
}

TEST(Loader, ends_when_any_thread_calls_stop) {
  const auto dataset = std::make_shared<Stuck>();
  Loader waiting(World::single(), dataset, {.batch_size = 2});
  Loader idle(World::single(), std::make_shared<Numbers>(40), {.batch_size = 4});
  std::unique_lock lock(dataset->stuck);
  std::thread elsewhere([] { stop("enough"); });
  EXPECT_TRUE(contains(message_of<DataError>([&] { waiting.epoch(0).begin(); }), "was stopped: enough"));
  elsewhere.join();
  EXPECT_THROW(idle.epoch(0).begin(), DataError);
}

TEST(Loader, stops_and_keeps_its_position) {
  Loader loader(LoaderPlace{.rank = 1, .ranks = 2}, std::make_shared<Numbers>(40),
                {.batch_size = 4, .shuffle = false, .workers = 2});
  auto batches = loader.epoch(3).begin();
  EXPECT_EQ(samples_of(*batches), (Order{2, 3}));
  loader.stop();
  EXPECT_TRUE(++batches == std::default_sentinel);
  EXPECT_EQ(loader.position().epoch, 3);
  EXPECT_EQ(loader.position().samples, 4);
}

TEST(Loader, leaves_a_worker_behind_that_the_storage_does_not_answer) {
  const auto dataset = std::make_shared<Stuck>();
  std::unique_lock lock(dataset->stuck);
  {
    Loader loader(World::single(), dataset, {.batch_size = 2, .timeout = std::chrono::milliseconds(50)});
    EXPECT_THROW(loader.epoch(0).begin(), DataError);
  }
  EXPECT_GT(dataset.use_count(), 1);  // the worker's
  lock.unlock();
  const Deadline deadline = Deadline::after(std::chrono::seconds(30));
  while (dataset.use_count() > 1 && !deadline.passed()) std::this_thread::yield();
  EXPECT_EQ(dataset.use_count(), 1);
}

TEST(Loader, reports_where_the_time_went) {
  Loader loader = make_loader(World::single(), Numbers(40), {.batch_size = 4, .workers = 2});
  for (const Batch& batch : loader.epoch(0)) EXPECT_EQ(batch.size(), 4);
  const LoadingStatistics& statistics = loader.statistics();
  EXPECT_EQ(statistics.batches, 10);
  EXPECT_EQ(statistics.samples, 40);
  EXPECT_GT(statistics.assemble, 0);
  EXPECT_GE(statistics.mean_queued(), 1);
  EXPECT_LE(statistics.mean_queued(), 4);
}

TEST(Loader, hints_at_the_setting_that_helps) {
  const auto hint = [](const LoadingStatistics& took, int workers, int cores) {
    const LoaderPlace place{.cores = CoreSet(to_size(cores))};
    return Loader(place, std::make_shared<Numbers>(40), {.batch_size = 4, .workers = workers, .prefetch = 4})
        .hint(took, 10);
  };
  const LoadingStatistics waiting{.wait = 5, .read = 9, .assemble = 1};
  EXPECT_EQ(hint({.wait = 0.1}, 1, 4), "");
  EXPECT_TRUE(contains(hint(waiting, 0, 4), "--workers 1"));
  EXPECT_TRUE(contains(hint(waiting, 1, 4), "raise --workers from 1"));
  EXPECT_TRUE(contains(hint(waiting, 1, 4), "50 % of the time"));
  EXPECT_TRUE(contains(hint(waiting, 4, 4), "raise --prefetch"));
  EXPECT_TRUE(contains(hint(waiting, 1, 1), "store smaller images"));
}

TEST(Loader, refuses_options_that_make_no_sense) {
  const auto refusal = [](const LoaderOptions& options) {
    return message_of<UsageError>([&] { make_loader(World::single(), Numbers(4), options); });
  };
  EXPECT_TRUE(contains(refusal({.workers = -1}), "workers=-1"));
  EXPECT_TRUE(contains(refusal({.prefetch = 0}), "prefetch=0"));
  EXPECT_TRUE(contains(refusal({.skip_bad = -2}), "skip_bad=-2"));
}

}  // namespace
}  // namespace lockstep
