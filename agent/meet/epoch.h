// SPDX-License-Identifier: Apache-2.0
// agent/meet/epoch.h: which machines a job runs on, from one agreement of their launchers to the next.
//
// Flow:    membership.h decides on each -> here -> the launcher numbers its ranks by it
// Threads: values
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

inline constexpr int kMostRanksOfMachine = 1 << 16;

// The launcher of one machine. A launcher that is started again is another member.
struct Member {
  std::string id;                     // "gpu-a/4711/9f3c20d1": its host, its pid, and a number that nobody else has
  std::string address;                // as a number: where the others reach it
  std::array<int, 2> master_ports{};  // for rank 0's store, if it runs there; epochs use them in turn
  int ranks = 1;

  std::string host() const { return id.substr(0, id.find('/')); }
  bool operator==(const Member&) const = default;
};

struct Epoch {
  int number = 0;                 // 0: as the job began
  int restarts = 0;               // so far in the whole job, of ranks that failed
  std::vector<Member> members{};  // in the order of their ranks; the first has rank 0

  const Member* find(std::string_view id) const;
  bool has(std::string_view id) const { return find(id) != nullptr; }
  int index_of(std::string_view id) const;    // -1: no member
  int first_rank(std::string_view id) const;  // of a member
  int world_size() const;
  int master_port() const { return members.front().master_ports[static_cast<size_t>(number % 2)]; }
};

// The place of a machine's ranks in the job.
struct PlaceInJob {
  int nodes = 1;
  int node_rank = 0;
  int first_rank = 0;
  int world_size = 1;
  std::string master_addr;
  int master_port = 0;
};
PlaceInJob place_of(const Epoch& epoch, const std::string& member);

// An id for this process.
std::string new_member_id();

}  // namespace lockstep
