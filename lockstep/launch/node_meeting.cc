// SPDX-License-Identifier: Apache-2.0
#include "lockstep/launch/node_meeting.h"

#include <sys/socket.h>

#include <algorithm>
#include <list>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/base/files/unique_fd.h"
#include "lockstep/base/sockets/poll.h"
#include "lockstep/base/sockets/port.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "lockstep/launch/interfaces.h"
#include "lockstep/launch/line_channel.h"
#include "lockstep/launch/secured_channel.h"

namespace lockstep {
namespace {

constexpr milliseconds kTryEvery{100};
constexpr milliseconds kConnectsWithin{5000};
constexpr milliseconds kGreetsWithin{10'000};
constexpr milliseconds kHearsItsPlaceWithin{1000};
constexpr milliseconds kSecretIsSeenWithin{60'000};  // a file in a home on NFS may be seen late
constexpr std::size_t kLongestGreeting = 4096;
constexpr std::size_t kMostNewcomers = 64;  // that have not greeted; the oldest makes room

// Returns none while the name is unknown: if machines start with the job, DNS learns it a little later. Debian gives a
// machine's own name the address 127.0.1.1, at which the others can't reach it.
AddressList find_addresses(const NodeMeeting& meeting, const Deadline& deadline) {
  AddressList found = look_up(meeting.place, deadline).addresses;
  if (!found || is_loopback(meeting.place.host) || !is_loopback(numeric(found->ai_addr, found->ai_addrlen)))
    return found;
  const std::string mine = address_for_others();
  return mine.empty() ? std::move(found) : look_up({mine, meeting.place.port}, deadline).addresses;
}

// The first words of a launcher, before its member.
std::string greeting(const NodeMeeting& meeting) {
  return concat("lockstep 2 ", meeting.least, ":", meeting.most, meeting.stays ? " stays " : " ", meeting.job.size(),
                " ", meeting.job, " ");
}

struct Guest {
  LineChannel lines;
  std::optional<Member> member{};  // none: it has not said yet
  Deadline greets_by = Deadline::after(kGreetsWithin);
};
using Guests = std::list<Guest>;

// The finding of machine 0: the others, or that the job runs already and where.
struct Gathered {
  Guests guests;
  std::optional<Endpoint> running{};
};

// A job that runs already has its secret: machine 0 that comes back makes no other one.
SecretPtr secret_of(const NodeMeeting& meeting, bool is_first) {
  const std::string name = concat("machines ", meeting.place.text(), " ", meeting.job);
  auto found = std::make_shared<const JobSecret>(name, false);
  const bool is_known = !found->comes_by_munge() && (found->is_off() || (meeting.stays && found->find()));
  return !is_first || is_known ? found : std::make_shared<const JobSecret>(name, true);
}

// Makes what this launcher will be to the others. It listens at the meeting's port if that is free here.
Roster own_roster(const NodeMeeting& meeting, const std::string& address, UniqueFd listener = {}) {
  const Deadline at_once = Deadline::after(kConnectsWithin);
  for (const int port : {meeting.place.port, 0})
    if (!listener) listener = listen_at(look_up({address, port}, at_once).addresses);
  if (!listener) throw system_error("listen at", address);
  Roster roster{.me = {.id = new_member_id(), .address = address, .ranks = meeting.ranks}};
  roster.me.port = endpoint_of(listener.get()).port;
  roster.greeting = greeting(meeting);
  roster.listener = std::move(listener);
  for (int& port : roster.me.master_ports) port = roster.ports.emplace_back(address).number();
  return roster;
}

RendezvousError too_few(const NodeMeeting& meeting, std::size_t came) {
  return RendezvousError({.what = concat(came, " of at least ", meeting.least, " machines came to ",
                                         meeting.place.text(), " within ", human_seconds(meeting.timeout)),
                          .likely = "a machine that did not start, or has another --rdzv-endpoint",
                          .next = "look at the other machines; --rdzv-conf join_timeout=SECONDS waits longer"});
}

// ---- machine 0

void admit(const UniqueFd& listener, const SecretPtr& secret, Guests& newcomers) {
  UniqueFd fd(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (newcomers.size() >= kMostNewcomers) newcomers.pop_front();
  auto channel = fd ? serve_channel(std::move(fd), secret) : nullptr;
  if (channel) newcomers.push_back({.lines = LineChannel(std::move(channel), kLongestGreeting)});
}

// "running ADDRESS PORT GREETING": of a member of the job, which runs already.
std::optional<Endpoint> place_of_job(const std::string& line, const NodeMeeting& meeting) {
  const auto parts = split(line, ' ');
  Endpoint place;
  if (!meeting.stays || parts.size() < 4 || parts[0] != "running" || !parse_int(parts[2], place.port)) return {};
  place.host = parts[1];
  if (line != concat("running ", place.host, " ", place.port, " ", greeting(meeting))) return {};
  return place;
}

// False: it has said something else than a launcher of this job.
bool hear_greeting(Guest& guest, const NodeMeeting& meeting, Gathered& gathered) {
  guest.lines.move();
  const auto line = guest.lines.take();
  if (!line) return !guest.lines.is_gone();
  const std::string expected = greeting(meeting);
  if (line->starts_with(expected)) guest.member = parse_member(line->substr(expected.size()));
  if (guest.member) return true;
  if ((gathered.running = place_of_job(*line, meeting))) return false;
  guest.lines.write("refused", Deadline::after(kHearsItsPlaceWithin));
  return false;
}

// Makes guests of those that have greeted, in this order, as long as there are places.
void hear(Guests& newcomers, Gathered& gathered, const NodeMeeting& meeting) {
  for (auto each = newcomers.begin(); each != newcomers.end() && !gathered.running;) {
    const auto next = std::next(each);
    if (each->greets_by.passed() || !hear_greeting(*each, meeting, gathered))
      newcomers.erase(each);
    else if (each->member && std::ssize(gathered.guests) + 1 < meeting.most)
      gathered.guests.splice(gathered.guests.end(), newcomers, each);
    each = next;
  }
}

void forget_gone(Guests& guests) {
  std::erase_if(guests, [](Guest& guest) {
    guest.lines.move();
    return guest.lines.take() || guest.lines.is_gone();
  });
}

// Until somebody comes or says something.
bool wait_for_any(const UniqueFd& listener, const Guests& newcomers, milliseconds longest) {
  std::vector<pollfd> polls{to_poll(listener.get())};
  for (const Guest& guest : newcomers) polls.push_back(to_poll(guest.lines.fd(), guest.lines.events()));
  poll_for(polls, longest);
  return polls.front().revents != 0;
}

Gathered gather(const UniqueFd& listener, const SecretPtr& secret, const NodeMeeting& meeting) {
  Guests newcomers;
  Gathered gathered;
  Guests& guests = gathered.guests;  // the other machines
  const Deadline deadline = Deadline::after(meeting.timeout);
  Deadline last_call = Deadline::after(meeting.last_call);
  while (std::ssize(guests) + 1 < meeting.most && !gathered.running) {
    forget_gone(guests);
    const bool enough = std::ssize(guests) + 1 >= meeting.least;
    if (enough && last_call.passed()) break;
    if (!enough && deadline.passed()) throw too_few(meeting, guests.size() + 1);
    const std::size_t before = guests.size();
    if (wait_for_any(listener, newcomers, std::min(kTryEvery, (enough ? last_call : deadline).left())))
      admit(listener, secret, newcomers);
    hear(newcomers, gathered, meeting);
    if (guests.size() > before) last_call = Deadline::after(meeting.last_call);
  }
  return gathered;
}

Roster place_everybody(Roster roster, Guests guests) {
  roster.job = roster.me.id;
  roster.epoch.members.push_back(roster.me);
  for (const Guest& guest : guests) roster.epoch.members.push_back(*guest.member);
  for (Guest& guest : guests)
    guest.lines.write(concat("epoch ", roster.job, " ", to_text(roster.epoch)), Deadline::after(kHearsItsPlaceWithin));
  return roster;
}

// ---- the others

RendezvousError wrong_job(const NodeMeeting& meeting) {
  return RendezvousError(
      {.what = concat("the launcher at ", meeting.place.text(), " is not one of this job"),
       .here = concat("--rdzv-id '", meeting.job, "', --nnodes ", meeting.least, ":", meeting.most),
       .likely = "two jobs with one --rdzv-endpoint, or machines with different --nnodes or --max-restarts",
       .next = "give every machine the same --nnodes, --rdzv-id, --rdzv-endpoint and --max-restarts"});
}

RendezvousError nobody(const NodeMeeting& meeting, bool was_refused) {
  if (was_refused)
    return RendezvousError({.what = concat("this machine was not let in at ", meeting.place.text()),
                            .here = concat("--rdzv-id '", meeting.job, "'"),
                            .likely = "another secret there than here, or none; or another program answers",
                            .next = ways_to_a_secret()});
  return RendezvousError(
      {.what = concat("no launcher of this job at ", meeting.place.text()),
       .likely = "a name that does not resolve, a firewall, or machines that have begun without this one",
       .next = "give every machine the same --rdzv-endpoint, the address of one of them"});
}

// "epoch NUMBER-OF-JOB EPOCH", which is checked: it numbers the ranks.
bool take_epoch(const std::string& answer, const NodeMeeting& meeting, Roster& roster) {
  const std::size_t job = answer.find(' ');
  const std::size_t text = answer.find(' ', std::min(job, answer.size() - 1) + 1);
  if (!answer.starts_with("epoch ") || text == std::string::npos) return false;
  const auto epoch = parse_epoch(std::string_view(answer).substr(text + 1));
  const int nodes = epoch ? static_cast<int>(epoch->members.size()) : 0;
  const Member* const me = epoch ? epoch->find(roster.me.id) : nullptr;
  if (nodes < meeting.least || nodes > meeting.most || me == nullptr || *me != roster.me ||
      epoch->index_of(me->id) == 0)
    return false;
  roster.job = answer.substr(job + 1, text - job - 1);
  roster.epoch = *epoch;
  return true;
}

// One launcher that is not machine 0.
class Newcomer {
 public:
  explicit Newcomer(const NodeMeeting& meeting)
      : meeting_(meeting), last_answer_(Deadline::after(meeting.timeout + meeting.last_call)) {}

  // Returns nothing if nobody answers there, or not a launcher of this version, or it has gone.
  std::optional<Roster> ask_at(const AddressList& addresses, const Deadline& deadline) {
    if (!secret_) secret_ = secret_of(meeting_, /*is_first=*/false);
    auto answered = connect_securely(addresses, *secret_, Deadline::after(std::min(kConnectsWithin, deadline.left())));
    if (!answered) return {};
    if (!secret_by_) secret_by_ = Deadline::after(kSecretIsSeenWithin);
    if (!answered->channel) return {};
    become(endpoint_of(answered->channel->fd()).host);
    LineChannel lines(std::move(answered->channel));
    if (!lines.write(greeting(meeting_) + to_text(roster_->me), last_answer_)) return {};
    const auto answer = lines.read(last_answer_);
    if (answer == "refused") throw wrong_job(meeting_);
    if (!answer || !take_epoch(*answer, meeting_, *roster_)) return {};
    roster_->key = answered->key;
    roster_->secret = JobSecret::learned(*secret_, answered->key);
    return std::move(roster_);
  }

  // Waits a little. Where a member of the job has come and told where it runs: there.
  std::optional<Endpoint> wait_for_a_knock(const AddressList& endpoint, milliseconds longest) {
    if (const auto mine = meeting_.stays && !roster_ ? own_address_towards(endpoint) : std::nullopt) become(*mine);
    if (!secret_) secret_ = secret_of(meeting_, /*is_first=*/false);
    const bool has_key = secret_->is_off() || secret_->find().has_value();
    if (!meeting_.stays || !roster_ || !has_key) {
      std::this_thread::sleep_for(longest);
      return {};
    }
    if (!wait_for(POLLIN, roster_->listener.get(), Deadline::after(longest))) return {};
    UniqueFd fd(::accept4(roster_->listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    auto channel = fd ? serve_channel(std::move(fd), secret_) : nullptr;
    if (!channel) return {};
    const auto line = LineChannel(std::move(channel), kLongestGreeting).read(Deadline::after(kHearsItsPlaceWithin));
    return line ? place_of_job(*line, meeting_) : std::nullopt;
  }

  // Somebody answers, but has not let this machine in for as long as a secret may take.
  bool is_refused() const { return secret_by_ && secret_by_->passed() && !secret_->is_off() && !secret_->find(); }
  bool was_answered() const { return secret_by_.has_value(); }

 private:
  void become(const std::string& address) {
    if (!roster_ || roster_->me.address != address) roster_.emplace(own_roster(meeting_, address));
  }

  const NodeMeeting& meeting_;
  Deadline last_answer_;
  SecretPtr secret_{};
  std::optional<Deadline> secret_by_{};  // since somebody answers
  std::optional<Roster> roster_{};
};

void require_sayable(const NodeMeeting& meeting) {
  constexpr std::size_t kLongestName = 176;
  if (meeting.job.size() <= kLongestName && meeting.job.find('\n') == std::string::npos) return;
  throw UsageError({.what = concat("--rdzv-id has ", meeting.job.size(), " characters"),
                    .next = concat("choose a line of at most ", kLongestName)});
}

}  // namespace

Roster meet_nodes(const NodeMeeting& meeting) {
  require_sayable(meeting);
  const Deadline deadline = Deadline::after(meeting.timeout);
  Newcomer newcomer(meeting);
  do {
    const AddressList addresses = find_addresses(meeting, deadline);
    std::optional<Endpoint> running;
    if (UniqueFd listener = listen_at(addresses)) {
      const auto secret = secret_of(meeting, /*is_first=*/true);
      Gathered gathered = gather(listener, secret, meeting);
      if (!gathered.running) {
        const std::string address = endpoint_of(listener.get()).host;
        Roster roster = own_roster(meeting, address, std::move(listener));
        roster.secret = secret;
        roster.key = secret->find();
        return place_everybody(std::move(roster), std::move(gathered.guests));
      }
      running = gathered.running;
    } else if (auto roster = newcomer.ask_at(addresses, deadline)) {
      return std::move(*roster);
    }
    if (newcomer.is_refused()) break;
    if (!running) running = newcomer.wait_for_a_knock(addresses, std::min(kTryEvery, deadline.left()));
    if (running)
      if (auto roster = newcomer.ask_at(look_up(*running, deadline).addresses, deadline)) return std::move(*roster);
  } while (!deadline.passed());
  throw nobody(meeting, newcomer.was_answered());
}

}  // namespace lockstep
