// SPDX-License-Identifier: Apache-2.0
// The strategy `kvstore` with servers: a server.
#include <map>

#include "lockstep/model/parameters.h"
#include "lockstep/strategy/kvstore/peer_servers.h"
#include "lockstep/strategy/kvstore/store_strategy.h"

namespace lockstep {
namespace {

class ServerStrategy : public ReplicaStrategy {
 public:
  ServerStrategy(const DistSetting& setting, const Task& task, const StrategyOptions& options)
      : ReplicaStrategy(task, {make_replica(task, options)}),
        setting_(setting),
        peers_(setting.links.servers, options.timeout / 4) {
    setting_.share_model(model());
    values_ = tensors_of(trained_parameters(model()));
    trained_ = values_.size();
    for (const auto& [name, buffer] : named_buffers(model())) values_.push_back(buffer);
    seed_steps(options.seed);
    server_ = std::make_unique<StoreServer>(setting.server_options(options), setting.links.clients);
  }

  // The workers' step is over when all that are there have pushed it.
  BatchTotals forward_backward(const Batch&) override {
    return timed(phases_.exchange, [&] { return server_->wait_for_pushes(++pushes_); });
  }
  void update() override {}  // the serving threads have done it

  // The first server's model gets the weights of all servers, or those of the first worker.
  void synchronise() override {
    const torch::NoGradGuard no_grad;
    if (!setting_.update_in_store) return follow_first_worker();
    if (is_first()) collect();
    if (setting_.in_step()) setting_.broadcast_model(model(), 0);
  }

  void restored(std::int64_t) override {
    const torch::NoGradGuard no_grad;
    if (setting_.update_in_store) server_->set_states(states_of_model(server_->layout()));
    setting_.world.barrier();
  }

  bool has_data() const override { return false; }
  World data_world(const World&) const override { return World::single(); }  // it has no part in the batches
  World loop_world(const World& world) const override { return setting_.loop_world(world); }
  Report report() const override { return server_->statistics().report(); }
  std::string table() const override { return server_->statistics().table(); }

 private:
  using States = std::map<std::size_t, Optimizer::StateTensors>;  // of whole keys

  bool is_first() const { return setting_.world.rank() == 0; }

  void follow_first_worker() {
    setting_.broadcast_model(model(), setting_.first_worker());
    if (!is_first()) return;
    for (std::size_t i = 0; i < trained_; ++i)
      optimizer().set_state(values_[i], receive_state(setting_.world, setting_.first_worker()).state);
  }

  void collect() {
    States states;
    const BlockLayout own = server_->layout();
    const std::vector<SliceState> slices = server_->states();
    for (std::size_t i = 0; i < slices.size(); ++i) place(own.slices()[i], slices[i], states);
    peers_.for_each([&](const Link& peer) {
      peer.send(RequestHeader{.request = Request::kState, .count = pushes_});
      const auto count = peer.receive<ReplyHeader>().count;
      for (std::int64_t i = 0; i < count; ++i) {
        const auto slice = peer.receive<KeySlice>();
        place(slice, receive_state(peer.world(), peer.peer()), states);
      }
    });
    for (std::size_t i = 0; i < trained_; ++i) optimizer().set_state(values_[i], states[i]);
  }

  // Into the model, and into `states`, where the parts of a split key come together.
  void place(const KeySlice& slice, const SliceState& found, States& states) const {
    const torch::Tensor& value = values_[slice.key];
    slice.in_value(value).copy_(found.value);
    for (const auto& [name, part] : found.state) {
      torch::Tensor& whole = states[slice.key][name];
      if (!whole.defined()) whole = part.dim() == 0 ? part : torch::empty_like(value.detach(), part.scalar_type());
      if (part.dim() > 0) slice.in_value(whole).copy_(part);
    }
  }

  std::vector<SliceState> states_of_model(const BlockLayout& layout) const {
    std::vector<SliceState> slices;
    for (const KeySlice& slice : layout.slices()) {
      const torch::Tensor& value = values_[slice.key];
      slices.push_back({.value = slice.in_value(value), .state = {}});
      if (slice.trained == 0) continue;
      for (const auto& [name, whole] : replicas_.front().optimizer->state_of(value))
        slices.back().state[name] = name == "step" ? whole : slice.in_value(whole);
    }
    return slices;
  }

  DistSetting setting_;
  std::vector<torch::Tensor> values_;  // [key] its trained parameters, then its buffers
  std::size_t trained_ = 0;
  PeerServers peers_;  // empty but for the first server
  std::int64_t pushes_ = 0;
  std::unique_ptr<StoreServer> server_;  // destroyed first: the other servers end once this one says goodbye
};

}  // namespace

std::unique_ptr<Strategy> make_server_strategy(const DistSetting& setting, const Task& task,
                                               const StrategyOptions& options) {
  return std::make_unique<ServerStrategy>(setting, task, options);
}

}  // namespace lockstep
