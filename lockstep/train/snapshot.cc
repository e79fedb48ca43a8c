// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/snapshot.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <iterator>
#include <set>
#include <span>

#include <nlohmann/json.hpp>

#include "lockstep/base/log.h"
#include "lockstep/base/page_guard.h"
#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/error.h"
#include "lockstep/model/parameters.h"
#include "lockstep/model/partial_model.h"

namespace lockstep {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Position, epoch, step_in_epoch, step, samples, epoch_loss, epoch_samples,
                                   epoch_seconds)

namespace {

// Keys of the file's metadata.
constexpr const char* kPosition = "lockstep.position";
constexpr const char* kFingerprint = "lockstep.course";  // the name that checkpoints have had from the start

const std::string kOptimizer = "optimizer.";
const std::string kOwnPart = "own.";
const std::string kOwnGenerator = "rng.cpu";
constexpr int kTag = 0;  // no other messages are under way between two steps

// What a rank draws from: the CPU's generator, and its GPU's where it has one.
std::vector<torch::Device> devices_with_generators(const World& world) {
  std::vector<torch::Device> devices{torch::kCPU};
  if (!world.device().is_cpu()) devices.push_back(world.device());
  return devices;
}

std::string generator_name(torch::Device device, int rank) {
  return concat("rng.", c10::DeviceTypeName(device.type(), /*lower_case=*/true), ".", rank);
}

torch::Tensor generator_state(torch::Device device) { return at::globalContext().defaultGenerator(device).get_state(); }

void set_generator_state(torch::Device device, const torch::Tensor& state) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

std::vector<NamedTensor> parameters_and_buffers(const torch::nn::Module& model) {
  std::vector<NamedTensor> tensors = named_parameters(model);
  std::ranges::move(named_buffers(model), std::back_inserter(tensors));
  return tensors;
}

// A value that is null on either side belongs to an option that the chosen optimizer does not have.
void require_same_fingerprint(const Json& saved, const TrainOptions& options) {
  const Json now = resume_fingerprint(options);
  for (const auto& [option, value] : saved.items()) {
    if (option == "lr" && options.from_step > 0) continue;
    if (now.contains(option) && (now[option] == value || now[option].is_null() || value.is_null())) continue;
    throw CheckpointError(
        {.what = concat("the checkpoint was made with ", option, " = ", value.dump(), ", now it is ",
                        now.contains(option) ? now[option].dump() : "unknown"),
         .likely = "--resume with other options than the run was started with",
         .next = "give the same options, or start a new run in another --checkpoint-dir; --lr may change with "
                 "--from-step"});
  }
}

std::string send_to_all(const World& world, const std::string& text) {
  const torch::Tensor size = torch::tensor({static_cast<std::int64_t>(text.size())});
  world.broadcast(size);
  torch::Tensor buffer = torch::empty({size.item<std::int64_t>()}, torch::kUInt8);
  if (world.rank() == 0) std::memcpy(buffer.data_ptr(), text.data(), text.size());
  world.broadcast(buffer);
  return {static_cast<const char*>(buffer.const_data_ptr()), buffer.nbytes()};
}

// The same memory, to be sent: collectives do not have every dtype.
torch::Tensor bytes_of(const torch::Tensor& contiguous) { return contiguous.reshape({-1}).view(torch::kUInt8); }

CheckpointError no_such_tensor(const std::string& name, const torch::Tensor& into) {
  return CheckpointError(
      {.what = concat("the checkpoint has no tensor ", name, " of ", into.dtype().name(), into.sizes()),
       .likely = "a checkpoint of another model",
       .next = "resume with the model that the run was started with"});
}

std::map<std::string, std::string> metadata_of(const Position& position, const TrainOptions& options) {
  return {{kPosition, nlohmann::json(position).dump()}, {kFingerprint, resume_fingerprint(options).dump()}};
}

CheckpointError no_checkpoint() {
  return CheckpointError({.what = "the file is a safetensors file, but not a checkpoint of lockstep",
                          .next = "name the --checkpoint-dir of a run"});
}

using TensorsByName = std::map<std::string, torch::Tensor>;

// Where the checkpoint's tensors go, but for the optimizer's. Throws CheckpointError if it lacks one.
TensorsByName places_of(Strategy& strategy, const TensorFile& shapes) {
  TensorsByName places;
  for (const auto& [name, tensor] : parameters_and_buffers(strategy.model())) places["model." + name] = tensor;
  for (const auto& [name, tensor] : strategy.state()) places["strategy." + name] = tensor;
  for (const auto& [name, tensor] : places) {
    const auto found = shapes.tensors.find(name);
    if (found == shapes.tensors.end() || found->second.sizes() != tensor.sizes() ||
        found->second.dtype() != tensor.dtype())
      throw no_such_tensor(name, tensor);
  }
  return places;
}

// Every parameter in the checkpoint that has a state, and the keys of that.
std::map<std::string, std::vector<std::string>> saved_states(const TensorFile& shapes) {
  std::map<std::string, std::vector<std::string>> keys;
  for (const auto& [name, tensor] : shapes.tensors)
    if (name.starts_with(kOptimizer)) {
      const std::size_t dot = name.rfind('.');
      keys[name.substr(kOptimizer.size(), dot - kOptimizer.size())].push_back(name.substr(dot + 1));
    }
  return keys;
}

void restore_optimizer(SharedCheckpoint& file, Strategy& strategy) {
  const auto states = saved_states(file.shapes());
  TensorsByName parameters;
  for (const auto& [name, tensor] : held(named_parameters(strategy.model()))) {
    parameters[name] = tensor;
    if (!states.contains(name)) strategy.optimizer().set_state(tensor, {});
  }
  for (const auto& [name, keys] : states) {
    Optimizer::StateTensors state;
    for (const std::string& key : keys) state[key] = file.read(concat(kOptimizer, name, ".", key));
    if (parameters.contains(name)) strategy.optimizer().set_state(parameters[name], state);
  }
}

// What this rank has for a checkpoint, beside generators.
TensorsByName own_tensors(Strategy& strategy) {
  TensorsByName own;
  for (const auto& [name, tensor] : held(parameters_and_buffers(strategy.model()))) own["model." + name] = tensor;
  for (const auto& [name, tensor] : held(named_parameters(strategy.model())))
    for (const auto& [key, state] : strategy.optimizer().state_of(tensor))
      own[concat(kOptimizer, name, ".", key)] = state;
  for (const auto& [name, tensor] : strategy.state()) own["strategy." + name] = tensor;
  return own;
}

// A tensor that rank 0 does not have: the first rank that has it, and what it looks like.
struct Elsewhere {
  int owner = 0;
  torch::Tensor meta;
};

// In the order of their names, which is that of the file. The same on every rank. A rank that holds all sends null.
std::map<std::string, Elsewhere> tensors_elsewhere(const World& world, Strategy& strategy, const TensorsByName& own) {
  const auto all = parameters_and_buffers(strategy.model());
  Json mine;
  if (held(all).size() < all.size()) {
    mine = Json::object();
    for (const auto& [name, tensor] : own) mine[name] = {static_cast<int>(tensor.scalar_type()), tensor.sizes().vec()};
  }
  const auto texts = world.exchange_texts(mine.dump());
  const Json first = Json::parse(texts.front());
  std::map<std::string, Elsewhere> elsewhere;
  if (first.is_null()) return elsewhere;
  for (int rank = 1; rank < world.size(); ++rank) {
    const Json held = Json::parse(texts[to_size(rank)]);
    for (const auto& [name, looks] : held.items()) {
      if (first.contains(name)) continue;
      const auto options =
          torch::TensorOptions(torch::kMeta).dtype(static_cast<torch::ScalarType>(looks[0].get<int>()));
      elsewhere.try_emplace(name, Elsewhere{rank, torch::empty(looks[1].get<std::vector<std::int64_t>>(), options)});
    }
  }
  return elsewhere;
}

// The file that rank 0 has opened and verified, if this rank sees it under the same name.
std::optional<CheckpointReader> open_same(const std::string& path, const std::string& checksum) try {
  CheckpointReader file(path, Checksum::kTrusted);
  return file.checksum() == checksum ? std::optional(std::move(file)) : std::nullopt;
} catch (const Error&) {
  return std::nullopt;
}

// Of NaN and infinity, and of nothing else, all bits of the exponent are set. One pass, at the speed of memory.
bool all_finite(const torch::Tensor& tensor) {
  if (!tensor.is_cpu() || tensor.scalar_type() != torch::kFloat32 || !tensor.is_non_overlapping_and_dense())
    return torch::isfinite(tensor.element_size() == 1 ? tensor.to(torch::kFloat32) : tensor).all().item<bool>();
  constexpr std::uint32_t kExponent = 0x7f800000;
  const std::span values(tensor.const_data_ptr<float>(), to_size(tensor.numel()));
  std::uint32_t largest = 0;
  for (const float value : values) largest = std::max(largest, std::bit_cast<std::uint32_t>(value) & kExponent);
  return largest < kExponent;
}

}  // namespace

std::string first_non_finite(const std::vector<NamedTensor>& tensors) {
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

std::size_t snapshot_bytes(Strategy& strategy) {
  constexpr std::size_t kRest = std::size_t{1} << 20;  // header and generators
  const auto all = parameters_and_buffers(strategy.model());
  if (held(all).size() < all.size()) return 0;
  std::size_t bytes = kRest;
  for (const auto& [name, tensor] : own_tensors(strategy)) bytes += tensor.nbytes();
  return bytes;
}

Snapshot take_snapshot(const World& world, Strategy& strategy, const Position& position, const TrainOptions& options) {
  strategy.synchronise();
  TensorsByName own = own_tensors(strategy);
  const auto elsewhere = tensors_elsewhere(world, strategy, own);
  TensorFile file;
  for (const torch::Device device : devices_with_generators(world)) {
    const torch::Tensor states = world.all_gather(generator_state(device));
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
    const Elsewhere& from = elsewhere.at(name);
    const torch::Tensor tensor = torch::empty_like(from.meta, torch::TensorOptions(torch::kCPU));
    if (tensor.numel() > 0) world.receive(bytes_of(tensor), {.from = from.owner, .tag = kTag});
    return tensor;
  };
  return {.file = std::move(file), .fetch = fetch, .send = nullptr};
}

SharedCheckpoint::SharedCheckpoint(const World& world, std::optional<CheckpointFolder::Loaded> found) : world_(world) {
  Json header = {{"is_there", found.has_value()}, {"tensors", Json::object()}, {"metadata", Json::object()}};
  if (found) {
    header["path"] = std::filesystem::absolute(found->path).string();
    header["checksum"] = found->file.checksum();
    for (const auto& [name, entry] : found->file.entries())
      header["tensors"][name] = {static_cast<int>(entry.dtype), entry.shape};
    header["metadata"] = found->file.metadata();
    file_ = std::move(found->file);
  }
  const Json sent = Json::parse(send_to_all(world, header.dump()));
  is_there_ = sent["is_there"].get<bool>();
  if (!is_there_) return;
  metadata_ = sent["metadata"].get<std::map<std::string, std::string>>();
  for (const auto& [name, looks] : sent["tensors"].items()) {
    const auto options = torch::TensorOptions(torch::kMeta).dtype(static_cast<torch::ScalarType>(looks[0].get<int>()));
    shapes_.tensors[name] = torch::empty(looks[1].get<std::vector<std::int64_t>>(), options);
  }
  if (world.rank() != 0) file_ = open_same(sent["path"].get<std::string>(), sent["checksum"].get<std::string>());
  is_mapped_ = std::ranges::count(world.exchange_texts(file_ ? "yes" : "no"), "no") == 0;
  if (!is_mapped_ && world.rank() != 0) file_.reset();
}

torch::Tensor SharedCheckpoint::read(const std::string& name) {
  torch::Tensor tensor =
      file_ ? file_->read(name) : torch::empty_like(shapes_.tensors.at(name), torch::TensorOptions(torch::kCPU));
  if (!is_mapped_) {
    if (file_) tensor = tensor.clone();  // a transport may write to what it sends
    world_.broadcast(bytes_of(tensor));
  }
  read_.add(tensor.const_data_ptr(), tensor.nbytes());
  return tensor;
}

void SharedCheckpoint::require_same_on_all_ranks() const {
  const auto digests = world_.exchange_texts(read_.digits());
  for (int rank = 1; rank < world_.size(); ++rank)
    if (digests[to_size(rank)] != digests.front())
      throw CheckpointError(
          {.what = concat("rank ", rank, " has read other values from the checkpoint than rank 0: digest ",
                          digests[to_size(rank)], ", not ", digests.front()),
           .likely = "a disk or memory that fails, or an old copy in the cache of a network disk",
           .next = "resume again; if it stays so, on other machines"});
}

// All ranks read the same tensors in the same order: those of the file, whatever a rank has.
Position restore_snapshot(SharedCheckpoint& file, const World& world, Strategy& strategy,
                          const TrainOptions& options) try {
  const torch::NoGradGuard no_grad;
  const ParameterWrite write;
  require_same_fingerprint(Json::parse(file.metadata().at(kFingerprint)), options);
  const Position position = nlohmann::json::parse(file.metadata().at(kPosition));
  const TensorsByName places = places_of(strategy, file.shapes());
  TensorsByName generators;
  for (const auto& [name, shape] : file.shapes().tensors) {
    if (name.starts_with(kOptimizer)) continue;
    const torch::Tensor value = file.read(name);
    if (name.starts_with("rng.")) generators[name] = value;
    if (const auto place = places.find(name); place != places.end() && is_held(place->second))
      torch::Tensor(place->second).copy_(value);
  }
  restore_optimizer(file, strategy);
  file.require_same_on_all_ranks();
  strategy.restored(position.step);
  for (const torch::Device device : devices_with_generators(world)) {
    const auto saved = generators.find(generator_name(device, world.rank()));
    if (saved != generators.end()) set_generator_state(device, saved->second);
  }
  return position;
} catch (const std::out_of_range&) {
  throw no_checkpoint();
}

KeptParts parts_to_keep(const World& world, Strategy& strategy, const Position& position,
                        const TrainOptions& options) {
  strategy.synchronise();
  KeptParts parts;
  (is_in_parts(strategy) ? parts.own : parts.common).tensors = own_tensors(strategy);
  parts.common.metadata = metadata_of(position, options);
  for (const torch::Device device : devices_with_generators(world))
    parts.own.tensors[generator_name(device, world.rank())] = generator_state(device);
  for (const auto& [name, tensor] : strategy.own_state()) parts.own.tensors[kOwnPart + name] = tensor;
  return parts;
}

namespace {

// What was kept: of all ranks alike, of this rank, of the others on this machine, and what others have sent.
class KeptTensors {
 public:
  explicit KeptTensors(const LoopState::Found& found) : readers_{&found.common, &found.own} {
    for (const SafetensorsReader& each : found.here) readers_.push_back(&each);
  }

  bool contains(const std::string& name) const { return sent_.contains(name) || reader_with(name) != nullptr; }

  std::optional<torch::Tensor> find(const std::string& name) const {
    if (const auto sent = sent_.find(name); sent != sent_.end()) return sent->second;
    const SafetensorsReader* const reader = reader_with(name);
    return reader == nullptr ? std::nullopt : std::optional(reader->read(name));
  }

  void take(const std::string& name, const torch::Tensor& into) const {
    const auto value = find(name);
    if (!value || value->sizes() != into.sizes() || value->dtype() != into.dtype()) throw no_such_tensor(name, into);
    torch::Tensor(into).copy_(*value);
  }

  // The optimizer's, of a parameter, by key.
  Optimizer::StateTensors states_of(const std::string& parameter) const {
    Optimizer::StateTensors states;
    const std::string prefix = concat(kOptimizer, parameter, ".");
    for (const auto& [name, tensor] : all_from(prefix)) states[name.substr(prefix.size())] = tensor;
    return states;
  }

  // A parameter or buffer, by its name in the model, and the optimizer's state of it.
  TensorsByName with_states(const std::string& name) const {
    TensorsByName all = all_from(concat(kOptimizer, name, "."));
    if (const auto value = find(concat("model.", name))) all[concat("model.", name)] = *value;
    return all;
  }

  void add_sent(const std::string& name, const torch::Tensor& tensor) { sent_[name] = tensor; }

 private:
  const SafetensorsReader* reader_with(const std::string& name) const {
    const auto has_it = [&](const SafetensorsReader* reader) { return reader->entries().contains(name); };
    const auto found = std::ranges::find_if(readers_, has_it);
    return found == readers_.end() ? nullptr : *found;
  }

  TensorsByName all_from(const std::string& prefix) const {
    TensorsByName all = sent_;
    const auto is_one = [&](const std::string& name) {
      return name.starts_with(prefix) && name.rfind('.') == prefix.size() - 1;
    };
    std::erase_if(all, [&](const auto& each) { return !is_one(each.first); });
    for (const SafetensorsReader* reader : readers_)
      for (const auto& [name, entry] : reader->entries())
        if (is_one(name) && !all.contains(name)) all[name] = reader->read(name);
    return all;
  }

  std::vector<const SafetensorsReader*> readers_;
  TensorsByName sent_;
};

using Names = std::set<std::string>;

// Of what this rank holds: the names of which it has no values.
Names names_lacking(Strategy& strategy, const KeptTensors& kept) {
  Names lacking;
  for (const auto& [name, tensor] : held(parameters_and_buffers(strategy.model())))
    if (!kept.contains("model." + name)) lacking.insert(name);
  return lacking;
}

Names names_of_all(const World& world, const Names& mine) {
  Names all;
  for (const std::string& text : world.exchange_texts(Json(mine).dump())) all.merge(Json::parse(text).get<Names>());
  return all;
}

// The tensor goes from `owner` to all ranks.
torch::Tensor send_tensor(const World& world, int owner, const Json& looks, const torch::Tensor& mine) {
  const auto dtype = static_cast<torch::ScalarType>(looks[0].get<int>());
  torch::Tensor tensor = world.rank() == owner ? mine.clone() : torch::empty(looks[1].get<std::vector<std::int64_t>>(), dtype);
  world.broadcast(bytes_of(tensor), owner);
  return tensor;
}

// Sends what some rank lacks. Returns the first name that no rank has; "": there is none.
std::string gather_parts(const World& world, Strategy& strategy, KeptTensors& kept) {
  const Names lacking = names_lacking(strategy, kept);
  for (const std::string& name : names_of_all(world, lacking)) {
    const TensorsByName mine = kept.with_states(name);
    Json offer = Json::object();
    if (mine.contains("model." + name))
      for (const auto& [key, tensor] : mine) offer[key] = {static_cast<int>(tensor.scalar_type()), tensor.sizes().vec()};
    const auto offers = world.exchange_texts(offer.dump());
    const auto found = std::ranges::find_if(offers, [](const std::string& text) { return text != "{}"; });
    if (found == offers.end()) return name;
    const int owner = static_cast<int>(found - offers.begin());
    const Json offered = Json::parse(*found);
    for (const auto& [key, looks] : offered.items()) {
      const auto own = mine.find(key);
      const torch::Tensor sent = send_tensor(world, owner, looks, own == mine.end() ? torch::Tensor() : own->second);
      if (lacking.contains(name)) kept.add_sent(key, sent);
    }
  }
  return "";
}

}  // namespace

bool is_in_parts(Strategy& strategy) {
  const auto all = parameters_and_buffers(strategy.model());
  return held(all).size() < all.size();
}

std::optional<Position> restore_parts(const LoopState::Found& found, const World& world, Strategy& strategy,
                                      const TrainOptions& options) try {
  const torch::NoGradGuard no_grad;
  const ParameterWrite write;
  require_same_fingerprint(Json::parse(found.common.metadata().at(kFingerprint)), options);
  const Position position = nlohmann::json::parse(found.common.metadata().at(kPosition));
  KeptTensors kept(found);
  if (const std::string lost = gather_parts(world, strategy, kept); !lost.empty()) {
    if (world.rank() == 0) log_warning(concat("no machine that is left has ", lost, ", a part of the model"));
    return {};
  }
  for (const auto& [name, tensor] : held(parameters_and_buffers(strategy.model()))) kept.take("model." + name, tensor);
  for (const auto& [name, tensor] : strategy.state()) kept.take("strategy." + name, tensor);
  for (const auto& [name, tensor] : held(named_parameters(strategy.model())))
    strategy.optimizer().set_state(tensor, kept.states_of(name));
  strategy.restored(position.step);
  if (!found.is_own_rank) return position;
  std::vector<NamedTensor> own;
  for (const auto& [name, entry] : found.own.entries())
    if (name.starts_with(kOwnPart)) own.push_back({name.substr(kOwnPart.size()), found.own.read(name)});
  strategy.set_own_state(own);
  for (const torch::Device device : devices_with_generators(world))
    if (const auto saved = kept.find(generator_name(device, world.rank()))) set_generator_state(device, *saved);
  return position;
} catch (const std::out_of_range&) {
  throw no_checkpoint();
}

TensorFile own_state(Strategy& strategy, const Position& position, const TrainOptions& options) {
  TensorFile file;
  file.metadata = {{kPosition, nlohmann::json(position).dump()}, {kFingerprint, resume_fingerprint(options).dump()}};
  file.tensors[kOwnGenerator] = generator_state(torch::kCPU);
  for (const auto& [name, tensor] : named_buffers(strategy.model())) file.tensors["model." + name] = tensor;
  for (const auto& [name, tensor] : strategy.state()) file.tensors["strategy." + name] = tensor;
  return file;
}

Position restore_own_state(const SafetensorsReader& file, Strategy& strategy, const TrainOptions& options) try {
  const torch::NoGradGuard no_grad;
  require_same_fingerprint(Json::parse(file.metadata().at(kFingerprint)), options);
  const Position position = nlohmann::json::parse(file.metadata().at(kPosition));
  for (const auto& [name, tensor] : named_buffers(strategy.model())) torch::Tensor(tensor).copy_(file.read("model." + name));
  for (const auto& [name, tensor] : strategy.state()) torch::Tensor(tensor).copy_(file.read("strategy." + name));
  strategy.restored(position.step);
  set_generator_state(torch::kCPU, file.read(kOwnGenerator));
  return position;
} catch (const std::out_of_range&) {
  throw no_checkpoint();
}

}  // namespace lockstep
