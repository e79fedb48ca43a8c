// SPDX-License-Identifier: Apache-2.0
// Every collective over every transport against a reference, at tolerance 0.
#include <limits>
#include <numeric>

#include "lockstep/collective/calls/tensor_call.h"
#include "lockstep/collective/shm/reduce_kernels.h"
#include "lockstep/world.h"
#include "tests/worlds.h"

namespace lockstep {
namespace {

using testing::Fabric;
using testing::kDtypes;
using testing::same;
using testing::values_of;
using Rows = std::vector<int64_t>;

constexpr int64_t kSizes[] = {0, 1, 1001};
constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kMean,   ReduceOp::kProduct, ReduceOp::kMin,
                             ReduceOp::kMax, ReduceOp::kBitAnd, ReduceOp::kBitOr,   ReduceOp::kBitXor};

class EveryWorld : public ::testing::TestWithParam<std::tuple<Fabric, int>> {
 protected:
  void run(const testing::Body& body) { testing::run_over(std::get<0>(GetParam()), std::get<1>(GetParam()), body); }
};

// Over Gloo every call is a few wake-ups of threads: fewer worlds there.
INSTANTIATE_TEST_SUITE_P(Worlds, EveryWorld,
                         ::testing::Values(std::tuple(Fabric::kSharedMemory, 1), std::tuple(Fabric::kSharedMemory, 2),
                                           std::tuple(Fabric::kSharedMemory, 3), std::tuple(Fabric::kSharedMemory, 4),
                                           std::tuple(Fabric::kSharedMemory, 7), std::tuple(Fabric::kLonelyHosts, 2),
                                           std::tuple(Fabric::kLonelyHosts, 3), std::tuple(Fabric::kHosts, 3),
                                           std::tuple(Fabric::kHosts, 4)),
                         [](const auto& test) {
                           return testing::name_of(std::get<0>(test.param)) + "_of_" +
                                  std::to_string(std::get<1>(test.param));
                         });

bool is_defined(torch::ScalarType dtype, ReduceOp op) {
  if (op == ReduceOp::kMean) return c10::isFloatingType(dtype);
  return shm::defined(*to_dtype(dtype), op);
}

torch::Tensor combine(const torch::Tensor& one, const torch::Tensor& other, ReduceOp op) {
  switch (op) {
    case ReduceOp::kProduct: return one * other;
    case ReduceOp::kMin: return torch::minimum(one, other);
    case ReduceOp::kMax: return torch::maximum(one, other);
    case ReduceOp::kBitAnd: return one.bitwise_and(other);
    case ReduceOp::kBitOr: return one.bitwise_or(other);
    case ReduceOp::kBitXor: return one.bitwise_xor(other);
    default: return one + other;
  }
}

// The reduction of values_of(0) ... values_of(ranks - 1).
torch::Tensor reduced(int ranks, torch::IntArrayRef sizes, torch::ScalarType dtype, ReduceOp op) {
  const auto wide = c10::isFloatingType(dtype) ? (dtype == torch::kFloat64 ? torch::kFloat64 : torch::kFloat32)
                                               : (dtype == torch::kBool ? torch::kBool : torch::kInt64);
  torch::Tensor result = values_of(0, sizes, dtype).to(wide);
  for (int rank = 1; rank < ranks; ++rank) result = combine(result, values_of(rank, sizes, dtype).to(wide), op);
  return (op == ReduceOp::kMean ? result / ranks : result).to(dtype);
}

template <class Body>
void for_each_reduction(const Body& body) {
  for (const auto dtype : kDtypes)
    for (const ReduceOp op : kOps)
      if (is_defined(dtype, op)) {
        SCOPED_TRACE(c10::toString(dtype) + std::string(" ") + to_string(op));
        body(dtype, op);
      }
}

TEST_P(EveryWorld, all_reduce_gives_every_rank_the_result) {
  run([](World& world) {
    for_each_reduction([&](auto dtype, ReduceOp op) {
      for (const int64_t size : kSizes) {
        const torch::Tensor tensor = values_of(world.rank(), {size}, dtype);
        world.all_reduce(tensor, op);
        EXPECT_TRUE(same(tensor, reduced(world.size(), {size}, dtype, op)));
      }
    });
  });
}

TEST_P(EveryWorld, all_reduce_of_large_tensors_is_exact) {
  run([](World& world) {
    for (const int64_t size : {70001, 600011}) {
      const torch::Tensor tensor = values_of(world.rank(), {size}, torch::kFloat32);
      world.all_reduce(tensor);
      EXPECT_TRUE(same(tensor, reduced(world.size(), {size}, torch::kFloat32, ReduceOp::kSum)));
    }
  });
}

TEST_P(EveryWorld, reduce_changes_the_roots_tensor_only) {
  run([](World& world) {
    for_each_reduction([&](auto dtype, ReduceOp op) {
      const int root = world.size() - 1;
      const torch::Tensor tensor = values_of(world.rank(), {3, 5}, dtype);
      world.reduce(tensor, {.op = op, .root = root});
      EXPECT_TRUE(same(tensor, world.rank() == root ? reduced(world.size(), {3, 5}, dtype, op)
                                                    : values_of(world.rank(), {3, 5}, dtype)));
    });
  });
}

TEST_P(EveryWorld, reduce_scatter_gives_every_rank_its_rows) {
  run([](World& world) {
    const int n = world.size();
    for_each_reduction([&](auto dtype, ReduceOp op) {
      for (const int64_t each : {0, 1, 5}) {
        const Rows shape{each * n, 3};
        const torch::Tensor part = world.reduce_scatter(values_of(world.rank(), shape, dtype), {.op = op});
        EXPECT_TRUE(same(part, reduced(n, shape, dtype, op).narrow(0, each * world.rank(), each)));
      }
    });
  });
}

Rows uneven_rows(int ranks, int first) {
  Rows rows;
  for (int rank = 0; rank < ranks; ++rank) rows.push_back((rank + first) % 3);
  return rows;
}

int64_t sum_of(const Rows& rows, int end) { return std::accumulate(rows.begin(), rows.begin() + end, int64_t{0}); }

TEST_P(EveryWorld, reduce_scatter_takes_parts_of_different_sizes) {
  run([](World& world) {
    const int n = world.size();
    const Rows rows = uneven_rows(n, 2);
    const Rows shape{sum_of(rows, n), 7};
    const int64_t mine = rows[static_cast<unsigned>(world.rank())];
    for (const auto dtype : kDtypes) {
      const torch::Tensor part =
          world.reduce_scatter(values_of(world.rank(), shape, dtype), {.op = ReduceOp::kMax, .rows = rows});
      const torch::Tensor whole = reduced(n, shape, dtype, ReduceOp::kMax);
      EXPECT_TRUE(same(part, whole.narrow(0, sum_of(rows, world.rank()), mine)));
    }
  });
}

TEST_P(EveryWorld, broadcast_gives_every_rank_the_roots_values) {
  run([](World& world) {
    for (const auto dtype : kDtypes)
      for (int root = 0; root < world.size(); ++root) {
        const torch::Tensor tensor = values_of(world.rank(), {11, 3}, dtype);
        world.broadcast(tensor, root);
        EXPECT_TRUE(same(tensor, values_of(root, {11, 3}, dtype)));
      }
  });
}

TEST_P(EveryWorld, all_gather_gives_the_tensors_in_rank_order) {
  run([](World& world) {
    for (const auto dtype : kDtypes)
      for (const int64_t size : kSizes) {
        const torch::Tensor gathered = world.all_gather(values_of(world.rank(), {size}, dtype));
        ASSERT_EQ(gathered.size(0), world.size());
        for (int rank = 0; rank < world.size(); ++rank)
          EXPECT_TRUE(same(gathered[rank], values_of(rank, {size}, dtype)));
      }
  });
}

TEST_P(EveryWorld, all_gather_rows_joins_tensors_of_different_lengths) {
  run([](World& world) {
    const Rows rows = uneven_rows(world.size(), 1);
    for (const auto dtype : kDtypes)
      for (const Rows& told : {rows, Rows()}) {
        const Rows mine{rows[static_cast<unsigned>(world.rank())], 5};
        const torch::Tensor joined = world.all_gather_rows(values_of(world.rank(), mine, dtype), {.rows = told});
        for (int rank = 0; rank < world.size(); ++rank) {
          const int64_t theirs = rows[static_cast<unsigned>(rank)];
          EXPECT_TRUE(same(joined.narrow(0, sum_of(rows, rank), theirs), values_of(rank, {theirs, 5}, dtype)));
        }
      }
  });
}

TEST_P(EveryWorld, rows_whose_sum_no_tensor_can_have_are_refused) {
  run([](World& world) {
    if (world.size() == 1) return;
    constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
    const torch::Tensor tensor = torch::empty({kMost, 0});
    const AllGatherRowsOptions told{.rows = Rows(static_cast<unsigned>(world.size()), kMost)};
    EXPECT_TRUE(contains(message_of<UsageError>([&] { static_cast<void>(world.all_gather_rows(tensor, told)); }),
                         "give one count from 0 up for each rank, or none"));
  });
}

TEST_P(EveryWorld, gather_and_scatter_pass_through_the_root) {
  run([](World& world) {
    const int root = world.size() / 2;
    for (const auto dtype : kDtypes) {
      const torch::Tensor gathered = world.gather(values_of(world.rank(), {9}, dtype), root);
      EXPECT_EQ(gathered.defined(), world.rank() == root);
      for (int rank = 0; world.rank() == root && rank < world.size(); ++rank)
        EXPECT_TRUE(same(gathered[rank], values_of(rank, {9}, dtype)));
      const torch::Tensor back = torch::zeros({9}, dtype);
      world.scatter(gathered, back, root);
      EXPECT_TRUE(same(back, values_of(world.rank(), {9}, dtype)));
    }
  });
}

TEST_P(EveryWorld, all_to_all_sends_a_part_to_every_rank) {
  run([](World& world) {
    const int n = world.size();
    for (const auto dtype : kDtypes)
      for (const int64_t each : {0, 1, 17}) {
        const torch::Tensor received = world.all_to_all(values_of(world.rank(), {each * n, 2}, dtype));
        for (int rank = 0; rank < n; ++rank)
          EXPECT_TRUE(same(received.narrow(0, rank * each, each),
                           values_of(rank, {each * n, 2}, dtype).narrow(0, world.rank() * each, each)));
      }
  });
}

TEST_P(EveryWorld, all_to_all_takes_parts_of_different_sizes) {
  run([](World& world) {
    const int n = world.size();
    const auto sent_by = [n](int rank) { return uneven_rows(n, rank); };
    const Rows mine = sent_by(world.rank());
    Rows received_rows;
    for (int rank = 0; rank < n; ++rank) received_rows.push_back(sent_by(rank)[static_cast<unsigned>(world.rank())]);
    for (const auto dtype : kDtypes)
      for (const Rows& told : {received_rows, Rows()}) {
        const torch::Tensor received = world.all_to_all(values_of(world.rank(), {sum_of(mine, n), 4}, dtype),
                                                        {.send_rows = mine, .receive_rows = told});
        for (int rank = 0; rank < n; ++rank) {
          const Rows theirs = sent_by(rank);
          const torch::Tensor part =
              values_of(rank, {sum_of(theirs, n), 4}, dtype)
                  .narrow(0, sum_of(theirs, world.rank()), theirs[static_cast<unsigned>(world.rank())]);
          EXPECT_TRUE(same(received.narrow(0, sum_of(received_rows, rank), part.size(0)), part));
        }
      }
  });
}

TEST_P(EveryWorld, tensors_with_gaps_are_copied_in_and_out) {
  run([](World& world) {
    const int n = world.size();
    const auto transposed = [](int rank) { return values_of(rank, {4, 6}, torch::kFloat32).t(); };
    const auto every_second = [](const torch::Tensor& whole) { return whole.slice(0, 0, whole.size(0), 2); };

    const torch::Tensor sum = transposed(world.rank());
    world.all_reduce(sum);
    EXPECT_FALSE(sum.is_contiguous());
    EXPECT_TRUE(same(sum, reduced(n, {4, 6}, torch::kFloat32, ReduceOp::kSum).t()));

    const torch::Tensor whole = values_of(world.rank(), {8}, torch::kInt16);
    world.broadcast(every_second(whole), n - 1);
    EXPECT_TRUE(same(every_second(whole), every_second(values_of(n - 1, {8}, torch::kInt16))));
    EXPECT_TRUE(
        same(every_second(whole.slice(0, 1)), every_second(values_of(world.rank(), {8}, torch::kInt16).slice(0, 1))));

    const torch::Tensor gathered = torch::zeros({n, 6, 8}) /*room*/.slice(2, 0, 8, 2);
    static_cast<void>(world.all_gather(transposed(world.rank()), {.output = gathered}));
    for (int rank = 0; rank < n; ++rank) EXPECT_TRUE(same(gathered[rank], transposed(rank)));

    const torch::Tensor output = torch::zeros({6, 8}).slice(1, 0, 8, 2);
    const torch::Tensor parts = torch::stack(std::vector<torch::Tensor>(static_cast<unsigned>(n), transposed(0)), 2);
    world.scatter(parts.permute({2, 0, 1}), output, 0);
    EXPECT_TRUE(same(output, transposed(0)));
  });
}

TEST_P(EveryWorld, results_go_where_the_caller_wants_them) {
  run([](World& world) {
    const int n = world.size();
    const torch::Tensor whole = torch::zeros({n, 5});
    whole[world.rank()].copy_(values_of(world.rank(), {5}, torch::kFloat32));
    const torch::Tensor gathered = world.all_gather(whole[world.rank()], {.output = whole});  // overlapping
    EXPECT_TRUE(gathered.is_same(whole));
    for (int rank = 0; rank < n; ++rank) EXPECT_TRUE(same(whole[rank], values_of(rank, {5}, torch::kFloat32)));
    const torch::Tensor part = torch::zeros({1, 5});
    static_cast<void>(world.reduce_scatter(whole, {.output = part}));
    EXPECT_TRUE(same(part[0], values_of(world.rank(), {5}, torch::kFloat32) * n));
    EXPECT_THROW(static_cast<void>(world.all_gather(part, {.output = whole})), UsageError);
  });
}

TEST_P(EveryWorld, refuses_what_makes_no_sense_before_anything_is_sent) {
  run([](World& world) {
    const torch::Tensor three = torch::ones({3});
    EXPECT_THROW(world.all_reduce(torch::ones({3}, torch::kInt32), ReduceOp::kMean), UsageError);
    EXPECT_THROW(world.all_reduce(three, ReduceOp::kBitAnd), UsageError);
    EXPECT_THROW(world.all_reduce(torch::ones({1}).expand({4})), UsageError);
    EXPECT_THROW(world.all_reduce(torch::ones({2}, torch::kComplexFloat)), UsageError);
    EXPECT_THROW(world.broadcast(three, world.size()), UsageError);
    EXPECT_THROW(static_cast<void>(world.broadcast_async(three, world.size())), UsageError);
    EXPECT_THROW(static_cast<void>(world.all_reduce_async(three, {.op = ReduceOp::kBitAnd})), UsageError);
    EXPECT_THROW(world.all_reduce(torch::Tensor()), UsageError);
    EXPECT_THROW(static_cast<void>(world.reduce_scatter(torch::ones({}))), UsageError);
    EXPECT_THROW(static_cast<void>(world.reduce_scatter(three, {.rows = {1}})), UsageError);
    EXPECT_THROW(static_cast<void>(world.reduce_scatter(torch::ones({world.size() * 2 + 1}), {.rows = Rows(9, 1)})),
                 UsageError);
    EXPECT_THROW(world.send(three, world.rank()), UsageError);
    EXPECT_THROW(world.send(three, 0, -1), UsageError);
    world.barrier();
  });
}

}  // namespace
}  // namespace lockstep
