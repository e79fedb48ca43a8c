// SPDX-License-Identifier: Apache-2.0
// collective/shm/memory/segment.h: memory that several processes map: an anonymous file that grows and never shrinks.
//
// A segment is the file. A Window is the range of addresses at which one process sees it. The range is reserved for the
// largest size from the start, so that pointers stay valid while the file grows; what was added is mapped on first use.
// The kernel frees a file when no process maps or holds it any more, however the processes ended.
//
// Owns:    Segment: a descriptor. Window: a descriptor and a mapping
// Threads: Window::at from any thread; the rest from one
// Ranks:   the file is sealed against shrinking: no peer can take pages away from under a reader
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>

#include "lockstep/base/unique_fd.h"

namespace lockstep::shm {

// A zeroed file of `bytes` bytes whose memory is already taken from the machine, so that using it can't fail later. It
// stays as large as that; one of 0 bytes can grow. Throws SystemError: no descriptors left, not enough memory, above RLIMIT_FSIZE.
UniqueFd make_segment(const std::string& name, std::size_t bytes);

// Throws SystemError unless `fd` is a segment of at least `bytes` bytes that can't shrink.
void check_segment(int fd, std::size_t bytes, const std::string& name);

class Window {
 public:
  Window(UniqueFd fd, std::size_t reserve, std::string name);  // throws SystemError: no addresses left (ulimit -v)
  ~Window();
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  // The address of `offset`, valid for `bytes` bytes for as long as this lives.
  // Throws SystemError: the file is shorter than that, or it can't be mapped.
  std::byte* at(std::uint64_t offset, std::size_t bytes) {
    if (offset + bytes > mapped_.load(std::memory_order_acquire)) map_until(offset + bytes);
    return base_ + offset;
  }

  // Takes the memory for [from, to). Throws SystemError: none left, or no addresses; the file is then as large as before.
  void grow(std::size_t from, std::size_t to);

  bool contains(const void* address, std::size_t bytes) const {
    const auto offset = static_cast<std::uint64_t>(static_cast<const std::byte*>(address) - base_);
    return offset < reserve_ && bytes <= reserve_ - offset;
  }
  std::uint64_t offset_of(const void* address) const {
    return static_cast<std::uint64_t>(static_cast<const std::byte*>(address) - base_);
  }

 private:
  void map_until(std::uint64_t end);

  UniqueFd fd_;
  std::size_t reserve_;
  std::string name_;
  std::byte* base_ = nullptr;
  std::atomic<std::size_t> mapped_{0};  // bytes from base_ that are mapped
  std::mutex mutex_;
};

}  // namespace lockstep::shm
