// SPDX-License-Identifier: Apache-2.0
// collective/machines/signature_check.h: machines compare the signatures of their calls: Gloo ends the process when the
// two sides of a message differ in size.
//
// Data does not wait for the comparison: transfers of calls with different signatures have different tags (link.h), so
// they never meet. Only waits for data come after it. The ranks of one machine compare through shared memory
// (Hierarchy::run_inside).
//
// Flow:    Signature -> here -> MismatchError, or transfers may be waited for
// Owns:    the signatures of all machines
// Threads: one at a time
// Ranks:   one of each machine, those of the link, in the same order
#pragma once

#include "lockstep/base/int_vector.h"
#include "lockstep/collective/call.h"
#include "lockstep/collective/machines/link.h"

namespace lockstep {

class SignatureCheck {
 public:
  // Sends 24 bytes to each peer. Transfers that are started afterwards belong to `mine`. Does not block.
  void begin(MachineLink& link, const Signature& mine);

  // Block until the signature of that peer, or of all, has arrived. Throw MismatchError, PeerLost.
  void compare(MachineLink& link, int peer);
  void finish(MachineLink& link);

 private:
  IntVector<Signature> signatures_;  // of each peer
  IntVector<MachineLink::Transfers> receives_;
  MachineLink::Transfers sends_;
};

}  // namespace lockstep
