// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/c10d/backend.h"

#include <gtest/gtest.h>

#include <torch/nn/modules/linear.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <atomic>
#include <functional>
#include <future>
#include <thread>
#include <vector>

#include "lockstep/base/file.h"
#include "lockstep/base/int_vector.h"
#include "lockstep/base/text.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using testing::contains;
using testing::message_of;
using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;
using StorePtr = c10::intrusive_ptr<c10d::Store>;
using Tensors = std::vector<at::Tensor>;

constexpr auto kTimeout = std::chrono::seconds(20);

GroupPtr make_group(const StorePtr& store, int rank, int size) {
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, size);
  group->setBackend(c10::kCPU, c10d::ProcessGroup::BackendType::CUSTOM,
                    c10::make_intrusive<ShmBackend>(store, rank, size, kTimeout));
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
  return group;
}

// Runs `body` once per rank, each rank a thread; a failure of any fails the test.
void run_threads(int size, const std::function<void(int rank, const StorePtr& store)>& body) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      try {
        body(rank, store);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  for (std::thread& thread : threads) thread.join();
}

void run_group(int size, const std::function<void(const GroupPtr& group)>& body) {
  run_threads(size, [&](int rank, const StorePtr& store) { body(make_group(store, rank, size)); });
}

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

class BackendOfSize : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, BackendOfSize, ::testing::Values(1, 2, 3, 4, 7));

// What rank r has: small integers, so that sums are exact.
torch::Tensor data_of(int rank, std::int64_t elements = 1001, torch::ScalarType dtype = torch::kFloat32) {
  return (torch::arange(elements) % 5 + rank + 1).to(dtype);
}

torch::Tensor sum_of_all(int size, std::int64_t elements = 1001) {
  torch::Tensor sum = torch::zeros({elements});
  for (int rank = 0; rank < size; ++rank) sum += data_of(rank, elements);
  return sum;
}

Tensors data_of_all(int size) {
  Tensors all;
  for (int rank = 0; rank < size; ++rank) all.push_back(data_of(rank));
  return all;
}

Tensors empty_like_all(int size) { return Tensors(to_size(size)); }

Tensors zeros(int count, std::int64_t elements) {
  Tensors all = empty_like_all(count);
  for (torch::Tensor& tensor : all) tensor = torch::zeros({elements});
  return all;
}

void expect_equal(const torch::Tensor& actual, const torch::Tensor& expected) {
  EXPECT_TRUE(torch::equal(actual, expected)) << actual << "\ninstead of\n" << expected;
}

void expect_equal(const Tensors& actual, const Tensors& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) expect_equal(actual[i], expected[i]);
}

TEST_P(BackendOfSize, all_reduce_gives_the_exact_sum_of_every_dtype) {
  run_group(GetParam(), [](const GroupPtr& group) {
    for (const auto dtype : {torch::kFloat32, torch::kFloat64, torch::kFloat16, torch::kBFloat16, torch::kInt8,
                             torch::kUInt8, torch::kInt16, torch::kInt32, torch::kInt64, torch::kComplexFloat}) {
      Tensors tensors{data_of(group->getRank(), 1001, dtype)};
      group->allreduce(tensors)->wait();
      expect_equal(tensors[0], sum_of_all(group->getSize()).to(dtype));
    }
  });
}

TEST_P(BackendOfSize, all_reduce_knows_every_reduction_of_c10d) {
  run_group(GetParam(), [](const GroupPtr& group) {
    const auto reduce = [&](const torch::Tensor& tensor, const c10d::ReduceOp& op) {
      Tensors tensors{tensor.clone()};
      group->allreduce(tensors, {.reduceOp = op})->wait();
      return tensors[0];
    };
    const int rank = group->getRank();
    const int size = group->getSize();
    const torch::Tensor stacked = torch::stack(data_of_all(size));
    expect_equal(reduce(data_of(rank), c10d::ReduceOp::MIN), stacked.amin(0));
    expect_equal(reduce(data_of(rank), c10d::ReduceOp::MAX), stacked.amax(0));
    expect_equal(reduce(data_of(rank) * size, c10d::ReduceOp::AVG), stacked.sum(0));
    expect_equal(reduce(data_of(rank) % 3, c10d::ReduceOp::PRODUCT), stacked.remainder(3).prod(0));
    expect_equal(reduce(data_of(rank), c10d::makeNCCLPreMulSum(0.5)), stacked.sum(0) * 0.5);
    const torch::Tensor bit = torch::full({3}, 1 << rank, torch::kInt32);
    expect_equal(reduce(bit, c10d::ReduceOp::BOR), torch::full({3}, (1 << size) - 1, torch::kInt32));
    expect_equal(reduce(bit, c10d::ReduceOp::BXOR), torch::full({3}, (1 << size) - 1, torch::kInt32));
    expect_equal(reduce(bit | 128, c10d::ReduceOp::BAND), torch::full({3}, size == 1 ? 129 : 128, torch::kInt32));
  });
}

TEST_P(BackendOfSize, several_all_reduces_are_in_flight_and_their_futures_hold_the_sums) {
  run_group(GetParam(), [](const GroupPtr& group) {
    IntVector<c10::intrusive_ptr<c10d::Work>> works;
    for (int i = 0; i < 8; ++i) {
      Tensors tensors{data_of(group->getRank(), 100000 * i)};
      works.push_back(group->allreduce(tensors));
    }
    for (int i = 7; i >= 0; --i) {
      auto future = works[i]->getFuture();
      future->wait();
      expect_equal(future->value().toTensorVector()[0], sum_of_all(group->getSize(), 100000 * i));
    }
  });
}

TEST_P(BackendOfSize, tensors_of_any_layout_are_exchanged) {
  run_group(GetParam(), [](const GroupPtr& group) {
    const torch::Tensor matrix = torch::zeros({30, 40});
    matrix.t().copy_(data_of(group->getRank(), 1200).view({40, 30}));
    Tensors transposed{matrix.t()};
    group->allreduce(transposed)->wait();
    expect_equal(matrix.t(), sum_of_all(group->getSize(), 1200).view({40, 30}));

    Tensors column{matrix.narrow(1, 3, 1).zero_()};
    if (group->getRank() == 0) column[0].fill_(7);
    group->broadcast(column)->wait();
    expect_equal(matrix.narrow(1, 3, 1), torch::full({30, 1}, 7.0));
  });
}

TEST_P(BackendOfSize, reduce_and_broadcast_serve_every_root) {
  run_group(GetParam(), [](const GroupPtr& group) {
    for (int root = 0; root < group->getSize(); ++root) {
      const torch::Tensor mine = data_of(group->getRank());
      Tensors reduced{mine.clone()};
      group->reduce(reduced, {.rootRank = root})->wait();
      expect_equal(reduced[0], group->getRank() == root ? sum_of_all(group->getSize()) : mine);
      Tensors copied{mine.clone()};
      group->broadcast(copied, {.rootRank = root})->wait();
      expect_equal(copied[0], data_of(root));
    }
  });
}

TEST_P(BackendOfSize, all_gather_fills_lists_and_flat_tensors) {
  run_group(GetParam(), [](const GroupPtr& group) {
    const int size = group->getSize();
    Tensors inputs{data_of(group->getRank())};
    std::vector<Tensors> outputs{zeros(size, 1001)};
    group->allgather(outputs, inputs)->wait();
    expect_equal(outputs[0], data_of_all(size));

    torch::Tensor flat = torch::zeros({size * 1001});
    group->_allgather_base(flat, inputs[0])->wait();
    expect_equal(flat, torch::cat(data_of_all(size)));

    torch::Tensor in_place = torch::zeros({size * 1001});
    torch::Tensor own_part = in_place.narrow(0, group->getRank() * 1001, 1001).copy_(inputs[0]);
    group->_allgather_base(in_place, own_part)->wait();
    expect_equal(in_place, flat);

    Tensors flats{torch::zeros({size * 1001}), torch::zeros({size * 1001}, torch::kInt64)};
    Tensors parts{inputs[0], inputs[0].to(torch::kInt64)};
    group->allgather_into_tensor_coalesced(flats, parts)->wait();
    expect_equal(flats, {flat, flat.to(torch::kInt64)});
  });
}

TEST_P(BackendOfSize, reduce_scatter_takes_lists_and_flat_tensors) {
  run_group(GetParam(), [](const GroupPtr& group) {
    const int size = group->getSize();
    const int rank = group->getRank();
    Tensors parts;
    for (int i = 0; i < size; ++i) parts.push_back(data_of(rank) * (i + 1));
    const torch::Tensor expected = sum_of_all(size) * (rank + 1);

    std::vector<Tensors> inputs{parts};
    Tensors outputs{torch::zeros({1001})};
    group->reduce_scatter(outputs, inputs)->wait();
    expect_equal(outputs[0], expected);

    torch::Tensor flat = torch::cat(parts);
    torch::Tensor output = torch::zeros({1001});
    group->_reduce_scatter_base(output, flat)->wait();
    expect_equal(output, expected);

    Tensors flats{flat, flat.to(torch::kFloat64)};
    Tensors two{torch::zeros({1001}), torch::zeros({1001}, torch::kFloat64)};
    group->reduce_scatter_tensor_coalesced(two, flats)->wait();
    expect_equal(two, {expected, expected.to(torch::kFloat64)});
  });
}

TEST_P(BackendOfSize, gather_and_scatter_serve_every_root) {
  run_group(GetParam(), [](const GroupPtr& group) {
    const int size = group->getSize();
    for (int root = 0; root < size; ++root) {
      const bool is_root = group->getRank() == root;
      Tensors mine{data_of(group->getRank())};
      std::vector<Tensors> gathered;
      if (is_root) gathered.push_back(zeros(size, 1001));
      group->gather(gathered, mine, {.rootRank = root})->wait();
      if (is_root) expect_equal(gathered[0], data_of_all(size));

      std::vector<Tensors> parts;
      if (is_root) parts.push_back(data_of_all(size));
      Tensors part{torch::zeros({1001})};
      group->scatter(part, parts, {.rootRank = root})->wait();
      expect_equal(part, mine);
    }
  });
}

TEST_P(BackendOfSize, all_to_all_exchanges_even_and_uneven_parts) {
  run_group(GetParam(), [](const GroupPtr& group) {
    const int size = group->getSize();
    const int rank = group->getRank();
    // Rank r sends r + to + 1 rows of value 100 r + to.
    Tensors sent, expected;
    std::vector<std::int64_t> rows;
    for (int other = 0; other < size; ++other) {
      rows.push_back(rank + other + 1);
      sent.push_back(torch::full({rows.back(), 3}, 100 * rank + other));
      expected.push_back(torch::full({rows.back(), 3}, 100 * other + rank));
    }
    torch::Tensor input = torch::cat(sent);
    torch::Tensor output = torch::zeros_like(input);
    group->alltoall_base(output, input, rows, rows)->wait();
    expect_equal(output, torch::cat(expected));

    Tensors received;
    for (const torch::Tensor& tensor : expected) received.push_back(torch::zeros_like(tensor));
    group->alltoall(received, sent)->wait();
    expect_equal(received, expected);

    std::vector<std::int64_t> even;
    torch::Tensor ranks = torch::full({size, 2}, rank);
    torch::Tensor all = torch::zeros_like(ranks);
    group->alltoall_base(all, ranks, even, even)->wait();
    expect_equal(all, torch::arange(size).view({-1, 1}).expand({size, 2}));
  });
}

TEST_P(BackendOfSize, messages_go_round_in_a_ring_and_to_any_receiver) {
  run_group(GetParam(), [](const GroupPtr& group) {
    const int size = group->getSize();
    if (size == 1) return;
    const int rank = group->getRank();
    Tensors mine{data_of(rank, 100000)};
    Tensors from_left{torch::zeros({2, 100000}).t().narrow(1, 0, 1).squeeze(1)};  // not contiguous
    auto sending = group->send(mine, (rank + 1) % size, 5);
    group->recv(from_left, (rank + size - 1) % size, 5)->wait();
    sending->wait();
    expect_equal(from_left[0], data_of((rank + size - 1) % size, 100000));

    Tensors small{torch::full({4}, rank)};
    if (rank > 0) return static_cast<void>(group->send(small, 0, 6)->wait());
    for (int i = 1; i < size; ++i) {
      auto work = group->recvAnysource(small, 6);
      work->wait();
      expect_equal(small[0], torch::full({4}, work->sourceRank()));
    }
  });
}

TEST_P(BackendOfSize, barrier_coalesced_and_empty_calls_return) {
  run_group(GetParam(), [](const GroupPtr& group) {
    group->barrier()->wait();
    Tensors tensors{data_of(group->getRank()), data_of(group->getRank(), 3, torch::kInt64), torch::zeros({0})};
    group->allreduce_coalesced(tensors)->wait();
    expect_equal(tensors,
                 {sum_of_all(group->getSize()), sum_of_all(group->getSize(), 3).to(torch::kInt64), torch::zeros({0})});
    EXPECT_EQ(group->getBackend(c10::kCPU)->getSequenceNumberForGroup(), 2U);
  });
}

TEST_P(BackendOfSize, sub_groups_work_at_the_same_time) {
  const int size = GetParam();
  run_threads(size, [size](int rank, const StorePtr& store) {
    const auto prefixed = [&](const std::string& prefix) {
      return c10::make_intrusive<c10d::PrefixStore>(prefix, store);
    };
    const GroupPtr all = make_group(prefixed("all"), rank, size);
    const int parity = rank % 2;
    const int members = (size + 1 - parity) / 2;
    const GroupPtr half = make_group(prefixed(concat("half", parity)), rank / 2, members);
    Tensors in_all{torch::full({100000}, rank)};
    Tensors in_half{torch::full({100000}, rank)};
    auto first = all->allreduce(in_all);
    half->allreduce(in_half)->wait();
    first->wait();
    expect_equal(in_all[0], torch::full({100000}, size * (size - 1) / 2));
    expect_equal(in_half[0], torch::full({100000}, members * (members - 1) + parity * members));
  });
}

TEST_P(BackendOfSize, c10ds_own_reducer_gives_the_mean) {
  run_group(GetParam(), [](const GroupPtr& group) {
    torch::nn::Linear model(4, 4);
    std::vector<at::Tensor> parameters = model->parameters();
    auto reducer = std::make_shared<c10d::Reducer>(parameters, std::vector<std::vector<std::size_t>>{{1}, {0}}, group,
                                                   std::vector<bool>{false, false}, 1 << 20, false, true,
                                                   std::unordered_map<std::size_t, std::string>{}, 1 << 20, false,
                                                   false, std::vector<std::int64_t>{});
    const torch::Tensor output = model->forward(torch::ones({2, 4}));
    reducer->prepare_for_forward();
    reducer->prepare_for_backward({output});
    (output.sum() * group->getSize() * (group->getRank() + 1)).backward();
    const double sum_of_ranks = group->getSize() * (group->getSize() + 1) / 2;
    expect_equal(model->bias.grad(), torch::full({4}, 2 * sum_of_ranks));
    expect_equal(model->weight.grad(), torch::full({4, 4}, 2 * sum_of_ranks));
  });
}

class Callbacks : public ::testing::TestWithParam<int> {
 public:
  using Body = std::function<at::Tensor(const GroupPtr& group, at::Tensor sum)>;

  // Starts `count` all-reduces, the callback of each being `body` with its sum; expects `factor` times the sums.
  static void run(int count, std::int64_t factor, const Body& body) {
    run_threads(GetParam(), [&](int rank, const StorePtr& store) {
      const GroupPtr group = make_group(store, rank, GetParam());
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
        expect_equal(future->value().toTensor(), sum_of_all(GetParam(), 100 * i) * factor);
      }
      group->getBackend(c10::kCPU)->shutdown();
    });
  }
};
INSTANTIATE_TEST_SUITE_P(Sizes, Callbacks, ::testing::Values(2, 3));

TEST_P(Callbacks, make_a_blocking_all_reduce) {
  run(1, GetParam(), [](const GroupPtr& group, const at::Tensor& sum) {
    Tensors tensors{sum.clone()};
    group->allreduce(tensors, {.asyncOp = false})->wait();
    return tensors[0];
  });
}

TEST_P(Callbacks, make_an_async_all_reduce_and_wait_for_its_future) {
  run(1, GetParam(), [](const GroupPtr& group, const at::Tensor& sum) {
    Tensors tensors{sum.clone()};
    const IValueFuturePtr future = group->allreduce(tensors)->getFuture();
    future->waitAndThrow();
    return future->value().toTensorVector()[0];
  });
}

TEST_P(Callbacks, nest_and_several_are_under_way_at_once) {
  run(8, GetParam() * GetParam(), [](const GroupPtr& group, const at::Tensor& sum) {
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
    group->barrier()->wait(kTimeout);
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

TEST(Backend, a_message_whose_work_was_dropped_arrives_whole) {
  run_group(2, [](const GroupPtr& group) {
    Tensors received{torch::zeros({1001})};
    if (group->getRank() == 0) {
      Tensors strided{torch::zeros({1001, 2}).select(1, 0).copy_(data_of(0))};  // sent out of a copy
      static_cast<void>(group->send(strided, 1, 5));
    }
    Tensors others;  // where the copy was, if it is gone
    for (int i = 0; i < 64; ++i) others.push_back(torch::full({1001}, -1.0));
    group->barrier()->wait(kTimeout);
    if (group->getRank() == 0) return;
    group->recv(received, 0, 5)->wait(kTimeout);
    expect_equal(received[0], data_of(0));
  });
}

TEST(Backend, a_tensor_stays_until_its_message_has_come_though_nobody_waits_any_more) {
  run_group(2, [](const GroupPtr& group) {
    std::vector<float> memory(100000);
    std::atomic<bool> freed = false;
    const auto elements = static_cast<std::int64_t>(memory.size());
    if (group->getRank() == 1) {
      Tensors tensors{torch::from_blob(memory.data(), {elements}, [&](void*) { freed = true; })};
      EXPECT_THROW(group->recv(tensors, 0, 5)->wait(std::chrono::milliseconds(20)), PeerLost);
    }
    EXPECT_FALSE(freed);
    group->barrier()->wait(kTimeout);
    Tensors small{torch::ones({4})};
    if (group->getRank() == 0) {
      Tensors late{data_of(0, elements)};
      group->send(late, 1, 5)->wait(kTimeout);
    }
    group->barrier()->wait(kTimeout);  // what is as long as that has been received once it is sent
    if (group->getRank() == 0) return static_cast<void>(group->send(small, 1, 6)->wait(kTimeout));
    expect_equal(torch::from_blob(memory.data(), {elements}), data_of(0, elements));
    group->recv(small, 0, 6)->wait(kTimeout);
    EXPECT_TRUE(freed);  // the next message lets go of those that are done
  });
}

TEST(Backend, tensors_from_it_are_exchanged_and_outlive_it) {
  torch::Tensor kept;
  run_threads(2, [&](int rank, const StorePtr& store) {
    ShmBackend backend(store, rank, 2, kTimeout);
    Tensors tensors{backend.allocateTensor(1001, torch::kFloat32)};
    tensors[0].copy_(data_of(rank));
    backend.allreduce(tensors, {})->wait();
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
    group->barrier()->wait();
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
  run_group(2, [](const GroupPtr& group) {
    Tensors tensors{torch::ones({10})};
    if (group->getRank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(200));
    const auto work = group->allreduce(tensors);
    if (group->getRank() == 0) {
      EXPECT_ANY_THROW(work->wait(std::chrono::milliseconds(20)));
    }
    work->wait();
    expect_equal(tensors[0], torch::full({10}, 2.0));
  });
}

TEST(Backend, the_timeout_of_a_call_ends_it_and_names_who_is_missing) {
  run_group(2, [](const GroupPtr& group) {
    if (group->getRank() == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      return group->getBackend(c10::kCPU)->abort();
    }
    c10d::BarrierOptions options;
    options.timeout = std::chrono::milliseconds(50);
    const auto message = message_of<PeerLost>([&] { group->getBackend(c10::kCPU)->monitoredBarrier(options); });
    EXPECT_TRUE(contains(message, "rank 1 did not answer within 50.0 ms"));
  });
}

TEST(Backend, splits_into_backends_that_work_at_the_same_time) {
  run_threads(4, [](int rank, const StorePtr& store) {
    ShmBackend whole(store, rank, 4, kTimeout);
    const std::vector<int> ranks = rank % 2 == 0 ? std::vector{0, 2} : std::vector{1, 3};
    const auto prefix = c10::make_intrusive<c10d::PrefixStore>(rank % 2 == 0 ? "even" : "odd", store);
    const auto half = whole.split(prefix, ranks, whole.getBackendOptions());
    EXPECT_EQ(half->getRank(), rank / 2);
    Tensors tensors{torch::full({10}, static_cast<double>(rank))};
    half->allreduce(tensors, {})->wait();
    expect_equal(tensors[0], torch::full({10}, rank % 2 == 0 ? 2.0 : 4.0));
    EXPECT_EQ(whole.split(store, {(rank + 1) % 4}, nullptr), nullptr);
    whole.barrier({})->wait();
  });
}

TEST(Backend, arguments_that_make_no_sense_are_refused_at_once) {
  run_group(2, [](const GroupPtr& group) {
    Tensors sparse{torch::eye(3).to_sparse()};
    EXPECT_THROW(group->allreduce(sparse), UsageError);
    torch::Tensor whole = torch::zeros({7});
    torch::Tensor part = torch::zeros({3});
    EXPECT_THROW(group->_allgather_base(whole, part), UsageError);
    EXPECT_THROW(group->_reduce_scatter_base(part, whole), UsageError);
    Tensors complex{torch::zeros({3}, torch::kComplexFloat)};
    EXPECT_THROW(group->allreduce(complex, {.reduceOp = c10d::ReduceOp::MAX}), UsageError);
    Tensors meta{torch::zeros({3}, torch::kMeta)};
    EXPECT_THROW(group->getBackend(c10::kCPU)->allreduce(meta), DeviceError);
    group->barrier()->wait();
  });
}

TEST(Backend, ranks_of_different_machines_are_refused) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  store->set("lockstep/machine/1", std::vector<std::uint8_t>{1, 2, 3});
  const std::string message = message_of<RendezvousError>([&] { ShmBackend(store, 0, 2, kTimeout); });
  EXPECT_TRUE(contains(message, "ranks 0 and 1 run on different machines"));
}

TEST(Backend, rank_0_that_goes_away_before_it_gives_its_address_is_an_error_within_the_timeout) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  store->set("lockstep/machine/0", read_file("/proc/sys/kernel/random/boot_id"));
  const auto join = [&] { ShmBackend(store, 1, 2, std::chrono::milliseconds(50)); };
  store->setTimeout(kTimeout);
  EXPECT_TRUE(contains(message_of<RendezvousError>(join), "not all ranks have come"));
}

TEST(Backend, a_call_after_shutdown_is_an_error) {
  run_threads(2, [](int rank, const StorePtr& store) {
    ShmBackend backend(store, rank, 2, kTimeout);
    backend.shutdown();
    Tensors tensors{torch::ones({1})};
    EXPECT_THROW(backend.allreduce(tensors, {}), UsageError);
  });
}

}  // namespace
}  // namespace lockstep
