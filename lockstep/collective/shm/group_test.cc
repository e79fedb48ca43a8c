// SPDX-License-Identifier: Apache-2.0
// What all collectives have in common: order, disagreement, sub-groups, calls that do not block, errors.
#include "lockstep/collective/shm/group.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <latch>
#include <memory>
#include <numeric>
#include <thread>

#include "lockstep/base/text.h"
#include "lockstep/collective/calls/call_queue.h"
#include "lockstep/collective/shm/connect/peers.h"
#include "lockstep/collective/shm/connect/rendezvous_server.h"
#include "lockstep/collective/shm/group.h"
#include "lockstep/collective/shm/memory/control_block.h"
#include "lockstep/collective/shm/transfer.h"
#include "tests/shm/support.h"
#include "tests/support.h"

namespace lockstep::shm {

struct CountersOf {
  static void set(Group& group, uint32_t collectives, uint32_t steps) {
    group.sequence_ = collectives;
    group.phase_ = steps;
    group.post(0);
  }
};

namespace {

using lockstep::testing::contains;
using testing::expect_none;
using testing::run_threads;

std::string text_of(const std::exception_ptr& error) {
  if (!error) return "nothing";
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& caught) {
    return caught.what();
  }
}

class Sizes : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Shm, Sizes, ::testing::Values(1, 2, 3, 4, 7));

TEST_P(Sizes, barrier_lets_nobody_through_before_the_last) {
  std::atomic<int> arrived{0};
  expect_none(run_threads(GetParam(), [&](Group& group) {
    for (int round = 1; round <= 50; ++round) {
      ++arrived;
      group.barrier();
      EXPECT_GE(arrived.load(), round * GetParam());
      group.barrier();
    }
  }));
}

// All ranks of a group of threads, whose counters are about to wrap.
class NearWrap {
 public:
  explicit NearWrap(int size) {
    PeerHandles handles;
    handles.control = make_control_segment(size, 4096);
    for (int rank = 0; rank < size; ++rank) handles.memories.push_back(make_segment("memory", 0));
    const auto peers = std::make_shared<Peers>(std::move(handles));
    for (int rank = 0; rank < size; ++rank) peers->take_seat(rank, rank);
    for (int rank = 0; rank < size; ++rank) {
      groups_.push_back(Group::of_all(peers, rank, std::chrono::seconds(20)));
      CountersOf::set(*groups_.back(), kWrap - 3, kWrap - 10);
      groups_.back()->area().progress(rank).bell.raise(kWrap - 2);
    }
  }

  void on_each(const std::function<void(Group&)>& body) {
    std::vector<std::thread> threads;
    for (const auto& group : groups_) threads.emplace_back([&] { EXPECT_NO_THROW(body(*group)); });
    for (std::thread& thread : threads) thread.join();
  }

  static constexpr uint32_t kWrap = 0;  // 2^32

 private:
  std::vector<GroupPtr> groups_;
};

TEST_P(Sizes, counters_wrap_between_collectives_and_within_one) {
  NearWrap(GetParam()).on_each([size = GetParam()](Group& group) {
    const int sum = size * (size + 1) / 2;
    for (int round = 0; round < 12; ++round)
      for (const size_t count : {1, 700, 20'000}) {  // in a line, in a slot, in 20 chunks
        std::vector<int32_t> data(count, group.rank() + 1), all(count * static_cast<unsigned>(size));
        group.run({.operation = Operation::kAllReduce,
                   .input = data.data(),
                   .output = data.data(),
                   .count = count,
                   .dtype = DType::kInt32});
        EXPECT_EQ(std::ranges::count(data, sum), std::ssize(data));
        group.barrier();
        std::ranges::fill(data, group.rank());
        group.run({.operation = Operation::kAllGather,
                   .input = data.data(),
                   .output = all.data(),
                   .count = count,
                   .dtype = DType::kInt32});
        for (int rank = 0; rank < size; ++rank) EXPECT_EQ(all[static_cast<unsigned>(rank) * count + count - 1], rank);
      }
  });
}

// Four headers, so that messages of both sides of the wrap lie there together.
TEST_P(Sizes, messages_stay_in_order_where_their_numbers_wrap) {
  std::latch sent(GetParam());
  NearWrap(GetParam()).on_each([&, size = GetParam()](Group& group) {
    IntVector<uint32_t> numbers(size, NearWrap::kWrap - 2);
    const auto transfer = [&](Operation operation, int peer, int32_t& value) {
      Call call{.operation = operation, .count = 1, .dtype = DType::kInt32};
      call.input = call.output = &value;
      call.peer = peer;
      Transfer one(group, call, numbers);
      while (!one.progress()) std::this_thread::yield();
    };
    const int next = (group.rank() + 1) % size, previous = (group.rank() + size - 1) % size;
    for (int32_t value = 0; value < 4; ++value) transfer(Operation::kSend, next, value);
    sent.arrive_and_wait();
    for (int32_t expected = 0; expected < 4; ++expected) {
      int32_t value = -1;
      transfer(Operation::kReceive, previous, value);
      EXPECT_EQ(value, expected);
    }
  });
}

TEST(group, disagreement_is_named_on_all_ranks_and_the_group_stays_usable) {
  expect_none(run_threads(3, [](Group& group) {
    std::vector<float> data(200);
    for (int round = 0; round < 3; ++round) {
      const std::string message = lockstep::testing::message_of<MismatchError>([&] {
        if (group.rank() == 1)
          group.run({.operation = Operation::kBroadcast, .output = data.data(), .count = 7, .root = 2});
        else
          group.run({.operation = Operation::kAllReduce, .input = data.data(), .output = data.data(), .count = 100});
      });
      EXPECT_TRUE(contains(message, "all_reduce of 100 float32 (sum)"));
      EXPECT_TRUE(contains(message, "broadcast of 7 float32 with root 2"));
      EXPECT_TRUE(contains(message, "rank 1"));
    }
    float one = 1;
    group.run({.operation = Operation::kAllReduce, .input = &one, .output = &one, .count = 1});
    EXPECT_EQ(one, 3);
  }));
}

TEST(group, every_part_of_a_signature_is_compared) {
  expect_none(run_threads(2, [](Group& group) {
    std::vector<float> data(64);
    const bool odd = group.rank() == 1;
    const auto differs = [&](const Call& call) { EXPECT_THROW(group.run(call), MismatchError); };
    const Call same{.operation = Operation::kAllReduce, .input = data.data(), .output = data.data(), .count = 16};
    Call other = same;
    other.count = odd ? 15 : 16;
    differs(other);
    other = same;
    other.dtype = odd ? DType::kInt32 : DType::kFloat32;
    differs(other);
    other = same;
    other.op = odd ? ReduceOp::kMax : ReduceOp::kSum;
    differs(other);
    other = same;
    other.algorithm = odd ? Algorithm::kRing : Algorithm::kDirect;
    differs(other);
    EXPECT_THROW(
        group.run({.operation = Operation::kBroadcast, .output = data.data(), .count = 4, .root = odd ? 1 : 0}),
        MismatchError);
    const std::vector<size_t> counts = odd ? std::vector<size_t>{1, 3} : std::vector<size_t>{2, 2};
    EXPECT_THROW(
        group.run(
            {.operation = Operation::kAllGather, .input = data.data(), .output = data.data() + 32, .counts = counts}),
        MismatchError);
    EXPECT_THROW(group.run({.operation = Operation::kAllToAll,
                            .input = data.data(),
                            .output = data.data() + 32,
                            .counts = {1, 2},
                            .receive_counts = {1, 1}}),
                 MismatchError);
  }));
}

TEST(group, refuses_arguments_that_make_no_sense) {
  expect_none(run_threads(2, [](Group& group) {
    std::vector<float> data(8);
    EXPECT_THROW(group.run({.operation = Operation::kBroadcast, .output = data.data(), .count = 1, .root = 2}),
                 UsageError);
    EXPECT_THROW(group.run({.operation = Operation::kAllReduce,
                            .input = data.data(),
                            .output = data.data(),
                            .count = 1,
                            .op = ReduceOp::kBitOr}),
                 UsageError);
    EXPECT_THROW(
        group.run({.operation = Operation::kAllGather, .input = data.data(), .output = data.data(), .counts = {1}}),
        UsageError);
    EXPECT_THROW(
        group.run({.operation = Operation::kAllToAll, .input = data.data(), .output = data.data(), .count = 2}),
        UsageError);
    group.barrier();
  }));
}

TEST(group, a_rank_that_throws_fails_the_others_at_once) {
  const Stopwatch watch;
  const auto errors = run_threads(4, [](Group& group) {
    if (group.rank() == 2) throw std::runtime_error("no more data");
    for (int i = 0; i < 1000000; ++i) group.barrier();
  });
  EXPECT_LT(watch.seconds(), lockstep::testing::kAtOnce);
  for (const int rank : {0, 1, 3}) {
    EXPECT_TRUE(contains(text_of(errors[rank]), "PeerLost: rank 2 failed"));
  }
}

TEST(group, poison_tells_everybody_the_reason) {
  const auto errors = run_threads(3, [](Group& group) {
    if (group.rank() == 1) group.poison("the disk is full");
    for (int i = 0; i < 1000000; ++i) group.barrier();
  });
  for (const auto& error : errors) EXPECT_TRUE(contains(text_of(error), "rank 1 failed: the disk is full"));
}

TEST(group, names_ranks_as_the_job_does) {
  auto groups = make_thread_group(2, {.timeout = std::chrono::milliseconds(50), .job_ranks = {4, 7}});
  EXPECT_EQ(groups[0]->job_rank(1), 7);
  const std::string message = lockstep::testing::message_of<PeerLost>([&] { groups[0]->barrier(); });
  EXPECT_TRUE(contains(message, "rank 7 did not answer within 50.0 ms"));
  EXPECT_TRUE(contains(message, "rank 0 of 2 (rank 4 of the job) in barrier"));
}

TEST(group, what_is_announced_is_compared_and_named_in_place_of_the_call) {
  expect_none(run_threads(2, [](Group& group) {
    const auto announced = [&](ReduceOp op) {
      return Signature{.operation = Operation::kAllReduce, .dtype = DType::kFloat32, .op = op, .count = 100};
    };
    const Signature mean = announced(ReduceOp::kMean);
    group.run({.operation = Operation::kBarrier}, &mean);
    const std::string message = lockstep::testing::message_of<MismatchError>([&] {
      const Signature own = announced(group.rank() == 0 ? ReduceOp::kMean : ReduceOp::kSum);
      group.run({.operation = Operation::kBarrier}, &own);
    });
    EXPECT_TRUE(contains(message, "all_reduce of 100 float32 (mean)"));
    EXPECT_TRUE(contains(message, "all_reduce of 100 float32 (sum)"));
    group.barrier();
  }));
}

TEST(group, the_deadline_lists_what_every_rank_does) {
  std::latch given_up(2);
  const auto errors = run_threads(
      3,
      [&](Group& group) {
        float value = 0;
        group.run({.operation = Operation::kAllReduce, .input = &value, .output = &value, .count = 1});
        if (group.rank() == 1) return given_up.wait();
        std::vector<int64_t> data(10);
        try {
          group.run({.operation = Operation::kBroadcast, .output = data.data(), .count = 10, .dtype = DType::kInt64});
        } catch (...) {
          given_up.count_down();
          throw;
        }
      },
      {.timeout = std::chrono::milliseconds(100)});
  for (const int rank : {0, 2}) {
    const std::string message = text_of(errors[rank]);
    EXPECT_TRUE(contains(message, "PeerLost: rank 1 did not answer within"));
    EXPECT_TRUE(contains(message, concat("rank ", rank, " of 3 in broadcast of 10 int64 with root 0, collective 2")));
    EXPECT_TRUE(contains(message, ": all_reduce of 1 float32 (sum), collective 1 (this rank: 2)"));
  }
}

TEST(group, a_call_may_have_a_timeout_of_its_own) {
  std::latch given_up(1);
  const Stopwatch watch;
  const auto errors = run_threads(2, [&](Group& group) {
    if (group.rank() == 1) return given_up.wait();
    try {
      group.run({.operation = Operation::kBarrier, .timeout = std::chrono::milliseconds(50)});
    } catch (...) {
      given_up.count_down();
      throw;
    }
    given_up.count_down();
  });
  EXPECT_TRUE(contains(text_of(errors[0]), "rank 1 did not answer within 50.0 ms"));
  EXPECT_LT(watch.seconds(), lockstep::testing::kAtOnce);
}

TEST(group, a_rank_that_left_is_not_waited_for) {
  const Stopwatch watch;
  const auto errors = run_threads(2, [](Group& group) {
    if (group.rank() == 0) group.barrier();
  });
  EXPECT_LT(watch.seconds(), lockstep::testing::kAtOnce);
  EXPECT_TRUE(contains(text_of(errors[0]), "rank 1 has left"));
}

TEST(group, memory_of_a_failed_rank_is_not_touched_any_more) {
  for (int round = 0; round < 20; ++round) {
    const auto errors = run_threads(3, [round](Group& group) {
      std::vector<float> data(1 << 16);  // freed as soon as this rank sees an error
      for (int i = 0; i < 50; ++i) {
        if (group.rank() == 1 && i == round) throw std::runtime_error("stop");
        group.run(
            {.operation = Operation::kAllReduce, .input = data.data(), .output = data.data(), .count = data.size()});
      }
    });
    EXPECT_TRUE(contains(text_of(errors[0]), "rank 1 failed"));
  }
}

TEST_P(Sizes, subgroups_split_and_work_at_the_same_time_as_their_parent) {
  expect_none(run_threads(GetParam(), [](Group& group) {
    IntVector<int> mine;
    for (int rank = group.size() - 1; rank >= 0; --rank)
      if (rank % 2 == group.rank() % 2) mine.push_back(rank);
    const GroupPtr half = group.subgroup(mine.elements());
    ASSERT_NE(half, nullptr);
    EXPECT_EQ(mine[half->rank()], group.rank());
    std::thread other([&] {
      for (int i = 0; i < 200; ++i) {
        int sum = group.rank();
        half->run(
            {.operation = Operation::kAllReduce, .input = &sum, .output = &sum, .count = 1, .dtype = DType::kInt32});
        EXPECT_EQ(sum, std::accumulate(mine.begin(), mine.end(), 0));
      }
    });
    for (int i = 0; i < 200; ++i) {
      int count = 1;
      group.run(
          {.operation = Operation::kAllReduce, .input = &count, .output = &count, .count = 1, .dtype = DType::kInt32});
      EXPECT_EQ(count, group.size());
    }
    other.join();
  }));
}

TEST(group, a_rank_outside_a_subgroup_gets_none) {
  expect_none(run_threads(3, [](Group& group) {
    for (int i = 0; i < 20; ++i) {  // their memory is used again
      const bool outside = group.rank() == 1;
      const GroupPtr pair = group.subgroup(outside ? std::vector<int>() : std::vector<int>{2, 0});
      EXPECT_EQ(pair == nullptr, outside);
    }
  }));
}

// Collectives of a group that a worker thread makes, as a transport has them made.
class Started {
 public:
  explicit Started(Group& group) : group_(group) {}
  ~Started() {
    if (std::uncaught_exceptions() > 0) group_.cancel();
  }

  FuturePtr start(const Call& call) {
    FuturePtr future = queue.add([this, call] { group_.run(call); });
    queue.hand_to_worker();
    return future;
  }

 private:
  Group& group_;

 public:
  CallQueue queue;
};

TEST_P(Sizes, started_calls_are_made_in_order) {
  expect_none(run_threads(GetParam(), [](Group& group) {
    Started started(group);
    std::vector<std::vector<float>> data(20, std::vector<float>(3000));
    std::vector<FuturePtr> futures;
    for (size_t i = 0; i < data.size(); ++i) {
      std::fill(data[i].begin(), data[i].end(), static_cast<float>(i));
      futures.push_back(started.start(
          {.operation = Operation::kAllReduce, .input = data[i].data(), .output = data[i].data(), .count = 3000}));
    }
    float value = 1;
    started.queue.run(
        [&] { group.run({.operation = Operation::kAllReduce, .input = &value, .output = &value, .count = 1}); });
    EXPECT_EQ(value, static_cast<float>(group.size()));
    for (size_t i = 0; i < futures.size(); ++i) {
      futures[i]->wait(testing::soon());
      EXPECT_TRUE(futures[i]->done());
      EXPECT_EQ(data[i][2999], static_cast<float>(i) * static_cast<float>(group.size()));
    }
  }));
}

TEST(group, a_started_call_throws_where_it_is_waited_for) {
  expect_none(run_threads(2, [](Group& group) {
    Started started(group);
    float value = 0;
    const FuturePtr future =
        started.start({.operation = Operation::kBroadcast, .output = &value, .count = 1, .root = group.rank()});
    EXPECT_THROW(future->wait(testing::soon()), MismatchError);
    started.queue.run([&] { group.barrier(); });
  }));
}

TEST(group, closing_gives_up_what_was_started) {
  const Stopwatch watch;
  const auto errors = run_threads(2, [](Group& group) {
    Started started(group);
    float value = 0;
    const FuturePtr future = started.start({.operation = Operation::kBroadcast, .output = &value, .count = 1});
    if (group.rank() == 0) throw std::runtime_error("enough");
    future->wait(testing::soon());
    started.queue.run([&] { group.barrier(); });
  });
  EXPECT_LT(watch.seconds(), lockstep::testing::kAtOnce);
}

}  // namespace
}  // namespace lockstep::shm
