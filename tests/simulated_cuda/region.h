// SPDX-License-Identifier: Apache-2.0
// tests/simulated_cuda/region.h: addresses of one device, mapped twice, and which of them are free.
//
// Owns:    both mappings, until the process ends
// Threads: mutex() is held by the caller, except for contains() and real()
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <deque>
#include <map>
#include <utility>

namespace simulated_cuda {

// Freed memory is filled with 0xff, which is NaN. It is used again once 64 MiB more are freed, or when memory is short.
class Region {
 public:
  explicit Region(int device);

  // nullptr: above the limit. The memory is full of 0xff.
  char* take(size_t bytes);
  void give_back(char* address, size_t bytes);

  bool contains(const void* address) const { return address >= seen_ && address < seen_ + size_; }
  char* real(const void* address) const { return real_ + (static_cast<const char*>(address) - seen_); }

  void set_limit(size_t limit) { limit_ = limit; }
  size_t limit() const { return limit_; }
  size_t live() const { return live_; }

 private:
  void release_oldest();
  void merge(size_t offset, size_t bytes);

  size_t limit_, size_;
  char* seen_ = nullptr;  // PROT_NONE
  char* real_ = nullptr;
  pid_t owner_;
  size_t live_ = 0, waiting_bytes_ = 0;
  std::map<size_t, size_t> free_;                  // offset to bytes
  std::deque<std::pair<size_t, size_t>> waiting_;  // freed, oldest first
};

}  // namespace simulated_cuda
