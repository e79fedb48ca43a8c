// collective/machines/machine_exchange.h: gather, scatter and all_to_all of ranks on several machines. Every byte of them is for
// one rank alone, so each goes straight from its rank to that one, as a message: there is nothing to add up or to
// share inside.
//
// Flow:    hierarchical_transport.cc -> here -> host_link.h between all ranks
// Owns:    nothing but its transfers
// Threads: one at a time
// Ranks:   all of all machines, in the same order
#pragma once

#include <vector>

#include "lockstep/collective/machines/machine_check.h"
#include "lockstep/collective/machines/machine_link.h"
#include "lockstep/collective/shm/group.h"
#include "lockstep/collective/transport.h"

namespace lockstep {

class HostExchange {
 public:
  // `between`: the link of this machine's rank 0 to those of the others, null or not used elsewhere. `all`: the link
  // of all ranks.
  HostExchange(shm::Group& inside, HostLink* between, HostLink& all) : inside_(inside), between_(between), all_(all) {}

  // Throw MismatchError, PeerLost. What is sent: gather K from each rank but root; scatter K/p from root to each;
  // all_to_all (p-1)/p * K from each rank.
  void gather(const Collective& call);
  void scatter(const Collective& call);

  // `theirs`: counts[r] is what rank r sends to this rank. Throws MismatchError: it is not what this rank expects.
  void all_to_all(const Collective& call, const std::vector<std::int64_t>& theirs);

  // Blocks until it is known that all ranks want `call`. Throws MismatchError, PeerLost.
  void check(const Collective& call);

  // After one of them threw: forgets its transfers. Once the link has, nothing touches its tensors any more.
  void give_up();

 private:
  void exchange(const torch::Tensor& input, const std::vector<std::int64_t>& send, const torch::Tensor& output,
                const std::vector<std::int64_t>& receive);

  shm::Group& inside_;
  HostLink* between_;
  HostLink& all_;
  HostCheck check_;
  HostLink::Transfers transfers_;
};

}  // namespace lockstep
