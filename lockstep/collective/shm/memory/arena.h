// SPDX-License-Identifier: Apache-2.0
// collective/shm/memory/arena.h: memory of one rank that its peers can read: gradients and parameters are allocated here.
//
// Collectives of memory from here copy nothing. The arena grows on demand and never shrinks; freed memory is used again.
// A peer maps what was added when it first needs it.
//
// A Memory may be freed as soon as no collective on it is under way: each returns only after its peers have read. A peer
// that reads it by other means has to agree with the owner on when, for instance by a barrier. Memory outlives the group:
// the last Memory of an arena frees the arena.
//
// Owns:    Arena: a window on its segment, and the list of free ranges. Memory: its range, and a share of the arena
// Threads: any
// Ranks:   no communication
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "lockstep/collective/shm/memory/segment.h"

namespace lockstep::shm {

class Memory;

class Arena : public std::enable_shared_from_this<Arena> {
 public:
  static constexpr std::size_t kFirstExtent = std::size_t{64} << 20;

  // Makes one in the segment `fd`, which messages call `name`.
  Arena(UniqueFd fd, std::string name) : window_(std::move(fd), kFirstExtent, std::move(name)) {}

  Window& window() { return window_; }

  // `bytes` bytes at a multiple of 64; not zeroed, except where the memory was never used before.
  // Throws SystemError: the machine has no more memory, RLIMIT_FSIZE, no addresses left.
  Memory allocate(std::size_t bytes);

  std::size_t bytes_taken() const;  // from the machine

 private:
  friend class Memory;
  struct GiveBack {
    void operator()(std::byte*) const { arena->give_back(offset, size); }

    std::shared_ptr<Arena> arena;
    std::uint64_t offset = 0;
    std::size_t size = 0;
  };
  using FreeRanges =
      std::map<std::uint64_t, std::size_t>;  // offset -> bytes; each in one extent, no two adjacent there

  std::uint64_t take(std::size_t bytes);
  FreeRanges::iterator best_fit(std::size_t bytes);
  void grow(std::size_t bytes);
  void give_back(std::uint64_t offset, std::size_t bytes);
  void insert(std::uint64_t offset, std::size_t bytes);
  bool adjoin(const FreeRanges::value_type& one, const FreeRanges::value_type& next) const;

  Window window_;
  mutable std::mutex mutex_;
  FreeRanges free_;
  std::size_t taken_ = 0;  // from the machine
  std::uint64_t end_ = 0;  // of the file
};

// A range of an arena; gives it back when it goes.
class Memory {
 public:
  Memory() = default;

  std::byte* data() const { return data_.get(); }
  std::size_t size() const { return data_.get_deleter().size; }
  std::uint64_t offset() const { return data_.get_deleter().offset; }  // what a peer needs to find it

  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data());
  }

 private:
  friend class Arena;
  Memory(std::byte* data, Arena::GiveBack give_back) : data_(data, std::move(give_back)) {}

  std::unique_ptr<std::byte, Arena::GiveBack> data_;
};

}  // namespace lockstep::shm
