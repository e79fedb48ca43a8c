// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/shared_memory.h"

#include "agent/recover/job_memory.h"
#include "lockstep/base/process/core_places.h"
#include "lockstep/collective/shm/group.h"

namespace lockstep {
namespace {

std::shared_ptr<std::byte> ordinary_memory(size_t bytes) {
  const std::align_val_t alignment{kCacheLine};
  return {static_cast<std::byte*>(::operator new(std::max(bytes, kCacheLine), alignment)),
          [alignment](std::byte* data) { ::operator delete(data, alignment); }};
}

}  // namespace

SharedMemory::SharedMemory(std::shared_ptr<shm::Group> group, std::shared_ptr<shm::Arena> arena)
    : group_(std::move(group)), arena_(std::move(arena)), outlives_ranks_(arena_ != nullptr) {}

std::shared_ptr<SharedMemory> SharedMemory::of(const World& world) {
  auto group = world.machine_group();
  JobMemory* const launcher = JobMemory::get();
  if (!group && launcher != nullptr && world.size() == 1)
    return alone(std::make_shared<shm::Arena>(shm::make_segment("the memory of rank 0", 0), "the memory of rank 0"));
  if (!group) return alone();
  std::shared_ptr<SharedMemory> memory(new SharedMemory(std::move(group), nullptr));
  memory->outlives_ranks_ = launcher != nullptr;
  return memory;
}

std::shared_ptr<SharedMemory> SharedMemory::alone(std::shared_ptr<shm::Arena> arena) {
  return std::shared_ptr<SharedMemory>(new SharedMemory(nullptr, std::move(arena)));
}

bool SharedMemory::machine_has_several_nodes() { return has_several_nodes(core_places()); }

int SharedMemory::rank() const { return group_ ? group_->rank() : 0; }
int SharedMemory::size() const { return group_ ? group_->size() : 1; }

std::shared_ptr<std::byte> SharedMemory::allocate_common(size_t bytes, bool by_shares) {
  if (!group_) {
    auto memory = allocate(bytes).data;
    std::memset(memory.get(), 0, bytes);
    return memory;
  }
  constexpr size_t kHeader = sizeof(shm::SharedHeader);
  shm::Memory memory;
  if (rank() == 0) memory = shm::make_shared_memory(*group_, kHeader + bytes, size());
  std::array<uint64_t, 2> layout{rank() == 0 ? memory.offset() : 0, by_shares};
  group_->run({.operation = Operation::kBroadcast, .output = &layout, .count = sizeof layout, .dtype = DType::kUInt8});
  std::byte* const start = rank() == 0 ? memory.data() : group_->peer_memory(0, layout[0], kHeader + bytes);
  if (layout[1] != 0) {
    barrier();
    shm::take_own_pages(start + kHeader, bytes, rank(), size());
    barrier();
  }
  const auto release = [keep = shared_from_this(), process = OwnProcess(),
                        held = std::make_shared<shm::Memory>(std::move(memory))](std::byte* data) {
    if (!process.is_here()) return;  // a forked child is no user
    reinterpret_cast<shm::SharedHeader*>(data - kHeader)->users.fetch_sub(1);
    if (held->data() != nullptr) keep->group_->peers().retire(std::move(*held));
  };
  return {start + kHeader, release};
}

SharedMemory::Own SharedMemory::allocate(size_t bytes) {
  if (!group_ && !arena_) {
    auto memory = ordinary_memory(bytes);
    const auto place = std::bit_cast<uint64_t>(memory.get());
    return {std::move(memory), place};
  }
  auto memory = std::make_shared<shm::Memory>(group_ ? group_->allocate(bytes) : arena_->allocate(bytes));
  return {{memory, memory->data()}, memory->offset()};
}

std::byte* SharedMemory::peer(int rank, uint64_t place, size_t bytes) {
  if (group_) return group_->peer_memory(rank, place, bytes);
  return arena_ ? arena_->window().at(place, bytes) : std::bit_cast<std::byte*>(place);
}

std::optional<SharedMemory::ArenaOffset> SharedMemory::locate(const void* address, size_t bytes) const {
  const auto offset = arena_ ? arena_->window().offset_of(address, bytes) : std::nullopt;
  if (offset) return ArenaOffset{0, *offset};
  const shm::Location place = group_ ? group_->locate(address, bytes) : shm::Location{};
  if (place.kind != shm::Location::kArena) return std::nullopt;
  return ArenaOffset{place.owner, place.at};
}

void SharedMemory::keep() const {
  JobMemory* const launcher = outlives_ranks_ ? JobMemory::get() : nullptr;
  if (launcher != nullptr) launcher->keep("arena", group_ ? group_->memory_file() : arena_->window().fd());
}

void SharedMemory::barrier(const Signature& announced) {
  if (group_) group_->run({.operation = Operation::kBarrier}, &announced);
}

void SharedMemory::require_own_process() const {
  if (group_) group_->require_own_process();
}

void SharedMemory::fail(const std::string& reason) {
  if (group_) group_->poison(reason);
}

}  // namespace lockstep
