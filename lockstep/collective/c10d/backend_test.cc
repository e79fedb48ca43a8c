// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/c10d/backend.h"

#include <atomic>
#include <future>
#include <thread>
#include <vector>

#include "tests/backend_groups.h"

namespace lockstep {
namespace {

using namespace testing::backend;
using testing::contains;
using testing::message_of;

TEST(Backend, a_message_whose_work_was_dropped_arrives_whole) {
  run_group(2, [](const GroupPtr& group) {
    Tensors received{torch::zeros({1001})};
    if (group->getRank() == 0) {
      Tensors strided{torch::zeros({1001, 2}).select(1, 0).copy_(data_of(0))};  // sent out of a copy
      static_cast<void>(group->send(strided, 1, 5));
    }
    Tensors others;  // where the copy was, if it is gone
    for (int i = 0; i < 64; ++i) others.push_back(torch::full({1001}, -1.0));
    barrier(group)->wait(kTimeout);
    if (group->getRank() == 0) return;
    group->recv(received, 0, 5)->wait(kTimeout);
    expect_equal(received[0], data_of(0));
  });
}

TEST(Backend, a_tensor_stays_until_its_message_has_come_though_nobody_waits_any_more) {
  run_group(2, [](const GroupPtr& group) {
    std::vector<float> memory(100000);
    std::atomic<bool> freed = false;
    const auto elements = static_cast<int64_t>(memory.size());
    if (group->getRank() == 1) {
      Tensors tensors{torch::from_blob(memory.data(), {elements}, [&](void*) { freed = true; })};
      EXPECT_THROW(group->recv(tensors, 0, 5)->wait(std::chrono::milliseconds(20)), PeerLost);
    }
    EXPECT_FALSE(freed);
    barrier(group)->wait(kTimeout);
    Tensors small{torch::ones({4})};
    if (group->getRank() == 0) {
      Tensors late{data_of(0, elements)};
      group->send(late, 1, 5)->wait(kTimeout);
    }
    barrier(group)->wait(kTimeout);  // what is as long as that has been received once it is sent
    if (group->getRank() == 0) return static_cast<void>(group->send(small, 1, 6)->wait(kTimeout));
    expect_equal(torch::from_blob(memory.data(), {elements}), data_of(0, elements));
    group->recv(small, 0, 6)->wait(kTimeout);
    EXPECT_TRUE(freed);  // the next message lets go of those that are done
  });
}

TEST(Backend, tensors_from_it_are_exchanged_and_outlive_it) {
  torch::Tensor kept;
  run_threads(2, [&](int rank, const StorePtr& store) {
    const auto backend = make_c10d_backend(store, rank, 2, kTimeout);
    Tensors tensors{backend->allocateTensor(1001, torch::kFloat32)};
    tensors[0].copy_(data_of(rank));
    backend->allreduce(tensors, {})->wait();
    if (rank == 0) kept = tensors[0];
  });
  expect_equal(kept, sum_of_all(2));
}

TEST(Backend, different_shapes_are_an_error_that_names_both_ranks_and_the_group_goes_on) {
  run_group(2, [](const GroupPtr& group) {
    Tensors tensors{torch::ones({group->getRank() + 1})};
    const auto work = group->allreduce(tensors);
    const std::string message = message_of<MismatchError>([&] { work->wait(); });
    EXPECT_TRUE(contains(message, "rank 0"));
    EXPECT_TRUE(contains(message, "rank 1"));
    EXPECT_THROW(work->getFuture()->waitAndThrow(), MismatchError);
    barrier(group)->wait();
  });
}

TEST(Backend, a_peer_that_is_gone_is_an_error_out_of_wait) {
  run_group(2, [](const GroupPtr& group) {
    if (group->getRank() == 1) return;
    Tensors tensors{torch::ones({100000})};
    const auto work = group->allreduce(tensors);
    EXPECT_TRUE(contains(message_of<PeerLost>([&] { work->wait(); }), "rank 1"));
  });
}

TEST(Backend, abort_ends_what_is_under_way_on_every_rank) {
  run_group(2, [](const GroupPtr& group) {
    if (group->getRank() == 1) return group->getBackend(c10::kCPU)->abort();
    Tensors tensors{torch::ones({10})};
    EXPECT_THROW(group->allreduce(tensors)->wait(), PeerLost);
  });
}

TEST(Backend, a_wait_with_a_timeout_ends_and_the_call_goes_on) {
  std::promise<void> timed_out;
  run_group(2, [&timed_out](const GroupPtr& group) {
    Tensors tensors{torch::ones({10})};
    if (group->getRank() == 1) timed_out.get_future().wait();
    const auto work = group->allreduce(tensors);
    if (group->getRank() == 0) {
      const std::string message = message_of<c10::Error>([&] { work->wait(std::chrono::milliseconds(20)); });
      EXPECT_TRUE(contains(message, "Operation timed out"));
      timed_out.set_value();
    }
    work->wait();
    expect_equal(tensors[0], torch::full({10}, 2.0));
  });
}

// Calls, a message among them, are begun by whoever waits first, with a timeout or without.
class SeveralThreads : public ::testing::TestWithParam<Machines> {};
INSTANTIATE_TEST_SUITE_P(Layouts, SeveralThreads, ::testing::Values(Machines{0, 0}, Machines{0, 1}),
                         [](const auto& test) { return "ranks_on_" + join(test.param, ""); });

TEST_P(SeveralThreads, wait_for_one_call) {
  run_group(GetParam(), [](const GroupPtr& group) {
    const int peer = 1 - group->getRank();
    for (int round = 0; round < 50; ++round) {
      Tensors sum{torch::ones({10})}, sent{torch::ones({100000})}, received{torch::zeros({100000})};
      const std::vector<c10::intrusive_ptr<c10d::Work>> works{group->allreduce(sum), group->send(sent, peer, 0),
                                                              group->recv(received, peer, 0)};
      std::vector<std::thread> threads;
      for (const auto timeout : {kNoTimeout, std::chrono::milliseconds(kTimeout), std::chrono::milliseconds(kTimeout)})
        threads.emplace_back([&works, timeout] {
          for (const auto& work : works) EXPECT_TRUE(work->wait(timeout));
        });
      for (std::thread& thread : threads) thread.join();
      expect_equal(sum[0], torch::full({10}, 2.0));
      expect_equal(received[0], sent[0]);
    }
  });
}

TEST(Backend, every_thread_that_waits_gets_the_error) {
  run_group(2, [](const GroupPtr& group) {
    Tensors tensors{torch::ones({group->getRank() + 1})};
    const auto work = group->allreduce(tensors);
    std::thread other([&] { EXPECT_THROW(work->wait(kTimeout), MismatchError); });
    EXPECT_THROW(work->wait(), MismatchError);
    other.join();
    barrier(group)->wait();
  });
}

TEST(Backend, the_timeout_of_a_call_ends_it_and_names_who_is_missing) {
  std::promise<void> ended;
  run_group(2, [&, over = ended.get_future().share()](const GroupPtr& group) {
    if (group->getRank() == 1) {
      EXPECT_EQ(over.wait_for(kTimeout), std::future_status::ready);
      return group->getBackend(c10::kCPU)->abort();
    }
    c10d::BarrierOptions options;
    options.timeout = std::chrono::milliseconds(50);
    const auto message = message_of<PeerLost>([&] { barrier(group, options)->wait(); });
    EXPECT_TRUE(contains(message, "rank 1 did not answer within 50.0 ms"));
    ended.set_value();
  });
}

TEST(Backend, splits_into_backends_that_work_at_the_same_time) {
  run_threads(4, [](int rank, const StorePtr& store) {
    const auto whole = make_c10d_backend(store, rank, 4, kTimeout);
    const std::vector<int> ranks = rank % 2 == 0 ? std::vector{0, 2} : std::vector{1, 3};
    const auto prefix = c10::make_intrusive<c10d::PrefixStore>(rank % 2 == 0 ? "even" : "odd", store);
    const auto half = whole->split(prefix, ranks, whole->getBackendOptions());
    EXPECT_EQ(half->getRank(), rank / 2);
    Tensors tensors{torch::full({10}, static_cast<double>(rank))};
    half->allreduce(tensors, {})->wait();
    expect_equal(tensors[0], torch::full({10}, rank % 2 == 0 ? 2.0 : 4.0));
    EXPECT_EQ(whole->split(store, {(rank + 1) % 4}, nullptr), nullptr);
    whole->barrier({})->wait();
  });
}

TEST(Backend, arguments_that_make_no_sense_are_refused_at_once) {
  run_group(2, [](const GroupPtr& group) {
    Tensors rows{torch::eye(3).to_sparse_csr()};
    EXPECT_THROW(group->getBackend(c10::kCPU)->allreduce(rows), UsageError);
    Tensors sparse{torch::eye(3).to_sparse()};
    EXPECT_THROW(group->allreduce(sparse, {.reduceOp = c10d::ReduceOp::MAX}), UsageError);
    EXPECT_THROW(group->getBackend(c10::kCPU)->broadcast(sparse), UsageError);
    Tensors none;
    EXPECT_THROW(group->getBackend(c10::kCPU)->broadcast(none), UsageError);
    torch::Tensor whole = torch::zeros({7});
    torch::Tensor part = torch::zeros({3});
    EXPECT_THROW(group->_allgather_base(whole, part), UsageError);
    EXPECT_THROW(group->_reduce_scatter_base(part, whole), UsageError);
    Tensors complex{torch::zeros({3}, torch::kComplexFloat)};
    EXPECT_THROW(group->allreduce(complex, {.reduceOp = c10d::ReduceOp::MAX}), UsageError);
    Tensors meta{torch::zeros({3}, torch::kMeta)};
    EXPECT_THROW(group->getBackend(c10::kCPU)->allreduce(meta), DeviceError);
    barrier(group)->wait();
  });
}

TEST(Backend, rank_0_that_goes_away_before_it_gives_its_address_is_an_error_within_the_timeout) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  store->set("lockstep/connection/1/lockstep/machine/0", std::string("machine 0"));
  const auto join = [&] { make_c10d_backend(store, 1, 2, std::chrono::milliseconds(50), "machine 0"); };
  store->setTimeout(kTimeout);
  EXPECT_TRUE(contains(message_of<RendezvousError>(join), "not all ranks have come"));
}

TEST(Backend, a_call_after_shutdown_is_an_error) {
  run_threads(2, [](int rank, const StorePtr& store) {
    const auto backend = make_c10d_backend(store, rank, 2, kTimeout);
    backend->shutdown();
    Tensors tensors{torch::ones({1})};
    EXPECT_THROW(backend->allreduce(tensors, {}), UsageError);
  });
}

}  // namespace
}  // namespace lockstep
