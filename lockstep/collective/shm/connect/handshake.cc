// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/shm/connect/handshake.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "lockstep/base/text.h"
#include "lockstep/collective/shm/memory/segment.h"
#include "lockstep/error.h"

namespace lockstep::shm {
namespace {

UniqueFd own_pidfd() {
  UniqueFd fd(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)));
  if (!fd) throw system_error("get a handle on", "this process");
  return fd;
}

std::string memory_name(int rank) { return concat("the memory of rank ", rank); }

}  // namespace

UniqueFd make_memory(int rank) { return make_segment(memory_name(rank), 0, Growth::kGrows); }

Handles own_handles(int rank) { return {make_memory(rank), own_pidfd()}; }

void HandshakeServer::wait_for_hellos() {
  while (!complete()) {
    wait_for_input();
    accept_new();
    std::erase_if(newcomers_, [this](UniqueFd& newcomer) { return hear(newcomer); });
    drop_lost_peers();
    if (complete() || !deadline_.passed()) continue;
    throw RendezvousError({.what = concat("ranks that did not come: ", join(missing(), ", "), " of ", size_),
                           .here = "rank 0, waiting for the ranks of this machine",
                           .likely = "they did not start, ended early, or run as another user",
                           .next = "read their logs; raise the timeout if they start slowly"});
  }
}

std::vector<std::string> HandshakeServer::missing() const {
  std::vector<std::string> ranks;
  for (int rank = 1; rank < size_; ++rank)
    if (!peers_[rank].socket) ranks.push_back(std::to_string(rank));
  return ranks;
}

void HandshakeServer::wait_for_input() {
  std::vector<pollfd> polls{{.fd = listener_, .events = POLLIN, .revents = 0}};
  for (const UniqueFd& newcomer : newcomers_) polls.push_back({.fd = newcomer.get(), .events = POLLIN, .revents = 0});
  for (const Connection& peer : peers_)
    if (peer.socket) polls.push_back({.fd = peer.socket.get(), .events = POLLIN, .revents = 0});
  ::poll(polls.data(), polls.size(), static_cast<int>(deadline_.left().count()));
}

void HandshakeServer::accept_new() {
  while (UniqueFd newcomer = accept_from(listener_))
    if (is_own_user(newcomer.get())) newcomers_.push_back(std::move(newcomer));
}

// True once there is nothing more to hear: it became a peer, or is disconnected.
bool HandshakeServer::hear(UniqueFd& newcomer) {
  Message hello;
  std::vector<UniqueFd> descriptors;
  const Received received = receive_message(newcomer.get(), hello, descriptors, 2);
  if (received == Received::kNothingYet) return false;
  if (received != Received::kMessage || hello.kind != Message::Kind::kHello || hello.size != size_ ||
      hello.layout != control_bytes(size_) || hello.rank < 1 || hello.rank >= size_)
    return true;
  drop_lost_peers();  // a rank that came, died and was started again may have left two hellos here
  Connection& peer = peers_[hello.rank];
  if (!peer.socket) peer = {std::move(newcomer), {std::move(descriptors[0]), std::move(descriptors[1])}};
  return true;
}

// A peer has nothing to say before it was welcomed: if there is something, it is gone.
void HandshakeServer::drop_lost_peers() {
  for (Connection& peer : peers_) {
    pollfd gone{.fd = peer.socket.get(), .events = POLLIN, .revents = 0};
    if (peer.socket && ::poll(&gone, 1, 0) > 0) peer = {};
  }
}

void HandshakeServer::lost(int rank) const {
  throw RendezvousError({.what = concat("rank ", rank, " was lost while the ranks of this machine connected"),
                         .here = "rank 0",
                         .likely = "it ended, or could not map the shared memory",
                         .next = "read its log"});
}

void HandshakeServer::send_to(int rank, const Message& message, const std::vector<int>& descriptors) {
  if (!send_message(peers_[rank].socket.get(), message, deadline_, descriptors)) lost(rank);
}

void HandshakeServer::welcome(int control, const Handles& own) {
  for (int rank = 1; rank < size_; ++rank) {
    send_to(rank, message(Message::Kind::kWelcome, rank), {control});
    for (int other = 0; other < size_; ++other) {
      const Handles& handles = other == 0 ? own : peers_[other].handles;
      if (other != rank)
        send_to(rank, message(Message::Kind::kRank, other), {handles.memory.get(), handles.pidfd.get()});
    }
  }
}

void HandshakeServer::wait_until_ready() {
  for (int rank = 1; rank < size_; ++rank) {
    const int socket = peers_[rank].socket.get();
    Message ready;
    std::vector<UniqueFd> none;
    if (!wait_readable(socket, deadline_) || receive_message(socket, ready, none, 0) != Received::kMessage ||
        ready.kind != Message::Kind::kReady)
      lost(rank);
  }
}

void HandshakeServer::go() {
  for (int rank = 1; rank < size_; ++rank) send_to(rank, message(Message::Kind::kGo, rank), {});
}

MachineParts HandshakeServer::take_parts(UniqueFd control, UniqueFd own_memory) {
  MachineParts parts{.control = std::move(control), .memories = {}, .pidfds = {}};
  parts.memories.push_back(std::move(own_memory));
  parts.pidfds.emplace_back();
  for (int rank = 1; rank < size_; ++rank) {
    check_segment(peers_[rank].handles.memory.get(), 0, memory_name(rank));
    parts.memories.push_back(std::move(peers_[rank].handles.memory));
    parts.pidfds.push_back(std::move(peers_[rank].handles.pidfd));
  }
  return parts;
}

UniqueFd HandshakeClient::connect(const std::string& address) {
  try {
    UniqueFd socket = connect_to(address);
    if (is_own_user(socket.get())) return socket;
  } catch (const SystemError& error) {
    throw RendezvousError({.what = error.text().what,
                           .here = address,
                           .likely = "rank 0 is gone, or belongs to another user",
                           .next = "start all ranks of a machine as one user; read rank 0's log"});
  }
  throw RendezvousError({.what = "the other end of the socket belongs to another user", .here = address});
}

void HandshakeClient::refused() {
  throw RendezvousError({.what = "rank 0 closed the connection",
                         .likely = "it ended, another rank was lost, or this rank's number, size or version is not "
                                   "what rank 0 expects",
                         .next = "read rank 0's log; start all ranks from the same installation"});
}

Message HandshakeClient::receive(Message::Kind kind, std::vector<UniqueFd>& descriptors, std::size_t expected) const {
  Message message;
  if (!wait_readable(socket_.get(), deadline_))
    throw RendezvousError({.what = "the ranks of this machine are not complete at the deadline",
                           .here = concat("rank ", rank_, " of ", size_),
                           .likely = "a rank that did not start",
                           .next = "rank 0's error names it"});
  if (receive_message(socket_.get(), message, descriptors, expected) != Received::kMessage || message.kind != kind ||
      message.size != size_ || message.layout != control_bytes(size_))
    refused();
  return message;
}

MachineParts HandshakeClient::exchange() {
  Handles own = own_handles(rank_);
  if (!send_message(socket_.get(), message(Message::Kind::kHello), deadline_, {own.memory.get(), own.pidfd.get()}))
    refused();
  std::vector<UniqueFd> control;
  receive(Message::Kind::kWelcome, control, 1);
  check_segment(control[0].get(), control_bytes(size_), "the control segment");
  MachineParts parts{.control = std::move(control[0]), .memories = {}, .pidfds = {}};
  parts.memories.resize(size_);
  parts.pidfds.resize(size_);
  for (int i = 1; i < size_; ++i) {
    std::vector<UniqueFd> handles;
    const int other = receive(Message::Kind::kRank, handles, 2).rank;
    if (other < 0 || other >= size_) refused();
    check_segment(handles[0].get(), 0, memory_name(other));
    parts.memories[other] = std::move(handles[0]);
    parts.pidfds[other] = std::move(handles[1]);
  }
  parts.memories[rank_] = std::move(own.memory);
  return parts;
}

void HandshakeClient::finish() {
  if (!send_message(socket_.get(), message(Message::Kind::kReady), deadline_)) refused();
  std::vector<UniqueFd> none;
  receive(Message::Kind::kGo, none, 0);
}

}  // namespace lockstep::shm
