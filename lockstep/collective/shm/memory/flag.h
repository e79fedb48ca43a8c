// SPDX-License-Identifier: Apache-2.0
// collective/shm/memory/flag.h: a counter in shared memory that one side raises and the other waits for.
//
// Flow:    data written -> raise() -> a peer's load() sees the value -> the peer may read the data
// Owns:    eight bytes inside a control block; zeroed memory is a valid Flag
// Threads: any thread of any process that maps it. Give each Flag a cache line that only its owner writes
// Ranks:   no order; a Flag may be raised while nobody waits
//
// No wake-up is lost: a sleeper counts itself in, reads the value again, then sleeps; a raiser stores the value, then
// reads the count of sleepers. All four are sequentially consistent, so at least one of the two sees the other. (The only
// such pair here; the rest is acquire/release.) Values wrap around after 2^32; reached() compares by distance.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace lockstep::shm {

class Flag {
 public:
  uint32_t load() const { return value_.load(std::memory_order_acquire); }

  bool reached(uint32_t target) const { return static_cast<int32_t>(load() - target) >= 0; }

  // Everything written before is visible to a rank that sees the value. A system call only if some rank sleeps.
  void raise(uint32_t value) {
    value_.store(value, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) != 0) wake_all();
  }

  // The same for a Flag that several may raise: only that it changed matters.
  void ring() {
    value_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) != 0) wake_all();
  }

  // Sleeps until the value is no longer `seen`, somebody woke it, or `longest` is over.
  void sleep_while(uint32_t seen, std::chrono::nanoseconds longest);

 private:
  void wake_all();

  std::atomic<uint32_t> value_{0};
  std::atomic<uint32_t> sleepers_{0};
};

static_assert(sizeof(Flag) == 8 && std::atomic<uint32_t>::is_always_lock_free);

// Tells the processor that this is a spin loop.
inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

}  // namespace lockstep::shm
