// SPDX-License-Identifier: Apache-2.0
// Collectives between simulated GPUs: ranks are threads here.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <functional>
#include <thread>

#include "tests/simulated_cuda/four_gpus.h"
#include "tests/simulated_cuda/nccl.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using lockstep::testing::contains;
using torch::Tensor;
using Tensors = std::vector<Tensor>;

struct Rank {
  int rank;
  c10d::Backend& nccl;
};

// What each rank's body threw, or "".
std::vector<std::string> run(int ranks, const std::function<void(Rank)>& body, bool on_one_gpu = false) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::string> errors(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] {
      const c10::DeviceGuard guard(gpu(on_one_gpu ? 0 : rank));
      try {
        const auto nccl = c10::intrusive_ptr<c10d::Backend>::reclaim(
            lockstep_simulated_nccl(store, rank, ranks, std::chrono::seconds(30)));
        body({rank, *nccl});
      } catch (const std::exception& error) {
        errors[static_cast<size_t>(rank)] = error.what();
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (int i = 0; i < 4; ++i) gpus().synchronizeDevice(gpu(i).index());  // an error leaves work behind
  simulated_cuda_clear_races();
  return errors;
}

Tensor here(Rank rank, float value, int count = 6) { return torch::full({count}, value, gpu(rank.rank)); }
float total(const Tensor& tensor) { return tensor.sum().item<float>(); }

void expect_no_errors(const std::vector<std::string>& errors) {
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

TEST(SimulatedNccl, reduces_and_broadcasts) {
  expect_no_errors(run(3, [](Rank rank) {
    Tensors mine{here(rank, static_cast<float>(rank.rank))};
    c10d::AllreduceOptions options;
    options.reduceOp = c10d::ReduceOp::AVG;
    rank.nccl.allreduce(mine, options)->wait();
    EXPECT_EQ(total(mine[0]), 6);
    c10d::BroadcastOptions from_2;
    from_2.rootRank = 2;
    Tensors value{here(rank, static_cast<float>(rank.rank))};
    rank.nccl.broadcast(value, from_2)->wait();
    EXPECT_EQ(total(value[0]), 12);
    c10d::ReduceOptions onto_1;
    onto_1.rootRank = 1;
    Tensors ones{here(rank, 1)};
    rank.nccl.reduce(ones, onto_1)->wait();
    EXPECT_EQ(total(ones[0]), rank.rank == 1 ? 18 : 6);
    rank.nccl.barrier(c10d::BarrierOptions())->wait();
  }));
}

TEST(SimulatedNccl, scatters_and_gathers_uneven_parts) {
  expect_no_errors(run(2, [](Rank rank) {
    const auto id = static_cast<float>(rank.rank);
    Tensors part{here(rank, 0, 2 + 2 * rank.rank)};
    std::vector<Tensors> whole{here(rank, id + 1).split_with_sizes({2, 4})};
    rank.nccl.reduce_scatter(part, whole, c10d::ReduceScatterOptions())->wait();
    EXPECT_EQ(total(part[0]), 3 * (2 + 2 * rank.rank));
    std::vector<Tensors> parts{here(rank, 0).split_with_sizes({2, 4})};
    rank.nccl.allgather(parts, part, c10d::AllgatherOptions())->wait();
    EXPECT_EQ(total(parts[0][0]) + total(parts[0][1]), 18);
    std::vector<Tensors> at_root;
    if (rank.rank == 0) at_root = parts;
    rank.nccl.gather(at_root, part, c10d::GatherOptions())->wait();
    rank.nccl.scatter(part, at_root, c10d::ScatterOptions())->wait();
    EXPECT_EQ(total(part[0]), 3 * (2 + 2 * rank.rank));
    Tensor to = here(rank, 0), from = here(rank, id);
    std::vector<int64_t> none;
    rank.nccl.alltoall_base(to, from, none, none, c10d::AllToAllOptions())->wait();
    EXPECT_EQ(total(to), 3);
  }));
}

TEST(SimulatedNccl, scatters_and_gathers_equal_parts_of_a_tensor) {
  expect_no_errors(run(2, [](Rank rank) {
    Tensor part = here(rank, 0, 3), whole = here(rank, static_cast<float>(rank.rank + 1));
    rank.nccl._reduce_scatter_base(part, whole, c10d::ReduceScatterOptions())->wait();
    EXPECT_EQ(total(part), 9);
    part.add_(rank.rank);
    rank.nccl._allgather_base(whole, part, c10d::AllgatherOptions())->wait();
    EXPECT_EQ(total(whole[0]) + total(whole[3]), 7);
  }));
}

TEST(SimulatedNccl, sends_and_receives_in_order) {
  expect_no_errors(run(2, [](Rank rank) {
    Tensors first{here(rank, 1)}, second{here(rank, 2)};
    if (rank.rank == 0) {
      rank.nccl.send(first, 1, 0)->wait();
      rank.nccl.send(second, 1, 0)->wait();
    } else {
      rank.nccl.recv(second, 0, 0)->wait();
      rank.nccl.recv(first, 0, 0)->wait();
      EXPECT_EQ(total(second[0]), 6);
      EXPECT_EQ(total(first[0]), 12);
    }
  }));
}

TEST(SimulatedNccl, needs_a_wait_before_the_result_is_used) {
  const auto errors = run(2, [](Rank rank) {
    Tensors mine{here(rank, 1)};
    const auto work = rank.nccl.allreduce(mine);
    if (rank.rank == 0) (void)mine[0].exp();
    work->wait();
  });
  EXPECT_TRUE(contains(errors[0], "nccl allreduce"));
  EXPECT_TRUE(contains(errors[0], "aten::exp"));
  EXPECT_EQ(errors[1], "");
}

TEST(SimulatedNccl, names_ranks_that_call_different_things) {
  const auto errors = run(2, [](Rank rank) {
    Tensors mine{here(rank, 1, 4 + rank.rank)};
    rank.nccl.allreduce(mine)->wait();
  });
  EXPECT_TRUE(contains(errors[0], "rank 0 calls allreduce sum of 4 Floats, rank 1 calls allreduce sum of 5 Floats"));
}

TEST(SimulatedNccl, refuses_what_nccl_refuses) {
  const auto errors = run(1, [](Rank rank) {
    Tensors host{torch::ones({3})};
    EXPECT_THROW(rank.nccl.allreduce(host), c10::Error);
    Tensors gaps{torch::ones({4, 4}, gpu(0)).t()};
    EXPECT_THROW(rank.nccl.allreduce(gaps), c10::Error);
    c10d::AllreduceOptions bits;
    bits.reduceOp = c10d::ReduceOp::BXOR;
    Tensors whole{torch::ones({4}, torch::dtype(torch::kInt).device(gpu(0)))};
    EXPECT_THROW(rank.nccl.allreduce(whole, bits), c10::Error);
  });
  expect_no_errors(errors);
  const auto one_gpu = [](Rank rank) {
    Tensors mine{torch::ones({3}, gpu(0))};
    rank.nccl.allreduce(mine)->wait();
  };
  EXPECT_TRUE(contains(run(2, one_gpu, true)[0], "Duplicate GPU detected : rank 0 and rank 1"));
}

}  // namespace
}  // namespace lockstep
