// SPDX-License-Identifier: Apache-2.0
// A pipeline whose devices are threads of one process: sets of cores, or GPUs.
//
// Each device has a part: a model of its own, in which only the tensors of its stage have memory, on the device; the
// others are meta tensors, as in a stage that is a rank (model/partial_model.h). The whole model, which the optimizer,
// validation and checkpoints see, has no memory of its own: each of its tensors is that of the first device that holds
// it. Replicas of a stage, and stages that share a parameter, hold the same tensor:
//
//   cores   share the parameter's memory; the optimizer sums the gradients of all holders in the pass that updates, on
//           the cores of all devices. A buffer is copied: running statistics are of the samples that a replica has seen
//   GPUs    have a copy each. The first holder adds up the gradients and is updated, and the others copy it
//
// Activations pass through channels; a GPU copies what it gets from its neighbour.
//
// Owns:    the devices' threads and the parts
// Threads: one scheduling thread. Nothing runs on the devices between calls of Devices::run()
#include <map>

#include "lockstep/base/to_size.h"
#include "lockstep/collective/gpus.h"
#include "lockstep/collective/operator_spans.h"
#include "lockstep/model/parameters.h"
#include "lockstep/model/partial_model.h"
#include "lockstep/strategy/devices/gpu_team.h"
#include "lockstep/strategy/pipeline/pipeline.h"

namespace lockstep {
namespace {

struct Holder {
  int device = 0;
  Tensor tensor;
};

struct PlacedTensor {
  Tensor whole;
  std::vector<Holder> holders;  // never empty

  const Tensor& first() const { return holders.front().tensor; }
};
using PlacedTensors = std::vector<PlacedTensor>;

struct ModelPart {
  ModulePtr model;
  std::vector<Piece> pieces;
  Tensors tensors;  // in the order of StagedTensors
};

class LocalPipeline : public Pipeline {
 public:
  LocalPipeline(const World& world, const Task& task, const StrategyOptions& options) : Pipeline(world, task, options) {
    replicas_ = {make_replica(task_, options_)};
    read_stages(options_.devices, pieces_of(task_, model()));
    devices_ = make_devices(world, options_);
    Replica& whole = replicas_.front();
    whole.layout = options_.layout.value_or(preferred_layout(model(), devices_->where(0)));
    set_layout(model(), whole.layout);
    gradients_ = on_gpus() ? std::make_shared<LocalGradients>(on_each_gpu())
                           : std::make_shared<LocalGradients>(on_all(*devices_));
    make_parts();
    move_to(cut_);
    seed_steps(options.seed);
  }

  void update() override {
    in_phase(Phase::kUpdate, [&] {
      if (!on_gpus()) gradients_->set(gradients_of_holders());
      optimizer().step();
      copy_from_first(copied_parameters_);
    });
  }

  void restored(int64_t step) override {
    Pipeline::restored(step);
    copy_from_first(copied_parameters_);
    copy_from_first(copied_buffers_);
  }

  // No GPU has the whole model: through all stages of the first replica.
  Tensor forward(const Batch& batch) override {
    if (!on_gpus()) return ReplicaStrategy::forward(batch);
    follow_mode();
    Tensors outputs;
    for (const Batch& part : in_micro_batches(batch)) {
      Tensors tensors = inputs_of(part.to(devices_->where(0)));
      for (int device = 0; device < stages_; ++device)
        on_device(devices_->where(device),
                  [&] { tensors = through(pieces(device), received_on(devices_->where(device), tensors)); });
      outputs.push_back(tensors.at(0));
    }
    return torch::cat(outputs);
  }

 protected:
  std::vector<double> seconds_of_pieces(const Batch& first) override {
    const auto tensors = std::make_shared<Tensors>(inputs_of(first.to(devices_->where(0))));
    const auto all = std::make_shared<std::vector<double>>();
    for (int stage = 0; stage < stages_; ++stage)  // one after the other
      devices_->run([=, part = parts_[stage], pieces = pieces(stage)](Device& device) {
        if (device.index() != stage) return;
        *tensors = received_on(device.where(), *tensors);
        const auto seconds = measure_pieces(pieces, *part.model, *tensors);
        all->insert(all->end(), seconds.begin(), seconds.end());
      });
    return *all;
  }

  // Copies tensors at first from the host, later from where they were. No gradient is left.
  void move_to(const Cut& cut) override {
    const torch::NoGradGuard no_grad;
    OptimizerStates states;
    for (const auto& [name, parameter] : named_parameters(model()))
      if (parameter.requires_grad()) states[parameter.unsafeGetTensorImpl()] = optimizer().state_of(parameter);
    cut_ = cut;
    parameters_.clear(), copied_parameters_.clear(), copied_buffers_.clear();
    const StagedTensors staged = stage_tensors(model(), pieces_of(task_, model()), cut);
    for (size_t i = 0; i < staged.size(); ++i) {
      const PlacedTensor placed = place(staged[i], i);
      const bool is_copied = placed.holders.size() > 1 && !placed.holders[1].tensor.is_alias_of(placed.first());
      if (is_copied) (staged[i].is_buffer ? copied_buffers_ : copied_parameters_).push_back(placed);
      if (!staged[i].is_buffer) parameters_.push_back(placed);
    }
    renew_optimizer(states, gradients_);
  }

  void begin_step() override {
    follow_mode();
    for (const ModelPart& part : parts_) part.model->zero_grad();
    model().zero_grad();
  }

  IntVector<StageResult> run_stages(const Batch& batch, const IntVector<IntVector<int64_t>>& counts,
                                    int64_t samples) override {
    const std::vector<Batch> copied = parts_for_devices(batch);
    const auto work = std::make_shared<IntVector<StageWork>>();
    for (int i = 0; i < devices_->size(); ++i) {
      const int replica = i / stages_;
      const Batch &first = copied[to_size(2 * replica)], &last = copied[to_size(2 * replica + 1)];
      const int stage = i % stages_;
      const Batch part{first.data, last.target, (stage == 0 ? first : last).more};
      work->push_back(work_of(replica, stage, part, counts[replica], samples));
      work->back().pieces = pieces(i);
      work->back().device = devices_->where(i);
      work->back().waits = true;
    }
    const auto links = thread_links(devices_->size(), stages_, to_size(micro_batches_));
    const auto results = std::make_shared<IntVector<StageResult>>(devices_->size());
    // `parts` keeps alive what the pieces point to, should a device be left behind.
    devices_->run([work, links, results, task = task_, parts = parts_](Device& device) {
      (*results)[device.index()] = run_stage(task, (*work)[device.index()], links(device));
    });
    return *results;
  }

  void exchange(BatchTotals&) override {
    run_on_copied(copied_parameters_, [](const PlacedTensor& parameter, Device& device) {
      if (parameter.holders.front().device != device.index()) return;
      Tensor first = parameter.first();
      for (const Holder& each : parameter.holders)
        if (each.tensor.grad().defined() && !each.tensor.is_same(first))
          dense_gradient(first).add_(brought_to(first.device(), each.tensor.grad()));
    });
    for (PlacedTensor& each : parameters_) each.whole.mutable_grad() = each.first().grad();
  }

  // A device gets only what it needs: the first one of a replica the data, the last one the targets, both what is more.
  std::vector<CopiedBatch> start_copies(const Batch& batch) const override {
    std::vector<CopiedBatch> copies;
    const auto copy = [&](int device, const Batch& part) {
      const torch::Device where = devices_->where(device);
      copies.push_back(on_device(where, [&] { return start_copy(part, copy_stream(where)); }));
    };
    for (int replica = 0; replica < replica_count_; ++replica) {
      const Batch part = part_of(batch, replica, replica_count_), none = part.rows(0, 0);
      copy(replica * stages_, {part.data, none.target, part.more});
      copy((replica + 1) * stages_ - 1, {none.data, part.target, part.more});
    }
    return copies;
  }

 private:
  bool on_gpus() const { return devices_->on_gpus(); }
  std::vector<Piece> pieces(int device) const { return pieces_in(parts_[device].pieces, cut_[device % stages_]); }

  void make_parts() {
    const auto generator = hold_generator();
    const PartialModel partial(task_.make_model);
    for (int i = 0; i < devices_->size(); ++i) {
      const ModulePtr part = partial.make_part(options_.seed, [](torch::nn::Module&) { return Tensors(); });
      name_modules(named_parameters(*part));
      parts_.push_back({part, pieces_of(task_, *part), tensors_of(*part)});
    }
  }

  // Gives a tensor of the model, the index-th, to the devices whose stages use it.
  PlacedTensor place(const StagedTensor& staged, size_t index) {
    PlacedTensor placed{.whole = staged.named.tensor, .holders = {}};
    for (int device = 0; device < parts_.size(); ++device) {
      const Tensor& tensor = parts_[device].tensors[index];
      if (staged.is_used_by(device % stages_))
        placed.holders.push_back({device, tensor});
      else if (is_held(tensor))
        put_data(tensor, on_meta(tensor));
    }
    const Tensor source = placed.whole.detach();
    for (Holder& each : placed.holders) {
      const torch::Device where = devices_->where(each.device);
      const bool is_first = each.device == placed.holders.front().device;
      const bool has_own = !is_first && (staged.is_buffer || !where.is_cpu());
      put_data(each.tensor, on_device(where, [&] {
                 const Tensor there = brought_to(where, source);
                 return has_own && there.is_alias_of(source) ? there.clone() : there;
               }));
      each.tensor.mutable_grad() = Tensor();
    }
    put_data(placed.whole, placed.first());
    placed.whole.mutable_grad() = Tensor();
    return placed;
  }

  void follow_mode() {
    for (const ModelPart& part : parts_)
      if (part.model->is_training() != model().is_training()) part.model->train(model().is_training());
  }

  // [holder][parameter]: undefined where there is none.
  std::vector<Tensors> gradients_of_holders() const {
    std::vector<Tensors> lists;
    for (size_t i = 0; i < parameters_.size(); ++i)
      for (size_t holder = 0; holder < parameters_[i].holders.size(); ++holder) {
        if (holder == lists.size()) lists.emplace_back(parameters_.size());
        lists[holder][i] = parameters_[i].holders[holder].tensor.grad();
      }
    return lists;
  }

  template <class Work>
  void run_on_copied(const PlacedTensors& copied, const Work& work) {
    if (copied.empty()) return;
    devices_->run([copied, work](Device& device) {
      const torch::NoGradGuard no_grad;
      for (const PlacedTensor& each : copied) work(each, device);
    });
  }

  void copy_from_first(const PlacedTensors& copied) {
    run_on_copied(copied, [](const PlacedTensor& tensor, Device& device) {
      for (const Holder& holder : tensor.holders)
        if (holder.device == device.index() && !holder.tensor.is_same(tensor.first()))
          copy_between(holder.tensor.detach(), tensor.first().detach());
    });
  }

  // Lets the first device of each GPU work.
  OnEachGpu on_each_gpu() {
    std::map<torch::DeviceIndex, int> first;
    for (int i = 0; i < devices_->size(); ++i) first.emplace(devices_->where(i).index(), i);
    return [this, first](const std::function<void(torch::Device)>& work) {
      // `kept` keeps alive what `work` points to, should a device be left behind.
      devices_->run([work, first, kept = replicas_](Device& device) {
        if (first.at(device.where().index()) == device.index()) work(device.where());
      });
    };
  }

  IntVector<ModelPart> parts_;  // of each device
  PlacedTensors parameters_;
  PlacedTensors copied_parameters_;  // those of which several devices have copies
  PlacedTensors copied_buffers_;
  std::shared_ptr<LocalGradients> gradients_;
};

}  // namespace

std::unique_ptr<Strategy> make_local_pipeline(const World& world, const Task& task, const StrategyOptions& options) {
  return std::make_unique<LocalPipeline>(world, task, options);
}

}  // namespace lockstep
