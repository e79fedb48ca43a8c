// SPDX-License-Identifier: Apache-2.0
#include "agent/meet/store_server.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <vector>

#include "lockstep/base/sockets/local_socket.h"
#include "lockstep/base/sockets/poll.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

constexpr milliseconds kLookAtDeadlinesEvery{1000};
constexpr milliseconds kLeastSilence{100};
constexpr milliseconds kMostSilence = std::chrono::hours(1);
constexpr milliseconds kWithoutDescriptors{100};  // until the next try to accept

}  // namespace

MeetingServer::MeetingServer(UniqueFd listener, Admit admit)
    : listener_(std::move(listener)), admit_(std::move(admit)) {
  auto own = connected_pair();
  auto control = connected_pair();
  own_end_ = std::move(own[0]);
  connections_.push_back(
      {.stream = PacketStream(std::make_unique<Channel>(std::move(own[1]))), .number = ++numbers_, .known = true});
  control_ = std::move(control[0]);
  wishes_ = std::move(control[1]);
  thread_ = std::thread([this] { serve(); });
}

MeetingServer::~MeetingServer() {
  ask(kEnd);
  thread_.join();
}

void MeetingServer::ask(Wish wish) const { (void)!::send(control_.get(), &wish, 1, MSG_NOSIGNAL); }

void MeetingServer::stop_listening() const {
  ask(kNoMoreRanks);
  Wish done = kEnd;
  (void)!::recv(control_.get(), &done, 1, 0);
}

bool MeetingServer::hear_wish() {
  Wish wish = kEnd;
  if (::recv(wishes_.get(), &wish, 1, 0) != 1 || wish == kEnd) return false;
  ::shutdown(listener_.get(), SHUT_RDWR);  // also for forked children, which have it, too
  listener_.reset();
  admit_ = nullptr;  // with the secret that it holds
  std::erase_if(connections_, [](const Connection& connection) { return !connection.known; });
  (void)!::send(wishes_.get(), &wish, 1, MSG_NOSIGNAL);  // it is done
  return true;
}

// -1 ms: ranks that ask, or the end, wake it. A tenth of the shortest silence, so that a turn which comes late counts for little.
milliseconds MeetingServer::longest_wait() const {
  milliseconds wait = !listener_               ? milliseconds(-1)
                      : accept_again_.passed() ? kLookAtDeadlinesEvery
                                               : kWithoutDescriptors;
  for (const Connection& connection : connections_)
    if (connection.silence.count() > 0 && (wait.count() < 0 || connection.silence / 10 < wait))
      wait = connection.silence / 10;
  return wait;
}

bool MeetingServer::is_late(Connection& connection, milliseconds passed) const {
  connection.silent += std::min(passed, connection.silence / 5);
  return (!connection.known && connection.says_hello_by.passed()) ||
         (connection.silence.count() > 0 && connection.silent > connection.silence);
}

void MeetingServer::serve() {
  auto turn = std::chrono::steady_clock::now();
  for (;;) {
    const bool accepts = listener_ && accept_again_.passed();
    std::vector<pollfd> polls{to_poll(wishes_.get()), to_poll(accepts ? listener_.get() : -1)};
    for (const Connection& connection : connections_)
      polls.push_back(to_poll(connection.stream.fd(), connection.stream.events()));
    poll_for(polls, longest_wait());
    const auto passed = std::chrono::duration_cast<milliseconds>(std::chrono::steady_clock::now() - turn);
    turn += passed;
    auto polled = polls.begin() + 2;
    std::erase_if(connections_, [&](Connection& connection) {
      const bool has_gone = ((polled++)->revents != 0 && !serve_one(connection)) || is_late(connection, passed);
      if (has_gone) table_.erase_keys_of(connection.number);
      return has_gone;
    });
    if (polls[0].revents != 0 && !hear_wish()) return;
    if (polls[1].revents != 0 && listener_) accept_one();
  }
}

void MeetingServer::accept_one() {
  UniqueFd fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  const bool no_descriptors = !fd && (errno == EMFILE || errno == ENFILE);
  if (no_descriptors) accept_again_ = Deadline::after(kWithoutDescriptors);
  if (fd || no_descriptors) make_room();
  if (!fd) return;
  if (auto channel = admit_(std::move(fd)))
    connections_.push_back(
        {.stream = PacketStream(std::move(channel), PacketStream::kLongestHello), .number = ++numbers_});
}

// Connections are in the order in which they came.
void MeetingServer::make_room() {
  const auto is_new = [](const Connection& connection) { return !connection.known; };
  if (static_cast<size_t>(std::ranges::count_if(connections_, is_new)) < kMostNewcomers && accept_again_.passed())
    return;
  if (const auto oldest = std::ranges::find_if(connections_, is_new); oldest != connections_.end())
    connections_.erase(oldest);
}

// False: it is to be closed. Nothing is read from a rank that does not take its answers.
bool MeetingServer::serve_one(Connection& connection) {
  PacketStream& stream = connection.stream;
  if (!stream.write()) return false;
  while (!stream.has_to_write()) {
    if (!stream.read()) return false;
    const auto request = stream.next();
    if (!request) return !stream.is_broken();
    if (!connection.known && request->kind != Packet::Kind::kHello) return false;
    connection.known = true;
    connection.silent = {};
    if (request->kind == Packet::Kind::kSetOwn)
      connection.silence = std::clamp(milliseconds(request->number), kLeastSilence, kMostSilence);
    stream.allow(PacketStream::kLongestPacket);
    stream.put(table_.answer(*request, connection.number));
    if (!stream.write()) return false;
  }
  return true;
}

}  // namespace lockstep
