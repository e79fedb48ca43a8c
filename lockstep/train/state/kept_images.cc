// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/state/kept_images.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>

#include "lockstep/base/process/cgroup.h"
#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/base/files/unique_fd.h"
#include "lockstep/checkpoint/file_image.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

constexpr std::uint64_t kMagic = 0x3165746174736b6c;  // "lkstate1"
constexpr std::size_t kHeadBytes = 4096;

// The first page of a slot.
struct SlotHead {
  std::uint64_t magic;
  std::atomic<std::uint64_t> whole;  // 0 while it is written
  std::int64_t step;
  std::uint64_t bytes;  // of the image, which follows this page
  ImageOwner owner;
};
static_assert(sizeof(SlotHead) <= kHeadBytes && std::atomic<std::uint64_t>::is_always_lock_free);

std::string slot_name(const std::string& name, int index) { return concat(name, ".", index); }

}  // namespace

ImageOwner owner_in(const World& world) { return {world.rank(), world.size(), world.local_rank(), world.local_size()}; }

KeptBytes map_kept(const UniqueFd& fd) {
  struct stat status {};
  if (::fstat(fd.get(), &status) != 0) throw system_error("look at", "the state that the launcher keeps");
  const std::size_t bytes = to_size(status.st_size);
  if (bytes == 0) return {};
  void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (memory == MAP_FAILED) throw system_error("map", "the state that the launcher keeps");
  return {{static_cast<std::byte*>(memory), [bytes](std::byte* mapped) { ::munmap(mapped, bytes); }}, bytes};
}

struct KeptSlot {
  UniqueFd fd;
  KeptBytes memory{};  // with the head

  SlotHead& head() const { return *reinterpret_cast<SlotHead*>(memory.begin.get()); }
  bool is_ours() const { return memory.size >= kHeadBytes && head().magic == kMagic; }
};

KeptImages::KeptImages(JobMemory& memory, std::string name, const ImageOwner& owner)
    : memory_(memory), name_(std::move(name)), owner_(owner) {}
KeptImages::~KeptImages() = default;

bool KeptImages::adopt(std::vector<JobMemory::Kept>& former, std::int64_t step) {
  for (int index : {0, 1})
    for (JobMemory::Kept& kept : former) {
      if (kept.name != slot_name(name_, index) || !kept.fd) continue;
      KeptSlot slot{.fd = {}, .memory = map_kept(kept.fd)};
      if (!slot.is_ours() || slot.head().owner.rank != owner_.rank) continue;
      slot.fd = std::move(kept.fd);
      memory_.keep(kept.name, slot.fd.get());
      slots_[to_size(index)] = std::make_unique<KeptSlot>(std::move(slot));
    }
  for (const int index : {0, 1}) {
    const auto& slot = slots_[to_size(index)];
    if (slot && slot->head().whole != 0 && slot->head().step == step) {
      next_ = 1 - index;
      if (const auto& other = slots_[to_size(next_)]) other->head().whole = 0;
      return true;
    }
  }
  return false;
}

void KeptImages::reserve(std::size_t bytes) {
  for (const int index : {0, 1}) resize(index, bytes + kHeadBytes);
}

// Gives the memory to the launcher once; it grows with the file.
void KeptImages::resize(int index, std::size_t bytes) {
  auto& slot = slots_[to_size(index)];
  if (slot && slot->memory.size >= bytes) return;
  require_memory_room(bytes - (slot ? slot->memory.size : 0), memory_room());
  const bool is_new = !slot;
  if (is_new) {
    slot = std::make_unique<KeptSlot>(UniqueFd(::memfd_create("lockstep state", MFD_CLOEXEC)));
    if (!slot->fd) throw system_error("take memory for", "the state that the launcher keeps");
  }
  slot->memory = {};
  while (::fallocate(slot->fd.get(), 0, 0, static_cast<off_t>(bytes)) != 0)  // or a later write might end in SIGBUS
    if (errno != EINTR) throw system_error("take memory for", "the state that the launcher keeps");
  slot->memory = map_kept(slot->fd);
  ::madvise(slot->memory.begin.get(), bytes,
            MADV_POPULATE_WRITE);  // an older kernel has none: the first copy is slower
  slot->head().magic = kMagic;
  slot->head().owner = owner_;
  if (is_new) memory_.keep(slot_name(name_, index), slot->fd.get());
}

void KeptImages::write(std::int64_t step, const TensorFile& file) {
  const std::string head = safetensors_head(file);
  const std::size_t bytes = head.size() + tensor_bytes(file);
  if (const auto& slot = slots_[to_size(next_)]; slot && slot->memory.begin) slot->head().whole = 0;
  resize(next_, kHeadBytes + bytes);
  const KeptSlot& slot = *slots_[to_size(next_)];
  SlotHead& is = slot.head();
  is.whole = 0;
  std::atomic_thread_fence(std::memory_order_seq_cst);  // before every byte that follows
  is.step = step;
  is.bytes = bytes;
  is.owner = owner_;
  copy_file(head, file, slot.memory.begin.get() + kHeadBytes);
  is.whole = 1;  // after them
  next_ = 1 - next_;
}

std::vector<KeptImage> images_in(const std::vector<JobMemory::Kept>& kept, const std::string& name) {
  std::vector<KeptImage> images;
  for (const JobMemory::Kept& each : kept) {
    if (each.name != slot_name(name, 0) && each.name != slot_name(name, 1)) continue;
    const KeptSlot slot{.fd = {}, .memory = map_kept(each.fd)};
    if (!slot.is_ours()) continue;
    const SlotHead& head = slot.head();
    const auto& [begin, bytes] = slot.memory;
    if (head.whole == 0 || head.bytes > bytes - kHeadBytes) continue;
    images.push_back({head.owner, head.step, {{begin, begin.get() + kHeadBytes}, head.bytes}});
  }
  std::ranges::stable_sort(images, {}, [](const KeptImage& image) { return image.owner.rank; });
  return images;
}

const KeptImage* image_of(const std::vector<KeptImage>& images, std::int64_t step, std::optional<int> rank) {
  const auto found = std::ranges::find_if(images, [&](const KeptImage& image) {
    return image.step == step && image.owner.rank == rank.value_or(image.owner.rank);
  });
  return found == images.end() ? nullptr : &*found;
}

SafetensorsReader reader_of(const KeptBytes& image) {
  return {{.size = image.size, .mapped = image.begin}, "the state that the launcher keeps", Checksum::kTrusted};
}

}  // namespace lockstep
