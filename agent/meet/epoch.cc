// SPDX-License-Identifier: Apache-2.0
#include "agent/meet/epoch.h"

#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <set>

#include "lockstep/base/process/host_name.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

constexpr int kMostRanksOfMember = 1 << 16;

bool is_port(int number) { return number >= 1 && number <= 65535; }

}  // namespace

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
  std::uint64_t number = 0;
  if (::getrandom(&number, sizeof number, 0) != sizeof number) throw system_error("make", "random bytes");
  std::string host = host_name();
  std::ranges::replace_if(
      host, [](char letter) { return letter <= ' ' || letter == ',' || letter == '/'; }, '_');
  return concat(host, "/", ::getpid(), "/", std::hex, number);
}

std::string to_text(const Member& member) {
  return concat(member.id, ",", member.address, ",", member.master_ports[0], ",", member.master_ports[1], ",",
                member.ranks);
}

std::string to_text(const Epoch& epoch) {
  std::string text = concat(epoch.number, " ", epoch.restarts);
  for (const Member& member : epoch.members) text += " " + to_text(member);
  return text;
}

std::optional<Member> parse_member(std::string_view text) {
  const auto parts = split(text, ',');
  Member member;
  if (parts.size() != 5 || parts[0].empty() || parts[1].empty()) return std::nullopt;
  member.id = parts[0];
  member.address = parts[1];
  const bool read = parse_int(parts[2], member.master_ports[0]) && parse_int(parts[3], member.master_ports[1]) &&
                    parse_int(parts[4], member.ranks);
  const bool possible = read && is_port(member.master_ports[0]) && is_port(member.master_ports[1]) &&
                        member.ranks >= 1 && member.ranks <= kMostRanksOfMember;
  return possible ? std::optional(member) : std::nullopt;
}

std::optional<Epoch> parse_epoch(std::string_view text) {
  const auto parts = split(text, ' ');
  Epoch epoch;
  if (parts.size() < 3 || !parse_int(parts[0], epoch.number) || !parse_int(parts[1], epoch.restarts) ||
      epoch.number < 0 || epoch.restarts < 0)
    return std::nullopt;
  std::set<std::string> ids;
  for (std::size_t i = 2; i < parts.size(); ++i) {
    auto member = parse_member(parts[i]);
    if (!member || !ids.insert(member->id).second) return std::nullopt;
    epoch.members.push_back(std::move(*member));
  }
  return epoch;
}

}  // namespace lockstep
