// SPDX-License-Identifier: Apache-2.0
// Ranks on several machines. Here a machine is a group of threads: shared memory inside it, Gloo between them.
#include "lockstep/collective/machines/hierarchy.h"

#include <algorithm>
#include <atomic>
#include <future>
#include <mutex>
#include <numeric>
#include <thread>

#include "lockstep/deadline.h"
#include "tests/worlds.h"

namespace lockstep {
namespace {

using testing::contains;
using testing::Nodes;
using testing::run_over_machines;
using testing::same;
using testing::values_of;

class Machines : public ::testing::TestWithParam<Nodes> {};

std::string text_of(const Nodes& nodes) {
  std::string text;
  for (const int node : nodes) text += std::to_string(node);
  return text;
}

INSTANTIATE_TEST_SUITE_P(Layouts, Machines,
                         ::testing::Values(Nodes{0, 1}, Nodes{0, 0, 1}, Nodes{0, 0, 1, 1}, Nodes{0, 1, 0, 1},
                                           Nodes{0, 1, 2, 3}, Nodes{0, 1, 1, 0, 2, 1, 0}),
                         [](const auto& test) { return "ranks_on_" + text_of(test.param); });

torch::Tensor sum_of(int ranks, int64_t size, torch::ScalarType dtype) {
  torch::Tensor sum = torch::zeros({size}, torch::kFloat64);
  for (int rank = 0; rank < ranks; ++rank) sum += values_of(rank, {size}, dtype);
  return sum.to(dtype);
}

TEST_P(Machines, all_reduce_exactly_in_one_shot_in_one_chunk_in_many_and_around_the_ring) {
  run_over_machines(GetParam(), [](World& world) {
    for (const int64_t size : {0, 1, 7, 16384, 16385, 32768, 32769, 100003, 1200007, 2500007}) {
      const torch::Tensor tensor = values_of(world.rank(), {size}, torch::kFloat32);
      world.all_reduce(tensor);
      EXPECT_TRUE(same(tensor, sum_of(world.size(), size, torch::kFloat32))) << size;
    }
  });
}

TEST(Hierarchy, adds_gathers_and_broadcasts_between_seven_machines) {
  run_over_machines(testing::lonely(7), [](World& world) {
    for (const int64_t size : {1, 6553, 6554, 262144, 700001}) {  // one shot up to 6553
      const torch::Tensor own = values_of(world.rank(), {size}, torch::kFloat32);
      const torch::Tensor sum = sum_of(world.size(), size, torch::kFloat32);
      const torch::Tensor tensor = own.clone();
      world.all_reduce(tensor);
      EXPECT_TRUE(same(tensor, sum)) << size;
      const torch::Tensor all = world.all_gather(own);
      for (int rank = 0; rank < world.size(); ++rank)
        EXPECT_TRUE(same(all[rank], values_of(rank, {size}, torch::kFloat32))) << size;
      const int root = to_int(size % world.size());
      world.broadcast(own, root);
      EXPECT_TRUE(same(own, values_of(root, {size}, torch::kFloat32))) << size;
    }
  });
}

TEST(LargeTensors, of_more_than_2_gib_are_reduced_between_machines) {
  static constexpr int64_t kBytes = (int64_t{1} << 31) + 4099;
  run_over_machines({0, 1},
                    [](World& world) {
                      const torch::Tensor tensor = torch::full({kBytes}, world.rank() + 1, torch::kUInt8);
                      world.all_reduce(tensor);
                      const auto* const data = tensor.const_data_ptr<uint8_t>();
                      EXPECT_EQ(std::count(data, data + kBytes, 3), kBytes);
                    },
                    {.timeout = std::chrono::minutes(2)});
}

TEST_P(Machines, all_reduce_in_place_where_the_world_allocates) {
  run_over_machines(GetParam(), [](World& world) {
    std::vector<torch::Tensor> tensors;
    std::vector<Work> under_way;
    for (const int64_t size : {300007, 5, 70001}) {
      tensors.push_back(world.allocate({size}, torch::kInt16).copy_(values_of(world.rank(), {size}, torch::kInt16)));
      under_way.push_back(world.all_reduce_async(tensors.back()));
    }
    for (size_t i = 0; i < tensors.size(); ++i) {
      under_way[i].wait();
      EXPECT_TRUE(same(tensors[i], sum_of(world.size(), tensors[i].numel(), torch::kInt16)));
    }
  });
}

// Machine by machine, and inside each rank by rank: so gradients have the same bits wherever they lie in a bucket.
TEST_P(Machines, sum_directly_in_the_order_of_machines_and_ranks) {
  const Topology topology{GetParam()};
  const auto fractions = [](int rank, int64_t size) { return 1 / (torch::arange(size) + 3.0F * rank + 1.1F); };
  for (const int64_t size : {100, 300007}) {
    torch::Tensor expected;
    for (int node = 0; node < topology.machines(); ++node) {
      torch::Tensor inside;
      for (const int rank : topology.ranks_on(node))
        inside = inside.defined() ? inside + fractions(rank, size) : fractions(rank, size);
      expected = expected.defined() ? expected + inside : inside;
    }
    run_over_machines(GetParam(), [&](World& world) {
      const torch::Tensor tensor = fractions(world.rank(), size);
      world.all_reduce(tensor, {.algorithm = Algorithm::kDirect});
      EXPECT_TRUE(same(tensor, expected));
    });
  }
}

TEST_P(Machines, sum_to_the_same_bits_on_all_ranks_every_time) {
  std::mutex mutex;
  std::vector<torch::Tensor> sums;
  for (int run = 0; run < 2; ++run)
    run_over_machines(GetParam(), [&](World& world) {
      torch::Tensor tensor = 1 / (torch::arange(2500007) + 3.0F * world.rank() + 1.1F);
      world.all_reduce(tensor);
      const std::lock_guard lock(mutex);
      sums.push_back(tensor);
    });
  for (const torch::Tensor& sum : sums) EXPECT_TRUE(same(sum, sums[0]));
}

TEST(Hierarchy, rounds_16_bit_floats_once_also_in_large_arrays) {
  run_over_machines(testing::lonely(4), [](World& world) {
    const torch::Tensor tensor = torch::full({400007}, world.rank() == 0 ? 256 : 1, torch::kBFloat16);
    world.all_reduce(tensor);
    EXPECT_TRUE(same(tensor, torch::full_like(tensor, 260)));  // of 259; one by one each 1 would be lost
  });
}

TEST_P(Machines, broadcast_from_every_rank) {
  run_over_machines(GetParam(), [](World& world) {
    for (int root = 0; root < world.size(); ++root)
      for (const int64_t size : {1, 300007}) {
        const torch::Tensor tensor = values_of(world.rank(), {size}, torch::kInt64);
        world.broadcast(tensor, root);
        EXPECT_TRUE(same(tensor, values_of(root, {size}, torch::kInt64)));
      }
  });
}

TEST_P(Machines, all_reduce_around_the_ring_of_machines) {
  run_over_machines(GetParam(), [](World& world) {
    for (const int64_t size : {0, 1, 100003}) {
      const torch::Tensor tensor = values_of(world.rank(), {size}, torch::kFloat32);
      world.all_reduce(tensor, {.algorithm = Algorithm::kRing});
      EXPECT_TRUE(same(tensor, sum_of(world.size(), size, torch::kFloat32))) << size;
    }
    const torch::Tensor mean = torch::full({5}, world.rank() + 1.0F);
    world.all_reduce(mean, {.op = ReduceOp::kMean, .algorithm = Algorithm::kRing});
    EXPECT_TRUE(same(mean, torch::full({5}, (world.size() + 1) / 2.0F)));
  });
}

TEST_P(Machines, reduce_to_every_rank_and_change_no_other) {
  run_over_machines(GetParam(), [](World& world) {
    for (int root = 0; root < world.size(); ++root)
      for (const int64_t size : {1, 5000, 300007}) {
        const torch::Tensor before = values_of(world.rank(), {size}, torch::kFloat32);
        const torch::Tensor tensor = before.clone();
        world.reduce(tensor, {.root = root});
        EXPECT_TRUE(same(tensor, world.rank() == root ? sum_of(world.size(), size, torch::kFloat32) : before)) << size;
      }
  });
}

// Rank 2 comes when rank 1 is done, or has failed.
TEST(Hierarchy, reduces_a_small_array_without_a_wait_for_ranks_whose_data_go_elsewhere) {
  std::promise<void> first;
  std::future<void> first_is_done = first.get_future();
  run_over_machines(testing::lonely(3), [&](World& world) {
    world.barrier();
    std::promise<void> done;
    if (world.rank() == 1) done = std::move(first);
    if (world.rank() == 2) first_is_done.get();
    const torch::Tensor tensor = values_of(world.rank(), {100}, torch::kFloat32);
    world.reduce(tensor);
    if (world.rank() == 0) {
      EXPECT_TRUE(same(tensor, sum_of(3, 100, torch::kFloat32)));
    }
    if (world.rank() == 1) done.set_value();
  });
}

// Rows of each rank: even, growing with the rank, or all with the one in the middle.
using Rows = std::vector<int64_t>;
std::vector<Rows> row_lists(int ranks) {
  Rows growing;
  for (int rank = 0; rank < ranks; ++rank) growing.push_back(7001 * rank);
  const Rows none(growing.size(), 0);
  Rows lonely = none;
  lonely[ranks / 2] = 150001;
  return {none, Rows(growing.size(), 1), Rows(growing.size(), 90001), growing, lonely};
}

int64_t before(const Rows& rows, int rank) { return std::accumulate(rows.begin(), rows.begin() + rank, int64_t{0}); }

TEST_P(Machines, reduce_scatter_parts_of_any_length) {
  run_over_machines(GetParam(), [](World& world) {
    for (const Rows& rows : row_lists(world.size())) {
      const int64_t size = before(rows, world.size());
      const torch::Tensor given = values_of(world.rank(), {size}, torch::kFloat32);
      const torch::Tensor kept = given.clone();
      const torch::Tensor part = world.reduce_scatter(given, {.rows = rows});
      const int64_t mine = rows[world.rank()];
      const torch::Tensor sum = sum_of(world.size(), size, torch::kFloat32);
      EXPECT_TRUE(same(part, sum.narrow(0, before(rows, world.rank()), mine).contiguous())) << size;
      EXPECT_TRUE(same(given, kept)) << "what is given stays as it was";
    }
  });
}

TEST_P(Machines, reduce_scatter_to_means_where_the_world_allocates) {
  run_over_machines(GetParam(), [](World& world) {
    const torch::Tensor given = world.allocate({world.size(), 30001}, torch::kFloat32).fill_(world.rank() + 1);
    const torch::Tensor part = world.allocate({1, 30001}, torch::kFloat32);
    static_cast<void>(world.reduce_scatter(given, {.op = ReduceOp::kMean, .output = part}));
    EXPECT_TRUE(same(part.clone(), torch::full({1, 30001}, (world.size() + 1) / 2.0F)));
  });
}

TEST_P(Machines, all_gather_parts_of_any_length) {
  run_over_machines(GetParam(), [](World& world) {
    for (const Rows& rows : row_lists(world.size())) {
      const torch::Tensor whole = values_of(7, {before(rows, world.size())}, torch::kInt16);
      const int64_t mine = rows[world.rank()];
      const torch::Tensor part = whole.narrow(0, before(rows, world.rank()), mine).clone();
      EXPECT_TRUE(same(world.all_gather_rows(part, {.rows = rows}), whole)) << whole.numel();
    }
  });
}

TEST_P(Machines, gather_scatter_and_exchange_large_tensors) {
  run_over_machines(GetParam(), [](World& world) {
    const int64_t ranks = world.size();
    const torch::Tensor table = values_of(0, {ranks, ranks, 50001}, torch::kFloat32);  // [from][to]
    const int root = world.size() - 1;
    const torch::Tensor all = world.gather(table[world.rank()].contiguous(), root);
    if (world.rank() == root) {
      EXPECT_TRUE(same(all, table));
    }
    const torch::Tensor own = torch::empty({ranks, 50001});
    world.scatter(world.rank() == root ? table : torch::Tensor(), own, root);
    EXPECT_TRUE(same(own, table[world.rank()].contiguous()));
    EXPECT_TRUE(same(world.all_to_all(own), table.select(1, world.rank()).contiguous()));
  });
}

TEST_P(Machines, have_a_group_of_their_own_on_each_machine) {
  run_over_machines(GetParam(), [](World& world) {
    auto group = world.machine_group();
    ASSERT_NE(group, nullptr);
    EXPECT_EQ(group->rank(), world.local_rank());
    EXPECT_EQ(group->size(), world.local_size());
    group->barrier();
    world.barrier();
  });
}

// The victim fails first; all other ranks, on whichever machine, must get PeerLost soon.
void expect_all_others_lose(const Nodes& nodes, int victim, const testing::Body& others) {
  std::mutex mutex;
  int lost = 0;
  double longest = 0;
  const auto body = [&](World& world) {
    const Stopwatch watch;
    try {
      world.barrier();
      if (world.rank() == victim) throw DataError({.what = "the victim ends"});
      others(world);
    } catch (const PeerLost&) {
      const std::lock_guard lock(mutex);
      ++lost;
      longest = std::max(longest, watch.seconds());
      throw;
    }
  };
  const auto run = [&] { run_over_machines(nodes, body, {.timeout = std::chrono::seconds(60)}); };
  EXPECT_TRUE(contains(testing::message_of<DataError>(run), "the victim ends"));
  EXPECT_EQ(lost, static_cast<int>(nodes.size()) - 1);
  EXPECT_LT(longest, 10) << "far below the timeout of a minute";
}

TEST_P(Machines, report_a_lost_rank_everywhere_in_all_reduce) {
  for (int victim = 0; victim < static_cast<int>(GetParam().size()); ++victim)
    expect_all_others_lose(GetParam(), victim, [](World& world) {
      const torch::Tensor tensor = torch::ones({1000003});
      for (int i = 0; i < 1000; ++i) world.all_reduce(tensor);
    });
}

// Large tensors: a rank fails when a part of a message has arrived.
TEST_P(Machines, report_a_lost_rank_everywhere_in_every_other_collective) {
  const std::vector<testing::Body> calls{
      [](World& world) { world.reduce(torch::ones({1000003})); },
      [](World& world) { world.broadcast(torch::ones({1000003})); },
      [](World& world) { static_cast<void>(world.all_gather(torch::ones({300007}))); },
      [](World& world) { static_cast<void>(world.reduce_scatter(torch::ones({world.size() * 300007}))); },
      [](World& world) { static_cast<void>(world.gather(torch::ones({300007}))); },
      [](World& world) {
        world.scatter(torch::ones({world.size(), 300007}), torch::empty({300007}));
      },
      [](World& world) { static_cast<void>(world.all_to_all(torch::ones({world.size() * 300007}))); }};
  for (size_t i = 0; i < calls.size(); ++i)
    expect_all_others_lose(GetParam(), static_cast<int>(i % GetParam().size()), [&](World& world) {
      for (int round = 0; round < 100000; ++round) calls[i](world);
    });
}

TEST(Hierarchy, reports_the_loss_of_a_message_sender) {
  expect_all_others_lose({0, 1}, 1, [](World& world) {
    const torch::Tensor tensor = torch::ones({10000019});
    static_cast<void>(world.receive(tensor, {.from = 1}));
  });
}

// Ranks `first`, `first` + 1, ... of `machines` make the call `other`, those before them `usual`.
void expect_both_named(int machines, int first, const testing::Body& usual, const testing::Body& other,
                       const std::string& signature, const std::string& other_signature) {
  const auto body = [&](World& world) { world.rank() < first ? usual(world) : other(world); };
  const std::string message =
      testing::message_of<MismatchError>([&] { run_over_machines(testing::lonely(machines), body); });
  EXPECT_TRUE(contains(message, signature)) << first << " of " << machines;
  EXPECT_TRUE(contains(message, other_signature)) << first << " of " << machines;
}

TEST(Hierarchy, names_both_calls_when_machines_disagree) {
  const auto all_reduce_of = [](int64_t size) {
    return [size](World& world) { world.all_reduce(torch::ones({size})); };
  };
  const auto broadcast_from = [](int root) {
    return [root](World& world) { world.broadcast(torch::ones({10}), root); };
  };
  for (const int machines : {2, 3, 4})
    for (int first = 1; first < machines; ++first) {
      expect_both_named(machines, first, all_reduce_of(10), all_reduce_of(11), "all_reduce of 10 float32",
                        "all_reduce of 11 float32");
      expect_both_named(machines, first, broadcast_from(0), broadcast_from(first), "with root 0",
                        concat("with root ", first));
      expect_both_named(machines, first, broadcast_from(0), all_reduce_of(10), "broadcast of 10 float32",
                        "all_reduce of 10 float32");
    }
}

// Rank 2, alone on machine 1, makes another call than the others. Some rank's MismatchError contains `part`.
void expect_mismatch(const testing::Body& usual, const testing::Body& other, const std::string& part) {
  std::mutex mutex;
  std::string messages;
  const auto body = [&](World& world) {
    try {
      world.rank() == 2 ? other(world) : usual(world);
    } catch (const MismatchError& error) {
      const std::lock_guard lock(mutex);
      messages += error.what();
      throw;
    }
  };
  EXPECT_THROW(run_over_machines({0, 0, 1}, body), Error);
  EXPECT_TRUE(contains(messages, part));
}

TEST(Hierarchy, reports_a_mismatch_before_data_moves) {
  const auto gather_of = [](int64_t size) {
    return [size](World& world) { static_cast<void>(world.gather(torch::ones({size}))); };
  };
  const auto all_gather_of = [](Rows rows) {
    return [rows](World& world) {
      static_cast<void>(world.all_gather_rows(torch::ones({rows[world.rank()]}), {.rows = rows}));
    };
  };
  const auto all_to_all_of = [](Rows send, Rows receive) {
    return [=](World& world) {
      static_cast<void>(world.all_to_all(torch::ones({before(send, 3)}), {.send_rows = send, .receive_rows = receive}));
    };
  };
  expect_mismatch(gather_of(10), gather_of(11), "gather of 11 float32");
  expect_mismatch(gather_of(10), all_gather_of({1, 2, 3}), "all_gather of 6 float32");
  expect_mismatch(all_gather_of({1, 2, 3}), all_gather_of({2, 1, 3}), "in uneven parts");
  expect_mismatch(all_to_all_of({1, 1, 1}, {1, 1, 1}), all_to_all_of({1, 1, 1}, {1, 2, 1}),
                  "sends 1 elements to rank 2");
}

// On each of two machines of two ranks, local rank 0 calls `one` and local rank 1 `other`, so ranks with the same local
// number agree. On the machine that notices first both ranks get a MismatchError that names both calls.
void expect_mismatch_inside(const testing::Body& one, const std::string& signature, const testing::Body& other,
                            const std::string& other_signature) {
  std::mutex mutex;
  IntVector<int> mismatches(2);
  const auto body = [&](World& world) {
    try {
      world.local_rank() == 0 ? one(world) : other(world);
      ADD_FAILURE() << "rank " << world.rank() << " got no MismatchError: " << signature << ", " << other_signature;
    } catch (const MismatchError& error) {
      const std::lock_guard lock(mutex);
      ++mismatches[world.node_rank()];
      const std::string first = std::to_string(world.node_rank() * 2);
      const std::string second = std::to_string(world.node_rank() * 2 + 1);
      EXPECT_TRUE(contains(error.what(), "rank " + first + " wants " + signature));
      EXPECT_TRUE(contains(error.what(), "rank " + second + " wants " + other_signature));
      throw;
    }
  };
  EXPECT_THROW(run_over_machines({0, 0, 1, 1}, body), MismatchError);
  EXPECT_EQ(std::ranges::max(mismatches), 2) << signature << ", " << other_signature;
}

TEST(Hierarchy, reports_a_mismatch_inside_a_machine) {
  const auto all_reduce_by = [](ReduceOp op) {
    return [op](World& world) { world.all_reduce(torch::ones({300007}), {.op = op}); };
  };
  const auto reduce_to = [](int root) {
    return [root](World& world) { world.reduce(torch::ones({5}), {.root = root}); };
  };
  const auto all_reduce_byte = [](World& world) { world.all_reduce(torch::ones({1}, torch::kUInt8)); };
  const auto barrier = [](World& world) { world.barrier(); };
  const auto gather = [](World& world) { static_cast<void>(world.gather(torch::ones({5}))); };
  expect_mismatch_inside(all_reduce_by(ReduceOp::kMean), "all_reduce of 300007 float32 (mean)",
                         all_reduce_by(ReduceOp::kSum), "all_reduce of 300007 float32 (sum)");
  expect_mismatch_inside(reduce_to(0), "reduce of 5 float32 (sum) with root 0", reduce_to(1),
                         "reduce of 5 float32 (sum) with root 1");
  expect_mismatch_inside(barrier, "barrier", all_reduce_byte, "all_reduce of 1 uint8 (sum)");
  expect_mismatch_inside(gather, "gather of 5 float32 with root 0", reduce_to(0), "reduce of 5 float32 (sum)");
}

TEST(Hierarchy, names_a_lost_rank_by_its_number_in_the_job) {
  std::mutex mutex;
  std::string message;
  const auto body = [&](World& world) {
    auto group = world.machine_group();
    world.barrier();
    if (world.rank() == 3) throw DataError({.what = "the victim ends"});
    if (world.rank() != 2) return world.barrier();
    try {
      while (true) group->barrier();
    } catch (const PeerLost& error) {
      const std::lock_guard lock(mutex);
      message = error.what();
      throw;
    }
  };
  EXPECT_TRUE(contains(testing::message_of<DataError>([&] {
                         run_over_machines({0, 0, 1, 1}, body);
                       }),
                       "the victim ends"));
  EXPECT_TRUE(contains(message, "rank 3 failed"));
  EXPECT_TRUE(contains(message, "rank 0 of 2 (rank 2 of the job)"));
}

// One link per machine, with these timeouts.
std::vector<std::unique_ptr<GlooLink>> link_machines(const std::vector<std::chrono::seconds>& timeouts) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::unique_ptr<GlooLink>> links(timeouts.size());
  std::vector<std::string> names;
  for (size_t node = 0; node < links.size(); ++node) names.push_back(concat("machine ", node));
  std::vector<std::thread> threads;
  for (size_t node = 0; node < links.size(); ++node)
    threads.emplace_back([&, node] {
      links[node] = std::make_unique<GlooLink>(store,
                                               TransportOptions{.rank = static_cast<int>(node),
                                                                .size = static_cast<int>(links.size()),
                                                                .describe = concat("machine ", node),
                                                                .timeout = timeouts[node]},
                                               names);
    });
  for (auto& thread : threads) thread.join();
  return links;
}

// Machine 0 watches machine 1; machine 2 does not answer.
TEST(GlooLink, names_the_machine_that_did_not_answer_in_time) {
  constexpr std::chrono::seconds kLong{60};
  auto links = link_machines({std::chrono::seconds(3), kLong, kLong});
  std::atomic<int> losses{0};
  links[0]->watch([&](const std::exception_ptr&) { ++losses; });
  std::byte nothing{};
  GlooLink::Transfers transfers;
  links[0]->receive(2, &nothing, 1, transfers);
  const std::string message = testing::message_of<PeerLost>([&] { links[0]->wait(transfers); });
  EXPECT_TRUE(contains(message, "lost machine 2: "));
  links.clear();
  EXPECT_EQ(losses, 0) << "of machine 1";
}

constexpr Signature kFirstCall{.operation = Operation::kBarrier};
constexpr Signature kSecondCall{.operation = Operation::kAllReduce, .count = 5};

// Machine 1 has only begun the first call when the signatures of both are sent to it.
TEST(GlooLink, takes_the_signature_of_the_next_call_beside_that_of_this_one) {
  constexpr std::chrono::seconds kLong{60};
  const auto links = link_machines({kLong, kLong, kLong});
  for (const auto& link : links) link->begin_check(kFirstCall);
  for (const size_t machine : {0U, 2U}) links[machine]->finish_check();
  for (const size_t machine : {0U, 2U}) links[machine]->begin_check(kSecondCall);
  EXPECT_NO_THROW(links[0]->finish_check());
  EXPECT_NO_THROW(links[1]->finish_check());
  links[1]->begin_check(kSecondCall);
  EXPECT_NO_THROW(links[1]->finish_check());
  EXPECT_NO_THROW(links[2]->finish_check());
}

TEST(GlooLink, may_leave_when_it_has_sent_its_part_of_a_call) {
  constexpr std::chrono::seconds kLong{60};
  auto links = link_machines({kLong, kLong, kLong});
  std::atomic<int> losses{0};
  links[2]->watch([&](const std::exception_ptr&) { ++losses; });
  const std::vector<std::byte> sent(size_t{8} << 20, std::byte{5});
  std::vector<std::byte> received(sent.size());
  GlooLink::Transfers sending, receiving;
  for (const auto& link : links) link->begin_check(kFirstCall);
  links[1]->receive(0, received.data(), received.size(), receiving);
  links[0]->send(1, sent.data(), sent.size(), sending);
  links[0]->finish_check();
  links[0]->wait(sending);
  links[0]->leave();
  links[0].reset();
  EXPECT_NO_THROW(links[1]->finish_check());
  EXPECT_NO_THROW(links[1]->wait(receiving));
  EXPECT_EQ(received, sent);
  EXPECT_NO_THROW(links[2]->finish_check());
  links.clear();
  EXPECT_EQ(losses, 0);
}

// Gloo closes all connections when no peer receives the goodbye.
TEST(GlooLink, that_leaves_is_not_lost) {
  auto links = link_machines({std::chrono::seconds(60), std::chrono::seconds(60)});
  std::atomic<int> losses{0};
  links[0]->watch([&](const std::exception_ptr&) { ++losses; });
  links[0]->leave();
  links.clear();
  EXPECT_EQ(losses, 0);
}

TEST(Hierarchy, refuses_an_algorithm_by_name) {
  run_over_machines({0, 1}, [](World& world) {
    const auto by_tree = [&] { world.all_reduce(torch::ones({1}), {.algorithm = Algorithm::kTree}); };
    EXPECT_TRUE(contains(testing::message_of<UsageError>(by_tree), "tree"));
    world.barrier();
  });
}

}  // namespace
}  // namespace lockstep
