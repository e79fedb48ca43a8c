// SPDX-License-Identifier: Apache-2.0
// The strategy `kvstore` with servers: a server.
#include <condition_variable>
#include <exception>
#include <list>
#include <map>
#include <mutex>
#include <thread>

#include "lockstep/base/sockets/received.h"
#include "lockstep/base/text.h"
#include "lockstep/model/parameters.h"
#include "lockstep/strategy/devices/replica_strategy.h"
#include "lockstep/strategy/kvstore/server.h"
#include "lockstep/strategy/kvstore/store.h"
#include "lockstep/strategy/pipeline/tensor_messages.h"

namespace lockstep {
namespace {

// The first server's links to the other servers, whom it asks for their slices only when it validates or saves. In
// between a thread tells them that it is alive: a server takes a client that is silent for too long for lost.
class PeerServers {
 public:
  PeerServers(const std::vector<StoreLink>& links, milliseconds interval) {
    for (const StoreLink& link : links) peers_.emplace_back(link);
    if (!peers_.empty())
      thread_ = std::jthread([this, interval](const std::stop_token& stop) { keep_alive(stop, interval); });
  }

  // Says goodbye; while an exception is in flight it ends the links instead.
  ~PeerServers() {
    const bool failed = std::uncaught_exceptions() > 0;
    if (failed)
      for (const Peer& peer : peers_) peer.link.abandon("the first server has failed");
    thread_ = {};  // stops and joins it
    for (const Peer& peer : peers_)
      if (!failed) tell(peer.link, Request::kGoodbye);
  }
  PeerServers& operator=(PeerServers&&) = delete;

  // Calls talk(link) for one after the other. Throws what `talk` throws.
  template <class Talk>
  void for_each(const Talk& talk) {
    for (Peer& peer : peers_) {
      const std::lock_guard lock(peer.in_use);
      talk(peer.link);
    }
  }

 private:
  struct Peer {
    explicit Peer(StoreLink to) : link(std::move(to)) {}
    StoreLink link;
    std::mutex in_use;
  };

  // The loss of a server is not reported here: it ends the workers, and their loss ends this server. A peer that
  // for_each() talks to right now hears from this server anyway: it is left out, not waited for.
  void keep_alive(const std::stop_token& stop, milliseconds interval) {
    std::mutex mutex;
    std::condition_variable_any stopped;
    std::unique_lock lock(mutex);
    while (!stopped.wait_for(lock, stop, interval, [&stop] { return stop.stop_requested(); }))
      for (Peer& peer : peers_)
        if (const std::unique_lock free(peer.in_use, std::try_to_lock); free) tell(peer.link, Request::kAlive);
  }

  std::list<Peer> peers_;
  std::jthread thread_;
};

class ServerStrategy : public ReplicaStrategy {
 public:
  ServerStrategy(const DistSetting& setting, const Task& task)
      : ReplicaStrategy(task, {make_replica(task, setting.options)}),
        setting_(setting),
        peers_(setting.to_servers, setting.options.timeout / 4) {
    setting_.share_model(model());
    const auto parameters = trainable(named_parameters(model())), buffers = named_buffers(model());
    values_ = tensors_of(parameters);
    trained_ = values_.size();
    for (const auto& [name, buffer] : buffers) values_.push_back(buffer);
    layouts_ = plan_keys(keys_of(parameters, buffers), setting.servers.size(), setting.options.kvstore.split_above);
    seed_steps(setting.options.seed, -1);  // rank 0 of the workers has the next seed
    server_ = make_kv_server(setting_);
  }

  // The workers' step is over when all that are there have pushed it.
  BatchTotals forward_backward(const Batch&) override {
    return in_phase(Phase::kExchange, [&] { return server_->wait_for_pushes(++pushes_); });
  }
  void update() override {}  // the serving threads have done it

  // The first server's model gets the weights of all servers, or those of the first worker.
  void synchronise() override {
    const torch::NoGradGuard no_grad;
    if (!setting_.options.kvstore.update_on_kvstore) return follow_first_worker();
    if (setting_.number == 0) collect();
    if (setting_.in_step()) broadcast_model(setting_.world, model());
  }

  void restored(int64_t) override {
    const torch::NoGradGuard no_grad;
    if (setting_.options.kvstore.update_on_kvstore) server_->set_states(states_of_model());
    setting_.world.barrier();
  }

  StrategyRanks ranks(const World& world) const override {
    return {.data = World::single(), .validation = world, .step = setting_.loop_world(world), .has_data = false};
  }
  Report report() const override { return server_->statistics().report(); }
  std::string table() const override { return server_->statistics().table(); }

 private:
  using States = std::map<size_t, Optimizer::StateTensors>;  // of whole keys

  void follow_first_worker() {
    const int first_worker = setting_.workers.front();
    broadcast_model(setting_.world, model(), first_worker);
    if (setting_.number > 0) return;
    for (size_t i = 0; i < trained_; ++i)
      optimizer().set_state(values_[i], state_in(receive_tensors(setting_.world, first_worker, /*tag=*/0)));
  }

  void collect() {
    States states;
    for (const SliceState& slice : server_->states()) place(slice, states);
    auto layout = layouts_.begin();
    peers_.for_each([&](const StoreLink& peer) {
      const Received sender(concat("the server that is rank ", peer.peer_in_job()));
      peer.send(RequestHeader{.request = Request::kState, .count = pushes_});
      for (const KeySlice& slice : (++layout)->slices()) {
        SliceState found{.place = slice, .state = state_in(receive_tensors(peer.world(), peer.peer(), /*tag=*/0))};
        found.value = found.state["value"];
        found.state.erase("value");
        check(sender, found);
        place(found, states);
      }
    });
    for (size_t i = 0; i < trained_; ++i) optimizer().set_state(values_[i], states[i]);
  }

  // Checks what another server has sent.
  void check(const Received& sender, const SliceState& found) const {
    const KeySlice& slice = found.place;
    const auto is_slice = [&slice](const Tensor& part) {
      return part.defined() && part.dim() == 1 && part.numel() == slice.count;
    };
    sender.require(is_slice(found.value) && found.value.scalar_type() == slice.dtype,
                   concat("it is not a slice of tensor ", slice.key));
    for (const auto& [name, part] : found.state)
      sender.require(is_slice(part) || (part.defined() && part.dim() == 0),
                     concat("no optimizer's state of that slice: ", name));
  }

  // Into the model, and into `states`, where the parts of a split key come together.
  void place(const SliceState& found, States& states) const {
    const KeySlice& slice = found.place;
    const Tensor& value = values_[slice.key];
    slice.in_value(value).copy_(found.value);
    for (const auto& [name, part] : found.state) {
      Tensor& whole = states[slice.key][name];
      if (!whole.defined()) whole = part.dim() == 0 ? part : torch::empty_like(value.detach(), part.scalar_type());
      if (part.dim() > 0) slice.in_value(whole).copy_(part);
    }
  }

  std::vector<SliceState> states_of_model() const {
    std::vector<SliceState> slices;
    for (const KeySlice& slice : layouts_[setting_.number].slices()) {
      const Tensor& value = values_[slice.key];
      slices.push_back({.place = slice, .value = slice.in_value(value)});
      if (!slice.trained) continue;
      for (const auto& [name, whole] : replicas_.front().optimizer->state_of(value))
        slices.back().state[name] = name == "step" ? whole : slice.in_value(whole);
    }
    return slices;
  }

  DistSetting setting_;
  Tensors values_;  // [key] its trained parameters, then its buffers
  size_t trained_ = 0;
  std::vector<BlockLayout> layouts_;  // of each server
  int64_t pushes_ = 0;
  PeerServers peers_;
  std::unique_ptr<KVServer> server_;
};

}  // namespace

std::unique_ptr<Strategy> make_server_strategy(const DistSetting& setting, const Task& task) {
  return std::make_unique<ServerStrategy>(setting, task);
}

}  // namespace lockstep
