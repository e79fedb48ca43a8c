// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/state/loop_state.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <utility>

#include <nlohmann/json.hpp>

#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

// Names in the launcher's memory; that of arenas is collective/shared_memory.cc's.
constexpr const char* kArena = "arena";
constexpr const char* kManifest = "manifest";

std::string image_name(const char* kind, bool in_place) { return concat(in_place ? "in place." : "state.", kind); }

std::map<int, MappedMemory> map_arenas(const std::vector<JobMemory::Kept>& kept) {
  std::map<int, MappedMemory> of_ranks;
  for (const JobMemory::Kept& each : kept)
    if (each.name == kArena)
      if (MappedMemory memory = map_memory(each.fd); memory.size > 0)
        of_ranks.try_emplace(each.local_rank, std::move(memory));
  return of_ranks;
}

// The steps of which this machine has the common image and every rank's own.
std::set<int64_t> whole_steps(const std::vector<StateImage>& common, const std::vector<StateImage>& own) {
  std::set<int64_t> steps;
  for (const StateImage& image : common) {
    std::set<int> ranks;  // of the same World
    for (const StateImage& each : own)
      if (each.step == image.step && each.owner.ranks == image.owner.ranks) ranks.insert(each.owner.rank);
    if (std::ssize(ranks) == image.owner.local_ranks) steps.insert(image.step);
  }
  return steps;
}

// The newest step that some machine has whole, or -1, and the first rank there. Where ranks have parts of the state: that every machine
// has whole which has any; one that is new has none.
std::pair<int64_t, int> newest_in(const std::vector<std::string>& of_ranks) {
  std::vector<nlohmann::json> all;
  for (const std::string& text : of_ranks) all.push_back(nlohmann::json::parse(text));
  const bool in_parts =
      std::ranges::any_of(all, [](const auto& each) { return each["in_parts"].template get<bool>(); });
  const auto has = [](const nlohmann::json& each, const nlohmann::json& step) {
    return std::ranges::count(each["steps"], step) > 0;
  };
  std::pair<int64_t, int> newest{-1, 0};
  for (size_t rank = 0; rank < all.size(); ++rank)
    for (const auto& step : all[rank]["steps"]) {
      const auto lacks_it = [&](const auto& each) {
        return each["has_state"].template get<bool>() && !has(each, step);
      };
      if (step.get<int64_t>() <= newest.first || (in_parts && std::ranges::any_of(all, lacks_it))) continue;
      newest = {step.get<int64_t>(), to_int(rank)};
    }
  return newest;
}

// This rank's image, or a copy of that of `source`. Collective.
MappedMemory mine_or_sent(const World& world, const StateImage* mine, int source) {
  const auto sizes = world.exchange_texts(mine != nullptr ? concat(mine->bytes.size) : "");
  if (std::ranges::count(sizes, "") == 0) return mine->bytes;
  Tensor sent = torch::empty({std::stoll(sizes[to_size(source)])}, torch::kUInt8);
  if (world.rank() == source) std::memcpy(sent.data_ptr(), mine->bytes.begin.get(), sent.nbytes());
  world.broadcast(sent, source);
  if (mine != nullptr) return mine->bytes;
  return {{static_cast<std::byte*>(sent.data_ptr()), [sent](std::byte*) {}}, sent.nbytes()};
}

// Tells whether all ranks pass true. Collective.
bool is_so_on_all(const World& world, bool here) {
  return std::ranges::count(world.exchange_texts(here ? "yes" : "no"), "no") == 0;
}

}  // namespace

LoopState::LoopState(const World& world, JobMemory& memory, double share_of_time, bool in_parts, Optimizer* optimizer)
    : world_(world),
      memory_(memory),
      share_of_time_(share_of_time),
      in_place_(is_so_on_all(world, optimizer != nullptr && !optimizer->manifest().empty()) ? optimizer : nullptr),
      common_(memory, image_name("common", in_place()), world),
      own_(memory, image_name("own", in_place()), world) {
  find(in_parts);
}

// Returns how many updates the lost ranks had made.
int64_t LoopState::take_over(const std::vector<JobMemory::Kept>& kept, const StateImage& manifest) const {
  const auto arenas = map_arenas(kept);
  const auto find = [&](int rank, uint64_t offset, size_t size) {
    const auto found = arenas.find(rank);
    if (found == arenas.end() || offset + size > found->second.size)
      throw CheckpointError({.what = concat("the memory that rank ", rank, " has left is incomplete"),
                             .next = "start the job again with --resume"});
    return found->second.begin.get() + offset;
  };
  return static_cast<int64_t>(in_place_->take_over(reader_of(manifest.bytes).metadata().at(kManifest), find));
}

// The first rank of a machine that has the newest state sends it to those whose machine has not.
void LoopState::find(bool in_parts) {
  std::vector<JobMemory::Kept> kept = memory_.previous();
  const auto common = images_in(kept, image_name("common", in_place()));
  const auto own = images_in(kept, image_name("own", in_place()));
  const bool has_state = !common.empty() || !own.empty();
  std::set<int64_t> here;
  if (!in_place())
    here = whole_steps(common, own);
  else if (is_so_on_all(world_, !common.empty()))
    here = {take_over(kept, common.front())};
  const auto steps =
      world_.exchange_texts(nlohmann::json{{"has_state", has_state}, {"steps", here}, {"in_parts", in_parts}}.dump());
  memory_.met();
  const auto [newest, source] = newest_in(steps);
  if (newest < 0) return;
  const bool whole_here = here.contains(newest);
  if (whole_here && image_of(own, newest) == nullptr)
    throw CheckpointError({.what = concat("no rank has kept its own state after ", newest, " updates"),
                           .next = "start the job again with --resume"});
  const StateImage* const all = whole_here ? image_of(common, in_place() ? 0 : newest) : nullptr;
  const StateImage* const mine = whole_here ? image_of(own, newest, world_.rank()) : nullptr;
  const StateImage* const rest = mine == nullptr && world_.rank() == source ? image_of(own, newest) : mine;
  SafetensorsReader common_state = reader_of(mine_or_sent(world_, all, source));
  SafetensorsReader own_state = reader_of(mine_or_sent(world_, rest, source));
  const Tensor ranks = torch::tensor({all != nullptr ? all->owner.ranks : 0});
  world_.broadcast(ranks, source);
  found_ = Found{.in_place = in_place(),
                 .common = std::move(common_state),
                 .own = std::move(own_state),
                 .is_own_rank = mine != nullptr,
                 .ranks = ranks.item<int>()};
  for (const StateImage& image : own)
    if (image.step == newest) found_->here.push_back(reader_of(image.bytes));
  if (in_place()) return;
  const bool adopts_common = !keeps_common() || (all != nullptr && common_.adopt(kept, newest));
  const bool adopts_own = mine != nullptr && own_.adopt(kept, newest);
  goes_on_ = adopts_common && adopts_own && found_->ranks == world_.size();
}

void LoopState::drop_found() {
  found_.reset();
  goes_on_ = false;
}

// The state of this World is whole already where as many ranks go on with the images of their predecessors; else with the first
// keep().
bool LoopState::taken(int64_t step) {
  is_whole_ = is_so_on_all(world_, goes_on_);
  if (found_ && world_.rank() == 0) log_info(concat("a rank was replaced: going on after step ", step));
  found_.reset();
  if (is_whole_ && world_.local_rank() == 0) memory_.complete();
  since_last_ = Stopwatch();
  return is_whole_;
}

bool LoopState::is_due() {
  ++steps_;
  if (steps_ < between_) return false;
  step_seconds_ = since_last_.seconds() / to_double(steps_);
  cost_ = Stopwatch();
  return true;
}

// In place images have numbers as Optimizer::take_over() counts updates. What the first three copies cost tells nothing: they take
// memory, which the later ones have; the optimizer's state first comes with the second.
void LoopState::keep(int64_t step, const TensorFile& common, const TensorFile& own) {
  const bool is_first = kept_ == 0;
  if (in_place()) {
    if (is_first && keeps_common()) common_.write(0, {.tensors = {}, .metadata = {{kManifest, in_place_->manifest()}}});
    own_.write(kept_, own);
    if (!is_first) return static_cast<void>(++kept_);
  } else {
    if (keeps_common()) common_.write(step, common);
    own_.write(step, own);
  }
  const Tensor between = torch::full({1}, steps_between(cost_.seconds()), torch::kInt64).to(world_.device());
  world_.all_reduce(between, ReduceOp::kMax);
  between_ = kept_ < 3 ? 1 : between.item<int64_t>();
  if (!is_whole_ && world_.local_rank() == 0) memory_.complete();
  is_whole_ = true;
  ++kept_;
  steps_ = 0;
  since_last_ = Stopwatch();
}

int64_t LoopState::steps_between(double cost) const {
  constexpr double kMost = 1e6;
  if (share_of_time_ >= 1) return 1;
  const double steps = std::ceil(cost / share_of_time_ / std::max(step_seconds_, 1e-9));
  return static_cast<int64_t>(std::clamp(steps, 1.0, kMost));
}

}  // namespace lockstep
