// SPDX-License-Identifier: Apache-2.0
// Every collective of the c10d backend, on one machine and on several.
#include <torch/nn/modules/linear.h>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <memory>

#include "lockstep/base/int_vector.h"
#include "tests/backend_groups.h"

namespace lockstep {
namespace {

using namespace testing::backend;

class Backends : public ::testing::TestWithParam<Machines> {};
INSTANTIATE_TEST_SUITE_P(Layouts, Backends,
                         ::testing::Values(one_machine(1), one_machine(2), one_machine(3), one_machine(4),
                                           one_machine(7), Machines{0, 1}, Machines{0, 1, 1}, Machines{0, 1, 2},
                                           Machines{0, 1, 0, 1}, Machines{0, 1, 1, 0, 2, 2, 0}),
                         [](const auto& test) { return "ranks_on_" + join(test.param, ""); });

TEST_P(Backends, all_reduce_gives_the_exact_sum_of_every_dtype) {
  run_group(GetParam(), [](const GroupPtr& group) {
    for (const auto dtype : {torch::kFloat32, torch::kFloat64, torch::kFloat16, torch::kBFloat16, torch::kInt8,
                             torch::kUInt8, torch::kInt16, torch::kInt32, torch::kInt64, torch::kComplexFloat}) {
      Tensors tensors{data_of(group->getRank(), 1001, dtype)};
      group->allreduce(tensors)->wait();
      expect_equal(tensors[0], sum_of_all(group->getSize()).to(dtype));
    }
  });
}

TEST_P(Backends, all_reduce_knows_every_reduction_of_c10d) {
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
    const torch::Tensor bit = torch::full({3}, 1 << rank, torch::kInt32);
    expect_equal(reduce(bit, c10d::ReduceOp::BOR), torch::full({3}, (1 << size) - 1, torch::kInt32));
    expect_equal(reduce(bit, c10d::ReduceOp::BXOR), torch::full({3}, (1 << size) - 1, torch::kInt32));
    expect_equal(reduce(bit | 128, c10d::ReduceOp::BAND), torch::full({3}, size == 1 ? 129 : 128, torch::kInt32));
  });
}

TEST_P(Backends, several_all_reduces_are_in_flight_and_their_futures_hold_the_sums) {
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

TEST_P(Backends, tensors_of_any_layout_are_exchanged) {
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

TEST_P(Backends, reduce_and_broadcast_serve_every_root) {
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

TEST_P(Backends, all_gather_fills_lists_and_flat_tensors) {
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

TEST_P(Backends, reduce_scatter_takes_lists_and_flat_tensors) {
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

TEST_P(Backends, gather_and_scatter_serve_every_root) {
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

TEST_P(Backends, all_to_all_exchanges_even_and_uneven_parts) {
  run_group(GetParam(), [](const GroupPtr& group) {
    const int size = group->getSize();
    const int rank = group->getRank();
    // Rank r sends r + to + 1 rows of value 100 r + to.
    Tensors sent, expected;
    std::vector<int64_t> rows;
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

    std::vector<int64_t> even;
    torch::Tensor ranks = torch::full({size, 2}, rank);
    torch::Tensor all = torch::zeros_like(ranks);
    group->alltoall_base(all, ranks, even, even)->wait();
    expect_equal(all, torch::arange(size).view({-1, 1}).expand({size, 2}));
  });
}

TEST_P(Backends, messages_go_round_in_a_ring_and_to_any_receiver) {
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

TEST_P(Backends, barrier_coalesced_and_empty_calls_return) {
  run_group(GetParam(), [](const GroupPtr& group) {
    barrier(group)->wait();
    Tensors tensors{data_of(group->getRank()), data_of(group->getRank(), 3, torch::kInt64), torch::zeros({0})};
    group->allreduce_coalesced(tensors)->wait();
    expect_equal(tensors,
                 {sum_of_all(group->getSize()), sum_of_all(group->getSize(), 3).to(torch::kInt64), torch::zeros({0})});
    EXPECT_EQ(group->getBackend(c10::kCPU)->getSequenceNumberForGroup(), 2U);
  });
}

TEST_P(Backends, sub_groups_work_at_the_same_time) {
  const Machines& machines = GetParam();
  const int size = static_cast<int>(machines.size());
  run_threads(size, [&machines, size](int rank, const StorePtr& store) {
    const auto prefixed = [&](const std::string& prefix) {
      return c10::make_intrusive<c10d::PrefixStore>(prefix, store);
    };
    const GroupPtr all = make_group(prefixed("all"), rank, size, machines[to_size(rank)]);
    const int parity = rank % 2;
    const int members = (size + 1 - parity) / 2;
    const GroupPtr half = make_group(prefixed(concat("half", parity)), rank / 2, members, machines[to_size(rank)]);
    Tensors in_all{torch::full({100000}, rank)};
    Tensors in_half{torch::full({100000}, rank)};
    auto first = all->allreduce(in_all);
    half->allreduce(in_half)->wait();
    first->wait();
    expect_equal(in_all[0], torch::full({100000}, size * (size - 1) / 2));
    expect_equal(in_half[0], torch::full({100000}, members * (members - 1) + parity * members));
  });
}

TEST_P(Backends, c10ds_own_reducer_gives_the_mean) {
  run_group(GetParam(), [](const GroupPtr& group) {
    torch::nn::Linear model(4, 4);
    std::vector<at::Tensor> parameters = model->parameters();
    auto reducer = std::make_shared<c10d::Reducer>(
        parameters, std::vector<std::vector<size_t>>{{1}, {0}}, group, std::vector<bool>{false, false}, 1 << 20, false,
        true, std::unordered_map<size_t, std::string>{}, 1 << 20, false, false, std::vector<int64_t>{});
    const torch::Tensor output = model->forward(torch::ones({2, 4}));
    reducer->prepare_for_forward();
    reducer->prepare_for_backward({output});
    (output.sum() * group->getSize() * (group->getRank() + 1)).backward();
    const double sum_of_ranks = group->getSize() * (group->getSize() + 1) / 2;
    expect_equal(model->bias.grad(), torch::full({4}, 2 * sum_of_ranks));
    expect_equal(model->weight.grad(), torch::full({4, 4}, 2 * sum_of_ranks));
  });
}

}  // namespace
}  // namespace lockstep
