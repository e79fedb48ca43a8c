// SPDX-License-Identifier: Apache-2.0
#include "lockstep/launch/machines.h"

#include <fcntl.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "lockstep/base/files/write_all.h"
#include "lockstep/base/log.h"
#include "lockstep/base/pipe.h"
#include "lockstep/base/sockets/endpoint.h"
#include "lockstep/base/sockets/poll.h"
#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/error.h"
#include "lockstep/launch/secured_channel.h"
#include "lockstep/launch/tls_channel.h"

namespace lockstep {
namespace {

constexpr milliseconds kOpenAgainAfter{100};
constexpr milliseconds kKnockEvery{1000};
constexpr milliseconds kUnknownFor{10'000};  // a connection that does not say whose it is
constexpr milliseconds kArbiterAnswersWithin{10'000};
constexpr int kMostUnknown = 64;
constexpr milliseconds kLastWordsWithin{300};
constexpr int kRefusals = 3;  // a member listens before anybody hears of it

}  // namespace

Machines::Machines(const Membership::Options& options, Roster roster, std::shared_ptr<Arbiter> arbiter)
    : roster_(std::move(roster)),
      membership_(options, me().id, roster_.epoch),
      beat_(options.beat),
      most_(options.most),
      arbiter_(std::move(arbiter)),
      taken_(epoch().number) {
  ::fcntl(roster_.listener.get(), F_SETFL, ::fcntl(roster_.listener.get(), F_GETFL) | O_NONBLOCK);
}

Machines::~Machines() {
  std::erase_if(links_, [](const Link& link) { return link.kind != Kind::kMember || link.lines.is_gone(); });
  for (Link& link : links_) link.lines.say_end();
  const Deadline deadline = Deadline::after(kLastWordsWithin);
  while (!links_.empty() && !deadline.passed()) {
    std::vector<pollfd> open;
    for (const Link& link : links_) open.push_back(to_poll(link.lines.fd()));
    poll_for(open, deadline.left());
    std::erase_if(links_, [](Link& link) { return !link.lines.drain(); });
  }
}

std::vector<Event> Machines::events() {
  std::vector<Event> events{{roster_.listener.get(), POLLIN, [] {}}};
  for (const Link& link : links_) events.push_back({link.lines.fd(), link.lines.events(), [] {}});
  if (answer_) events.push_back({answer_.get(), POLLIN, [] {}});
  return events;
}

std::vector<int> Machines::descriptors() const {
  std::vector<int> fds{roster_.listener.get()};
  for (const Link& link : links_) fds.push_back(link.lines.fd());
  for (const ReservedPort& port : roster_.ports) fds.push_back(port.fd());
  if (answer_) fds.push_back(answer_.get());
  return fds;
}

// Hears what has come before it counts time: a launcher that was stopped finds the others' words before it misses them.
void Machines::work() {
  accept_all();
  read_links();
  hear_arbiter();
  const auto now = Clock::now();
  const auto elapsed = std::chrono::duration_cast<milliseconds>(now - last_);
  if (elapsed.count() > 0) {
    last_ += elapsed;
    membership_.pass(std::min(elapsed, 2 * beat_));
  }
  say_what_is_lost();
  follow_epoch();
  open_links();
  say_when_all_are_connected();
  knock();
  deliver();
  drop_links();
}

std::optional<Epoch> Machines::take_news() {
  if (epoch().number == taken_ || !membership_.is_member()) return std::nullopt;
  taken_ = epoch().number;
  return epoch();
}

std::optional<std::string> Machines::end() const {
  if (ended_) return ended_;
  if (membership_.is_member()) return membership_.end();
  return concat("the other machines go on without this one, in generation ", epoch().number);
}

void Machines::end_job(const std::string& why) {
  for (Link& link : links_)
    if (link.kind == Kind::kMember) link.lines.write("ended " + why);
  for (Link& link : links_) link.lines.move();
}

// ---- connections

Machines::Link* Machines::link_of(const std::string& peer) {
  const auto found = std::ranges::find_if(links_, [&](const Link& link) {
    return link.kind == Kind::kMember && link.peer == peer && !link.lines.is_gone();
  });
  return found == links_.end() ? nullptr : &*found;
}

std::unique_ptr<Channel> Machines::channel_of(UniqueFd fd) const {
  if (!roster_.key) return std::make_unique<Channel>(std::move(fd));
  return std::make_unique<TlsChannel>(std::move(fd), *roster_.key, TlsChannel::Role::kClient);
}

void Machines::accept_all() {
  for (;;) {
    UniqueFd fd(::accept4(roster_.listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd) return;
    auto channel = serve_channel(std::move(fd), roster_.secret);
    if (!channel) continue;
    const auto is_stranger = [](const Link& link) { return link.kind == Kind::kStranger; };
    if (std::ranges::count_if(links_, is_stranger) >= kMostUnknown)
      links_.erase(std::ranges::find_if(links_, is_stranger));  // the oldest makes room
    links_.push_back({.kind = Kind::kStranger, .peer = "", .lines = LineChannel(std::move(channel))});
  }
}

void Machines::open(Kind kind, const std::string& peer, const std::string& address, int port,
                    const std::string& first_line) {
  UniqueFd fd = begin_to_connect({address, port});
  if (!fd) return;
  links_.push_back({.kind = kind, .peer = peer, .lines = LineChannel(channel_of(std::move(fd)))});
  links_.back().lines.write(first_line);
}

// Connects to every earlier machine in the order. One that was connected before and is not now is lost.
void Machines::open_links() {
  if (!membership_.is_member() || Clock::now() < next_try_) return;
  next_try_ = Clock::now() + kOpenAgainAfter;
  const int mine = node_rank();
  for (const Member& other : membership_.others())
    if (epoch().index_of(other.id) < mine && link_of(other.id) == nullptr && !was_linked_.contains(other.id))
      open(Kind::kMember, other.id, other.address, other.port, concat("member ", job(), " ", me().id, " ", other.id));
}

void Machines::read_links() {
  for (Link& link : links_) {
    link.lines.move();
    while (const auto line = link.lines.take())
      if (!hear(link, *line)) {
        link.lines.finish();
        break;
      }
  }
}

bool Machines::hear(Link& link, const std::string& line) {
  if (link.kind == Kind::kStranger) return hear_stranger(link, line);
  if (link.kind != Kind::kMember) return false;
  if (line == "welcome") {
    was_linked_.insert(link.peer);
    return true;
  }
  if (line.starts_with("ended ")) {
    if (!ended_) ended_ = line.substr(6);
    return true;
  }
  membership_.hear(link.peer, line);
  return true;
}

// "member JOB FROM TO", or a new machine's greeting.
bool Machines::hear_stranger(Link& link, const std::string& line) {
  const auto parts = split(line, ' ');
  if (parts.size() == 4 && parts[0] == "member") {
    if (parts[1] != job() || parts[3] != me().id || link_of(parts[2]) != nullptr) return false;
    link.kind = Kind::kMember;
    link.peer = parts[2];
    was_linked_.insert(link.peer);
    link.lines.write("welcome");
    return true;
  }
  const std::string& greeting = roster_.greeting;
  const auto guest = line.starts_with(greeting) ? parse_member(line.substr(greeting.size())) : std::nullopt;
  if (!guest) {
    link.lines.write("refused");
    return false;
  }
  link.kind = Kind::kGuest;
  link.peer = guest->id;
  membership_.admit(*guest);
  words_.push_back(concat("machine ", guest->host(), " asks to be taken in"));
  return true;
}

void Machines::drop_links() {
  const auto now = Clock::now();
  for (auto link = links_.begin(); link != links_.end();) {
    const bool is_member = link->kind == Kind::kMember;
    if (is_member && membership_.is_lost(link->peer)) link->lines.finish();
    const bool is_late =
        (link->kind == Kind::kStranger || link->kind == Kind::kKnock) && now - link->since > kUnknownFor;
    if (!link->lines.is_gone() && !is_late) {
      ++link;
      continue;
    }
    if (is_member && was_linked_.contains(link->peer))
      membership_.close(link->peer, "its launcher has closed the connection");
    else if (is_member && ++refusals_[link->peer] >= kRefusals)
      membership_.close(link->peer, "nobody answers at its port");
    if (link->kind == Kind::kGuest) membership_.dismiss(link->peer);
    link = links_.erase(link);
  }
}

// ---- what membership wants

void Machines::deliver() {
  for (const auto& [to, text] : membership_.take_messages()) {
    if (to == kArbiter) {
      ask_arbiter(text);
    } else if (Link* const link = link_of(to)) {
      link->lines.write(text);
    }
  }
  for (Link& link : links_) link.lines.move();
}

// Guests hear that they are in; who is not in any more has heard of it by now.
void Machines::follow_epoch() {
  if (epoch().number == roster_.epoch.number) return;
  deliver();
  const Epoch before = std::exchange(roster_.epoch, epoch());
  for (Link& link : links_) {
    if (link.kind == Kind::kGuest && epoch().has(link.peer)) {
      link.lines.write(concat("epoch ", job(), " ", to_text(epoch())));
      link.lines.finish();
      link.lines.move();
    }
    if (link.kind == Kind::kMember && before.has(link.peer) && !epoch().has(link.peer)) link.lines.finish();
  }
  for (const Member& member : before.members) gone_.insert_or_assign(member.id, member);
  for (const Member& member : epoch().members) gone_.erase(member.id);
  next_try_ = {};
}

void Machines::say_what_is_lost() {
  if (membership_.all_done()) return;  // they have ended
  for (const auto& [member, why] : membership_.lost()) {
    if (told_lost_.insert(member.id).second)
      words_.push_back(concat("machine ", member.host(), " (", member.address, ") is lost: ", why));
  }
}

void Machines::say_when_all_are_connected() {
  if (connected_ == epoch().number) return;
  for (const Member& member : epoch().members)
    if (member.id != me().id && (!was_linked_.contains(member.id) || link_of(member.id) == nullptr)) return;
  connected_ = epoch().number;
  log_debug(concat("generation ", connected_, ": connected to all machines"));
}

// A launcher that was started again where one was lost waits for the job to begin, or for somebody like this.
void Machines::knock() {
  if (gone_.empty() || node_rank() != 0 || std::ssize(epoch().members) >= most_ || Clock::now() < next_knock_) return;
  next_knock_ = Clock::now() + kKnockEvery;
  std::set<std::string> knocked;
  for (const auto& [id, member] : gone_)
    if (knocked.insert(concat(member.address, " ", member.port)).second)
      open(Kind::kKnock, "", member.address, member.port,
           concat("running ", me().address, " ", me().port, " ", roster_.greeting));
}

// ---- the arbiter, asked by a child: it may block

void Machines::ask_arbiter(const std::string& request) {
  if (!arbiter_ || (asking_ && Clock::now() - asked_at_ < kArbiterAnswersWithin)) return;
  Pipe pipe = make_pipe();
  answer_ = std::move(pipe.out);
  ::fcntl(answer_.get(), F_SETFL, O_NONBLOCK);
  ProcessOptions options{.body =
                             [arbiter = arbiter_, job = job(), request] {
                               write_all(STDOUT_FILENO, arbiter->answer(job, request) + "\n");
                               return 0;
                             },
                         .output_fd = pipe.in.get(),
                         .close_in_child = descriptors()};
  asking_.reset();
  asking_.emplace(options);
  asked_at_ = Clock::now();
  answered_.clear();
}

void Machines::hear_arbiter() {
  if (!answer_) return;
  std::array<char, 4096> room{};
  ssize_t bytes = 0;
  while ((bytes = ::read(answer_.get(), room.data(), room.size())) > 0) answered_.append(room.data(), to_size(bytes));
  if (bytes < 0 && (errno == EAGAIN || errno == EINTR)) return;
  answer_.reset();
  asking_.reset();
  if (const std::size_t end = answered_.find('\n'); end != std::string::npos && end > 0)
    membership_.hear(kArbiter, answered_.substr(0, end));
}

}  // namespace lockstep
