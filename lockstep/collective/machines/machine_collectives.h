// collective/machines/machine_collectives.h: all_reduce, reduce and broadcast of ranks on several machines that share memory inside
// each.
//
// Flow:    hierarchical_transport.cc -> here -> collective/shm/ inside a machine, host_link.h between machines
// Owns:    chunks of memory on the way
// Threads: one at a time
// Ranks:   all of all machines, in the same order
//
// Notation: n machines, S slices, S the smallest number of ranks on one machine; K bytes per rank. Local rank s < S of
// each machine owns slice s: it alone exchanges that slice, with its counterparts. A tensor goes in chunks c:
//
//   1  inside    reduce_scatter in shared memory: the owner of slice s has the machine's sum of it
//   2  between   the owner sends part m of its slice to machine m, receives its own part from all, reduces in
//                the order of the machines, sends the result to all: 2(n-1)/n * K leave each machine, in 2 rounds
//   3  inside    all_gather in shared memory
//
// While chunk c is in 1, c-1 is in 2 and c-2 in 3, so that the network does not wait. Two machines send each other
// whole slices and reduce for themselves: as many bytes in 1 round. So do more machines up to kOneShotBytes, with one
// slice. reduce sends the results of 2 to root's machine only. With the algorithm ring 2 goes around the machines, in
// one chunk and 2(n-1) rounds of K/n: as many bytes, and for study. broadcast goes inside root's machine, from
// machine to machine, and inside the others. docs/design/hierarchy.md
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

class HostCollectives {
 public:
  // `between`: null at ranks that own no slice. `node`: this machine.
  HostCollectives(shm::Group& inside, HostLink* between, Machines machines, int node);

  // Throw MismatchError, PeerLost.
  void all_reduce(const Collective& call);  // also for a barrier: of a byte
  void reduce(const Collective& call);      // call.output: defined on every rank, and changed
  void broadcast(const Collective& call);

  // After one of them threw: forgets its transfers. Once the link has, nothing touches its tensors any more.
  void give_up();

 private:
  struct Lane;
  struct Job;
  struct Route;

  void reduce_in_chunks(const Job& job);
  void reduce_inside(const Job& job, std::size_t chunk);
  void send_parts(const Job& job, std::size_t chunk);
  void reduce_between(const Job& job, std::size_t chunk);
  void share_inside(const Job& job, std::size_t chunk);
  void reduce_around(const Job& job);
  void scatter_around(const Job& job, std::byte* slice);
  void gather_around(const Job& job, std::byte* slice);
  void broadcast_inside(const Job& job, std::size_t chunk, int root);
  Route route_of(const Job& job) const;
  void receive_all(const Job& job);
  void pass_on(const Job& job, std::size_t chunk);
  Lane& lane_of(std::size_t chunk) { return *lanes_[chunk % lanes_.size()]; }
  bool owns_slice(const Job& job) const;
  bool alone() const { return inside_.size() == 1; }

  shm::Group& inside_;
  HostLink* between_;
  Machines machines_;
  int node_;
  std::array<std::shared_ptr<Lane>, 3> lanes_;  // of three chunks in turn
  HostCheck check_;
  std::vector<HostLink::Transfers> arriving_;  // of a broadcast, by chunk
  HostLink::Transfers leaving_;
};

}  // namespace lockstep
