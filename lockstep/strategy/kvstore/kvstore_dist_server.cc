#include <map>

#include "lockstep/deadline.h"
#include "lockstep/model/parameters.h"
#include "lockstep/strategy/devices/replica.h"
#include "lockstep/strategy/kvstore/kvstore_dist.h"
#include "lockstep/strategy/kvstore/kvstore_worker.h"
#include "lockstep/strategy/kvstore/other_servers.h"

namespace lockstep {
namespace {

KVServerOptions server_options(const DistSetting& setting, const StrategyOptions& options) {
  return {.consistency = setting.consistency,
          .staleness = options.kvstore.staleness,
          .workers = setting.roles.workers,
          .server = setting.roles.server_of(setting.world.rank()),
          .servers = static_cast<int>(setting.roles.servers.size()),
          .timeout = options.timeout};
}

// A slice's place in the memory order of its whole tensor.
torch::Tensor part_of(const torch::Tensor& whole, const KeySlice& slice) {
  return dense_view(whole.detach()).narrow(0, slice.begin, slice.count);
}

class KVStoreServer : public Strategy {
 public:
  KVStoreServer(const DistSetting& setting, Links links, const Task& task, const StrategyOptions& options)
      : setting_(setting),
        task_(task),
        replica_(make_replica(task, options)),
        others_(std::move(links.servers), options.timeout / 4) {
    require_same_model(setting.world, named_parameters(model()));
    broadcast_model(setting.world, model(), setting.first_worker());
    for (const auto& [name, parameter] : trained_parameters(model())) values_.push_back(parameter);
    trained_ = values_.size();
    for (const auto& [name, buffer] : named_buffers(model())) values_.push_back(buffer);
    seed_steps(options.seed);
    server_ = std::make_unique<KVServer>(server_options(setting, options), std::move(links.clients));
  }

  // The workers' step: over when all that are there have pushed it.
  BatchTotals forward_backward(const Batch&) override {
    const Stopwatch watch;
    const BatchTotals totals = server_->wait_for_pushes(++pushes_);
    phases_.exchange += watch.seconds();
    return totals;
  }
  void update() override {}  // the serving threads have

  // The first server's model gets what all servers have, or what the first worker has.
  void synchronise() override {
    const torch::NoGradGuard no_grad;
    if (!setting_.update_in_store) return follow_first_worker();
    if (is_first()) collect();
    if (setting_.in_step()) broadcast_model(setting_.world, model(), 0);
  }

  void restored(std::int64_t) override {
    const torch::NoGradGuard no_grad;
    if (setting_.update_in_store) server_->set_states(states_of_model(server_->layout()));
    setting_.world.barrier();
  }

  torch::Tensor forward(const torch::Tensor& data) override { return replica_.forward(task_, data); }
  torch::nn::Module& model() override { return *replica_.model; }
  Optimizer& optimizer() override { return *replica_.optimizer; }
  const PhaseTimes& phases() const override { return phases_; }
  bool has_data() const override { return false; }
  World data_world(const World&) const override { return World::single(); }  // it has no part in the batches
  World loop_world(const World& world) const override { return setting_.in_step() ? world : World::single(); }
  Report report() const override { return server_->statistics().report(); }
  std::string table() const override { return server_->statistics().table(); }

 private:
  using States = std::map<std::int64_t, Optimizer::StateTensors>;  // of whole keys

  bool is_first() const { return setting_.world.rank() == 0; }

  void follow_first_worker() {
    broadcast_model(setting_.world, model(), setting_.first_worker());
    if (!is_first()) return;
    for (std::size_t i = 0; i < trained_; ++i)
      optimizer().set_state(values_[i], receive_state(setting_.world, setting_.first_worker()).state);
  }

  void collect() {
    States states;
    const BlockLayout own = server_->layout();
    const std::vector<SliceState> slices = server_->states();
    for (std::size_t i = 0; i < slices.size(); ++i) place(own.slices()[i], slices[i], states);
    others_.for_each([&](const Link& other) {
      other.send(QuestionHeader{.question = Question::kState, .count = pushes_});
      const auto count = other.receive<AnswerHeader>().count;
      for (std::int64_t i = 0; i < count; ++i) {
        const auto slice = other.receive<KeySlice>();
        place(slice, receive_state(other.world(), other.peer()), states);
      }
    });
    for (std::size_t i = 0; i < trained_; ++i) optimizer().set_state(values_[i], states[static_cast<std::int64_t>(i)]);
  }

  // Into the model, and into `states`, where the parts of a split key come together.
  void place(const KeySlice& slice, const SliceState& found, States& states) const {
    const torch::Tensor& value = values_[static_cast<std::size_t>(slice.key)];
    part_of(value, slice).copy_(found.value);
    for (const auto& [name, part] : found.state) {
      torch::Tensor& whole = states[slice.key][name];
      if (!whole.defined()) whole = part.dim() == 0 ? part : torch::empty_like(value.detach(), part.scalar_type());
      if (part.dim() > 0) part_of(whole, slice).copy_(part);
    }
  }

  std::vector<SliceState> states_of_model(const BlockLayout& layout) const {
    std::vector<SliceState> slices;
    for (const KeySlice& slice : layout.slices()) {
      const torch::Tensor& value = values_[static_cast<std::size_t>(slice.key)];
      slices.push_back({.value = part_of(value, slice), .state = {}});
      if (slice.trained == 0) continue;
      for (const auto& [name, whole] : replica_.optimizer->state_of(value))
        slices.back().state[name] = name == "step" ? whole : part_of(whole, slice);
    }
    return slices;
  }

  DistSetting setting_;
  Task task_;
  Replica replica_;                    // what is validated and saved
  std::vector<torch::Tensor> values_;  // its trained parameters, then its buffers: the keys
  std::size_t trained_ = 0;
  OtherServers others_;  // of which the first is a client
  std::int64_t pushes_ = 0;
  PhaseTimes phases_;
  std::unique_ptr<KVServer> server_;  // ends first: once its clients have left, the other servers may
};

}  // namespace

std::unique_ptr<Strategy> make_kvstore_server(const DistSetting& setting, Links links, const Task& task,
                                              const StrategyOptions& options) {
  return std::make_unique<KVStoreServer>(setting, std::move(links), task, options);
}

}  // namespace lockstep
