// SPDX-License-Identifier: Apache-2.0
// base/sockets/received.h: numbers that another process has sent, checked before they are used.
//
// Flow:    headers of messages -> here -> sizes, places and types
// Threads: any
#pragma once

#include <unistd.h>

#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {

// Who has sent a message: "rank 3".
class Received {
 public:
  explicit Received(std::string from) : from_(std::move(from)) {}

  // `value`, which the message calls `name`. Throws MismatchError: it is not in [least, most].
  int64_t in(int64_t value, int64_t least, int64_t most, const std::string& name) const {
    if (value < least || value > most)
      require(false, concat(name, " is ", value, ", but must be ", least, " to ", most));
    return value;
  }

  // The bytes of so many elements, at most those of this machine's memory. Throws MismatchError.
  int64_t bytes(int64_t elements, int64_t size_of_element, const std::string& name) const {
    const int64_t memory = ::sysconf(_SC_PHYS_PAGES) * ::sysconf(_SC_PAGESIZE);
    int64_t bytes = 0;
    if (elements < 0 || __builtin_mul_overflow(elements, size_of_element, &bytes) || bytes > memory)
      require(false, concat(name, " has ", elements, " elements of ", size_of_element,
                            " bytes, and this machine's memory ", memory, " bytes"));
    return bytes;
  }

  // Throws MismatchError unless `holds`. what: "a slice that overlaps the one before it".
  void require(bool holds, const std::string& what) const {
    if (holds) return;
    throw MismatchError(
        {.what = concat("a malformed message: ", what),
         .peer = from_,
         .likely = "another version of lockstep there, or a message that was changed on the way",
         .next = "install the same lockstep on all machines; docs/security.md says what keeps others out"});
  }

 private:
  std::string from_;
};

}  // namespace lockstep
