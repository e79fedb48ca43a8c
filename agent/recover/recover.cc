// SPDX-License-Identifier: Apache-2.0
#include "lockstep/recovery.h"

#include "agent/recover/job_memory.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

// The launcher knows at once that a process has ended; what it takes longer to see is one that hangs.
constexpr std::chrono::minutes kToDecide{1};

bool goes_on_after(const Error& lost) {
  JobMemory* const memory = JobMemory::get();
  if (memory == nullptr) return false;
  const bool goes_on = memory->next_generation(kToDecide);
  if (goes_on) log_info(concat(lost.text().what, "; going on in generation ", memory->generation()));
  return goes_on;
}

}  // namespace

int recover(const std::function<int()>& body) {
  for (;;) {
    try {
      return body();
    } catch (const PeerLost& lost) {
      if (!goes_on_after(lost)) throw;
    } catch (const RendezvousError& lost) {  // while the ranks met
      if (!goes_on_after(lost)) throw;
    }
  }
}

}  // namespace lockstep
