// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/shm/memory/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "lockstep/base/process/cgroup.h"
#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/collective/shm/memory/control_block.h"
#include "lockstep/error.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // since Linux 5.14
#endif

namespace lockstep::shm {
namespace {

constexpr size_t kMappingUnit = size_t{2} << 20;  // addresses are rounded up to this

size_t size_of_file(int fd, const std::string& name) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) throw system_error("look at", name);
  return static_cast<uint64_t>(status.st_size);
}

// The kernel would answer with a signal that ends the process.
void check_file_limit(size_t bytes) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY || bytes <= limit.rlim_cur) return;
  throw SystemError({.what = concat("can't take ", human_bytes(bytes), " of shared memory: the limit on file sizes is ",
                                    human_bytes(limit.rlim_cur)),
                     .here = "RLIMIT_FSIZE",
                     .likely = "a limit set by the shell or the batch system (ulimit -f)",
                     .next = "raise the limit, or exchange less at a time"});
}

void grow_segment(int fd, size_t from, size_t to) {
  if (to <= from) return;
  check_file_limit(to);
  require_memory_room(to - from, memory_room());
  int result = 0;
  do {
    result = ::fallocate(fd, 0, static_cast<off_t>(from), static_cast<off_t>(to - from));
  } while (result != 0 && errno == EINTR);
  if (result != 0) throw system_error("take", human_bytes(to - from) + " of shared memory");
}

}  // namespace

UniqueFd make_segment(const std::string& name, size_t bytes) {
  UniqueFd fd(::memfd_create(("lockstep " + name).c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) throw system_error("make shared memory for", name);
  grow_segment(fd.get(), 0, bytes);
  const int seals = F_SEAL_SHRINK | F_SEAL_SEAL | (bytes > 0 ? F_SEAL_GROW : 0);
  if (::fcntl(fd.get(), F_ADD_SEALS, seals) != 0) throw system_error("seal", name);
  return fd;
}

void check_segment(int fd, size_t bytes, const std::string& name) {
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals >= 0 && (seals & F_SEAL_SHRINK) != 0 && size_of_file(fd, name) >= bytes) return;
  throw SystemError({.what = name + " is not the shared memory that was announced",
                     .likely = "another version of lockstep, or another program at the other end of the socket",
                     .next = "start all ranks from the same installation"});
}

void take_own_pages(std::byte* data, size_t bytes, int rank, int ranks) {
  const auto page = to_size(::sysconf(_SC_PAGESIZE));
  const auto start = std::bit_cast<uintptr_t>(data), end = (start + bytes) / page * page;
  const auto begin_of_share = [&](int r) {
    return std::min(end, round_up(start + bytes * to_size(r) / to_size(ranks), page));
  };
  const uintptr_t from = begin_of_share(rank), size = begin_of_share(rank + 1) - from;
  auto* const mine = std::bit_cast<std::byte*>(from);
  if (::madvise(mine, size, MADV_REMOVE) != 0) return;  // where the kernel can't, they stay where they are
  if (::madvise(mine, size, MADV_POPULATE_WRITE) == 0) return;
  if (errno != EINVAL) throw system_error("take", human_bytes(size) + " of shared memory");
  std::memset(mine, 0, size);  // an older kernel
}

Window::Window(UniqueFd fd, size_t first, std::string name)
    : fd_(std::move(fd)), first_(first), shift_(std::bit_width(first - 1)), name_(std::move(name)) {}

Window::~Window() {
  for (size_t i = 0; i < used_.load(); ++i)
    if (std::byte* const base = extents_[i].base.load()) ::munmap(base, addresses_of(i));
}

size_t Window::addresses_of(size_t extent) const {
  return round_up(begin_of(extent + 1) - begin_of(extent), kMappingUnit);
}

void Window::grow(size_t from, size_t to) { grow_segment(fd_.get(), from, to); }

// Maps up to the end of the extent or of the file, so that what comes next seldom needs another call. Where the file goes
// on behind the extent, the extent may end in a hole: filling the page tables would take memory for that.
void Window::map_until(size_t index, uint64_t end) {
  const std::lock_guard lock(mutex_);
  Extent& extent = extents_.at(index);
  const uint64_t begin = begin_of(index), file = size_of_file(fd_.get(), name_);
  const uint64_t from = std::max(begin, extent.mapped.load(std::memory_order_relaxed));
  const uint64_t to = std::min(file, begin_of(index + 1));
  if (end <= from) return;
  if (end > to) {
    errno = ERANGE;
    throw system_error("reach " + human_bytes(end) + " into", name_);
  }
  std::byte* base = extent.base.load(std::memory_order_relaxed);
  if (base == nullptr) {
    void* reserved =
        ::mmap(nullptr, addresses_of(index), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved == MAP_FAILED)
      throw system_error("reserve " + human_bytes(addresses_of(index)) + " of addresses for", name_);
    base = static_cast<std::byte*>(reserved);
    extent.base.store(base, std::memory_order_release);
    used_.store(std::max(used_.load(), index + 1), std::memory_order_release);
  }
  void* address = ::mmap(base + (from - begin), to - from, PROT_READ | PROT_WRITE,
                         MAP_SHARED | MAP_FIXED | (to == file ? MAP_POPULATE : 0), fd_.get(), static_cast<off_t>(from));
  if (address == MAP_FAILED) throw system_error("map", name_);
  ::madvise(address, to - from, MADV_DONTDUMP);  // or every rank's core dump would hold all ranks' memory
  extent.mapped.store(to, std::memory_order_release);
}

std::optional<uint64_t> Window::offset_of(const void* address, size_t bytes) const {
  for (size_t i = used_.load(std::memory_order_acquire); i-- > 0;) {
    const auto* const base = extents_[i].base.load(std::memory_order_acquire);
    const auto inside = static_cast<uint64_t>(static_cast<const std::byte*>(address) - base);
    const uint64_t size = begin_of(i + 1) - begin_of(i);
    if (base != nullptr && inside < size && bytes <= size - inside) return begin_of(i) + inside;
  }
  return std::nullopt;
}

}  // namespace lockstep::shm
