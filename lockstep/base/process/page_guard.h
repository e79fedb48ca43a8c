// SPDX-License-Identifier: Apache-2.0
// base/process/page_guard.h: with LOCKSTEP_CHECK set, memory that only lockstep may write is read-only between lockstep's own
// writes. The line of a program that writes there stops with SIGSEGV, after a message and a backtrace on stderr.
//
// Flow:    ParameterBlock guards the parameters, step/published.cc the published gradients -> mprotect
// Owns:    a list of what is guarded; the handler of SIGSEGV, from the first PageGuard on
// Threads: any
// Ranks:   no communication. Pages are read-only in the process that guards them
//
// Note [Ranks as threads]
// Ranks that are threads guard the same pages of the same mapping, so one that ends its write too early would stop
// another that still writes. So writes are counted over the process: pages are read-only again when the last one ends.
// In a step() every rank begins its write after barrier 2, when all ranks have left the program's own code, and ends it
// before barrier 3, so that the count is 0 when any of them returns to it.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace lockstep {

// The number n of LOCKSTEP_CHECK=n; 0 without it. Throws EnvironmentError: not a number.
int check_interval();

// Memory to guard needs pages of its own: allocate guarded_bytes(bytes), and begin at first_page() of it. Without
// LOCKSTEP_CHECK these are `bytes` and `memory` themselves.
size_t guarded_bytes(size_t bytes);
std::byte* first_page(std::byte* memory);

class PageGuard {
 public:
  enum class Kind { kParameters, kGradients };
  struct Part {
    std::string name;
    const std::byte* begin;
    size_t bytes;
  };

  // The pages of `parts`, which lie one after another from a page's beginning, are read-only while this lives; those of
  // parameters except while there is a ParameterWrite.
  PageGuard(Kind kind, const std::vector<Part>& parts);
  ~PageGuard();
  PageGuard& operator=(PageGuard&&) = delete;

 private:
  Kind kind_;
  std::byte* begin_;
  size_t bytes_;
  std::vector<size_t> parts_;  // in the handler's table
};

// While one exists, lockstep itself writes parameters: those of the process are writable.
class ParameterWrite {
 public:
  ParameterWrite();
  ~ParameterWrite();
  ParameterWrite& operator=(ParameterWrite&&) = delete;
};

}  // namespace lockstep
