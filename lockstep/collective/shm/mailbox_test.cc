// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/shm/mailbox.h"

#include <atomic>
#include <cstring>
#include <numeric>
#include <random>

#include "tests/shm/support.h"
#include "tests/support.h"

namespace lockstep::shm {
namespace {

using lockstep::testing::contains;
using testing::expect_none;
using testing::run_threads;

Options options_for(bool shared) {
  return {.timeout = std::chrono::seconds(20), .staging_bytes = 4096, .share_ordinary_memory = shared};
}

class Messages : public ::testing::TestWithParam<std::tuple<int, bool>> {
 protected:
  int size() const { return std::get<0>(GetParam()); }
  void run(const std::function<void(Group&)>& body) {
    expect_none(run_threads(size(), body, options_for(std::get<1>(GetParam()))));
  }
};
INSTANTIATE_TEST_SUITE_P(Shm, Messages, ::testing::Combine(::testing::Values(1, 2, 3, 7), ::testing::Bool()));

std::vector<int32_t> numbers(size_t count, int first) {
  std::vector<int32_t> data(count);
  std::iota(data.begin(), data.end(), first);
  return data;
}

TEST_P(Messages, go_round_a_ring_in_every_size) {
  run([](Group& group) {
    const int right = (group.rank() + 1) % group.size();
    const int left = (group.rank() + group.size() - 1) % group.size();
    for (const size_t count : {0, 1, 208, 209, 1000, 30000}) {
      const std::vector<int32_t> sent = numbers(count, group.rank());
      std::vector<int32_t> received(count);
      const FuturePtr work = group.start(Call{
          .operation = Operation::kSend, .input = sent.data(), .count = count, .dtype = DType::kInt32, .peer = right});
      EXPECT_EQ(group.run({.operation = Operation::kReceive,
                           .output = received.data(),
                           .count = count,
                           .dtype = DType::kInt32,
                           .peer = left}),
                left);
      work->wait(testing::soon());
      EXPECT_EQ(received, numbers(count, left));
    }
  });
}

TEST_P(Messages, from_anybody_arrive_once_each) {
  run([](Group& group) {
    constexpr int kEach = 20;
    if (group.rank() > 0) {
      for (int i = 0; i < kEach; ++i) {
        const std::vector<int32_t> data = numbers(i % 2 == 0 ? 10 : 5000, group.rank() * 1000 + i);
        group.run({.operation = Operation::kSend,
                   .input = data.data(),
                   .count = data.size(),
                   .dtype = DType::kInt32,
                   .peer = 0,
                   .tag = i});
      }
      return;
    }
    for (int i = 0; i < kEach; ++i) {
      IntVector<char> heard(group.size());
      for (int n = 1; n < group.size(); ++n) {
        std::vector<int32_t> data(i % 2 == 0 ? 10 : 5000);
        const int from = group.run({.operation = Operation::kReceive,
                                    .output = data.data(),
                                    .count = data.size(),
                                    .dtype = DType::kInt32,
                                    .tag = i});
        EXPECT_FALSE(heard[from]);
        heard[from] = true;
        EXPECT_EQ(data, numbers(data.size(), from * 1000 + i));
      }
    }
  });
}

TEST(messages, of_one_tag_keep_their_order_and_tags_may_overtake) {
  for (const bool shared : {true, false})
    expect_none(run_threads(
        2,
        [](Group& group) {
          constexpr int kCount = 200;
          if (group.rank() == 0) {
            std::vector<FuturePtr> works;
            IntVector<std::vector<int32_t>> data;
            for (int i = 0; i < kCount; ++i) data.push_back(numbers(i % 7 == 0 ? 3000 : 3, i));
            for (int i = 0; i < kCount; ++i)
              works.push_back(group.start(Call{.operation = Operation::kSend,
                                               .input = data[i].data(),
                                               .count = data[i].size(),
                                               .dtype = DType::kInt32,
                                               .peer = 1,
                                               .tag = 5}));
            for (const FuturePtr& work : works) work->wait(testing::soon());
            return;
          }
          for (int i = 0; i < kCount; ++i) {
            std::vector<int32_t> data(i % 7 == 0 ? 3000 : 3);
            group.run({.operation = Operation::kReceive,
                       .output = data.data(),
                       .count = data.size(),
                       .dtype = DType::kInt32,
                       .peer = 0,
                       .tag = 5});
            ASSERT_EQ(data, numbers(data.size(), i));
          }
        },
        options_for(shared)));
  expect_none(run_threads(2, [](Group& group) {
    int32_t value = 1;
    if (group.rank() == 0) {
      group.run(
          {.operation = Operation::kSend, .input = &value, .count = 1, .dtype = DType::kInt32, .peer = 1, .tag = 1});
      value = 2;
      group.run(
          {.operation = Operation::kSend, .input = &value, .count = 1, .dtype = DType::kInt32, .peer = 1, .tag = 2});
      return;
    }
    group.run(
        {.operation = Operation::kReceive, .output = &value, .count = 1, .dtype = DType::kInt32, .peer = 0, .tag = 2});
    EXPECT_EQ(value, 2);
    group.run(
        {.operation = Operation::kReceive, .output = &value, .count = 1, .dtype = DType::kInt32, .peer = 0, .tag = 1});
    EXPECT_EQ(value, 1);
  }));
}

TEST(messages, exchanged_by_both_sides_at_once_do_not_block_each_other) {
  for (const bool shared : {true, false})
    expect_none(run_threads(
        2,
        [](Group& group) {
          const int peer = 1 - group.rank();
          const std::vector<int32_t> sent = numbers(50000, group.rank());
          std::vector<int32_t> received(50000);
          const FuturePtr receive = group.start(Call{.operation = Operation::kReceive,
                                                     .output = received.data(),
                                                     .count = received.size(),
                                                     .dtype = DType::kInt32,
                                                     .peer = peer});
          const FuturePtr send = group.start(Call{.operation = Operation::kSend,
                                                  .input = sent.data(),
                                                  .count = sent.size(),
                                                  .dtype = DType::kInt32,
                                                  .peer = peer});
          group.barrier();
          receive->wait(testing::soon());
          send->wait(testing::soon());
          EXPECT_EQ(receive->source(), peer);
          EXPECT_EQ(received, numbers(50000, peer));
        },
        options_for(shared)));
}

TEST(messages, of_another_shape_are_refused_on_both_sides) {
  expect_none(run_threads(2, [](Group& group) {
    std::vector<float> data(5000);
    if (group.rank() == 0) {
      EXPECT_THROW(group.run({.operation = Operation::kSend, .input = data.data(), .count = 5000, .peer = 1}),
                   MismatchError);
    } else {
      const std::string message = lockstep::testing::message_of<MismatchError>(
          [&] { group.run({.operation = Operation::kReceive, .output = data.data(), .count = 4000, .peer = 0}); });
      EXPECT_TRUE(contains(message, "receive of 4000 float32 from rank 0, tag 0"));
      EXPECT_TRUE(contains(message, "send of 5000 float32"));
    }
    group.barrier();
  }));
}

TEST(messages, that_nobody_answers_end_at_the_deadline) {
  const auto errors = run_threads(
      2,
      [](Group& group) {
        float value = 0;
        group.run({.operation = Operation::kReceive, .output = &value, .count = 1, .peer = 1 - group.rank(), .tag = 9});
      },
      {.timeout = std::chrono::milliseconds(50)});
  for (const auto& error : errors) EXPECT_THROW(std::rethrow_exception(error), PeerLost);
}

// 0 waits for 1, which waits for 2, which waits for 3, which is at work.
TEST(messages, that_are_late_name_who_holds_up_their_sender) {
  std::atomic<bool> over{false};
  const auto errors = run_threads(4, [&](Group& group) {
    while (group.rank() == 3 && !over) std::this_thread::yield();
    if (group.rank() == 3) return;
    if (group.rank() == 0) group.set_timeout(std::chrono::milliseconds(300));
    const std::shared_ptr<void> at_the_end(nullptr, [&](void*) { over = true; });
    float value = 0;
    group.run({.operation = Operation::kReceive, .output = &value, .count = 1, .peer = group.rank() + 1});
  });
  for (int rank = 0; rank < 3; ++rank) {
    const auto rethrow = [&] { std::rethrow_exception(errors[rank]); };
    EXPECT_TRUE(contains(lockstep::testing::message_of<PeerLost>(rethrow),
                         "rank 3 held up rank 1, which did not answer within 300.0 ms"));
  }
}

}  // namespace
}  // namespace lockstep::shm
