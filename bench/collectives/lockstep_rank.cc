// SPDX-License-Identifier: Apache-2.0
// The shared-memory core, as the first of the systems.
#include <cstring>
#include <map>
#include <memory>

#include "bench/collectives/cases.h"
#include "bench/collectives/systems.h"
#include "lockstep/base/text.h"
#include "lockstep/collective/shm/connect/rendezvous_server.h"
#include "lockstep/cores.h"
#include "lockstep/error.h"

namespace lockstep::bench {
namespace {

template <class Enum>
Enum named(const std::string& name, int values) {
  for (int i = 0; i < values; ++i)
    if (to_string(static_cast<Enum>(i)) == name) return static_cast<Enum>(i);
  throw UsageError({.what = concat("there is no ", name), .next = "see lockstep bench collectives --help"});
}

// Memory of one kind or the other, written once so that it is really there.
class Array {
 public:
  Array(shm::Group& group, const std::string& kind, size_t bytes) {
    if (kind == "arena") arena_ = group.allocate(bytes);
    if (kind != "arena") ordinary_.reset(new std::byte[bytes]);
    std::memset(data(), 0, bytes);
  }
  std::byte* data() const { return ordinary_ ? ordinary_.get() : arena_.data(); }

 private:
  shm::Memory arena_;
  std::unique_ptr<std::byte[]> ordinary_;
};

class LockstepRank final : public System {
 public:
  explicit LockstepRank(shm::GroupPtr group) : group_(std::move(group)) {}
  ~LockstepRank() override { group_->leave(); }

  int rank() const override { return group_->rank(); }
  void barrier() override { group_->barrier(); }
  double slowest(double seconds) override {
    group_->run({.operation = Operation::kAllReduce,
                 .input = &seconds,
                 .output = &seconds,
                 .count = 1,
                 .dtype = DType::kFloat64,
                 .op = ReduceOp::kMax});
    return seconds;
  }
  std::function<void()> prepare(const Case& one) override;

 private:
  shm::GroupPtr group_;
  std::unique_ptr<Array> input_;
  std::unique_ptr<Array> output_;
};

std::function<void()> LockstepRank::prepare(const Case& one) {
  if (one.algorithm != "direct" && one.operation != "all_reduce") return nullptr;
  const auto dtype = named<DType>(one.dtype, lockstep::kDTypes);
  const auto algorithm = named<Algorithm>(one.algorithm, 4);
  const size_t count = one.count();
  const size_t part = one.part(group_->size());
  const size_t bytes = std::max(count, one.whole(group_->size())) * lockstep::size_of(dtype);
  input_.reset();
  output_.reset();
  input_ = std::make_unique<Array>(*group_, one.memory, bytes);
  output_ = std::make_unique<Array>(*group_, one.memory, bytes);
  std::byte* const in = input_->data();
  std::byte* const out = output_->data();
  const int peer = 1 - group_->rank();
  const Call send{.operation = Operation::kSend, .input = in, .count = count, .dtype = dtype, .peer = peer};
  const Call receive{.operation = Operation::kReceive, .output = in, .count = count, .dtype = dtype, .peer = peer};
  const auto call = [&](Operation operation, std::byte* input, std::byte* output, size_t elements) {
    return Call{.operation = operation,
                .input = input,
                .output = output,
                .count = elements,
                .dtype = dtype,
                .algorithm = algorithm};
  };
  const std::map<std::string, Call> calls{
      {"barrier", Call{}},
      {"all_reduce", call(Operation::kAllReduce, in, in, count)},
      {"reduce", call(Operation::kReduce, in, in, count)},
      {"reduce_scatter", call(Operation::kReduceScatter, in, out, part)},
      {"all_gather", call(Operation::kAllGather, in, out, part)},
      {"broadcast", call(Operation::kBroadcast, nullptr, in, count)},
      {"gather", call(Operation::kGather, in, out, part)},
      {"scatter", call(Operation::kScatter, in, out, part)},
      {"all_to_all", call(Operation::kAllToAll, in, out, part)},
  };
  if (one.operation == "memcpy") return [=] { std::memcpy(out, in, bytes); };
  if (one.operation == "send_receive")
    return there_and_back(
        group_->rank(), [=, this] { group_->run(send); }, [=, this] { group_->run(receive); });
  return [this, chosen = calls.at(one.operation)] { group_->run(chosen); };
}

}  // namespace

RunningSystemPtr start_lockstep(int ranks) {
  const auto server = std::make_shared<shm::RendezvousServer>(ranks);
  return std::make_unique<RunningSystem>("lockstep", ranks, ranks, [=](int rank, const std::string& address) {
    const auto body = [=] {
      const Deadline soon = Deadline::after(std::chrono::seconds(30));
      LockstepRank system(rank == 0 ? server->connect(soon)
                                    : shm::join_rendezvous(server->address(), rank, ranks, soon));
      serve(system, address);
      return 0;
    };
    return ProcessOptions{.body = body, .cores = cores_of_rank(usable_cores(), rank, ranks)};
  });
}

}  // namespace lockstep::bench
