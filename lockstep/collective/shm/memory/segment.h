// SPDX-License-Identifier: Apache-2.0
// collective/shm/memory/segment.h: memory that several processes map: an anonymous file that grows and never shrinks.
//
// A segment is the file. A Window is where one process sees it: in extents, each at addresses that follow one another. The
// addresses of an extent are reserved when it is first used, so that pointers stay valid while the file grows; what was
// added is mapped on first use. The first extent has `first` bytes, and so has the second; each further one has as many as
// all before it. So a process needs addresses for about twice the memory that it uses, however large the machine is.
// The kernel frees a file when no process maps or holds it any more, however the processes ended.
//
// Owns:    Segment: a descriptor. Window: a descriptor and its mappings
// Threads: Window::at from any thread; the rest from one
// Ranks:   the file is sealed against shrinking: no peer can take pages away from under a reader
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

#include "lockstep/base/files/unique_fd.h"

namespace lockstep::shm {

// A zeroed file of `bytes` bytes whose memory is already taken from the machine, so that using it can't fail later. It
// stays as large as that; one of 0 bytes can grow. Throws SystemError: no descriptors left, not enough memory, above RLIMIT_FSIZE.
UniqueFd make_segment(const std::string& name, size_t bytes);

// Throws SystemError unless `fd` is a segment of at least `bytes` bytes that can't shrink.
void check_segment(int fd, size_t bytes, const std::string& name);

// Moves this rank's equal share of zeroed memory into the NUMA node of the calling thread, which gives its pages back and touches new
// ones. All ranks call it after all have mapped the memory, and use that after all have returned. Throws SystemError: no memory left.
void take_own_pages(std::byte* data, size_t bytes, int rank, int ranks);

class Window {
 public:
  // first: 64 MiB or so, a power of two; or all that the file ever has.
  Window(UniqueFd fd, size_t first, std::string name);
  ~Window();
  Window& operator=(Window&&) = delete;

  int fd() const { return fd_.get(); }

  // The address of `offset`, valid for `bytes` bytes of its extent for as long as this lives.
  // Throws SystemError: the file or the extent ends before that, or it can't be mapped (ulimit -v).
  std::byte* at(uint64_t offset, size_t bytes) {
    const size_t index = extent_of(offset);
    if (offset + bytes > extents_[index].mapped.load(std::memory_order_acquire)) map_until(index, offset + bytes);
    return extents_[index].base.load(std::memory_order_relaxed) + (offset - begin_of(index));
  }

  // Takes the memory for [from, to). Throws SystemError: none left, or no addresses; the file is then as large as before.
  void grow(size_t from, size_t to);

  // The other way round; none: not all of it is in one extent.
  std::optional<uint64_t> offset_of(const void* address, size_t bytes) const;

  size_t extent_of(uint64_t offset) const { return static_cast<size_t>(std::bit_width(offset >> shift_)); }
  uint64_t begin_of(size_t extent) const { return extent == 0 ? 0 : first_ << (extent - 1); }

 private:
  struct Extent {
    std::atomic<std::byte*> base{nullptr};
    std::atomic<uint64_t> mapped{0};  // until which offset
  };

  void map_until(size_t index, uint64_t end);
  size_t addresses_of(size_t extent) const;

  UniqueFd fd_;
  size_t first_;
  int shift_;  // first_ is two to the power of this, or less if it is the only extent
  std::string name_;
  std::array<Extent, 48> extents_;
  std::atomic<size_t> used_{0};  // extents
  std::mutex mutex_;
};

}  // namespace lockstep::shm
