// SPDX-License-Identifier: Apache-2.0
// Random sequences of every collective, on a group and two sub-groups at once, from a thread each: every result is
// checked. LOCKSTEP_STRESS_CALLS sets how many
// calls the ranks make together in each group (default 150; `make soak`: minutes).
#include <cstdlib>
#include <optional>
#include <random>

#include "lockstep/base/text.h"
#include "tests/shm/support.h"
#include "tests/support.h"

namespace lockstep::shm {
namespace {

using testing::expect_none;
using testing::run_processes;
using testing::run_threads;

using Numbers = std::vector<int32_t>;

int32_t number_of(int rank, size_t index) {
  return static_cast<int32_t>((static_cast<unsigned>(rank) * 7 + index * 3) % 11) + 1;
}

// A sequence of calls on one group, the same on all its ranks because the seed is.
class Sequence {
 public:
  Sequence(Group& group, unsigned seed) : group_(group), p_(group.size()), random_(seed) {}

  void make_calls(int calls) {
    for (int call = 0; call < calls && !::testing::Test::HasFailure(); ++call) {
      count_ = random_() % (call % 10 == 0 ? 20000 : 60);
      root_ = static_cast<int>(random_() % static_cast<unsigned>(p_));
      make_call(random_() % 10);
    }
  }

 private:
  size_t whole() const { return count_ * static_cast<unsigned>(p_); }
  bool is_root() const { return group_.rank() == root_; }

  // Where it lies may differ from rank to rank.
  int32_t* numbers(size_t count, size_t first = 0) {
    const bool in_arena = (random_() + static_cast<unsigned>(group_.rank())) % 2 == 0;
    if (in_arena) arena_.push_back(group_.allocate(count * sizeof(int32_t)));
    if (!in_arena) ordinary_.emplace_back(count);
    int32_t* const data = in_arena ? arena_.back().as<int32_t>() : ordinary_.back().data();
    for (size_t i = 0; i < count; ++i) data[i] = number_of(group_.rank(), first + i);
    return data;
  }

  void expect_sum(const int32_t* data, size_t count, size_t first = 0) {
    for (size_t i = 0; i < count; ++i) {
      int32_t sum = 0;
      for (int rank = 0; rank < p_; ++rank) sum += number_of(rank, first + i);
      ASSERT_EQ(data[i], sum) << "element " << i << " of " << count;
    }
  }
  void expect_from(int rank, const int32_t* data, size_t count, size_t first = 0) {
    for (size_t i = 0; i < count; ++i)
      ASSERT_EQ(data[i], number_of(rank, first + i)) << "element " << i << " of " << count << " from rank " << rank;
  }
  void expect_from_each(const int32_t* data, size_t first = 0) {
    for (int rank = 0; rank < p_; ++rank) expect_from(rank, data + static_cast<unsigned>(rank) * count_, count_, first);
  }

  void make_call(unsigned kind);
  void pass_around_the_ring();

  Group& group_;
  int p_;
  std::mt19937 random_;
  size_t count_ = 0;
  int root_ = 0;
  std::vector<Memory> arena_;
  std::vector<Numbers> ordinary_;
};

void Sequence::make_call(unsigned kind) {
  arena_.clear();
  ordinary_.clear();
  const auto own_part = static_cast<unsigned>(group_.rank()) * count_;
  int32_t* const mine = numbers(count_);
  int32_t* const all = numbers(whole());
  int32_t* const result = numbers(whole());
  constexpr DType kInt = DType::kInt32;
  switch (kind) {
    case 0:
      group_.run({.operation = Operation::kAllReduce, .input = mine, .output = mine, .count = count_, .dtype = kInt});
      return expect_sum(mine, count_);
    case 1:
      group_.run({.operation = Operation::kReduce,
                  .input = mine,
                  .output = result,
                  .count = count_,
                  .dtype = kInt,
                  .root = root_});
      return is_root() ? expect_sum(result, count_) : void();
    case 2:
      group_.run(
          {.operation = Operation::kReduceScatter, .input = all, .output = mine, .count = count_, .dtype = kInt});
      return expect_sum(mine, count_, own_part);
    case 3:
      group_.run({.operation = Operation::kAllGather, .input = mine, .output = result, .count = count_, .dtype = kInt});
      return expect_from_each(result);
    case 4:
      group_.run({.operation = Operation::kBroadcast, .output = mine, .count = count_, .dtype = kInt, .root = root_});
      return expect_from(root_, mine, count_);
    case 5:
      group_.run({.operation = Operation::kGather,
                  .input = mine,
                  .output = result,
                  .count = count_,
                  .dtype = kInt,
                  .root = root_});
      return is_root() ? expect_from_each(result) : void();
    case 6:
      group_.run({.operation = Operation::kScatter,
                  .input = all,
                  .output = mine,
                  .count = count_,
                  .dtype = kInt,
                  .root = root_});
      return expect_from(root_, mine, count_, own_part);
    case 7:
      group_.run({.operation = Operation::kAllToAll, .input = all, .output = result, .count = count_, .dtype = kInt});
      return expect_from_each(result, own_part);
    case 8: return pass_around_the_ring();
    default: return group_.barrier();
  }
}

void Sequence::pass_around_the_ring() {
  if (p_ == 1) return;
  const int right = (group_.rank() + 1) % p_;
  const int left = (group_.rank() + p_ - 1) % p_;
  int32_t* const out = numbers(count_);
  int32_t* const in = numbers(count_);
  const FuturePtr sent = group_.start(
      Call{.operation = Operation::kSend, .input = out, .count = count_, .dtype = DType::kInt32, .peer = right});
  group_.run({.operation = Operation::kReceive, .output = in, .count = count_, .dtype = DType::kInt32, .peer = left});
  sent->wait();
  expect_from(left, in, count_);
}

// On the group, on its pairs, and on its odd and even ranks, all at once.
void make_calls_everywhere(Group& group, unsigned seed) {
  const int calls = lockstep::testing::rounds("LOCKSTEP_STRESS_CALLS", 150) / group.size();
  std::vector<int> pair;
  std::vector<int> parity;
  for (int rank = group.size() - 1; rank >= 0; --rank) {
    if (rank / 2 == group.rank() / 2) pair.push_back(rank);
    if (rank % 2 == group.rank() % 2) parity.push_back(rank);
  }
  const GroupPtr pairs = group.subgroup(pair);
  const GroupPtr parities = group.subgroup(parity);
  std::thread one([&] { Sequence(*pairs, seed + 1).make_calls(calls); });
  std::thread other([&] { Sequence(*parities, seed + 2).make_calls(calls); });
  Sequence(group, seed).make_calls(calls);
  one.join();
  other.join();
}

Options options(bool shared) {
  return {.timeout = std::chrono::seconds(60), .staging_bytes = 4096, .share_ordinary_memory = shared};
}

class Stress : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Shm, Stress, ::testing::Values(1, 2, 3, 4, 7));

TEST_P(Stress, random_sequences_on_several_groups_at_once) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE(seed);
  for (const bool shared : {true, false})
    expect_none(run_threads(
        GetParam(), [seed](Group& group) { make_calls_everywhere(group, seed); }, options(shared)));
}

TEST_P(Stress, random_sequences_between_processes) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE(seed);
  const auto codes = run_processes(
      GetParam(),
      [seed](Group& group) {
        make_calls_everywhere(group, seed);
        return ::testing::Test::HasFailure() ? 1 : 0;
      },
      options(false));
  EXPECT_EQ(codes, IntVector<int>(GetParam(), 0));
}

}  // namespace
}  // namespace lockstep::shm
