#include "lockstep/collective/machines/hierarchical_transport.h"

#include <exception>
#include <optional>

#include "lockstep/base/text.h"
#include "lockstep/collective/c10d/c10d_call.h"
#include "lockstep/collective/machines/collectives.h"
#include "lockstep/collective/machines/hierarchy.h"
#include "lockstep/collective/shm/work.h"
#include "lockstep/collective/shm_dtype.h"
#include "lockstep/collective/shm_transport.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

class TaskUnderWay : public Pending {
 public:
  TaskUnderWay(std::shared_ptr<shm::WorkState> state, std::string here)
      : state_(std::move(state)), here_(std::move(here)) {}

  void wait() override { state_->wait(nullptr); }
  void wait(Deadline deadline) override {
    if (state_->wait(&deadline)) return;
    throw PeerLost({.what = "a collective is not finished at the deadline",
                    .here = here_,
                    .likely = "a rank that is slower than the others, or stopped",
                    .next = "wait longer, or look at what each rank is doing"});
  }
  bool done() override { return state_->finished(); }

 private:
  std::shared_ptr<shm::WorkState> state_;
  std::string here_;
};

std::size_t count_of(const Collective& call, int size) {
  const torch::Tensor& given = call.input.defined() ? call.input : call.output;
  switch (call.operation) {
    case Operation::kBarrier: return 0;
    case Operation::kReduceScatter:
    case Operation::kScatter: return call.output.numel();
    case Operation::kAllToAll: return given.numel() / size;
    default: return given.numel();
  }
}

Call call_of(const Collective& call, int size) {
  const torch::Tensor& given = call.input.defined() ? call.input : call.output;
  return {.operation = call.operation,
          .input = call.input.defined() ? call.input.const_data_ptr() : nullptr,
          .output = call.output.defined() ? call.output.mutable_data_ptr() : nullptr,
          .count = count_of(call, size),
          .counts = {call.counts.begin(), call.counts.end()},
          .receive_counts = {call.receive_counts.begin(), call.receive_counts.end()},
          .dtype = given.defined() ? *to_shm_dtype(given.scalar_type()) : DType::kUInt8,
          .op = call.op,
          .root = call.root,
          .algorithm = call.algorithm};
}

class HierarchicalTransport : public Transport {
 public:
  HierarchicalTransport(shm::Group inside, const Topology& topology, c10::intrusive_ptr<c10d::Store> store,
                        TransportOptions options)
      : store_(std::move(store)),
        options_(std::move(options)),
        hierarchy_(std::move(inside), topology, store_, options_) {}

  // In good order, unless an exception is unwinding: then the others learn at once that this rank is gone.
  ~HierarchicalTransport() override {
    if (std::uncaught_exceptions() > 0) {
      hierarchy_.fail("an exception");
      return;
    }
    worker_.drain();
    hierarchy_.leave();
  }

  // On the calling thread, where nothing is under way on the worker's: that saves two wake-ups.
  void run(const Collective& call) override {
    if (!worker_.idle()) return start(call)->wait();
    check_algorithm(call);
    make_call(call_of(call, options_.size));
  }

  // On the worker's thread: an exchange over the network goes on while the caller computes.
  std::shared_ptr<Pending> start(Collective call) override {
    check_algorithm(call);
    auto state = worker_.start([this, call = std::move(call)] { make_call(call_of(call, options_.size)); });
    return std::make_shared<TaskUnderWay>(std::move(state), options_.describe);
  }

  std::shared_ptr<Pending> start_send(const torch::Tensor& tensor, int to, int tag) override {
    return hierarchy_.messages.send(tensor, to, tag);
  }
  std::shared_ptr<Pending> start_receive(const torch::Tensor& tensor, int from, int tag) override {
    return hierarchy_.messages.receive(tensor, from, tag, true);
  }
  int receive(const torch::Tensor& tensor, int from, int tag) override {
    const auto message = hierarchy_.messages.receive(tensor, from, tag, false);
    message->wait();
    return message->source();
  }

  std::unique_ptr<Transport> group(const RankLists& lists) override {
    worker_.drain();
    return transport_of(lists, subgroup_of(hierarchy_.inside, local(lists)), options_);
  }

  std::unique_ptr<Transport> separate(const RankLists& lists, std::chrono::milliseconds timeout) override {
    worker_.drain();
    TransportOptions options = options_;
    options.timeout = timeout;
    options.bare_messages = true;
    return transport_of(lists, separate_group_of(hierarchy_.inside, local(lists), timeout), options);
  }

  torch::Tensor allocate(torch::IntArrayRef sizes, const torch::TensorOptions& options) override {
    return allocate_shared(hierarchy_.inside, sizes, options);
  }

  std::optional<shm::Group> machine_group() override {
    worker_.drain();
    return whole_group_of(hierarchy_.inside);
  }

  void fail(const std::string& reason) override { hierarchy_.fail(reason); }

 private:
  void check_algorithm(const Collective& call) const {
    if (call.algorithm == Algorithm::kDirect || call.algorithm == Algorithm::kRing) return;
    throw UsageError({.what = concat("all_reduce by the algorithm ", to_string(call.algorithm), " between machines"),
                      .here = options_.describe,
                      .next = "leave the algorithm out, choose ring, or keep all ranks on one machine"});
  }

  RankLists local(const RankLists& lists) const { return hierarchy_.topology.lists_on(hierarchy_.machine, lists); }

  // `inside`: the members of this rank's list that are on this machine.
  std::unique_ptr<Transport> transport_of(const RankLists& lists, std::optional<shm::Group> inside,
                                          const TransportOptions& like) {
    const std::vector<int>& ranks = lists[static_cast<std::size_t>(options_.rank)];
    const std::string prefix = ranks.empty() ? "" : prefix_of_group(groups_made_, ranks);
    ++groups_made_;
    if (ranks.empty()) return nullptr;
    const Topology topology = hierarchy_.topology.of_group(ranks);
    if (topology.machines() == 1) return make_shared_memory(std::move(*inside));
    return make_hierarchical(std::move(*inside), topology, with_prefix(store_, prefix), options_of_group(like, ranks));
  }

  // Whatever a call throws ends the hierarchy, before the caller's arrays may go: Gloo could still write there.
  void make_call(const Call& call) try { dispatch(call); } catch (const UsageError&) {
    throw;
  } catch (...) {
    hierarchy_.give_up(std::current_exception());
    hierarchy_.forget_transfers();
    throw;
  }

  void dispatch(const Call& call) {
    switch (call.operation) {
      case Operation::kAllReduce: return all_reduce(hierarchy_, call);
      case Operation::kReduce: return reduce(hierarchy_, call);
      case Operation::kReduceScatter: return reduce_scatter(hierarchy_, call);
      case Operation::kAllGather: return all_gather(hierarchy_, call);
      case Operation::kBroadcast: return broadcast(hierarchy_, call);
      case Operation::kGather: return gather(hierarchy_, call);
      case Operation::kScatter: return scatter(hierarchy_, call);
      case Operation::kAllToAll: return all_to_all(hierarchy_, call);
      default: return barrier(hierarchy_);
    }
  }

  c10::intrusive_ptr<c10d::Store> store_;
  TransportOptions options_;
  Hierarchy hierarchy_;
  shm::Worker worker_;
  int groups_made_ = 0;
};

}  // namespace

std::unique_ptr<Transport> make_hierarchical(shm::Group inside, const Topology& topology,
                                             const c10::intrusive_ptr<c10d::Store>& store,
                                             const TransportOptions& options) {
  return std::make_unique<HierarchicalTransport>(std::move(inside), topology, store, options);
}

}  // namespace lockstep
