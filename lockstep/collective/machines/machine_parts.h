// collective/machines/machine_parts.h: reduce_scatter and all_gather of ranks on several machines that share memory inside each.
//
// Flow:    hierarchical_transport.cc -> here -> collective/shm/ inside a machine, host_link.h between machines
// Owns:    pieces of memory on the way
// Threads: one at a time
// Ranks:   all of all machines, in the same order
//
// Notation: n machines, S slices, S the smallest number of ranks on one machine; K bytes, the parts of all ranks
// together. An array goes in rounds of one piece per machine (machines.h). Local rank s < S of each machine owns
// slice s of every piece: it alone exchanges it, with its counterparts.
//
//   reduce_scatter  1  inside    reduce_scatter of the pieces of all machines: the owner of slice s has its sum here
//                   2  between   to every machine its piece: (n-1)/n * K leave each machine, in 1 round; the owner
//                                reduces in the order of the machines
//                   3  inside    all_to_all: every rank gets what is its own
//   all_gather      1  inside    all_gather of this machine's piece
//                   2  between   to every machine this one's piece: (n-1)/n * K leave each machine, in 1 round
//                   3  inside    all_gather of the other machines' pieces
//
// While round c is in 1 and 2, c-1 is waited for and in 3.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <vector>

#include "lockstep/collective/machines/machine_check.h"
#include "lockstep/collective/machines/machine_link.h"
#include "lockstep/collective/machines/topology.h"
#include "lockstep/collective/shm/group.h"
#include "lockstep/collective/transport.h"

namespace lockstep {

class HostParts {
 public:
  // `between`: null at ranks that own no slice. `rank`: of all.
  HostParts(shm::Group& inside, HostLink* between, Machines machines, int rank);

  // Throw MismatchError, PeerLost.
  void reduce_scatter(const Collective& call);
  void all_gather(const Collective& call);

  // After one of them threw: forgets its transfers. Once the link has, nothing touches its tensors any more.
  void give_up();

 private:
  struct Lane;
  struct Job;

  void begin_check(const Job& job);
  void finish_check(const Job& job);
  void reduce_inside(const Job& job, std::size_t round);
  const std::byte* pack(const Job& job, std::size_t round);
  void send_to_owners(const Job& job, std::size_t round);
  void reduce_between(const Job& job, std::size_t round);
  void deliver_inside(const Job& job, std::size_t round);
  void gather_inside(const Job& job, std::size_t round);
  void send_to_all(const Job& job, std::size_t round);
  void share_inside(const Job& job, std::size_t round);
  void finish(Lane& lane);
  Lane& lane_of(std::size_t round) { return *lanes_[round % lanes_.size()]; }
  bool owns_slice(const Job& job) const;
  bool alone() const { return inside_.size() == 1; }

  shm::Group& inside_;
  HostLink* between_;
  Machines machines_;
  int rank_;
  int node_;
  std::array<std::shared_ptr<Lane>, 2> lanes_;  // of two rounds in turn
  HostCheck check_;
};

}  // namespace lockstep
