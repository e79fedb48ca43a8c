// SPDX-License-Identifier: Apache-2.0
#include "lockstep/base/sockets/received.h"

#include <unistd.h>

#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {

void Received::require(bool holds, const std::string& what) const {
  if (holds) return;
  throw MismatchError(
      {.what = concat("a malformed message: ", what),
       .peer = from_,
       .likely = "another version of lockstep there, or a message that was changed on the way",
       .next = "install the same lockstep on all machines; docs/security.md says what keeps others out"});
}

std::int64_t Received::in(std::int64_t value, std::int64_t least, std::int64_t most, const std::string& name) const {
  if (value < least || value > most) require(false, concat(name, " is ", value, ", but must be ", least, " to ", most));
  return value;
}

std::int64_t Received::bytes(std::int64_t elements, std::int64_t size_of_element, const std::string& name) const {
  const std::int64_t memory = ::sysconf(_SC_PHYS_PAGES) * ::sysconf(_SC_PAGESIZE);
  std::int64_t bytes = 0;
  if (elements < 0 || __builtin_mul_overflow(elements, size_of_element, &bytes) || bytes > memory)
    require(false, concat(name, " has ", elements, " elements of ", size_of_element,
                          " bytes, and this machine's memory ", memory, " bytes"));
  return bytes;
}

}  // namespace lockstep
