// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/state/double_buffer.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <utility>

#include "lockstep/base/process/cgroup.h"
#include "lockstep/base/process/program_identity.h"
#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

constexpr uint64_t kMagic = 0x3165746174736b6c;  // "lkstate1"
constexpr size_t kHeadBytes = 4096;
constexpr const char* kProgram = "lockstep.program";
constexpr const char* kState = "the state that the launcher keeps";  // in errors

// The first page of a slot.
struct SlotHead {
  uint64_t magic;
  std::atomic<uint64_t> whole;  // 0 while it is written
  int64_t step;
  uint64_t bytes;  // of the image, which follows this page
  ImageOwner owner;
};
static_assert(sizeof(SlotHead) <= kHeadBytes && std::atomic<uint64_t>::is_always_lock_free);

SlotHead& head_of(const MappedMemory& memory) { return *reinterpret_cast<SlotHead*>(memory.begin.get()); }

bool is_slot(const MappedMemory& memory) { return memory.size >= kHeadBytes && head_of(memory).magic == kMagic; }

std::string slot_name(const std::string& name, size_t index) { return concat(name, ".", index); }

}  // namespace

MappedMemory map_memory(const UniqueFd& fd) {
  struct stat status {};
  if (::fstat(fd.get(), &status) != 0) throw system_error("look at", kState);
  const size_t bytes = to_size(status.st_size);
  if (bytes == 0) return {};
  void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (memory == MAP_FAILED) throw system_error("map", kState);
  return {{static_cast<std::byte*>(memory), [bytes](std::byte* mapped) { ::munmap(mapped, bytes); }}, bytes};
}

DoubleBuffer::DoubleBuffer(JobMemory& memory, std::string name, const World& world)
    : memory_(memory), name_(std::move(name)), owner_{world.rank(), world.size(), world.local_size()} {}

bool DoubleBuffer::adopt(std::vector<JobMemory::Kept>& former, int64_t step) {
  for (size_t index = 0; index < 2; ++index)
    for (JobMemory::Kept& kept : former) {
      if (kept.name != slot_name(name_, index) || !kept.fd) continue;
      MappedMemory memory = map_memory(kept.fd);
      if (!is_slot(memory) || head_of(memory).owner.rank != owner_.rank) continue;
      memory_.keep(kept.name, kept.fd.get());
      slots_[index] = {std::move(kept.fd), std::move(memory)};
    }
  for (next_ = 0; next_ < 2; ++next_) {
    const MappedMemory &memory = slots_[1 - next_].memory, &other = slots_[next_].memory;
    if (!memory.begin || head_of(memory).whole == 0 || head_of(memory).step != step) continue;
    if (other.begin) head_of(other).whole = 0;
    return true;
  }
  next_ = 0;
  return false;
}

// Gives the memory to the launcher once; it grows with the file.
void DoubleBuffer::resize(size_t index, size_t bytes) {
  constexpr size_t kGrain = size_t{64} << 10;  // more than an image's head varies by
  auto& [fd, memory] = slots_[index];
  if (memory.size >= bytes) return;
  bytes = (bytes + kGrain) / kGrain * kGrain;
  require_memory_room(bytes - memory.size, memory_room());
  const bool is_new = !fd;
  if (is_new) fd = UniqueFd(::memfd_create("lockstep state", MFD_CLOEXEC));
  if (!fd) throw system_error("take memory for", kState);
  memory = {};
  while (::fallocate(fd.get(), 0, 0, static_cast<off_t>(bytes)) != 0)  // or a later write might end in SIGBUS
    if (errno != EINTR) throw system_error("take memory for", kState);
  memory = map_memory(fd);
  ::madvise(memory.begin.get(), bytes, MADV_POPULATE_WRITE);  // an older kernel has none: the first copy is slower
  head_of(memory).magic = kMagic;
  head_of(memory).owner = owner_;
  if (is_new) memory_.keep(slot_name(name_, index), fd.get());
}

void DoubleBuffer::write(int64_t step, TensorFile file) {
  static const std::string program = program_identity();
  file.metadata[kProgram] = program;
  const std::string head = safetensors_head(file);
  const size_t bytes = head.size() + tensor_bytes(file);
  const MappedMemory& memory = slots_[next_].memory;
  if (memory.begin) head_of(memory).whole = 0;
  resize(next_, kHeadBytes + bytes);
  SlotHead& is = head_of(memory);
  is.whole = 0;
  std::atomic_thread_fence(std::memory_order_seq_cst);  // before every byte that follows
  is.step = step;
  is.bytes = bytes;
  is.owner = owner_;
  copy_file(head, file, memory.begin.get() + kHeadBytes);
  is.whole = 1;  // after them
  next_ = 1 - next_;
}

std::vector<StateImage> images_in(const std::vector<JobMemory::Kept>& kept, const std::string& name) {
  std::vector<StateImage> images;
  for (const JobMemory::Kept& each : kept) {
    if (each.name != slot_name(name, 0) && each.name != slot_name(name, 1)) continue;
    const MappedMemory memory = map_memory(each.fd);
    if (!is_slot(memory)) continue;
    const SlotHead& head = head_of(memory);
    if (head.whole == 0 || head.bytes > memory.size - kHeadBytes) continue;
    images.push_back({head.owner, head.step, {{memory.begin, memory.begin.get() + kHeadBytes}, head.bytes}});
  }
  std::ranges::stable_sort(images, {}, [](const StateImage& image) { return image.owner.rank; });
  return images;
}

const StateImage* image_of(const std::vector<StateImage>& images, int64_t step, std::optional<int> rank) {
  const auto found = std::ranges::find_if(images, [&](const StateImage& image) {
    return image.step == step && image.owner.rank == rank.value_or(image.owner.rank);
  });
  return found == images.end() ? nullptr : &*found;
}

SafetensorsReader reader_of(const MappedMemory& image) {
  SafetensorsReader reader({.size = image.size, .mapped = image.begin}, kState, Checksum::kTrusted);
  auto metadata = reader.metadata();
  require_same_program(metadata[kProgram]);
  return reader;
}

}  // namespace lockstep
