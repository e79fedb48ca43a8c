#include "lockstep/collective/machines/hierarchical_transport.h"

#include <exception>
#include <optional>
#include <thread>

#include "lockstep/base/text.h"
#include "lockstep/collective/c10d/c10d_call.h"
#include "lockstep/collective/call_queue.h"
#include "lockstep/collective/machines/gloo_messages.h"
#include "lockstep/collective/machines/machine_exchange.h"
#include "lockstep/collective/machines/machine_parts.h"
#include "lockstep/collective/shared_memory_transport.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

Collective collective_of(const TensorCall& call) {
  return {.operation = call.call.operation,
          .input = call.input,
          .output = call.output,
          .counts = {call.call.counts.begin(), call.call.counts.end()},
          .receive_counts = {call.call.receive_counts.begin(), call.call.receive_counts.end()},
          .op = call.call.op,
          .root = call.call.root,
          .algorithm = call.call.algorithm};
}

// Tells `on_loss` when a rank of this machine is lost, also while nobody waits in shared memory: it waits for a message
// that only this rank itself sends, when all is over.
class Sentinel {
 public:
  using OnLoss = std::function<void(std::exception_ptr)>;

  Sentinel(shm::Group& inside, OnLoss on_loss) {
    group_.emplace(whole_group_of(inside));
    group_->set_timeout(kForever);
    word_ = group_->start({.operation = Operation::kReceive, .output = &heard_, .count = 1, .dtype = DType::kUInt8});
    thread_ = std::thread([this, on_loss = std::move(on_loss)] { watch(on_loss); });
  }

  ~Sentinel() {
    try {
      group_->send({.input = &heard_, .count = 1, .dtype = DType::kUInt8, .peer = group_->rank()});
    } catch (const std::exception&) {  // lost: then it has ended by itself
    }
    thread_.join();
  }

 private:
  static constexpr std::chrono::hours kForever{24 * 365};

  void watch(const OnLoss& on_loss) {
    try {
      word_->wait();
    } catch (...) {
      on_loss(std::current_exception());
    }
  }

  std::uint8_t heard_ = 0;
  std::optional<shm::Group> group_;
  FuturePtr word_;
  std::thread thread_;
};

std::unique_ptr<HostLink> connect_counterparts(const shm::Group& inside, const Machines& machines,
                                               const c10::intrusive_ptr<c10d::Store>& store,
                                               const TransportOptions& options) {
  if (inside.rank() >= machines.slices()) return nullptr;
  TransportOptions mine = options;
  mine.rank = machines.nodes[static_cast<std::size_t>(options.rank)];
  mine.size = machines.count();
  return std::make_unique<HostLink>(with_prefix(store, concat("slice/", inside.rank())), mine);
}

std::string reason_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& known) {
    return known.text().what;
  } catch (const std::exception& other) {
    return other.what();
  }
}

class HierarchicalTransport : public Transport {
 public:
  HierarchicalTransport(shm::Group inside, const Machines& machines, c10::intrusive_ptr<c10d::Store> store,
                        TransportOptions options)
      : store_(std::move(store)),
        options_(std::move(options)),
        machines_(machines),
        inside_(std::move(inside)),
        all_(with_prefix(store_, "flat"), options_, "rank"),
        messages_(all_, options_.describe, !options_.message_headers),
        between_(connect_counterparts(inside_, machines_, store_, options_)),
        collectives_(inside_, between_.get(), machines_, node()),
        parts_(inside_, between_.get(), machines_, options_.rank),
        exchange_(inside_, between_.get(), all_) {
    if (inside_.size() > 1) sentinel_.emplace(inside_, [this](const std::exception_ptr& error) { close(error); });
    if (between_) between_->watch([this](const std::exception_ptr& error) { give_up(error); });
  }

  // As that of shared memory: in good order, unless an exception is on its way out.
  ~HierarchicalTransport() override {
    if (std::uncaught_exceptions() > 0) {
      fail("an exception");
      return;
    }
    queue_.drain();
    if (between_) between_->leave();
    sentinel_.reset();
    try {
      inside_.leave();
    } catch (const std::exception&) {
    }
  }

  int run(const TensorCall& call) override {
    if (is_message(call.call.operation)) {
      const FuturePtr message = start_message(call, false);
      message->wait();
      return message->source();
    }
    check_algorithm(call.call);
    queue_.run([&] { carry_out(collective_of(call)); });
    return kAnyRank;
  }

  FuturePtr start(TensorCall call) override {
    if (is_message(call.call.operation)) return start_message(call, true);
    check_algorithm(call.call);
    FuturePtr future = queue_.add([this, call = std::move(call)] { carry_out(collective_of(call)); });
    queue_.hand_to_worker();
    return future;
  }

  std::unique_ptr<Transport> group(const RankLists& lists) override {
    queue_.drain();
    return transport_of(lists, subgroup_of(inside_, lists_inside(lists)), options_);
  }

  std::unique_ptr<Transport> separate(const RankLists& lists, std::chrono::milliseconds timeout) override {
    queue_.drain();
    TransportOptions options = options_;
    options.timeout = timeout;
    options.message_headers = false;
    return transport_of(lists, separate_group_of(inside_, lists_inside(lists), timeout), options);
  }

  torch::Tensor allocate(torch::IntArrayRef sizes, const torch::TensorOptions& options) override {
    return allocate_shared(inside_, sizes, options);
  }

  std::optional<shm::Group> machine_group() override {
    queue_.drain();
    return whole_group_of(inside_);
  }

  void fail(const std::string& reason) override {
    inside_.poison(reason);
    close(std::make_exception_ptr(PeerLost({.what = "this rank has failed: " + reason, .here = options_.describe})));
  }

 private:
  int node() const { return machines_.nodes[static_cast<std::size_t>(options_.rank)]; }

  FuturePtr start_message(const TensorCall& call, bool alone) {
    const int tag = static_cast<int>(call.call.tag);
    if (call.call.operation == Operation::kSend) return messages_.send(call.input, call.call.peer, tag);
    return messages_.receive(call.output, call.call.peer, tag, alone);
  }

  void check_algorithm(const Call& call) const {
    if (call.algorithm != Algorithm::kDirect && call.algorithm != Algorithm::kRing)
      throw UsageError(
          {.what = concat("all_reduce by the algorithm ", to_string(call.algorithm), " between machines"),
           .here = options_.describe,
           .next = "leave the algorithm out, choose ring, or keep all ranks on one machine"});
  }

  // `inside`: the members of this rank's list that are on this machine.
  std::unique_ptr<Transport> transport_of(const RankLists& lists, std::optional<shm::Group> inside,
                                          const TransportOptions& like) {
    const std::vector<int>& ranks = lists[static_cast<std::size_t>(options_.rank)];
    const int made = groups_made_++;
    if (ranks.empty()) return nullptr;
    const Machines machines = machines_of(ranks);
    if (machines.count() == 1) return make_shared_memory(std::move(*inside));
    const TransportOptions options = options_of_group(like, ranks);
    return make_hierarchical(std::move(*inside), machines, with_prefix(store_, prefix_of_group(made, ranks)), options);
  }

  void carry_out(const Collective& call) try {
    own_.clear();
    switch (call.operation) {
      case Operation::kAllReduce: return collectives_.all_reduce(call);
      case Operation::kReduce: return collectives_.reduce(with_output(call));
      case Operation::kBroadcast: return collectives_.broadcast(call);
      case Operation::kReduceScatter: return parts_.reduce_scatter(call);
      case Operation::kAllGather: return parts_.all_gather(call);
      case Operation::kBarrier: return barrier();
      default: return exchange(call);
    }
  } catch (const UsageError&) {
    throw;
  } catch (...) {
    give_up(std::current_exception());
    forget_transfers();
    throw;
  }

  // A transfer may touch its memory until forget_transfers(): a tensor made here has to live as long, also while an
  // exception unwinds the call that made it.
  const torch::Tensor& keep(torch::Tensor tensor) { return own_.emplace_back(std::move(tensor)); }

  // Ranks other than root give a copy of what is theirs to read only.
  Collective with_output(Collective call) {
    if (!call.output.defined()) call.output = keep(call.input.detach().clone());
    return call;
  }

  void barrier() {
    const torch::Tensor& token = keep(torch::zeros({1}, torch::kUInt8));
    collectives_.all_reduce({.operation = Operation::kBarrier, .input = token, .output = token});
  }

  void exchange(const Collective& call) {
    exchange_.check(call);
    if (call.operation == Operation::kGather) return exchange_.gather(call);
    if (call.operation == Operation::kScatter) return exchange_.scatter(call);
    exchange_.all_to_all(call, call.counts.empty() ? std::vector<std::int64_t>() : sent_here(call.counts));
  }

  // Of what every rank sends to every rank, the part that is for this one.
  std::vector<std::int64_t> sent_here(const std::vector<std::int64_t>& mine) {
    const auto size = static_cast<std::int64_t>(mine.size());
    const torch::Tensor all = keep(torch::empty({size, size}, torch::kInt64));
    parts_.all_gather({.operation = Operation::kAllGather, .input = keep(torch::tensor(mine)), .output = all});
    const torch::Tensor here = all.select(1, options_.rank).contiguous();
    return {here.const_data_ptr<std::int64_t>(), here.const_data_ptr<std::int64_t>() + size};
  }

  // After an error: a transfer that may still arrive would write where the caller's tensors were.
  void forget_transfers() {
    collectives_.give_up();
    parts_.give_up();
    exchange_.give_up();
    if (between_) between_->forget();
    all_.forget();
  }

  void give_up(const std::exception_ptr& error) {
    inside_.poison(reason_of(error));
    close(error);
  }

  void close(const std::exception_ptr& reason) {
    if (between_) between_->close(reason);
    all_.close(reason);
    messages_.close();
  }

  // The lists as the ranks of this machine see them: only their own ranks, as local ones.
  RankLists lists_inside(const RankLists& lists) const {
    RankLists mine;
    for (const int rank : machines_.ranks_on(node())) {
      mine.emplace_back();
      for (const int member : lists[static_cast<std::size_t>(rank)])
        if (machines_.node_of(member) == node()) mine.back().push_back(machines_.local_rank(member));
    }
    return mine;
  }

  // Numbered anew, in the order of their first ranks.
  Machines machines_of(const std::vector<int>& ranks) const {
    std::vector<int> known;
    Machines machines;
    for (const int rank : ranks) {
      const int node = machines_.nodes[static_cast<std::size_t>(rank)];
      const auto place = std::ranges::find(known, node) - known.begin();
      if (place == static_cast<std::ptrdiff_t>(known.size())) known.push_back(node);
      machines.nodes.push_back(static_cast<int>(place));
    }
    return machines;
  }

  c10::intrusive_ptr<c10d::Store> store_;
  TransportOptions options_;
  Machines machines_;
  shm::Group inside_;
  HostLink all_;  // ranks
  GlooMessages messages_;
  std::unique_ptr<HostLink> between_;  // owners of one slice
  HostCollectives collectives_;
  HostParts parts_;
  HostExchange exchange_;
  std::vector<torch::Tensor> own_;  // of the call that is carried out
  std::optional<Sentinel> sentinel_;
  CallQueue queue_{options_.describe};
  int groups_made_ = 0;
};

}  // namespace

std::unique_ptr<Transport> make_hierarchical(shm::Group inside, const Machines& machines,
                                             const c10::intrusive_ptr<c10d::Store>& store,
                                             const TransportOptions& options) {
  return std::make_unique<HierarchicalTransport>(std::move(inside), machines, store, options);
}

}  // namespace lockstep
