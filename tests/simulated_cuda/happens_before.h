// SPDX-License-Identifier: Apache-2.0
// tests/simulated_cuda/happens_before.h: which work is certain to be over when other work begins.
//
// Each stream has a vector clock: how much of every stream's work is over when its next work begins. A launch takes over
// what the host has waited for; an event carries its stream's clock to the streams and threads that wait for it. Work on
// the same bytes, one of them a writer, must be ordered by these clocks, as in torch/cuda/_sanitizer.py.
//
// Threads: mutex() is held by the caller
#pragma once

#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace simulated_cuda {

using Clock = std::vector<uint64_t>;  // by the number of a stream

// The at-th work on a stream.
struct Moment {
  size_t stream = 0;
  uint64_t at = 0;
};

std::string name_of(const c10::Stream& stream);
std::string name_of(Moment moment);

Moment launch(const c10::Stream& stream);   // the next work on it
Moment now_on(const c10::Stream& stream);   // the newest work on it
Clock clock_of(const c10::Stream& stream);  // all that is over once its work so far is over
void wait(const c10::Stream& stream, const Clock& clock);
void host_waits(const Clock& clock);              // the calling thread; or all, see Settings::threads_apart
std::vector<c10::Stream> streams_of(int device);  // those that did some work
bool ordered(Moment first, const c10::Stream& then);
bool host_waited_for(Moment moment);

// Bytes of one block of memory that some work read or wrote.
struct Use {
  std::string work;
  Moment moment;
  size_t begin = 0, end = 0;
  bool writes = false;
};

// The uses of a block that are not yet followed by a use that covers them.
using Uses = std::vector<Use>;

// Notes a use on a stream. Returns the race with an earlier use, or "".
std::string note(Uses& uses, Use use, const c10::Stream& stream);

// Counts and prints a race, and throws where that is wanted. An empty text is none.
void report_race(const std::string& race);
// The same where nothing may be thrown: the next wait of the host throws.
void report_race_later(const std::string& race);
void throw_late_races();

}  // namespace simulated_cuda
