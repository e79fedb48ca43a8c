// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/shm/memory/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <cerrno>

#include "lockstep/base/memory_room.h"
#include "lockstep/base/text.h"
#include "lockstep/collective/shm/memory/control_block.h"
#include "lockstep/error.h"

namespace lockstep::shm {
namespace {

constexpr std::size_t kMappingUnit = std::size_t{2} << 20;  // late mappings are rounded up to this

std::size_t size_of_file(int fd, const std::string& name) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) throw system_error("look at", name);
  return static_cast<std::uint64_t>(status.st_size);
}

// The kernel would answer with a signal that ends the process.
void check_file_limit(std::size_t bytes) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY || bytes <= limit.rlim_cur) return;
  throw SystemError({.what = concat("can't take ", human_bytes(bytes), " of shared memory: the limit on file sizes is ",
                                    human_bytes(limit.rlim_cur)),
                     .here = "RLIMIT_FSIZE",
                     .likely = "a limit set by the shell or the batch system (ulimit -f)",
                     .next = "raise the limit, or exchange less at a time"});
}

void grow_segment(int fd, std::size_t from, std::size_t to) {
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

UniqueFd make_segment(const std::string& name, std::size_t bytes) {
  UniqueFd fd(::memfd_create(("lockstep " + name).c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) throw system_error("make shared memory for", name);
  grow_segment(fd.get(), 0, bytes);
  const int seals = F_SEAL_SHRINK | F_SEAL_SEAL | (bytes > 0 ? F_SEAL_GROW : 0);
  if (::fcntl(fd.get(), F_ADD_SEALS, seals) != 0) throw system_error("seal", name);
  return fd;
}

void check_segment(int fd, std::size_t bytes, const std::string& name) {
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals >= 0 && (seals & F_SEAL_SHRINK) != 0 && size_of_file(fd, name) >= bytes) return;
  throw SystemError({.what = name + " is not the shared memory that was announced",
                     .likely = "another version of lockstep, or a stranger at the other end of the socket",
                     .next = "start all ranks from the same installation"});
}

Window::Window(UniqueFd fd, std::size_t reserve, std::string name)
    : fd_(std::move(fd)), reserve_(round_up(reserve, kMappingUnit)), name_(std::move(name)) {
  void* address = ::mmap(nullptr, reserve_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) throw system_error("reserve " + human_bytes(reserve_) + " of addresses for", name_);
  base_ = static_cast<std::byte*>(address);
}

Window::~Window() { ::munmap(base_, reserve_); }

void Window::grow(std::size_t from, std::size_t to) {
  if (to > reserve_) {
    errno = ENOMEM;
    throw system_error("take another " + human_bytes(to - from) + " for", name_);
  }
  grow_segment(fd_.get(), from, to);
}

// Maps up to the end of the file, so that what comes next seldom needs another call.
void Window::map_until(std::uint64_t end) {
  const std::lock_guard lock(mutex_);
  const std::size_t from = mapped_.load(std::memory_order_relaxed);
  if (end <= from) return;
  const std::size_t size = std::min(size_of_file(fd_.get(), name_), reserve_);
  if (end > size) {
    errno = ERANGE;
    throw system_error("reach " + human_bytes(end) + " into", name_);
  }
  void* address = ::mmap(base_ + from, size - from, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_POPULATE,
                         fd_.get(), static_cast<off_t>(from));
  if (address == MAP_FAILED) throw system_error("map", name_);
  ::madvise(address, size - from, MADV_DONTDUMP);  // or every rank's core dump would hold all ranks' memory
  mapped_.store(size, std::memory_order_release);
}

}  // namespace lockstep::shm
