// SPDX-License-Identifier: Apache-2.0
#include "lockstep/launch/node_meeting.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <list>
#include <optional>
#include <thread>
#include <vector>

#include "lockstep/base/port.h"
#include "lockstep/base/text.h"
#include "lockstep/base/unique_fd.h"
#include "lockstep/deadline.h"
#include "lockstep/error.h"
#include "lockstep/launch/endpoint.h"
#include "lockstep/launch/interfaces.h"
#include "lockstep/launch/line_channel.h"
#include "lockstep/launch/secured_channel.h"

namespace lockstep {
namespace {

constexpr std::chrono::milliseconds kTryEvery{100};
constexpr std::chrono::milliseconds kConnectsWithin{5000};
constexpr std::chrono::milliseconds kGreetsWithin{10'000};
constexpr std::chrono::milliseconds kHearsItsPlaceWithin{1000};
constexpr std::chrono::milliseconds kSecretIsSeenWithin{60'000};  // a file in a home on NFS may be seen late
constexpr int kMostRanks = 1 << 16;                               // of a machine
constexpr std::size_t kMostNewcomers = 64;                        // that have not greeted; the oldest makes room

Endpoint endpoint_of(const NodeMeeting& meeting) { return {meeting.host, meeting.port}; }

// None while the name is not known: where machines start with the job, DNS learns it a little later. Debian gives a
// machine's own name the address 127.0.1.1, at which the others can't reach it.
AddressList find_addresses(const NodeMeeting& meeting, const Deadline& deadline) {
  AddressList found = look_up(endpoint_of(meeting), deadline).addresses;
  if (!found || is_loopback(meeting.host) || !is_loopback(numeric(found->ai_addr, found->ai_addrlen))) return found;
  const std::string mine = address_for_others();
  return mine.empty() ? std::move(found) : look_up({mine, meeting.port}, deadline).addresses;
}

// What a launcher says first; the number of its ranks comes after it.
std::string greeting(const NodeMeeting& meeting) {
  return concat("lockstep 1 ", meeting.least, ":", meeting.most, " ", meeting.job.size(), " ", meeting.job, " ranks ");
}

struct Guest {
  LineChannel lines;
  int ranks = 0;  // 0: it has not said yet
  Deadline greets_by = Deadline::after(kGreetsWithin);
};
using Guests = std::list<Guest>;

SecretPtr secret_of(const NodeMeeting& meeting, bool is_first) {
  return std::make_shared<const JobSecret>(concat("machines ", endpoint_of(meeting).text(), " ", meeting.job),
                                           is_first);
}

RendezvousError too_few(const NodeMeeting& meeting, std::size_t came) {
  return RendezvousError(
      {.what = concat(came, " of at least ", meeting.least, " machines came to ", endpoint_of(meeting).text(),
                      " within ", human_seconds(static_cast<double>(meeting.timeout.count()) / 1000)),
       .likely = "a machine that did not start, or has another --rdzv-endpoint",
       .next = "look at the other machines; --rdzv-conf join_timeout=SECONDS waits longer"});
}

// ---- machine 0

void admit(const UniqueFd& listener, const SecretPtr& secret, Guests& newcomers) {
  UniqueFd fd(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (newcomers.size() >= kMostNewcomers) newcomers.pop_front();
  auto channel = fd ? serve_channel(std::move(fd), secret) : nullptr;
  if (channel) newcomers.push_back({.lines = LineChannel(std::move(channel))});
}

// False: it has said something else than a launcher of this job.
bool hear_greeting(Guest& guest, const NodeMeeting& meeting) {
  const auto line = guest.lines.take();
  if (!line) return !guest.lines.is_lost();
  const std::string expected = greeting(meeting);
  if (line->starts_with(expected) && parse_int(line->substr(expected.size()), guest.ranks) && guest.ranks > 0 &&
      guest.ranks <= kMostRanks)
    return true;
  guest.lines.write("refused", Deadline::after(kHearsItsPlaceWithin));
  return false;
}

// Who has greeted is a guest, in this order, as long as there are places.
void hear(Guests& newcomers, Guests& guests, const NodeMeeting& meeting) {
  for (auto each = newcomers.begin(); each != newcomers.end();) {
    const auto next = std::next(each);
    if (each->greets_by.passed() || !hear_greeting(*each, meeting))
      newcomers.erase(each);
    else if (each->ranks > 0 && std::ssize(guests) + 1 < meeting.most)
      guests.splice(guests.end(), newcomers, each);
    each = next;
  }
}

void forget_gone(Guests& guests) {
  std::erase_if(guests, [](Guest& guest) { return guest.lines.take() || guest.lines.is_lost(); });
}

// Until somebody comes or says something.
bool wait_for_any(const UniqueFd& listener, const Guests& newcomers, std::chrono::milliseconds longest) {
  std::vector<pollfd> polls{{.fd = listener.get(), .events = POLLIN, .revents = 0}};
  for (const Guest& guest : newcomers)
    polls.push_back({.fd = guest.lines.fd(), .events = guest.lines.events(), .revents = 0});
  ::poll(polls.data(), polls.size(), static_cast<int>(longest.count()));
  return polls.front().revents != 0;
}

Guests gather(const UniqueFd& listener, const NodeMeeting& meeting) {
  const auto secret = secret_of(meeting, /*is_first=*/true);
  Guests newcomers, guests;  // the other machines
  const Deadline deadline = Deadline::after(meeting.timeout);
  Deadline last_call = Deadline::after(meeting.last_call);
  while (std::ssize(guests) + 1 < meeting.most) {
    forget_gone(guests);
    const bool enough = std::ssize(guests) + 1 >= meeting.least;
    if (enough && last_call.passed()) break;
    if (!enough && deadline.passed()) throw too_few(meeting, guests.size() + 1);
    const std::size_t before = guests.size();
    if (wait_for_any(listener, newcomers, std::min(kTryEvery, (enough ? last_call : deadline).left())))
      admit(listener, secret, newcomers);
    hear(newcomers, guests, meeting);
    if (guests.size() > before) last_call = Deadline::after(meeting.last_call);
  }
  return guests;
}

NodePlace place_everybody(const NodeMeeting& meeting, Guests guests) {
  NodePlace place{.nodes = static_cast<int>(guests.size()) + 1, .world_size = meeting.ranks};
  for (const Guest& guest : guests) place.world_size += guest.ranks;
  int node = 1;
  int first_rank = meeting.ranks;
  for (Guest& guest : guests) {
    guest.lines.write(concat(node++, ' ', place.nodes, ' ', first_rank, ' ', place.world_size),
                      Deadline::after(kHearsItsPlaceWithin));
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

RendezvousError nobody(const NodeMeeting& meeting, bool was_refused) {
  if (was_refused)
    return RendezvousError({.what = concat("this machine was not let in at ", endpoint_of(meeting).text()),
                            .here = concat("--rdzv-id '", meeting.job, "'"),
                            .likely = "another secret there than here, or none; or another program answers",
                            .next = ways_to_a_secret()});
  return RendezvousError(
      {.what = concat("no launcher of this job at ", endpoint_of(meeting).text()),
       .likely = "a name that does not resolve, a firewall, or machines that have begun without this one",
       .next = "give every machine the same --rdzv-endpoint, the address of one of them"});
}

// Of machine 0, whose answers are checked: what it says numbers the ranks.
std::optional<NodePlace> place_in(const std::string& answer, const NodeMeeting& meeting) {
  const auto parts = split(answer, ' ');
  NodePlace place;
  const bool read = parts.size() == 4 && parse_int(parts[0], place.node_rank) && parse_int(parts[1], place.nodes) &&
                    parse_int(parts[2], place.first_rank) && parse_int(parts[3], place.world_size);
  const bool possible = read && place.nodes >= meeting.least && place.nodes <= meeting.most && place.node_rank > 0 &&
                        place.node_rank < place.nodes && place.first_rank >= place.node_rank &&
                        place.world_size <= std::int64_t{place.nodes} * kMostRanks &&
                        place.first_rank <= place.world_size - meeting.ranks;
  return possible ? std::optional(place) : std::nullopt;
}

// Nothing: it was not a launcher of this version that answered, or it has gone.
std::optional<NodePlace> ask_for_place(LineChannel lines, const NodeMeeting& meeting, const Deadline& deadline) {
  if (!lines.write(concat(greeting(meeting), meeting.ranks), deadline)) return {};
  const auto answer = lines.read(deadline);
  if (!answer) return {};
  if (*answer == "refused") throw wrong_job(meeting);
  return place_in(*answer, meeting);
}

void require_sayable(const NodeMeeting& meeting) {
  constexpr std::size_t kForNumbers = 80;
  if (meeting.job.size() + kForNumbers <= LineChannel::kLongest && meeting.job.find('\n') == std::string::npos) return;
  throw UsageError({.what = concat("--rdzv-id has ", meeting.job.size(), " characters"),
                    .next = concat("choose a line of at most ", LineChannel::kLongest - kForNumbers)});
}

}  // namespace

NodePlace meet_nodes(const NodeMeeting& meeting) {
  require_sayable(meeting);
  const Deadline deadline = Deadline::after(meeting.timeout);
  const Deadline last_answer = Deadline::after(meeting.timeout + meeting.last_call);
  SecretPtr secret;
  std::optional<Deadline> secret_by;  // since somebody answers
  do {
    const AddressList addresses = find_addresses(meeting, deadline);
    if (const UniqueFd listener = listen_at(addresses)) return place_everybody(meeting, gather(listener, meeting));
    if (!secret) secret = secret_of(meeting, /*is_first=*/false);
    if (auto answered =
            connect_securely(addresses, *secret, Deadline::after(std::min(kConnectsWithin, deadline.left())))) {
      if (!secret_by) secret_by = Deadline::after(kSecretIsSeenWithin);
      if (!answered->channel && secret_by->passed()) break;
      if (answered->channel)
        if (const auto place = ask_for_place(LineChannel(std::move(answered->channel)), meeting, last_answer))
          return *place;
    }
    std::this_thread::sleep_for(std::min(kTryEvery, deadline.left()));
  } while (!deadline.passed());
  throw nobody(meeting, secret_by.has_value());
}

}  // namespace lockstep
