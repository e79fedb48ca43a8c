// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/state/snapshot.h"

#include <algorithm>
#include <bit>
#include <set>
#include <span>

#include <nlohmann/json.hpp>

#include "lockstep/base/log.h"
#include "lockstep/base/process/page_guard.h"
#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/error.h"
#include "lockstep/memory.h"
#include "lockstep/model/parameters.h"
#include "lockstep/model/partial_model.h"
#include "lockstep/train/state/generators.h"

namespace lockstep {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(Position, epoch, step_in_epoch, step, samples, epoch_loss,
                                                epoch_samples, epoch_surplus, epoch_seconds, best_epoch, best_step,
                                                best_loss)

namespace {

// Keys of the file's metadata.
constexpr const char* kPosition = "lockstep.position";
constexpr const char* kFingerprint = "lockstep.course";  // the name that checkpoints have had from the start
constexpr const char* kFit = "lockstep.fit";

const std::string kOptimizer = "optimizer.";
const std::string kOwnPart = "own.";
constexpr int kTag = 0;  // no other messages are under way between two steps

using TensorsByName = std::map<std::string, Tensor>;

// A value that is null on either side belongs to an option that the chosen optimizer does not have.
void require_same_fingerprint(const Json& saved, const TrainOptions& options) {
  const Json now = resume_fingerprint(options);
  for (const auto& [option, value] : saved.items()) {
    if (option == "lr" && options.from_step > 0) continue;
    if (now.contains(option) && (now[option] == value || now[option].is_null() || value.is_null())) continue;
    throw CheckpointError(
        {.what = concat("the checkpoint was made with ", option, " = ", value.dump(), ", now it is ",
                        now.contains(option) ? now[option].dump() : "unknown"),
         .next = "give the same options, or start a new run in another --checkpoint-dir; --lr may change with "
                 "--from-step"});
  }
}

// The same memory, to be sent: collectives do not have every dtype.
Tensor bytes_of(const Tensor& contiguous) { return contiguous.reshape({-1}).view(torch::kUInt8); }

std::map<std::string, std::string> metadata_of(const Position& position, const TrainOptions& options) {
  return {{kPosition, nlohmann::json(position).dump()},
          {kFingerprint, resume_fingerprint(options).dump()},
          {kFit, options.fit}};
}

// ---- What tensors look like: meta tensors here, {dtype, sizes} in messages

Tensor meta_tensor(const SafetensorsReader::Entry& entry) {
  return torch::empty(entry.shape, torch::TensorOptions(torch::kMeta).dtype(entry.dtype));
}

Json looks_of(const TensorsByName& tensors) {
  Json looks = Json::object();
  for (const auto& [name, tensor] : tensors)
    looks[name] = {static_cast<int>(tensor.scalar_type()), tensor.sizes().vec()};
  return looks;
}

TensorsByName meta_tensors(const Json& looks) {
  TensorsByName tensors;
  for (const auto& [name, each] : looks.items())
    tensors[name] = meta_tensor({static_cast<torch::ScalarType>(each[0].get<int>()), each[1]});
  return tensors;
}

// The first rank that has a tensor, and what it looks like.
struct Owned {
  int owner = 0;
  Tensor meta;
};

// Every tensor that a rank has, in the order of the names. The same on every rank. mine: looks_of() what this rank has;
// where rank 0 gives null, nothing is returned. Blocks.
std::map<std::string, Owned> find_owners(const World& world, const Json& mine) {
  const auto texts = world.exchange_texts(mine.dump());
  std::map<std::string, Owned> owned;
  if (texts.front() == "null") return owned;
  for (int rank = 0; rank < world.size(); ++rank)
    for (const auto& [name, meta] : meta_tensors(Json::parse(texts[to_size(rank)])))
      owned.try_emplace(name, Owned{rank, meta});
  return owned;
}

// ---- Taking a state

TensorsByName with_prefix(const std::string& prefix, const NamedTensors& tensors) {
  TensorsByName named;
  for (const auto& [name, tensor] : tensors) named[prefix + name] = tensor;
  return named;
}

// The tensors of model (`of_model`: a part of it) and strategy, by their names in the file.
TensorsByName places_of(Strategy& strategy, const NamedTensors& of_model) {
  TensorsByName places = with_prefix("model.", of_model);
  places.merge(with_prefix("strategy.", strategy.state()));
  return places;
}

// Model, optimizer and strategy, as far as this rank holds them.
TensorsByName own_tensors(Strategy& strategy) {
  TensorsByName own = places_of(strategy, held(named_tensors(strategy.model())));
  for (const auto& [name, tensor] : held(named_parameters(strategy.model())))
    for (const auto& [key, state] : strategy.optimizer().state_of(tensor))
      own[concat(kOptimizer, name, ".", key)] = state;
  return own;
}

// ---- Putting a state back

void require_tensors(const TensorsByName& places, const TensorsByName& shapes) {
  for (const auto& [name, tensor] : places) {
    const auto found = shapes.find(name);
    if (found == shapes.end() || found->second.sizes() != tensor.sizes() || found->second.dtype() != tensor.dtype())
      throw CheckpointError(
          {.what = concat("the checkpoint has no tensor ", name, " of ", tensor.dtype().name(), tensor.sizes()),
           .next = "resume with the model that the run was started with"});
  }
}

// Every rank reads the states of all parameters, one after another, and takes those of the parameters that it holds.
void restore_optimizer(const SavedState& saved, Strategy& strategy) {
  std::map<std::string, std::vector<std::string>> keys;  // of each parameter with a state
  for (const auto& [name, shape] : saved.shapes)
    if (name.starts_with(kOptimizer)) {
      const size_t dot = name.rfind('.');
      keys[name.substr(kOptimizer.size(), dot - kOptimizer.size())].push_back(name.substr(dot + 1));
    }
  const TensorsByName parameters = with_prefix("", held(named_parameters(strategy.model())));
  for (const auto& [name, tensor] : parameters)
    if (!keys.contains(name)) strategy.optimizer().set_state(tensor, {});
  for (const auto& [name, of_parameter] : keys) {
    Optimizer::StateTensors state;
    for (const std::string& key : of_parameter) state[key] = saved.read(concat(kOptimizer, name, ".", key));
    if (parameters.contains(name)) strategy.optimizer().set_state(parameters.at(name), state);
  }
}

// Reads the tensors in the order of their names, so that all ranks read the same ones at the same time. tensors: of the
// model. has_optimizer: its state is saved, too. A rank without a saved generator keeps its own.
Position restore(const SavedState& saved, const NamedTensors& tensors, bool has_optimizer, const World& world,
                 Strategy& strategy, const TrainOptions& options) {
  const torch::NoGradGuard no_grad;
  const ParameterWrite write;
  const SavedRun run = saved_run(saved.metadata);
  require_same_fingerprint(run.settings, options);
  const TensorsByName places = places_of(strategy, tensors);
  require_tensors(places, saved.shapes);
  TensorsByName generators;
  NamedTensors own;
  for (const auto& [name, shape] : saved.shapes) {
    if (name.starts_with(kOptimizer)) continue;
    const Tensor value = saved.read(name);
    if (name.starts_with(kGenerator)) generators[name] = value;
    if (name.starts_with(kOwnPart)) own.push_back({name.substr(kOwnPart.size()), value});
    if (const auto place = places.find(name); place != places.end() && is_held(place->second))
      Tensor(place->second).copy_(value);
  }
  if (has_optimizer) restore_optimizer(saved, strategy);
  strategy.restored(run.position.step);
  if (!own.empty()) strategy.set_own_state(own);
  for (const torch::Device device : devices_with_generators(world))
    if (const auto found = generators.find(generator_name(device, world.rank())); found != generators.end())
      set_generator_state(device, found->second);
  return run.position;
}

// All bits of the exponent are set in NaN and infinity, and in nothing else. One pass, at the speed of memory.
bool all_finite(const Tensor& tensor) {
  if (!tensor.is_cpu() || tensor.scalar_type() != torch::kFloat32 || !tensor.is_non_overlapping_and_dense())
    return torch::isfinite(tensor.element_size() == 1 ? tensor.to(torch::kFloat32) : tensor).all().item<bool>();
  constexpr uint32_t kExponent = 0x7f800000;
  const std::span values(tensor.const_data_ptr<float>(), to_size(tensor.numel()));
  uint32_t largest = 0;
  for (const float value : values) largest = std::max(largest, std::bit_cast<uint32_t>(value) & kExponent);
  return largest < kExponent;
}

}  // namespace

SavedRun saved_run(const std::map<std::string, std::string>& metadata) try {
  const auto fit = metadata.find(kFit);
  return {.position = nlohmann::json::parse(metadata.at(kPosition)),
          .settings = Json::parse(metadata.at(kFingerprint)),
          .fit = fit == metadata.end() ? "" : fit->second};
} catch (const std::out_of_range&) {
  throw CheckpointError({.what = "the file is a safetensors file, but not a checkpoint of lockstep",
                         .next = "name the --checkpoint-dir of a run"});
}

bool is_in_parts(Strategy& strategy) {
  const auto all = named_tensors(strategy.model());
  return held(all).size() < all.size();
}

std::string first_non_finite(const NamedTensors& tensors) {
  for (const auto& [name, tensor] : held(tensors))
    if (tensor.is_floating_point() && !all_finite(tensor)) return name;
  return {};
}

void require_finite_everywhere(const World& world, Strategy& strategy, const Position& position) {
  for (const std::string& bad : world.exchange_texts(first_non_finite(named_parameters(strategy.model()))))
    if (!bad.empty())
      throw NonFiniteError({.what = concat("parameter ", bad, " is not finite after step ", position.step),
                            .likely = "a learning rate that is too high",
                            .next = kLowerRate});
}

Snapshot take_snapshot(const World& world, Strategy& strategy, const Position& position, const TrainOptions& options) {
  strategy.synchronise();
  TensorsByName own = own_tensors(strategy);
  auto elsewhere = find_owners(world, is_in_parts(strategy) ? looks_of(own) : Json());
  std::erase_if(elsewhere, [](const auto& each) { return each.second.owner == 0; });
  TensorFile file;
  for (const torch::Device device : devices_with_generators(world)) {
    const Tensor states = world.all_gather(generator_state(device));
    for (int rank = 0; rank < world.size(); ++rank) file.tensors[generator_name(device, rank)] = states[rank];
  }
  if (world.rank() != 0)
    return {.file = {}, .fetch = nullptr, .send = [world, own = std::move(own), elsewhere] {
              for (const auto& [name, tensor] : elsewhere)
                if (tensor.owner == world.rank() && tensor.meta.numel() > 0)
                  world.send(bytes_of(own.at(name).detach().to(torch::kCPU).contiguous()), 0, kTag);
            }};
  file.metadata = metadata_of(position, options);
  file.tensors.merge(own);
  for (const auto& [name, tensor] : elsewhere) file.tensors[name] = tensor.meta;
  const auto fetch = [world, elsewhere](const std::string& name) {
    const Owned& from = elsewhere.at(name);
    const Tensor tensor = torch::empty_like(from.meta, torch::TensorOptions(torch::kCPU));
    if (tensor.numel() > 0) world.receive(bytes_of(tensor), {.from = from.owner, .tag = kTag});
    return tensor;
  };
  return {.file = std::move(file), .fetch = fetch, .send = nullptr};
}

std::optional<SavedState> share_checkpoint(const World& world, std::optional<LoadedCheckpoint> found) {
  Json header;
  if (found) {
    TensorsByName shapes;
    for (const auto& [name, entry] : found->file.entries()) shapes[name] = meta_tensor(entry);
    header = {{"tensors", looks_of(shapes)}, {"metadata", found->file.metadata()}};
  }
  const Json sent = Json::parse(world.exchange_texts(header.dump()).front());
  if (sent.is_null()) return {};
  SavedState saved{.metadata = sent["metadata"], .shapes = meta_tensors(sent["tensors"]), .read = nullptr};
  saved.read = [world, found = std::move(found), shapes = saved.shapes](const std::string& name) {
    const Tensor tensor =
        found ? found->file.read(name) : torch::empty_like(shapes.at(name), torch::TensorOptions(torch::kCPU));
    if (tensor.numel() > 0) world.broadcast(bytes_of(tensor));
    return tensor;
  };
  return saved;
}

Position restore_snapshot(const SavedState& saved, const World& world, Strategy& strategy,
                          const TrainOptions& options) {
  const Position position = restore(saved, named_tensors(strategy.model()), true, world, strategy, options);
  give_back_freed_memory();  // tensors, as they were read
  return position;
}

void restore_model(const SavedState& saved, torch::nn::Module& model) {
  const torch::NoGradGuard no_grad;
  const TensorsByName places = with_prefix("model.", named_tensors(model));
  require_tensors(places, saved.shapes);
  for (const auto& [name, tensor] : places) Tensor(tensor).copy_(saved.read(name));
}

StateParts state_parts(const World& world, Strategy& strategy, const Position& position, const TrainOptions& options,
                       bool in_place) {
  StateParts parts;
  if (in_place) {
    parts.own.tensors = places_of(strategy, named_buffers(strategy.model()));
  } else {
    strategy.synchronise();
    (is_in_parts(strategy) ? parts.own : parts.common).tensors = own_tensors(strategy);
  }
  parts.own.metadata = metadata_of(position, options);
  parts.own.tensors.merge(generators_of(world));
  parts.own.tensors.merge(with_prefix(kOwnPart, strategy.own_state()));
  return parts;
}

namespace {

// The tensors that were kept, of which those of this rank's number come first.
SavedState state_in_memory(const LoopState::Found& found) {
  std::map<std::string, const SafetensorsReader*> readers;
  SavedState kept{.metadata = found.own.metadata(), .shapes = {}, .read = nullptr};
  const auto add = [&](const SafetensorsReader& reader, bool is_own) {
    for (const auto& [name, entry] : reader.entries()) {
      const bool of_one_rank = name.starts_with(kGenerator) || name.starts_with(kOwnPart);
      if (is_own || !of_one_rank) readers.try_emplace(name, &reader);
    }
  };
  add(found.common, false);
  add(found.own, found.is_own_rank);
  for (const SafetensorsReader& each : found.here) add(each, false);
  for (const auto& [name, reader] : readers) kept.shapes[name] = meta_tensor(reader->entries().at(name));
  kept.read = [readers = std::move(readers)](const std::string& name) { return readers.at(name)->read(name); };
  return kept;
}

using Names = std::set<std::string>;

// Those of the tensors of some rank of which it has no values.
Names names_lacking(const World& world, const NamedTensors& tensors, const TensorsByName& shapes) {
  Names mine, all;
  for (const auto& [name, tensor] : tensors)
    if (!shapes.contains("model." + name)) mine.insert(name);
  for (const std::string& text : world.exchange_texts(Json(mine).dump())) all.merge(Json::parse(text).get<Names>());
  return all;
}

// Tells whether `key` is a parameter or buffer of this name, or the optimizer's state of it.
bool belongs_to(const std::string& key, const Names& names) {
  if (key.starts_with("model.")) return names.contains(key.substr(key.find('.') + 1));
  return key.starts_with(kOptimizer) &&
         names.contains(key.substr(kOptimizer.size(), key.rfind('.') - kOptimizer.size()));
}

// 1. Ranks say what they lack. 2. Each says which of those tensors it has. 3. The first rank that has a tensor sends it to all.
// Returns a name that no rank has; "": there is none.
std::string send_lacking_parts(const World& world, const NamedTensors& tensors, SavedState& kept) {
  const Names lacking = names_lacking(world, tensors, kept.shapes);
  if (lacking.empty()) return "";
  TensorsByName mine = kept.shapes;
  std::erase_if(mine, [&](const auto& each) { return !belongs_to(each.first, lacking); });
  const auto owned = find_owners(world, looks_of(mine));
  for (const std::string& name : lacking)
    if (!owned.contains("model." + name)) return name;
  TensorsByName sent;
  for (const auto& [name, from] : owned) {
    const bool is_mine = from.owner == world.rank();
    Tensor tensor = is_mine ? kept.read(name).clone() : torch::empty_like(from.meta, torch::TensorOptions(torch::kCPU));
    world.broadcast(bytes_of(tensor), from.owner);
    if (kept.shapes.try_emplace(name, from.meta).second) sent[name] = tensor;
  }
  kept.read = [sent, read = kept.read](const std::string& name) {
    const auto found = sent.find(name);
    return found != sent.end() ? found->second : read(name);
  };
  return "";
}

}  // namespace

std::optional<Position> restore_parts(const LoopState::Found& found, const World& world, Strategy& strategy,
                                      const TrainOptions& options) {
  SavedState kept = state_in_memory(found);
  const auto tensors = found.in_place ? named_buffers(strategy.model()) : held(named_tensors(strategy.model()));
  if (const std::string lost = send_lacking_parts(world, tensors, kept); !lost.empty()) {
    if (world.rank() == 0) log_warning(concat("no machine that is left has ", lost, ", a part of the model"));
    return {};
  }
  return restore(kept, tensors, !found.in_place, world, strategy, options);
}

}  // namespace lockstep
