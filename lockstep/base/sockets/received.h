// SPDX-License-Identifier: Apache-2.0
// base/sockets/received.h: numbers that another process has sent, checked before they are used.
//
// Flow:    headers of messages -> here -> sizes, places and types
// Threads: any
#pragma once

#include <cstdint>
#include <string>

namespace lockstep {

// Who has sent a message: "rank 3".
class Received {
 public:
  explicit Received(std::string from) : from_(std::move(from)) {}

  // `value`, which the message calls `name`. Throws MismatchError: it is not in [least, most].
  std::int64_t in(std::int64_t value, std::int64_t least, std::int64_t most, const std::string& name) const;

  // The bytes of so many elements, at most those of this machine's memory. Throws MismatchError.
  std::int64_t bytes(std::int64_t elements, std::int64_t size_of_element, const std::string& name) const;

  // Throws MismatchError unless `holds`. what: "a slice that overlaps the one before it".
  void require(bool holds, const std::string& what) const;

 private:
  std::string from_;
};

}  // namespace lockstep
