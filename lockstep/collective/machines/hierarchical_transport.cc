// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/machines/hierarchical_transport.h"

#include "lockstep/base/text.h"
#include "lockstep/collective/call_queue.h"
#include "lockstep/collective/machines/collectives.h"
#include "lockstep/collective/shared_memory_transport.h"

namespace lockstep {
namespace {

class HierarchicalTransport : public Transport {
 public:
  HierarchicalTransport(shm::Group inside, const Topology& topology, c10::intrusive_ptr<c10d::Store> store,
                        TransportOptions options)
      : store_(std::move(store)),
        options_(std::move(options)),
        hierarchy_(std::move(inside), topology, store_, options_),
        queue_(options_.describe) {}

  // In good order, unless an exception is unwinding: then the others learn at once that this rank is gone.
  ~HierarchicalTransport() override {
    if (std::uncaught_exceptions() > 0) {
      hierarchy_.fail("an exception");
      return;
    }
    queue_.drain();
    hierarchy_.leave();
  }

  // A collective runs on the calling thread, after those that were started before.
  int run(const TensorCall& call) override {
    if (is_message(call.call.operation)) {
      const FuturePtr message = start_message(call, false);
      message->wait();
      return call.call.operation == Operation::kReceive ? message->source() : kAnyRank;
    }
    check_algorithm(call.call);
    queue_.run([&] { make_call(call.call); });
    return kAnyRank;
  }

  // A collective runs on the queue's worker thread: an exchange over the network goes on while the caller computes.
  FuturePtr start(TensorCall call) override {
    if (is_message(call.call.operation)) return start_message(call, true);
    check_algorithm(call.call);
    FuturePtr future = queue_.add([this, call = std::move(call)] { make_call(call.call); });
    queue_.hand_to_worker();
    return future;
  }

  std::unique_ptr<Transport> group(const RankLists& lists) override {
    queue_.drain();
    return transport_of(lists, subgroup_of(hierarchy_.inside, local(lists)), options_);
  }

  std::unique_ptr<Transport> separate(const RankLists& lists, std::chrono::milliseconds timeout) override {
    queue_.drain();
    TransportOptions options = options_;
    options.timeout = timeout;
    options.message_headers = false;
    return transport_of(lists, separate_group_of(hierarchy_.inside, local(lists), timeout), options);
  }

  torch::Tensor allocate(torch::IntArrayRef sizes, const torch::TensorOptions& options) override {
    return allocate_shared(hierarchy_.inside, sizes, options);
  }

  std::optional<shm::Group> machine_group() override {
    queue_.drain();
    return whole_group_of(hierarchy_.inside);
  }

  void fail(const std::string& reason) override { hierarchy_.fail(reason); }

 private:
  void check_algorithm(const Call& call) const {
    if (call.algorithm == Algorithm::kDirect || call.algorithm == Algorithm::kRing) return;
    throw UsageError({.what = concat("all_reduce by the algorithm ", to_string(call.algorithm), " between machines"),
                      .here = options_.describe,
                      .next = "leave the algorithm out, choose ring, or keep all ranks on one machine"});
  }

  FuturePtr start_message(const TensorCall& call, bool in_background) {
    return call.call.operation == Operation::kSend ? hierarchy_.messages.send(call)
                                                   : hierarchy_.messages.receive(call, in_background);
  }

  RankLists local(const RankLists& lists) const { return hierarchy_.topology.lists_on(hierarchy_.machine, lists); }

  // `inside`: the members of this rank's list that are on this machine.
  std::unique_ptr<Transport> transport_of(const RankLists& lists, std::optional<shm::Group> inside,
                                          const TransportOptions& like) {
    const std::vector<int>& ranks = lists.begin()[options_.rank];
    const int made = groups_made_++;
    if (ranks.empty()) return nullptr;
    const Topology topology = hierarchy_.topology.of_group(ranks);
    if (topology.machines() == 1) return make_shared_memory(std::move(*inside));
    return make_hierarchical(std::move(*inside), topology, with_prefix(store_, prefix_of_group(made, ranks)),
                             options_of_group(like, ranks));
  }

  // Whatever a call throws ends the hierarchy, before the caller's arrays may go: Gloo could still write there.
  void make_call(const Call& call) {
    try {
      dispatch(call);
    } catch (const UsageError&) {
      throw;
    } catch (...) {
      hierarchy_.give_up(std::current_exception());
      hierarchy_.forget_transfers();
      throw;
    }
    hierarchy_.scratch.reset();
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
  CallQueue queue_;
  int groups_made_ = 0;
};

}  // namespace

std::unique_ptr<Transport> make_hierarchical(shm::Group inside, const Topology& topology,
                                             const c10::intrusive_ptr<c10d::Store>& store,
                                             const TransportOptions& options) {
  return std::make_unique<HierarchicalTransport>(std::move(inside), topology, store, options);
}

}  // namespace lockstep
