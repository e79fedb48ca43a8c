// SPDX-License-Identifier: Apache-2.0
// Callbacks of the c10d backend's futures, which make collectives themselves.
#include <functional>
#include <future>
#include <memory>

#include "lockstep/base/int_vector.h"
#include "tests/backend_groups.h"

namespace lockstep {
namespace {

using namespace testing::backend;
using testing::contains;
using testing::message_of;

using IValueFuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

// Throws what the future holds. One that is not done in time fails the test, and keeps the group: it could not end.
void wait_in_time(const IValueFuturePtr& future, const GroupPtr& group) {
  const auto done = std::make_shared<std::promise<void>>();
  future->addCallback([done](c10::ivalue::Future&) { done->set_value(); });
  if (done->get_future().wait_for(kTimeout) == std::future_status::ready) return future->waitAndThrow();
  ADD_FAILURE() << "rank " << group->getRank() << ": a callback that does not end";
  static_cast<void>(GroupPtr(group).release());
}

// Rank 0 starts last: the others attach a callback before the call can be done, so that the queue's thread runs it.
void rank_0_waits_for_the_others(const GroupPtr& group, const StorePtr& store) {
  if (group->getRank() > 0) return store->set(concat("attached", group->getRank()), std::string("yes"));
  for (int other = 1; other < group->getSize(); ++other) store->wait({concat("attached", other)}, kTimeout);
}

class Callbacks : public ::testing::TestWithParam<Machines> {
 public:
  using Body = std::function<at::Tensor(const GroupPtr& group, at::Tensor sum)>;

  static int size() { return static_cast<int>(GetParam().size()); }

  // Starts `count` all-reduces, the callback of each being `body` with its sum; expects `factor` times the sums.
  static void run(int count, int64_t factor, const Body& body) {
    run_threads(size(), [&](int rank, const StorePtr& store) {
      const GroupPtr group = make_group(store, rank, size(), GetParam()[to_size(rank)]);
      if (rank == 0) rank_0_waits_for_the_others(group, store);
      IntVector<IValueFuturePtr> futures;
      for (int i = 1; i <= count; ++i) {
        Tensors tensors{data_of(rank, 100 * i)};
        futures.push_back(group->allreduce(tensors)->getFuture()->then(
            [&body, &group](c10::ivalue::Future& done) -> c10::IValue {
              return body(group, done.value().toTensorVector()[0]);
            },
            c10::TensorType::get()));
      }
      if (rank > 0) rank_0_waits_for_the_others(group, store);
      for (int i = 1; i <= count; ++i) {
        const IValueFuturePtr& future = futures[i - 1];
        wait_in_time(future, group);
        if (!future->completed()) return;
        expect_equal(future->value().toTensor(), sum_of_all(size(), 100 * i) * factor);
      }
      group->getBackend(c10::kCPU)->shutdown();
    });
  }
};
INSTANTIATE_TEST_SUITE_P(Layouts, Callbacks,
                         ::testing::Values(one_machine(2), one_machine(3), Machines{0, 1}, Machines{0, 0, 1}));

TEST_P(Callbacks, make_a_blocking_all_reduce) {
  run(1, size(), [](const GroupPtr& group, const at::Tensor& sum) {
    Tensors tensors{sum.clone()};
    group->allreduce(tensors, {.asyncOp = false})->wait();
    return tensors[0];
  });
}

TEST_P(Callbacks, make_an_async_all_reduce_and_wait_for_its_future) {
  run(1, size(), [](const GroupPtr& group, const at::Tensor& sum) {
    Tensors tensors{sum.clone()};
    const IValueFuturePtr future = group->allreduce(tensors)->getFuture();
    future->waitAndThrow();
    return future->value().toTensorVector()[0];
  });
}

TEST_P(Callbacks, nest_and_several_are_under_way_at_once) {
  run(8, size() * size(), [](const GroupPtr& group, const at::Tensor& sum) {
    Tensors tensors{sum.clone()};
    const IValueFuturePtr future = group->allreduce(tensors)->getFuture()->then(
        [&group](c10::ivalue::Future& done) -> c10::IValue {
          Tensors again{done.value().toTensorVector()[0].clone()};
          const auto work = group->allreduce(again);
          work->wait();
          return again[0];
        },
        c10::TensorType::get());
    future->waitAndThrow();
    return future->value().toTensor();
  });
}

TEST(Backend, a_callback_that_throws_ends_the_work_with_its_error) {
  run_threads(2, [](int rank, const StorePtr& store) {
    const GroupPtr group = make_group(store, rank, 2);
    if (rank == 0) rank_0_waits_for_the_others(group, store);
    Tensors tensors{torch::ones({10})};
    const auto work = group->allreduce(tensors);
    const auto fail = [](c10::ivalue::Future&) { throw UsageError({.what = "a callback that fails"}); };
    if (rank == 1) {
      work->getFuture()->addCallback(fail);
      rank_0_waits_for_the_others(group, store);
      EXPECT_TRUE(contains(message_of<UsageError>([&] { work->wait(kTimeout); }), "a callback that fails"));
    }
    work->getFuture()->waitAndThrow();
    barrier(group)->wait(kTimeout);
  });
}

TEST(Backend, a_callback_may_hold_the_last_reference_to_it) {
  run_threads(2, [](int rank, const StorePtr& store) {
    GroupPtr group = make_group(store, rank, 2);
    if (rank == 0) rank_0_waits_for_the_others(group, store);
    Tensors tensors{torch::ones({10})};
    const auto work = group->allreduce(tensors);
    if (rank == 0) return work->getFuture()->waitAndThrow();
    std::promise<void> dropped;
    std::promise<void> done;
    work->getFuture()->addCallback([last = group, &dropped, &done](c10::ivalue::Future&) mutable {
      EXPECT_EQ(dropped.get_future().wait_for(kTimeout), std::future_status::ready);
      last.reset();
      done.set_value();
    });
    rank_0_waits_for_the_others(group, store);
    group.reset();
    dropped.set_value();
    EXPECT_EQ(done.get_future().wait_for(kTimeout), std::future_status::ready);
  });
}

}  // namespace
}  // namespace lockstep
