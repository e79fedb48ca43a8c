// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/state/in_place_state.h"

#include <map>
#include <utility>
#include <vector>

#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

// Names in the launcher's memory; that of arenas is collective/shared_memory.cc's.
constexpr const char* kManifest = "manifest";
constexpr const char* kArena = "arena";
constexpr const char* kOwnState = "own state";

std::map<int, MappedMemory> map_arenas(const std::vector<JobMemory::Kept>& kept) {
  std::map<int, MappedMemory> of_ranks;
  for (const JobMemory::Kept& each : kept)
    if (each.name == kArena)
      if (MappedMemory memory = map_memory(each.fd); memory.size > 0)
        of_ranks.try_emplace(each.local_rank, std::move(memory));
  return of_ranks;
}

// The state that the former rank of this number has published for so many updates; the first rank's, where there was no such
// number.
SafetensorsReader own_state_of(const std::vector<JobMemory::Kept>& kept, int rank, std::int64_t updates) {
  const auto images = images_in(kept, kOwnState);
  for (const int wanted : {rank, 0})
    if (const StateImage* const image = image_of(images, updates, wanted)) return reader_of(image->bytes);
  throw CheckpointError({.what = concat("no rank has kept its own state after ", updates, " updates"),
                         .next = "start the job again with --resume"});
}

}  // namespace

std::unique_ptr<InPlaceState> InPlaceState::of(JobMemory& memory, const World& world, Strategy& strategy,
                                               const TrainOptions& options) {
  const std::string manifest = strategy.optimizer().manifest();
  // publish() comes before the update, which changes the strategy's own state.
  if (!is_so_on_all(world, !manifest.empty() && strategy.state().empty())) return nullptr;
  if (world.rank() == 0) DoubleBuffer(memory, kManifest, world).write(0, {{}, {{kManifest, manifest}}});
  return std::unique_ptr<InPlaceState>(new InPlaceState(memory, world, strategy, options));
}

InPlaceState::InPlaceState(JobMemory& memory, const World& world, Strategy& strategy, const TrainOptions& options)
    : memory_(memory), world_(world), strategy_(strategy), options_(options), own_(memory, kOwnState, world) {}

std::optional<Position> InPlaceState::take_over(std::string& last_step) {
  const std::vector<JobMemory::Kept> kept = memory_.previous();
  const auto manifests = images_in(kept, kManifest);
  if (!is_so_on_all(world_, !manifests.empty())) return std::nullopt;
  const SafetensorsReader manifest = reader_of(manifests.front().bytes);
  const auto arenas = map_arenas(kept);
  const auto find = [&](int rank, std::uint64_t offset, std::size_t size) {
    const auto found = arenas.find(rank);
    if (found == arenas.end() || offset + size > found->second.size)
      throw CheckpointError({.what = concat("the memory that rank ", rank, " has left is incomplete"),
                             .next = "start the job again with --resume"});
    return found->second.begin.get() + offset;
  };
  const std::string& text = manifest.metadata().at(kManifest);
  const auto updates = static_cast<std::int64_t>(strategy_.optimizer().take_over(text, find));
  const SafetensorsReader own = own_state_of(kept, world_.rank(), updates);
  last_step = own.metadata().at(kLastStep);
  return restore_own_state(own, world_, strategy_, options_);
}

void InPlaceState::begin(const Position& position, const std::string& last_step) {
  updates_ = -1;
  publish(position, last_step);
  world_.barrier();
  if (world_.rank() == 0) memory_.complete();
}

void InPlaceState::publish(const Position& position, const std::string& last_step) {
  TensorFile file = own_state(world_, strategy_, position, options_);
  file.metadata[kLastStep] = last_step;
  own_.write(++updates_, std::move(file));
}

}  // namespace lockstep
