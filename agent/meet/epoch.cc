// SPDX-License-Identifier: Apache-2.0
#include "agent/meet/epoch.h"

#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>

#include "lockstep/base/process/host_name.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {

const Member* Epoch::find(std::string_view id) const {
  const auto found = std::ranges::find(members, id, &Member::id);
  return found == members.end() ? nullptr : &*found;
}

int Epoch::index_of(std::string_view id) const {
  const Member* const member = find(id);
  return member == nullptr ? -1 : static_cast<int>(member - members.data());
}

int Epoch::first_rank(std::string_view id) const {
  int rank = 0;
  for (const Member& member : members) {
    if (member.id == id) break;
    rank += member.ranks;
  }
  return rank;
}

int Epoch::world_size() const {
  int ranks = 0;
  for (const Member& member : members) ranks += member.ranks;
  return ranks;
}

PlaceInJob place_of(const Epoch& epoch, const std::string& member) {
  return {.nodes = static_cast<int>(epoch.members.size()),
          .node_rank = epoch.index_of(member),
          .first_rank = epoch.first_rank(member),
          .world_size = epoch.world_size(),
          .master_addr = epoch.members.front().address,
          .master_port = epoch.master_port()};
}

std::string new_member_id() {
  uint64_t number = 0;
  if (::getrandom(&number, sizeof number, 0) != sizeof number) throw system_error("make", "random bytes");
  std::string host = host_name();
  std::ranges::replace_if(
      host, [](char letter) { return letter <= ' ' || letter == '/'; }, '_');
  return concat(host, "/", ::getpid(), "/", std::hex, number);
}

}  // namespace lockstep
