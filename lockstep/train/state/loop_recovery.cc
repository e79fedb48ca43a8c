// SPDX-License-Identifier: Apache-2.0
#include "lockstep/loop_recovery.h"

#include <torch/serialize/archive.h>

#include <algorithm>
#include <sstream>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "agent/recover/job_memory.h"
#include "lockstep/base/require.h"
#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/error.h"
#include "lockstep/model/parameters.h"
#include "lockstep/optimizer.h"
#include "lockstep/step/guards/guards.h"
#include "lockstep/step/update/rule.h"
#include "lockstep/strategy/pipeline/tensor_messages.h"
#include "lockstep/train/state/generators.h"
#include "lockstep/train/state/loop_state.h"

namespace lockstep {
namespace {

using nlohmann::json;

// Names in the images.
constexpr const char* kProgress = "lockstep.progress";
constexpr const char* kGroups = "lockstep.groups";
constexpr const char* kTorchOptimizer = "optimizer";
const std::string kParameter = "model.", kBuffer = "buffer.", kItem = "item.";
constexpr const char* kStates = "optimizer.";

std::string states_name(size_t parameter) { return concat(kStates, parameter, "."); }

CheckpointError not_kept(const std::string& name, const std::string& looks) {
  return CheckpointError({.what = concat("the kept state has no ", name, looks),
                          .next = "make the same model, optimizer and items each time that the function is called"});
}

Tensor read(const SafetensorsReader& from, const std::string& name, const Tensor& like = {}) {
  const auto entry = from.entries().find(name);
  const bool fits =
      entry != from.entries().end() && (!like.defined() || (like.sizes() == torch::IntArrayRef(entry->second.shape) &&
                                                            like.scalar_type() == entry->second.dtype));
  if (!fits) throw not_kept(name, like.defined() ? concat(" of ", like.dtype().name(), like.sizes()) : "");
  return from.read(name);
}

// ---- The optimizer: one of lockstep's by its arrays, at the speed of memory; another as torch saves it.

void note_optimizer(const torch::optim::Optimizer& optimizer, TensorFile& into) {
  json groups = json::array();
  for (const auto& group : optimizer.param_groups()) groups.push_back(values_of(group.options()));
  into.metadata[kGroups] = groups.dump();
  if (const auto* const own = dynamic_cast<const Optimizer*>(&optimizer)) {
    const auto parameters = parameters_of(optimizer);
    for (size_t i = 0; i < parameters.size(); ++i)
      for (const auto& [key, tensor] : own->state_of(parameters[i])) into.tensors[states_name(i) + key] = tensor;
    return;
  }
  torch::serialize::OutputArchive archive;
  optimizer.save(archive);
  std::ostringstream text;
  archive.save_to(text);
  into.tensors[kTorchOptimizer] = bytes_of_text(text.str());
}

// Restores the states by the number of the parameter in the optimizer.
void restore_states(const SafetensorsReader& from, Optimizer& optimizer) {
  size_t taken = 0;
  const auto parameters = parameters_of(optimizer);
  for (size_t i = 0; i < parameters.size(); ++i) {
    Optimizer::StateTensors state;
    const std::string prefix = states_name(i);
    for (const auto& [name, entry] : from.entries())
      if (name.starts_with(prefix)) state[name.substr(prefix.size())] = from.read(name);
    optimizer.set_state(parameters[i], state);
    taken += state.size();
  }
  if (taken !=
      to_size(std::ranges::count_if(from.entries(), [](const auto& each) { return each.first.starts_with(kStates); })))
    throw not_kept("optimizer", " of as many parameters");
}

void restore_optimizer(const SafetensorsReader& from, torch::optim::Optimizer& optimizer) {
  if (auto* const own = dynamic_cast<Optimizer*>(&optimizer)) {
    restore_states(from, *own);
  } else {
    std::istringstream text(text_in(read(from, kTorchOptimizer)));
    torch::serialize::InputArchive archive;
    archive.load_from(text);
    optimizer.load(archive);
  }
  const json groups = json::parse(from.metadata().at(kGroups));
  if (groups.size() != optimizer.param_groups().size()) throw not_kept("optimizer", " with as many groups");
  for (size_t i = 0; i < groups.size(); ++i)
    set_options(optimizer.param_groups()[i].options(), groups[i].get<OptionValues>());
}

}  // namespace

struct Recovery::State {
  struct Item {
    std::string name;
    std::function<std::string()> save;  // null: value
    Tensor value;
  };

  State(DistributedDataParallel& trained, torch::optim::Optimizer& by, Loader* from, const Options& options)
      : ddp(trained),
        optimizer(by),
        loader(from),
        world(ddp.world()),
        parameters(named_parameters(ddp.module())),
        buffers(named_buffers(ddp.module())) {
    JobMemory* const memory = JobMemory::get();
    if (memory == nullptr) return;
    kept.emplace(world, *memory, options.share_of_time);
    if (kept->found() != nullptr) restore(*kept->found());
  }

  // Every rank writes the same values into what they share.
  void restore(const LoopState::Found& found) {
    ddp.write_parameters([&] {
      for (const auto& [name, tensor] : parameters) Tensor(tensor).copy_(read(found.common, kParameter + name, tensor));
      for (const auto& [name, tensor] : buffers) Tensor(tensor).copy_(read(found.own, kBuffer + name, tensor));
      restore_optimizer(found.common, optimizer);
    });
    world.barrier();  // the optimizer's state is what every rank has written
    if (found.is_own_rank)
      for (const torch::Device device : devices_with_generators(world))
        set_generator_state(device, read(found.own, generator_name(device, world.rank())).clone());
    const json progress = json::parse(found.common.metadata().at(kProgress));
    steps = progress.at("steps");
    position = {progress.at("epoch"), progress.at("samples")};
  }

  // Releases what was found: everything that there is to keep is known.
  void begin() {
    if (!std::exchange(begun, true) && kept) kept->taken(steps);
  }

  void require_forward(const LoaderPosition& now) const {
    if (now.epoch > position.epoch || (now.epoch == position.epoch && now.samples > position.samples)) return;
    throw UsageError(
        {.what = concat("step ", steps, " is of sample ", now.samples, " of epoch ", now.epoch,
                        ", but the training has been at sample ", position.samples, " of epoch ", position.epoch),
         .here = world.describe(),
         .likely = "a loop that starts over, or two calls of Recovery::step() for one batch",
         .next = "loop from recovery.epoch() on, over recovery.batches(epoch)"});
  }

  void require_scaler() const {
    const auto* const own = dynamic_cast<const Optimizer*>(&optimizer);
    if (keeps_scaler || own == nullptr || !own->adjusts_loss_scale()) return;
    throw UsageError({.what = "the optimizer has a GradientScaler that Recovery was not given",
                      .here = world.describe(),
                      .likely = "after the loss of a rank its scale would be the initial one",
                      .next = "recovery.keep(\"scaler\", scaler) right after Recovery is made"});
  }

  void finish_step() {
    begin();
    if (loader != nullptr) {
      const LoaderPosition now = loader->position();
      require_forward(now);
      position = now;
    }
    ++steps;
    if (!kept || !kept->is_due()) return;
    require_scaler();
    const torch::NoGradGuard no_grad;
    const bool gathers = !world.device().is_cpu();  // slices of the optimizer's state: a call of all ranks
    kept->keep(steps, kept->keeps_common() || gathers ? common() : TensorFile(), own());
  }

  TensorFile common() const {
    TensorFile file;
    for (const auto& [name, tensor] : parameters) file.tensors[kParameter + name] = tensor;
    note_optimizer(optimizer, file);
    const json progress = {{"steps", steps}, {"epoch", position.epoch}, {"samples", position.samples}};
    file.metadata[kProgress] = progress.dump();
    return file;
  }

  TensorFile own() const {
    TensorFile file{.tensors = generators_of(world), .metadata = {}};
    for (const auto& [name, tensor] : buffers) file.tensors[kBuffer + name] = tensor;
    for (const Item& item : items)
      file.tensors[kItem + item.name] = item.save ? bytes_of_text(item.save()) : item.value;
    return file;
  }

  const SafetensorsReader* add(Item item) {
    require(!begun, concat("Recovery::keep(\"", item.name, "\") after the first step or batch"),
            "call it right after Recovery is made");
    items.push_back(std::move(item));
    return kept && kept->found() != nullptr ? &kept->found()->own : nullptr;
  }

  DistributedDataParallel& ddp;
  torch::optim::Optimizer& optimizer;
  Loader* const loader;
  const World world;
  const NamedTensors parameters;
  const NamedTensors buffers;
  std::vector<Item> items;
  std::optional<LoopState> kept;  // by a launcher that replaces ranks
  bool begun = false;
  bool keeps_scaler = false;
  int64_t steps = 0;
  LoaderPosition position{};
};

Recovery::Recovery(DistributedDataParallel& ddp, torch::optim::Optimizer& optimizer, const Options& options)
    : state_(std::make_unique<State>(ddp, optimizer, nullptr, options)) {}
Recovery::Recovery(DistributedDataParallel& ddp, torch::optim::Optimizer& optimizer, Loader& loader,
                   const Options& options)
    : state_(std::make_unique<State>(ddp, optimizer, &loader, options)) {}
Recovery::~Recovery() = default;

void Recovery::keep(const std::string& name, const Tensor& value) {
  const SafetensorsReader* const found = state_->add({.name = name, .save = nullptr, .value = value});
  if (found == nullptr) return;
  const torch::NoGradGuard no_grad;
  Tensor(value).copy_(read(*found, kItem + name, value));
}

void Recovery::keep(const std::string& name, std::function<std::string()> save,
                    std::function<void(const std::string&)> load) {
  const SafetensorsReader* const found = state_->add({.name = name, .save = std::move(save), .value = {}});
  if (found != nullptr) load(text_in(read(*found, kItem + name)));
}

void Recovery::keep(const std::string& name, GradientScaler& scaler) {
  state_->keeps_scaler = true;
  keep(
      name, [&scaler] { return scaler.state(); }, [&scaler](const std::string& saved) { scaler.set_state(saved); });
}

int64_t Recovery::epoch() const { return state_->position.epoch; }
int64_t Recovery::steps() const { return state_->steps; }

Loader::Epoch Recovery::batches(int64_t epoch) {
  const LoaderPosition& at = state_->position;
  require(state_->loader != nullptr, "Recovery::batches() without a loader", "Recovery(ddp, optimizer, loader)");
  if (epoch < at.epoch)
    throw UsageError({.what = concat("epoch ", epoch, " again: the training has been in epoch ", at.epoch),
                      .here = state_->world.describe(),
                      .next = "begin with recovery.epoch()"});
  state_->begin();
  return state_->loader->resume(epoch == at.epoch ? at : LoaderPosition{.epoch = epoch, .samples = 0});
}

void Recovery::step() { state_->finish_step(); }

}  // namespace lockstep
