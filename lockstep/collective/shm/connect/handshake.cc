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

void Gathering::wait_for_hellos(Deadline deadline) {
  while (!complete()) {
    wait_for_news(deadline);
    accept_strangers();
    std::erase_if(strangers_, [this](UniqueFd& stranger) { return hear_stranger(stranger); });
    drop_lost_peers();
    if (complete() || !deadline.passed()) continue;
    throw RendezvousError({.what = concat("ranks that did not come: ", join(missing(), ", "), " of ", size_),
                           .here = "rank 0, waiting for the ranks of this machine",
                           .likely = "they did not start, ended early, or run as another user",
                           .next = "read their logs; raise the timeout if they start slowly"});
  }
}

std::vector<std::string> Gathering::missing() const {
  std::vector<std::string> ranks;
  for (std::size_t rank = 1; rank < peers_.size(); ++rank)
    if (!peers_[rank].socket) ranks.push_back(std::to_string(rank));
  return ranks;
}

void Gathering::wait_for_news(Deadline deadline) {
  std::vector<pollfd> polls{{.fd = listener_, .events = POLLIN, .revents = 0}};
  for (const UniqueFd& stranger : strangers_) polls.push_back({.fd = stranger.get(), .events = POLLIN, .revents = 0});
  for (const Connection& peer : peers_)
    if (peer.socket) polls.push_back({.fd = peer.socket.get(), .events = POLLIN, .revents = 0});
  ::poll(polls.data(), polls.size(), static_cast<int>(deadline.left().count()));
}

void Gathering::accept_strangers() {
  while (UniqueFd stranger = accept_from(listener_))
    if (is_own_user(stranger.get())) strangers_.push_back(std::move(stranger));
}

// True once there is nothing more to hear: it became a peer, or is disconnected.
bool Gathering::hear_stranger(UniqueFd& stranger) {
  Message hello;
  std::vector<UniqueFd> descriptors;
  const Received received = receive_message(stranger.get(), hello, descriptors, 2);
  if (received == Received::kNothingYet) return false;
  if (received != Received::kMessage || hello.kind != Message::Kind::kHello || hello.size != size_ ||
      hello.layout != control_bytes(size_) || hello.rank < 1 || hello.rank >= size_)
    return true;
  drop_lost_peers();  // a rank that came, died and was started again may have left two hellos here
  Connection& peer = peers_[static_cast<std::size_t>(hello.rank)];
  if (!peer.socket) peer = {std::move(stranger), {std::move(descriptors[0]), std::move(descriptors[1])}};
  return true;
}

// A peer has nothing to say before it was welcomed: if there is something, it is gone.
void Gathering::drop_lost_peers() {
  for (Connection& peer : peers_) {
    pollfd gone{.fd = peer.socket.get(), .events = POLLIN, .revents = 0};
    if (peer.socket && ::poll(&gone, 1, 0) > 0) peer = {};
  }
}

void Gathering::lost(int rank) const {
  throw RendezvousError({.what = concat("rank ", rank, " was lost while the ranks of this machine connected"),
                         .here = "rank 0",
                         .likely = "it ended, or could not map the shared memory",
                         .next = "read its log"});
}

void Gathering::send_to(int rank, const Message& message, const std::vector<int>& descriptors) {
  if (!send_message(peers_[static_cast<std::size_t>(rank)].socket.get(), message, descriptors)) lost(rank);
}

void Gathering::welcome(int control, const Handles& own) {
  for (int rank = 1; rank < size_; ++rank) {
    send_to(rank, message(Message::Kind::kWelcome, rank), {control});
    for (int other = 0; other < size_; ++other) {
      const Handles& handles = other == 0 ? own : peers_[static_cast<std::size_t>(other)].handles;
      if (other != rank)
        send_to(rank, message(Message::Kind::kRank, other), {handles.memory.get(), handles.pidfd.get()});
    }
  }
}

void Gathering::wait_until_ready(Deadline deadline) {
  for (int rank = 1; rank < size_; ++rank) {
    const int socket = peers_[static_cast<std::size_t>(rank)].socket.get();
    Message ready;
    std::vector<UniqueFd> none;
    if (!wait_readable(socket, deadline) || receive_message(socket, ready, none, 0) != Received::kMessage ||
        ready.kind != Message::Kind::kReady)
      lost(rank);
  }
}

void Gathering::go() {
  for (int rank = 1; rank < size_; ++rank) send_to(rank, message(Message::Kind::kGo, rank), {});
}

MachineParts Gathering::take_parts(UniqueFd control, UniqueFd own_memory) {
  MachineParts parts{.control = std::move(control), .memories = {}, .pidfds = {}};
  parts.memories.push_back(std::move(own_memory));
  parts.pidfds.emplace_back();
  for (std::size_t rank = 1; rank < peers_.size(); ++rank) {
    check_segment(peers_[rank].handles.memory.get(), 0, memory_name(static_cast<int>(rank)));
    parts.memories.push_back(std::move(peers_[rank].handles.memory));
    parts.pidfds.push_back(std::move(peers_[rank].handles.pidfd));
  }
  return parts;
}

UniqueFd Joining::connect(const std::string& address) {
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

void Joining::refused() {
  throw RendezvousError({.what = "rank 0 closed the connection",
                         .likely = "it ended, another rank was lost, or this rank's number, size or version is not "
                                   "what rank 0 expects",
                         .next = "read rank 0's log; start all ranks from the same installation"});
}

Message Joining::receive(Message::Kind kind, std::vector<UniqueFd>& descriptors, std::size_t expected) const {
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

MachineParts Joining::exchange() {
  Handles own = own_handles(rank_);
  if (!send_message(socket_.get(), message(Message::Kind::kHello), {own.memory.get(), own.pidfd.get()})) refused();
  std::vector<UniqueFd> control;
  receive(Message::Kind::kWelcome, control, 1);
  check_segment(control[0].get(), control_bytes(size_), "the control segment");
  MachineParts parts{.control = std::move(control[0]), .memories = {}, .pidfds = {}};
  parts.memories.resize(static_cast<std::size_t>(size_));
  parts.pidfds.resize(static_cast<std::size_t>(size_));
  for (int i = 1; i < size_; ++i) {
    std::vector<UniqueFd> handles;
    const auto other = static_cast<std::size_t>(receive(Message::Kind::kRank, handles, 2).rank);
    if (other >= parts.memories.size()) refused();
    check_segment(handles[0].get(), 0, memory_name(static_cast<int>(other)));
    parts.memories[other] = std::move(handles[0]);
    parts.pidfds[other] = std::move(handles[1]);
  }
  parts.memories[static_cast<std::size_t>(rank_)] = std::move(own.memory);
  return parts;
}

void Joining::finish() {
  if (!send_message(socket_.get(), message(Message::Kind::kReady))) refused();
  std::vector<UniqueFd> none;
  receive(Message::Kind::kGo, none, 0);
}

}  // namespace lockstep::shm
