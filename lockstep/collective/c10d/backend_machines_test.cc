// SPDX-License-Identifier: Apache-2.0
// What the c10d backend does on several machines beyond its collectives: lost ranks, timeouts, sub-groups; and what is the
// same on one: sparse sums, monitored barriers.
#include <future>
#include <string>

#include "tests/backend_groups.h"

namespace lockstep {
namespace {

using namespace testing::backend;
using std::chrono::milliseconds;
using testing::contains;
using testing::message_of;

// Holds ranks back until another one opens it.
class Gate {
 public:
  void open() { opened_.set_value(); }
  void wait() { EXPECT_EQ(future_.wait_for(kTimeout), std::future_status::ready); }

 private:
  std::promise<void> opened_;
  std::shared_future<void> future_ = opened_.get_future();
};

class BackendOver : public ::testing::TestWithParam<Machines> {
 public:
  static int size() { return static_cast<int>(GetParam().size()); }
};
INSTANTIATE_TEST_SUITE_P(Layouts, BackendOver,
                         ::testing::Values(one_machine(1), one_machine(3), Machines{0, 0, 1}, Machines{0, 1, 2}),
                         [](const auto& test) { return "ranks_on_" + join(test.param, ""); });

// Rank r has r entries of `row` values each, twice, at places that other ranks have too; rank 0 has none.
torch::Tensor sparse_of(int rank, torch::IntArrayRef row, torch::ScalarType dtype) {
  std::vector<int64_t> sizes{2 * rank};
  sizes.insert(sizes.end(), row.begin(), row.end());
  const torch::Tensor places = torch::arange(rank).repeat(2);
  const torch::Tensor values = torch::full(sizes, rank + 1).to(dtype);
  sizes.front() = 7;
  sizes.insert(sizes.begin() + 1, 3);
  return torch::sparse_coo_tensor(torch::stack({places, places.remainder(3)}), values, sizes);
}

TEST_P(BackendOver, all_reduce_sums_sparse_tensors) {
  run_group(GetParam(), [](const GroupPtr& group) {
    for (const auto dtype : {torch::kFloat32, torch::kFloat64, torch::kBFloat16, torch::kInt64})
      for (const std::vector<int64_t>& row : {std::vector<int64_t>{}, {4}}) {
        torch::Tensor expected = sparse_of(0, row, dtype).to_dense();
        for (int rank = 1; rank < group->getSize(); ++rank) expected += sparse_of(rank, row, dtype).to_dense();
        Tensors tensors{sparse_of(group->getRank(), row, dtype)};
        const auto work = group->allreduce(tensors);
        work->getFuture()->waitAndThrow();
        EXPECT_TRUE(tensors[0].is_coalesced());
        expect_equal(tensors[0].to_dense(), expected);
        expect_equal(work->getFuture()->value().toTensorVector()[0].to_dense(), expected);
      }
  });
}

TEST_P(BackendOver, sparse_tensors_of_different_shapes_are_an_error_on_all_ranks_and_the_group_goes_on) {
  if (size() == 1) return;
  run_group(GetParam(), [](const GroupPtr& group) {
    const int last = group->getSize() - 1;
    Tensors tensors{torch::eye(group->getRank() == last ? 4 : 3).to_sparse()};
    const auto message = message_of<MismatchError>([&] { group->allreduce(tensors)->wait(); });
    EXPECT_TRUE(contains(message, concat("the sparse tensors of ranks 0 and ", last, " differ in dtype, shape")));
    barrier(group)->wait();
  });
}

TEST_P(BackendOver, a_monitored_barrier_lets_all_ranks_go) {
  run_group(GetParam(), [](const GroupPtr& group) {
    for (const bool all : {false, true}) group->getBackend(c10::kCPU)->monitoredBarrier({}, all);
    Tensors tensors{torch::ones({10})};
    group->allreduce(tensors)->wait();
  });
}

// The last two ranks of three or more do not come. They wait until rank 0 has ended, so that they are late and not lost.
TEST_P(BackendOver, a_monitored_barrier_names_the_first_rank_that_is_missing_or_all) {
  if (size() == 1) return;
  for (const bool all : {false, true}) {
    Gate over;
    run_group(GetParam(), [&](const GroupPtr& group) {
      if (group->getRank() > 0) return over.wait();
      c10d::BarrierOptions options;
      options.timeout = milliseconds(50);
      const auto backend = group->getBackend(c10::kCPU);
      const auto message = message_of<PeerLost>([&] { backend->monitoredBarrier(options, all); });
      EXPECT_TRUE(contains(message, all ? "Ranks 1, 2 failed to pass" : "Rank 1 failed to pass"));
      over.open();
    });
  }
}

TEST_P(BackendOver, who_came_to_a_monitored_barrier_learns_that_it_failed) {
  if (size() == 1) return;
  Gate over;
  run_group(GetParam(), [&](const GroupPtr& group) {
    c10d::BarrierOptions options;
    options.timeout = milliseconds(50);
    const auto come = [&] { group->getBackend(c10::kCPU)->monitoredBarrier(options, false); };
    if (group->getRank() == 1) return over.wait();
    const auto message = message_of<PeerLost>(come);
    EXPECT_TRUE(contains(message, group->getRank() == 0 ? "Rank 1 failed to pass monitoredBarrier"
                                                        : "Rank 2 successfully reached monitoredBarrier"));
    if (group->getRank() != 2) return;
    over.open();
  });
}

TEST_P(BackendOver, the_timeout_of_a_call_ends_it_on_rank_0) {
  if (size() == 1) return;
  Gate over;
  run_group(GetParam(), [&](const GroupPtr& group) {
    if (group->getRank() > 0) return over.wait();
    Tensors tensors{torch::ones({100000})};
    EXPECT_THROW(group->allreduce(tensors, {.timeout = milliseconds(100)})->wait(), PeerLost);
    over.open();
  });
}

TEST_P(BackendOver, the_timeout_of_the_group_can_be_changed) {
  if (size() == 1) return;
  Gate over;
  run_group(GetParam(), [&](const GroupPtr& group) {
    if (group->getRank() > 0) return over.wait();
    group->getBackend(c10::kCPU)->setTimeout(milliseconds(100));
    Tensors tensors{torch::ones({100000})};
    EXPECT_THROW(group->allreduce(tensors)->wait(), PeerLost);
    over.open();
  });
}

TEST(BackendOverMachines, a_lost_rank_is_an_error_on_all_others_that_names_it_or_its_machine) {
  run_group(Machines{0, 0, 1, 1}, [](const GroupPtr& group) {
    if (group->getRank() == 3) {
      barrier(group)->wait();
      return group->getBackend(c10::kCPU)->abort();
    }
    Tensors tensors{torch::ones({100000})};
    const auto message = message_of<PeerLost>([&] {
      barrier(group)->wait();  // rank 3 may leave it, and abort, before the others do
      while (true) group->allreduce(tensors)->wait();
    });
    EXPECT_TRUE(contains(message, group->getRank() == 2 ? "rank 3" : "machine 1 (ranks 2, 3)"));
  });
}

TEST(BackendOverMachines, split_keeps_what_machine_each_rank_is_on) {
  run_threads(4, [](int rank, const StorePtr& store) {
    const auto whole = make_c10d_backend(store, rank, 4, kTimeout, concat("machine ", rank / 2));
    const auto prefix = c10::make_intrusive<c10d::PrefixStore>(concat("half", rank % 2), store);
    const auto half = whole->split(prefix, {rank % 2, 2 + rank % 2}, whole->getBackendOptions());
    Tensors tensors{torch::full({10}, rank)};
    half->allreduce(tensors, {})->wait();
    expect_equal(tensors[0], torch::full({10}, rank % 2 == 0 ? 2 : 4));
    whole->barrier({})->wait();
  });
}

}  // namespace
}  // namespace lockstep
