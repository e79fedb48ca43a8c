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
  explicit Arena(std::shared_ptr<Window> window) : window_(std::move(window)) {}

  // `bytes` bytes at a multiple of 64; not zeroed, except where the memory was never used before.
  // Throws SystemError: the machine has no more memory, RLIMIT_FSIZE, no addresses left.
  Memory allocate(std::size_t bytes);

  std::size_t bytes_in_use() const;
  std::size_t bytes_taken() const;  // from the machine

 private:
  friend class Memory;
  using FreeRanges = std::map<std::uint64_t, std::size_t>;  // offset -> bytes; no two adjacent

  std::uint64_t take(std::size_t bytes);
  FreeRanges::iterator best_fit(std::size_t bytes);
  void grow(std::size_t bytes);
  void give_back(std::uint64_t offset, std::size_t bytes);
  void insert(std::uint64_t offset, std::size_t bytes);

  std::shared_ptr<Window> window_;
  mutable std::mutex mutex_;
  FreeRanges free_;
  std::size_t taken_ = 0;
  std::size_t in_use_ = 0;
};

// A range of an arena; gives it back when it goes.
class Memory {
 public:
  Memory() = default;
  Memory(Memory&& other) noexcept { swap(other); }
  Memory& operator=(Memory&& other) noexcept {
    Memory(std::move(other)).swap(*this);
    return *this;
  }
  ~Memory();

  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }
  std::uint64_t offset() const { return offset_; }  // what a peer needs to find it

  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }

 private:
  friend class Arena;
  Memory(std::shared_ptr<Arena> arena, std::byte* data, std::uint64_t offset, std::size_t size)
      : arena_(std::move(arena)), data_(data), offset_(offset), size_(size) {}
  void swap(Memory& other) noexcept;

  std::shared_ptr<Arena> arena_;
  std::byte* data_ = nullptr;
  std::uint64_t offset_ = 0;
  std::size_t size_ = 0;
};

}  // namespace lockstep::shm
