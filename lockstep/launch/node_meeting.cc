// SPDX-License-Identifier: Apache-2.0
#include "lockstep/launch/node_meeting.h"

#include <sys/socket.h>

#include <algorithm>
#include <optional>
#include <thread>
#include <vector>

#include "lockstep/base/poll.h"
#include "lockstep/base/port.h"
#include "lockstep/base/text.h"
#include "lockstep/base/unique_fd.h"
#include "lockstep/deadline.h"
#include "lockstep/error.h"
#include "lockstep/launch/endpoint.h"
#include "lockstep/launch/interfaces.h"

namespace lockstep {
namespace {

constexpr std::size_t kLongestMeetingLine = 256;
constexpr std::chrono::milliseconds kTryEvery{100};
constexpr std::chrono::milliseconds kConnectsWithin{5000};

Endpoint endpoint_of(const NodeMeeting& meeting) { return {meeting.host, meeting.port}; }

// None while the name is not known: where machines start with the job, DNS learns it a little later. Debian gives a
// machine's own name the address 127.0.1.1, at which the others can't reach it.
AddressList find_addresses(const NodeMeeting& meeting, const Deadline& deadline) {
  AddressList found = look_up(endpoint_of(meeting), deadline).addresses;
  if (!found || is_loopback(meeting.host) || !is_loopback(numeric(found->ai_addr, found->ai_addrlen))) return found;
  const std::string mine = address_for_others();
  return mine.empty() ? std::move(found) : look_up({mine, meeting.port}, deadline).addresses;
}

// Nothing at the deadline, at the end, or if the line is too long.
std::optional<std::string> read_text_line(int fd, const Deadline& deadline) {
  std::string line;
  for (char letter = 0;
       line.size() < kLongestMeetingLine && wait_for(POLLIN, fd, deadline) && ::recv(fd, &letter, 1, 0) == 1;) {
    if (letter == '\n') return line;
    line += letter;
  }
  return {};
}

bool write_text_line(int fd, const std::string& line) {
  const std::string text = line + "\n";
  return ::send(fd, text.data(), text.size(), MSG_NOSIGNAL) == std::ssize(text);
}

bool has_gone(int fd) {
  char letter = 0;
  return ::recv(fd, &letter, 1, MSG_PEEK | MSG_DONTWAIT) == 0;
}

// What a launcher says first; the number of its ranks comes after it.
std::string greeting(const NodeMeeting& meeting) {
  return concat("lockstep 1 ", meeting.least, ":", meeting.most, " ", meeting.job.size(), " ", meeting.job, " ranks ");
}

struct Guest {
  UniqueFd connection;
  int ranks = 0;
};

RendezvousError too_few(const NodeMeeting& meeting, std::size_t came) {
  return RendezvousError(
      {.what = concat(came, " of at least ", meeting.least, " machines came to ", endpoint_of(meeting).text(),
                      " within ", human_seconds(static_cast<double>(meeting.timeout.count()) / 1000)),
       .likely = "a machine that did not start, or has another --rdzv-endpoint",
       .next = "look at the other machines; --rdzv-conf join_timeout=SECONDS waits longer"});
}

// ---- machine 0

void admit(const UniqueFd& listener, const NodeMeeting& meeting, std::vector<Guest>& guests) {
  Guest guest{UniqueFd(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC))};
  if (!guest.connection) return;
  constexpr std::chrono::seconds kGreetsWithin{1};  // the others wait meanwhile
  const auto line = read_text_line(guest.connection.get(), Deadline::after(kGreetsWithin));
  const std::string expected = greeting(meeting);
  if (line && line->starts_with(expected) && parse_int(line->substr(expected.size()), guest.ranks) && guest.ranks > 0)
    return guests.push_back(std::move(guest));
  if (line) write_text_line(guest.connection.get(), "refused");
}

void forget_gone(std::vector<Guest>& guests) {
  std::erase_if(guests, [](const Guest& guest) { return has_gone(guest.connection.get()); });
}

std::vector<Guest> gather(const UniqueFd& listener, const NodeMeeting& meeting) {
  std::vector<Guest> guests;  // the other machines
  const Deadline deadline = Deadline::after(meeting.timeout);
  Deadline last_call = Deadline::after(meeting.last_call);
  while (std::ssize(guests) + 1 < meeting.most) {
    forget_gone(guests);
    const bool enough = std::ssize(guests) + 1 >= meeting.least;
    if (enough && last_call.passed()) break;
    if (!enough && deadline.passed()) throw too_few(meeting, guests.size() + 1);
    const std::size_t before = guests.size();
    if (wait_for(POLLIN, listener.get(), Deadline::after(std::min(kTryEvery, (enough ? last_call : deadline).left()))))
      admit(listener, meeting, guests);
    if (guests.size() > before) last_call = Deadline::after(meeting.last_call);
  }
  return guests;
}

NodePlace place_everybody(const NodeMeeting& meeting, const std::vector<Guest>& guests) {
  NodePlace place{.nodes = static_cast<int>(guests.size()) + 1, .world_size = meeting.ranks};
  for (const Guest& guest : guests) place.world_size += guest.ranks;
  int node = 1;
  int first_rank = meeting.ranks;
  for (const Guest& guest : guests) {
    write_text_line(guest.connection.get(), concat(node++, ' ', place.nodes, ' ', first_rank, ' ', place.world_size));
    first_rank += guest.ranks;
  }
  return place;
}

// ---- the others

RendezvousError wrong_job(const NodeMeeting& meeting) {
  return RendezvousError({.what = concat("the launcher at ", endpoint_of(meeting).text(), " is not one of this job"),
                          .here = concat("--rdzv-id '", meeting.job, "', --nnodes ", meeting.least, ":", meeting.most),
                          .likely = "two jobs with one --rdzv-endpoint, or machines with different --nnodes",
                          .next = "give every machine the same --nnodes, --rdzv-id and --rdzv-endpoint"});
}

// Nothing: it was not a launcher of this version that answered, or it has gone.
std::optional<NodePlace> ask_for_place(const UniqueFd& connection, const NodeMeeting& meeting,
                                       const Deadline& deadline) {
  if (!write_text_line(connection.get(), concat(greeting(meeting), meeting.ranks))) return {};
  const auto answer = read_text_line(connection.get(), deadline);
  if (!answer) return {};
  if (*answer == "refused") throw wrong_job(meeting);
  const auto parts = split(*answer, ' ');
  NodePlace place;
  const bool read = parts.size() == 4 && parse_int(parts[0], place.node_rank) && parse_int(parts[1], place.nodes) &&
                    parse_int(parts[2], place.first_rank) && parse_int(parts[3], place.world_size);
  return read ? std::optional(place) : std::nullopt;
}

void require_sayable(const NodeMeeting& meeting) {
  constexpr std::size_t kForNumbers = 80;
  if (meeting.job.size() + kForNumbers <= kLongestMeetingLine && meeting.job.find('\n') == std::string::npos) return;
  throw UsageError({.what = concat("--rdzv-id has ", meeting.job.size(), " characters"),
                    .next = concat("choose a line of at most ", kLongestMeetingLine - kForNumbers)});
}

}  // namespace

NodePlace meet_nodes(const NodeMeeting& meeting) {
  require_sayable(meeting);
  const Deadline deadline = Deadline::after(meeting.timeout);
  const Deadline last_answer = Deadline::after(meeting.timeout + meeting.last_call);
  do {
    const AddressList addresses = find_addresses(meeting, deadline);
    if (const UniqueFd listener = listen_at(addresses)) return place_everybody(meeting, gather(listener, meeting));
    if (const auto connection = connect_to(addresses, Deadline::after(std::min(kConnectsWithin, deadline.left()))))
      if (const auto place = ask_for_place(connection->fd, meeting, last_answer)) return *place;
    std::this_thread::sleep_for(std::min(kTryEvery, deadline.left()));
  } while (!deadline.passed());
  throw RendezvousError(
      {.what = concat("no launcher of this job at ", endpoint_of(meeting).text()),
       .likely = "a name that does not resolve, a firewall, or machines that have begun without this one",
       .next = "give every machine the same --rdzv-endpoint, the address of one of them"});
}

}  // namespace lockstep
